// Packed tiles of codes in the first-level cache as bytes, 16 channels across vector lanes, and their products with
// quantised activations.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "host/byte_product.h"
#include "host/channel_parameters.h"
#include "host/multiversion.h"
#include "host/prefetch.h"
#include "host/quantized_rows.h"
#include "qcutlass/layout.h"

namespace qcutlass::host {

/// `Bytes`: a class of byte_dot.h.
template <class Bytes, Packing kPacking>
class ByteTiles {
 public:
  static constexpr int kTileK = layout::tile_k(kPacking);
  static constexpr int kColumns = 512;  ///< of all tiles: 8 KB of codes, which leaves room for rows of activations
  static constexpr int kTiles = kColumns / kTileK;

  /// `run`: columns whose codes are added up, kActivationBlock or kStepK.
  QCUTLASS_INLINE explicit ByteTiles(int run) : run_(run) {}

  /// Decodes `count` packed tiles from column `begin` on, with their scales and zeros; asks for as many behind them.
  QCUTLASS_INLINE void load(WeightArguments const& weights, int64_t strip, int64_t begin, uint8_t const* packed,
                            int64_t count) {
    for (int64_t tile = 0; tile < count; ++tile) {
      uint8_t const* const from = packed + tile * layout::kTileBytes;
      prefetch_tile(from, kTiles * layout::kTileBytes);
      decode(from, codes_ + tile * kTileK / 4 * layout::kTileN);
    }
    has_minimums_ = weights.has_minimums();
    int64_t const end = std::min(begin + count * kTileK, weights.k), last = weights.groups() - 1;
    int64_t const first = std::min(begin / weights.group_size, last);
    load_groups(weights, {strip, 1}, first, std::min((end - 1) / weights.group_size, last) + 1 - first,
                /*implied=*/true, groups_);
    int64_t group = first, group_end = (first + 1) * weights.group_size;
    for (int64_t k = begin, run = 0; k < end; k += run_, ++run) {
      if (k >= group_end && group < last) {
        ++group;
        group_end += weights.group_size;
      }
      group_of_[run] = static_cast<int16_t>(group - first);
    }
  }

  /// sums[row][channel] += the products of every row with the columns [begin, begin + columns) that were loaded.
  QCUTLASS_INLINE void multiply(QuantizedRows const& rows, int64_t begin, int64_t columns, float* sums) const {
    if (has_minimums_)
      multiply_offset<Offsets::kMinimums>(rows, begin, columns, sums);
    else
      multiply_offset<Offsets::kZeros>(rows, begin, columns, sums);
  }

 private:
  static constexpr int kLanes = Bytes::kLanes, kParts = layout::kTileN / kLanes;
  static constexpr int kBits = bits_of(kPacking);
  static constexpr ByteRange kRange = range_of(kPacking);
  static constexpr int kWords = layout::kTileBytes / 4, kVectors = kWords / kLanes;

  using Int = typename Bytes::Int;
  using Float = typename Vectors<kLanes>::Float;
  using Half = Vectors<layout::kTileN / 2>::Int;

  template <Offsets kOffsets>
  QCUTLASS_INLINE void multiply_offset(QuantizedRows const& rows, int64_t begin, int64_t columns, float* sums) const {
    for_row_blocks(rows.count, [&](auto size, int64_t row) {
      constexpr int kRows = decltype(size)::value;
      multiply_rows<kRows, kOffsets>(rows.codes.data() + row * rows.stride + begin * kRows,
                                     rows.parameters.data() + row * rows.runs + begin / run_ * kRows,
                                     static_cast<int>(layout::ceil_div(columns, run_)), sums + row * layout::kTileN);
    });
  }

  template <int kRows, Offsets kOffsets>
  QCUTLASS_INLINE void multiply_rows(int8_t const* __restrict a, QuantizedRows::Run const* __restrict parameters,
                                     int runs, float* __restrict sums) const {
    Float total[kRows][kParts];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
        std::memcpy(&total[row][part], sums + row * layout::kTileN + part * kLanes, sizeof(Float));
      }
    }
    int const words = run_ / 4;
    int32_t const* codes = codes_;
    for (int run = 0; run < runs; ++run) {
      ChannelSums<Bytes> dots[kRows];
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) dots[row].clear();
      add_dots<Bytes, kRange, kRows>(codes, a, words, dots);
      codes += words * layout::kTileN;
      a += run_ * kRows;
      ChannelParameters const& group = groups_[group_of_[run]];
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row)
          total[row][part] +=
              sum_of_run<Bytes, kRange, kOffsets>(dots[row].part[part], parameters[row], group, part * kLanes);
      }
      parameters += kRows;
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
        std::memcpy(sums + row * layout::kTileN + part * kLanes, &total[row][part], sizeof(Float));
      }
    }
  }

  /// Codes of a tile, [words of four columns][16 channels], columns in step_order().
  static QCUTLASS_INLINE void decode(uint8_t const* packed, int32_t* __restrict out) {
    Int words[kVectors];
    transpose(packed, words);
    if constexpr (kBits == 4) {
#pragma GCC unroll 16
      for (int i = 0; i < kVectors; ++i) {
        Int const lower = words[i] & 0x0f0f0f0f, upper = (words[i] >> 4) & 0x0f0f0f0f;
        if constexpr (kParts == 1) {
          store(__builtin_shufflevector(lower, upper, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                out + place_of(2 * i) * layout::kTileN);
          store(__builtin_shufflevector(lower, upper, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31),
                out + place_of(2 * i + 1) * layout::kTileN);
        } else {
          store(lower, out + place_of(i) * layout::kTileN);
          store(upper, out + place_of(i) * layout::kTileN + kLanes);
        }
      }
    } else {
      // A word holds two columns of both rows; the next one two more.
#pragma GCC unroll 8
      for (int i = 0; i < kWords / 16; ++i) {
        Half first, second;
        if constexpr (kParts == 1) {
          first = __builtin_shufflevector(words[i], words[i], 0, 1, 2, 3, 4, 5, 6, 7);
          second = __builtin_shufflevector(words[i], words[i], 8, 9, 10, 11, 12, 13, 14, 15);
        } else {
          first = words[2 * i];
          second = words[2 * i + 1];
        }
        Half const lower = (first & 0xffff) | second << 16, upper = (first >> 16 & 0xffff) | (second & ~0xffff);
        int32_t* const to = out + place_of(2 * i) * layout::kTileN;
        if constexpr (kParts == 1) {
          store(__builtin_shufflevector(lower, upper, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), to);
        } else {
          store(lower, to);
          store(upper, to + kLanes);
        }
      }
    }
  }

  static QCUTLASS_INLINE void store(Int const& vector, int32_t* out) { std::memcpy(out, &vector, sizeof(vector)); }

  /// The 32-bit words of a packed tile, [8 g][16 words], as [16 words][8 g]: three perfect shuffles.
  static QCUTLASS_INLINE void transpose(uint8_t const* packed, Int (&out)[kVectors]) {
    Int other[kVectors];
    load_vectors<Bytes>(packed, other);
    perfect_shuffle<Bytes>(other, out);
    perfect_shuffle<Bytes>(out, other);
    perfect_shuffle<Bytes>(other, out);
  }

  static constexpr int kWordsOfLane = layout::kLaneBytes / 4;
  static constexpr int kWordsOfStep = kBits / 4;  ///< of a lane

  /// Where the codes of packed word `word` (or of it and the next one) go: step by step, lanes in order.
  static constexpr int place_of(int word) {
    int const lane = word / kWordsOfLane, step = word % kWordsOfLane / kWordsOfStep;
    return step * (kStepK / 4) + lane;
  }

  /// What decode() makes of a tile is what step_order() says.
  static constexpr bool matches_layout() {
    constexpr auto kOrder = step_order(kPacking);
    for (int row = 0; row < layout::kTileN; ++row) {
      for (int word = 0; word < layout::kTileBytes / 32; word += kWordsOfStep) {
        for (int i = 0; i < 4; ++i) {
          int const place = 4 * place_of(word) + i, k = place / kStepK * kStepK + kOrder[place % kStepK];
          layout::Position const p = layout::position_in_tile(kPacking, row, k);
          int const group_byte = row % 8 * (layout::kTileBytes / 8);
          int const byte = kBits == 4 ? 4 * word + i : 4 * (word + i / 2) + row / 8 * 2 + i % 2;
          if (p.byte != group_byte + byte || p.bit != (kBits == 4 ? row / 8 * 4 : 0)) return false;
        }
      }
    }
    return true;
  }
  static_assert(matches_layout());

  alignas(64) int32_t codes_[kColumns / 4 * layout::kTileN];
  alignas(64) ChannelParameters groups_[kColumns / kStepK];
  int16_t group_of_[kColumns / kStepK];
  int run_;
  bool has_minimums_ = false;  ///< of the weights that were loaded: in place of zeros
};

}  // namespace qcutlass::host
