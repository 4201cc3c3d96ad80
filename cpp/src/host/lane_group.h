// The packed layout of weights for 16-bit activations as the host code walks it: a tile is eight lane groups, one for
// each g, of 64 bytes that hold rows g and g + 8.
#pragma once

#include <array>
#include <cstdint>

#include "host/multiversion.h"
#include "qcutlass/layout.h"

namespace qcutlass::host {

template <Packing kPacking>
struct LaneGroup {
  static constexpr int kBits = bits_of(kPacking);
  static constexpr int kTileK = layout::tile_k(kPacking);
  static constexpr int kGroups = 8;  ///< lane groups of a tile
  static constexpr int kBytes = layout::kTileBytes / kGroups;

  /// Natural order: byte i holds k = i % kTileK. 4-bit: of row g in the low nibble and g + 8 in the high one; 8-bit: of
  /// row g in the first half of the bytes and of row g + 8 in the second. kByte[i] is where that byte lies in the
  /// packed lane group.
  static constexpr std::array<uint8_t, kBytes> make_bytes() {
    std::array<uint8_t, kBytes> bytes{};
    for (int i = 0; i < kBytes; ++i) {
      bytes[i] = static_cast<uint8_t>(layout::position_in_tile(kPacking, i / kTileK * 8, i % kTileK).byte);
    }
    return bytes;
  }
  static constexpr std::array<uint8_t, kBytes> kByte = make_bytes();

  /// The layout has the shape described above, for every row and k of a tile.
  static constexpr bool matches_layout() {
    for (int row = 0; row < layout::kTileN; ++row) {
      for (int k = 0; k < kTileK; ++k) {
        int const upper = row / 8;
        layout::Position const p = layout::position_in_tile(kPacking, row, k);
        int const byte = row % 8 * kBytes + kByte[kBits == 4 ? k : upper * kTileK + k];
        if (p.byte != byte || p.bit != (kBits == 4 ? 4 * upper : 0)) return false;
      }
    }
    return true;
  }

  /// Codes of the two rows, in natural order.
  struct Codes {
    uint8_t lower[kTileK];
    uint8_t upper[kTileK];
  };

  static QCUTLASS_INLINE void pack(Codes const& codes, uint8_t* __restrict packed) {
    if constexpr (kBits == 4) {
      uint8_t merged[kBytes];
      for (int k = 0; k < kBytes; ++k) merged[k] = static_cast<uint8_t>(codes.lower[k] | codes.upper[k] << 4);
      for (int k = 0; k < kBytes; ++k) packed[kByte[k]] = merged[k];
    } else {
      for (int k = 0; k < kTileK; ++k) packed[kByte[k]] = codes.lower[k];
      for (int k = 0; k < kTileK; ++k) packed[kByte[kTileK + k]] = codes.upper[k];
    }
  }

  static QCUTLASS_INLINE void unpack(uint8_t const* __restrict packed, Codes& codes) {
    if constexpr (kBits == 4) {
      uint8_t merged[kBytes];
      for (int k = 0; k < kBytes; ++k) merged[k] = packed[kByte[k]];
      for (int k = 0; k < kBytes; ++k) codes.lower[k] = merged[k] & 15;
      for (int k = 0; k < kBytes; ++k) codes.upper[k] = merged[k] >> 4;
    } else {
      for (int k = 0; k < kTileK; ++k) codes.lower[k] = packed[kByte[k]];
      for (int k = 0; k < kTileK; ++k) codes.upper[k] = packed[kByte[kTileK + k]];
    }
  }
};

static_assert(LaneGroup<Packing::kW4A16>::matches_layout());
static_assert(LaneGroup<Packing::kW8A16>::matches_layout());

}  // namespace qcutlass::host
