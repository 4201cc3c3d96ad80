// Dot products of int8 rows, widened to int16: the compiler turns them into multiply-adds of pairs.
#pragma once

#include <cstdint>

#include "host/multiversion.h"
#include "host/tile_rows.h"

namespace qcutlass::host {

/// Columns of a strip of 16 channels, [16][columns]: up to `kMaxTiles` tiles.
template <int kMaxTiles>
class Int8Strip {
 public:
  /// Codes of `count` packed tiles.
  QCUTLASS_INLINE void decode(uint8_t const* packed, int64_t count) {
    for (int64_t tile = 0; tile < count; ++tile) {
#pragma GCC unroll 16
      for (int row = 0; row < layout::kTileN; ++row) {
        for (int chunk = 0; chunk < TileRows::kChunks; ++chunk) {
          widen(packed + tile * layout::kTileBytes + TileRows::byte(row, chunk),
                codes_[row] + tile * TileRows::kTileK + chunk * TileRows::kChunk);
        }
      }
    }
  }

  /// sums[m][channel] += sum of a[m][k] * code[channel][k] over `columns` columns, a whole number of tiles.
  QCUTLASS_INLINE void multiply(int16_t const* a, int64_t a_stride, int64_t m, int64_t columns, int32_t* sums) const {
    for (; m >= 4; m -= 4, a += 4 * a_stride, sums += 4 * layout::kTileN) {
      multiply_rows<4, 4>(a, a_stride, columns, sums);
    }
    for (; m > 0; --m, a += a_stride, sums += layout::kTileN) multiply_rows<1, 8>(a, a_stride, columns, sums);
  }

 private:
  static QCUTLASS_INLINE void widen(uint8_t const* __restrict codes, int16_t* __restrict out) {
    for (int k = 0; k < TileRows::kChunk; ++k) out[k] = static_cast<int8_t>(codes[k]);
  }

  /// Rows and channels at a time: their sums stay in registers, and each load serves several.
  template <int kRows, int kChannels>
  QCUTLASS_INLINE void multiply_rows(int16_t const* __restrict a, int64_t a_stride, int64_t columns,
                                     int32_t* __restrict sums) const {
    for (int channel = 0; channel < layout::kTileN; channel += kChannels) {
      int32_t dot[kRows][kChannels] = {};
      for (int64_t k = 0; k < columns; ++k) {
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 8
          for (int i = 0; i < kChannels; ++i) dot[row][i] += int32_t{a[row * a_stride + k]} * codes_[channel + i][k];
        }
      }
      for (int row = 0; row < kRows; ++row) {
        for (int i = 0; i < kChannels; ++i) sums[row * layout::kTileN + channel + i] += dot[row][i];
      }
    }
  }

  alignas(64) int16_t codes_[layout::kTileN][kMaxTiles * TileRows::kTileK];
};

}  // namespace qcutlass::host
