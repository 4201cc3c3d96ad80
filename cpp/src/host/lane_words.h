// Packed weights for 16-bit activations as vectors of 32-bit words meet them: the 16 words of a lane group hold all
// codes of channels g and g + 8 in a tile, and code i of a channel lies at the same bits of every word.
#pragma once

#include <array>
#include <cstdint>

#include "qcutlass/layout.h"

namespace qcutlass::host {

template <Packing kPacking>
struct LaneWords {
  static constexpr int kTileK = layout::tile_k(kPacking);
  static constexpr int kWords = 16;                                ///< of a lane group
  static constexpr int kGroups = layout::kTileBytes / 4 / kWords;  ///< lane groups of a tile: g
  static constexpr int kCodes = 32 / bits_of(kPacking) / 2;        ///< of one channel in a word
  static constexpr int kMask = (1 << bits_of(kPacking)) - 1;

  /// Code i of channel g is in bits [8 i, 8 i + bits) of a word, that of g + 8 so much higher.
  static constexpr int shift_of(int row, int k) {
    layout::Position const p = layout::position_in_tile(kPacking, row, k);
    return static_cast<int>(p.byte % 4 * 8 + p.bit);
  }
  static constexpr int word_of(int row, int k) {
    return static_cast<int>(layout::position_in_tile(kPacking, row, k).byte / 4);
  }
  static constexpr int kUpperShift = shift_of(kGroups, 0) - shift_of(0, 0);

  /// Column of code i of each word, [word][i].
  static constexpr std::array<uint8_t, kTileK> make_columns() {
    std::array<uint8_t, kTileK> columns{};
    for (int k = 0; k < kTileK; ++k) columns[word_of(0, k) * kCodes + shift_of(0, k) / 8] = static_cast<uint8_t>(k);
    return columns;
  }
  static constexpr std::array<uint8_t, kTileK> kColumn = make_columns();

  /// Columns of word w lie in step w % kSteps of a tile.
  static constexpr int kSteps = 4;
  static constexpr int kStepK = kTileK / kSteps;

  static constexpr bool matches_layout() {
    for (int row = 0; row < layout::kTileN; ++row) {
      for (int i = 0; i < kTileK; ++i) {
        int const word = row % kGroups * kWords + i / kCodes;
        int const shift = i % kCodes * 8 + row / kGroups * kUpperShift;
        if (word_of(row, kColumn[i]) != word || shift_of(row, kColumn[i]) != shift) return false;
        if (kColumn[i] / kStepK != i / kCodes % kSteps) return false;
      }
    }
    return true;
  }
  static_assert(matches_layout());
};

}  // namespace qcutlass::host
