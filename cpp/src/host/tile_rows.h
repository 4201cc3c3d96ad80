// The packed layout of weights for 8-bit activations as the host code walks it: 16 rows of a tile, each two chunks of
// neighbouring columns.
#pragma once

#include "qcutlass/layout.h"

namespace qcutlass::host {

struct TileRows {
  static constexpr int kTileK = layout::tile_k(Packing::kW8A8);
  static constexpr int kChunk = 16;  ///< columns, and bytes
  static constexpr int kChunks = kTileK / kChunk;

  /// Where a chunk of a row lies in the tile.
  static constexpr int byte(int row, int chunk) {
    return static_cast<int>(layout::position_in_tile(Packing::kW8A8, row, chunk * kChunk).byte);
  }

  static constexpr bool matches_layout() {
    for (int row = 0; row < layout::kTileN; ++row) {
      for (int k = 0; k < kTileK; ++k) {
        layout::Position const p = layout::position_in_tile(Packing::kW8A8, row, k);
        if (p.byte != byte(row, k / kChunk) + k % kChunk || p.bit != 0) return false;
      }
    }
    return true;
  }
};

static_assert(TileRows::matches_layout());

}  // namespace qcutlass::host
