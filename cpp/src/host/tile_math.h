// A tile of weights in the first-level cache, 16 channels across vector lanes: decode, dequantise, multiply.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "host/channel_parameters.h"
#include "host/multiversion.h"
#include "qcutlass/layout.h"

namespace qcutlass::host {

/// Eight lanes: one AVX register; other instruction sets split it.
typedef float FloatVector __attribute__((vector_size(32)));
typedef int32_t IntVector __attribute__((vector_size(32)));

template <class Vector>
QCUTLASS_INLINE Vector load_vector(void const* source) {
  Vector result;
  std::memcpy(&result, source, sizeof(Vector));
  return result;
}

template <Packing kPacking>
class TileMath {
 public:
  static constexpr int kTileK = layout::tile_k(kPacking);

  /// Codes of a packed tile as fp32.
  QCUTLASS_INLINE void decode(uint8_t const* packed) {
    // The tile is [8 g][16 words]; the codes of a word belong to rows g and g + 8 and to the same k for every g. Three
    // perfect shuffles transpose it to [16 words][8 g].
    alignas(64) uint32_t source[kWords], x[kWords], y[kWords];
    std::memcpy(source, packed, sizeof(source));
    shuffle(source, x);
    shuffle(x, y);
    shuffle(y, x);
    for (int word = 0; word < kWordsPerGroup; ++word) {
      IntVector const bits = load_vector<IntVector>(x + 8 * word);
      for (int i = 0; i < kCodesPerWord; ++i) {
        float* const out = weights_[kColumn[word * kCodesPerWord + i]];
        FloatVector const lower = __builtin_convertvector((bits >> 8 * i) & kMask, FloatVector);
        FloatVector const upper = __builtin_convertvector((bits >> (8 * i + kUpperShift)) & kMask, FloatVector);
        std::memcpy(out, &lower, sizeof(lower));
        std::memcpy(out + 8, &upper, sizeof(upper));
      }
    }
  }

  /// Turns the codes of columns [begin, end) into weights.
  QCUTLASS_INLINE void dequantize(int begin, int end, ChannelParameters const& parameters) {
    for (int half = 0; half < 2; ++half) {
      FloatVector const scale = load_vector<FloatVector>(parameters.scales + 8 * half);
      FloatVector const zero = load_vector<FloatVector>(parameters.zeros + 8 * half);
      for (int k = begin; k < end; ++k) {
        FloatVector const weight = (load_vector<FloatVector>(weights_[k] + 8 * half) - zero) * scale;
        std::memcpy(weights_[k] + 8 * half, &weight, sizeof(weight));
      }
    }
  }

  /// sums[m][channel] += sum of a[m][k] * weight[k][channel] over the first `count` columns.
  QCUTLASS_INLINE void multiply(float const* a, int64_t a_stride, int64_t m, int count, float* sums) const {
    for (; m >= 4; m -= 4, a += 4 * a_stride, sums += 4 * layout::kTileN) multiply_rows<4>(a, a_stride, count, sums);
    for (; m >= 2; m -= 2, a += 2 * a_stride, sums += 2 * layout::kTileN) multiply_rows<2>(a, a_stride, count, sums);
    if (m > 0) multiply_rows<1>(a, a_stride, count, sums);
  }

 private:
  static constexpr int kWords = layout::kTileBytes / 4;
  static constexpr int kWordsPerGroup = kWords / 8;
  static constexpr int kMask = (1 << bits_of(kPacking)) - 1;
  static constexpr int kCodesPerWord = 32 / bits_of(kPacking) / 2;  ///< of one row

  /// Bit of a word where the code of (row, k) starts, and the word among those of its lane group.
  static constexpr int shift_of(int row, int k) {
    layout::Position const p = layout::position_in_tile(kPacking, row, k);
    return static_cast<int>(p.byte % 4 * 8 + p.bit);
  }
  static constexpr int word_of(int row, int k) {
    return static_cast<int>(layout::position_in_tile(kPacking, row, k).byte / 4);
  }

  static constexpr int kUpperShift = shift_of(8, 0) - shift_of(0, 0);

  /// Column k of code i (bits 8 i up) of each word.
  static constexpr std::array<uint8_t, kTileK> make_columns() {
    std::array<uint8_t, kTileK> columns{};
    for (int k = 0; k < kTileK; ++k)
      columns[word_of(0, k) * kCodesPerWord + shift_of(0, k) / 8] = static_cast<uint8_t>(k);
    return columns;
  }
  static constexpr std::array<uint8_t, kTileK> kColumn = make_columns();

  static constexpr bool matches_layout() {
    for (int row = 0; row < layout::kTileN; ++row) {
      for (int i = 0; i < kTileK; ++i) {
        int const word = row % 8 * kWordsPerGroup + i / kCodesPerWord;
        int const shift = i % kCodesPerWord * 8 + row / 8 * kUpperShift;
        if (word_of(row, kColumn[i]) != word || shift_of(row, kColumn[i]) != shift) return false;
      }
    }
    return true;
  }
  static_assert(matches_layout());

  static QCUTLASS_INLINE void shuffle(uint32_t const* __restrict in, uint32_t* __restrict out) {
    for (int i = 0; i < kWords / 2; ++i) {
      out[2 * i] = in[i];
      out[2 * i + 1] = in[i + kWords / 2];
    }
  }

  template <int kRows>
  QCUTLASS_INLINE void multiply_rows(float const* __restrict a, int64_t a_stride, int count,
                                     float* __restrict sums) const {
    // Eight chains of additions hide the latency of one.
    constexpr int kSplit = 4 / kRows;
    FloatVector partial[kSplit][kRows][2] = {};
    auto const add = [&](int split, int k) {
      FloatVector const lower = load_vector<FloatVector>(weights_[k]);
      FloatVector const upper = load_vector<FloatVector>(weights_[k] + 8);
      for (int row = 0; row < kRows; ++row) {
        partial[split][row][0] += lower * a[row * a_stride + k];
        partial[split][row][1] += upper * a[row * a_stride + k];
      }
    };
    int k = 0;
    for (; k + kSplit <= count; k += kSplit) {
      for (int split = 0; split < kSplit; ++split) add(split, k + split);
    }
    for (; k < count; ++k) add(0, k);
    for (int row = 0; row < kRows; ++row) {
      for (int half = 0; half < 2; ++half) {
        float* const sum = sums + row * layout::kTileN + 8 * half;
        FloatVector total = load_vector<FloatVector>(sum);
        for (int split = 0; split < kSplit; ++split) total += partial[split][row][half];
        std::memcpy(sum, &total, sizeof(total));
      }
    }
  }

  alignas(64) float weights_[kTileK][layout::kTileN];
};

}  // namespace qcutlass::host
