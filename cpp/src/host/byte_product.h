// Rows of bytes in blocks that are multiplied together, and their dot products with codes of 16 channels.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "host/byte_dot.h"
#include "host/channel_parameters.h"
#include "host/multiversion.h"
#include "host/quantized_rows.h"
#include "qcutlass/layout.h"

namespace qcutlass::host {

/// Rows of a block: so many that a vector of codes is loaded seldom, while integer and floating sums of all of them
/// stay in registers. A remainder is cut into blocks of half as many, and so on.
inline constexpr int kMostRows = 8;

struct RowBlock {
  int64_t first, rows;
};

/// The block that a row is in.
inline RowBlock block_of(int64_t row, int64_t count) {
  int64_t first = 0;
  for (int64_t rows = kMostRows;; rows /= 2) {
    int64_t const end = first + (count - first) / rows * rows;  // of the blocks of so many rows
    if (row < end) return {first + (row - first) / rows * rows, rows};
    first = end;
  }
}

/// Calls multiply(std::integral_constant<int, rows>, first row) for each block.
template <class Multiply>
QCUTLASS_INLINE void for_row_blocks(int64_t count, Multiply const& multiply) {
  int64_t row = 0;
  auto const blocks_of = [&](auto rows) {
    for (; row + rows <= count; row += rows) multiply(rows, row);
  };
  static_assert(kMostRows == 8);
  blocks_of(std::integral_constant<int, 8>{});
  blocks_of(std::integral_constant<int, 4>{});
  blocks_of(std::integral_constant<int, 2>{});
  blocks_of(std::integral_constant<int, 1>{});
}

/// One integer for each of the 16 channels, in vectors of `Bytes`.
template <class Bytes>
struct ChannelSums {
  static constexpr int kLanes = Bytes::kLanes, kParts = layout::kTileN / kLanes;
  using Int = typename Bytes::Int;

  Int part[kParts];

  QCUTLASS_INLINE void clear() {
#pragma GCC unroll 2
    for (int i = 0; i < kParts; ++i) part[i] = Int{};
  }
  QCUTLASS_INLINE void load(int32_t const* source) {
#pragma GCC unroll 2
    for (int i = 0; i < kParts; ++i) std::memcpy(&part[i], source + i * kLanes, sizeof(Int));
  }
  QCUTLASS_INLINE void store(int32_t* target) const {
#pragma GCC unroll 2
    for (int i = 0; i < kParts; ++i) std::memcpy(target + i * kLanes, &part[i], sizeof(Int));
  }
};

/// Words whose partial sums are added up, no more than are exact.
inline constexpr int kWordsAtOnce = 4;
static_assert(kWordsAtOnce <= kMostPartialSums);

/// Adds the products of a block of rows with codes less Bytes::kLess. `codes`: [words][16 channels]; `a`:
/// [words][kRows], four bytes each; `words` is a multiple of kWordsAtOnce.
template <class Bytes, ByteRange kRange, int kRows>
QCUTLASS_INLINE void add_dots(int32_t const* codes, int8_t const* a, int words, ChannelSums<Bytes> (&sums)[kRows]) {
  constexpr bool kIsWhole = Bytes::template kIsWhole<kRange>;
#pragma GCC unroll 2
  for (int part = 0; part < ChannelSums<Bytes>::kParts; ++part) {
    int32_t const* from = codes + part * Bytes::kLanes;
    int8_t const* of_rows = a;
    for (int begin = 0; begin < words; begin += kWordsAtOnce) {
      typename Bytes::Int partial[kRows];
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) partial[row] = kIsWhole ? sums[row].part[part] : typename Bytes::Int{};
#pragma GCC unroll 4
      for (int word = 0; word < kWordsAtOnce; ++word) {
        typename Bytes::Int loaded;
        std::memcpy(&loaded, from, sizeof(loaded));
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) Bytes::template add_dot<kRange>(partial[row], loaded, of_rows + row * 4);
        from += layout::kTileN;
        of_rows += kRows * 4;
      }
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        auto const whole = Bytes::template whole<kRange>(partial[row]);
        sums[row].part[part] = kIsWhole ? whole : sums[row].part[part] + whole;
      }
    }
  }
}

/// What a run adds to sums of channels `first` and following: `dots` are those of a row's codes with theirs, which are
/// less by Bytes::kLess. They, and the difference to zeros that are integers, are exact in fp32.
template <class Bytes, ByteRange kRange, Offsets kOffsets, class Int>
QCUTLASS_INLINE auto sum_of_run(Int const& dots, QuantizedRows::Run const& run, ChannelParameters const& group,
                                int first) {
  using Float = typename Vectors<Bytes::kLanes>::Float;
  constexpr int kZero = kOffsets == Offsets::kImplied ? symmetric_zero(kRange == ByteRange::kFourBits ? 4 : 8) : 0;
  constexpr auto kMore = static_cast<float>(Bytes::template kLess<kRange> - kZero);
  Float scale, offset;
  std::memcpy(&scale, group.scales + first, sizeof(scale));
  Float codes = __builtin_convertvector(dots, Float);
  if constexpr (kMore != 0) codes += kMore * run.sum;
  if constexpr (kOffsets == Offsets::kImplied) {
    return codes * run.scale * scale;
  } else {
    std::memcpy(&offset, group.offsets + first, sizeof(offset));
    if constexpr (kOffsets == Offsets::kMinimums)
      return (codes * scale - offset * run.sum) * run.scale;
    else
      return (codes - offset * run.sum) * run.scale * scale;
  }
}

/// Vectors that lie together. One copy of all of them would be a call, or `rep movs`, which takes long to begin.
template <class Bytes, int kVectors>
QCUTLASS_INLINE void load_vectors(void const* from, typename Bytes::Int (&out)[kVectors]) {
#pragma GCC unroll 16
  for (int i = 0; i < kVectors; ++i)
    std::memcpy(&out[i], static_cast<char const*>(from) + i * sizeof(out[i]), sizeof(out[i]));
}

/// The 32-bit words of a tile with the upper half of their positions moved between the lower ones: times 2, modulo 127.
template <class Bytes, int kVectors>
QCUTLASS_INLINE void perfect_shuffle(typename Bytes::Int const (&in)[kVectors], typename Bytes::Int (&out)[kVectors]) {
#pragma GCC unroll 8
  for (int i = 0; i < kVectors / 2; ++i) {
    auto const &x = in[i], &y = in[i + kVectors / 2];
    if constexpr (Bytes::kLanes == 16) {
      out[2 * i] = __builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      out[2 * i + 1] = __builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    } else {
      out[2 * i] = __builtin_shufflevector(x, y, 0, 8, 1, 9, 2, 10, 3, 11);
      out[2 * i + 1] = __builtin_shufflevector(x, y, 4, 12, 5, 13, 6, 14, 7, 15);
    }
  }
}

}  // namespace qcutlass::host
