// Packed tiles of int8 weights in the first-level cache as unsigned bytes, and their products with rows of int8.
//
// Instructions multiply unsigned by signed bytes. So 128 is added to each code, and 128 times the sum of the
// activations taken off, before rather than after: partial sums then are sums of products of int8, and cannot overflow
// either.
#pragma once

#include <cstdint>
#include <cstring>

#include "host/byte_product.h"
#include "host/eight_bit_rows.h"
#include "host/multiversion.h"
#include "host/prefetch.h"
#include "host/tile_rows.h"
#include "qcutlass/layout.h"

namespace qcutlass::host {

/// `Bytes`: a class of byte_dot.h.
template <class Bytes>
class Int8Tiles {
 public:
  static constexpr int kTiles = 16;  ///< 8 KB, which leaves room for rows of activations

  /// Codes of `count` packed tiles; asks for as many behind them.
  QCUTLASS_INLINE void decode(uint8_t const* packed, int64_t count) {
    for (int64_t tile = 0; tile < count; ++tile) {
      uint8_t const* const from = packed + tile * layout::kTileBytes;
      prefetch_tile(from, count * layout::kTileBytes);
      decode_tile(from, codes_ + tile * kWords);
    }
  }

  /// sums[m][channel] += sum of a[m][k] * (code[channel][k] + 128) over the `columns` from `begin` on, that were
  /// decoded.
  QCUTLASS_INLINE void multiply(Int8Rows const& rows, int64_t begin, int64_t columns, int32_t* sums) const {
    for_row_blocks(rows.count, [&](auto size, int64_t row) {
      constexpr int kRows = decltype(size)::value;
      ChannelSums<Bytes> dots[kRows];
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) dots[i].load(sums + (row + i) * layout::kTileN);
      add_dots<Bytes, ByteRange::kAll, kRows>(codes_, rows.codes.data() + row * rows.stride + begin * kRows,
                                              static_cast<int>(columns / 4), dots);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) dots[i].store(sums + (row + i) * layout::kTileN);
    });
  }

  /// The same for one row and all columns, from packed tiles as they lie: moving codes between lanes would take longer
  /// than the products.
  static QCUTLASS_INLINE void multiply_row(uint8_t const* packed, Int8Rows const& rows, int32_t* sums) {
    constexpr int kRowsOfVector = Bytes::kLanes / kRowWords;
    constexpr int kChains = 8;  // vectors of sums at a time, which stay in registers
#pragma GCC unroll 2
    for (int begin = 0; begin < kVectors; begin += kChains) {
      Int dots[kChains];
#pragma GCC unroll 8
      for (int i = 0; i < kChains; ++i) dots[i] = Int{};
      uint8_t const* tile = packed + begin * sizeof(Int);
      for (int64_t k = 0; k < rows.stride; k += TileRows::kTileK, tile += layout::kTileBytes) {
        if (begin == 0) prefetch_tile(tile);
        Int const natural = load_columns(rows.codes.data() + k, 0), swapped = load_columns(rows.codes.data() + k, 1);
#pragma GCC unroll 8
        for (int i = 0; i < kChains; ++i) {
          Int codes;
          std::memcpy(&codes, tile + i * sizeof(Int), sizeof(codes));
          bool const is_swapped = (begin + i) * kRowsOfVector / 4 % 2 == 1;
          Bytes::template add_dot<ByteRange::kAll>(dots[i], codes ^ kUnsigned, is_swapped ? swapped : natural);
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < kChains; ++i) {
        int32_t lanes[Bytes::kLanes];
        std::memcpy(lanes, &dots[i], sizeof(lanes));
        for (int lane = 0; lane < Bytes::kLanes; ++lane) {
          sums[(begin + i) * kRowsOfVector + lane / kRowWords] += lanes[lane];
        }
      }
    }
  }

 private:
  using Int = typename Bytes::Int;

  static constexpr int kWords = layout::kTileBytes / 4, kVectors = kWords / Bytes::kLanes;
  static constexpr int kRowWords = TileRows::kTileK / 4;
  static constexpr int32_t kUnsigned = static_cast<int32_t>(0x80808080);  ///< adds 128 to each of four int8

  /// The columns of a tile as each of its rows meets them; those with swapped halves if `swapped`.
  static QCUTLASS_INLINE Int load_columns(int8_t const* a, int swapped) {
    int8_t columns[sizeof(Int)];
#pragma GCC unroll 4
    for (int chunk = 0; chunk < int(sizeof(Int)) / TileRows::kChunk; ++chunk) {
      std::memcpy(columns + chunk * TileRows::kChunk, a + (chunk + swapped) % TileRows::kChunks * TileRows::kChunk,
                  TileRows::kChunk);
    }
    Int vector;
    std::memcpy(&vector, columns, sizeof(vector));
    return vector;
  }

  /// The words of a packed tile, [16 rows][8], as [8][16 rows] in natural order.
  static QCUTLASS_INLINE void decode_tile(uint8_t const* packed, int32_t* __restrict out) {
    Int x[kVectors], y[kVectors];
    load_vectors<Bytes>(packed, x);
    perfect_shuffle<Bytes>(x, y);
    perfect_shuffle<Bytes>(y, x);
    perfect_shuffle<Bytes>(x, y);
    perfect_shuffle<Bytes>(y, x);
    // Rows with bit 2 have their halves swapped.
    Int swapped;
#pragma GCC unroll 16
    for (int lane = 0; lane < Bytes::kLanes; ++lane) swapped[lane] = lane / 4 % 2 == 1 ? -1 : 0;
    constexpr int kHalf = kVectors / 2;
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i) {
      Int const &own = x[i], &other = x[(i + kHalf) % kVectors];
      Int const codes = ((own & ~swapped) | (other & swapped)) ^ kUnsigned;
      std::memcpy(out + i * Bytes::kLanes, &codes, sizeof(codes));
    }
  }

  static constexpr bool matches_layout() {
    for (int row = 0; row < layout::kTileN; ++row) {
      for (int chunk = 0; chunk < TileRows::kChunks; ++chunk) {
        if (TileRows::byte(row, chunk) != row * TileRows::kTileK + (chunk ^ row / 4 % 2) * TileRows::kChunk)
          return false;
      }
    }
    return TileRows::kChunks == 2 && TileRows::kChunk * 2 == kRowWords * 4;
  }
  static_assert(matches_layout());

  alignas(64) int32_t codes_[kTiles * kWords];
};

}  // namespace qcutlass::host
