// A tile of weights in the first-level cache, 16 channels across vector lanes: decode, dequantise, multiply.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "host/channel_parameters.h"
#include "host/channel_vector.h"
#include "host/multiversion.h"
#include "qcutlass/layout.h"

namespace qcutlass::host {

/// `kLanes`: channels that a vector register holds.
template <Packing kPacking, int kLanes>
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
#pragma GCC unroll 16
    for (int word = 0; word < kWordsPerGroup; ++word) {
      Half lower;
      std::memcpy(&lower, x + 8 * word, sizeof(lower));
      Half const upper = lower >> kUpperShift;
      typename Vector::Int bits[Vector::kParts];
      if constexpr (Vector::kParts == 1) {
        bits[0] = __builtin_shufflevector(lower, upper, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      } else {
        bits[0] = lower;
        bits[1] = upper;
      }
      for (int i = 0; i < kCodesPerWord; ++i) {
        Vector codes;
        codes.extract(bits, 8 * i, kMask);
        codes.store(weights_[kColumn[word * kCodesPerWord + i]]);
      }
    }
  }

  /// Turns the codes of columns [begin, end) into weights.
  QCUTLASS_INLINE void dequantize(int begin, int end, ChannelParameters const& parameters) {
    Dequantized const weight(*this, parameters);
    for (int k = begin; k < end; ++k) {
      weight(k).store(weights_[k]);
    }
  }

  /// sums[m][channel] += sum of a[m][k] * weight[k][channel] over the first `count` columns, which are dequantised.
  QCUTLASS_INLINE void multiply(float const* a, int64_t a_stride, int64_t m, int count, float* sums) const {
    multiply(Stored(*this), a, a_stride, m, 0, count, sums);
  }

  /// The same over the codes of columns [begin, end), which stay codes: saves few rows a pass over the tile.
  QCUTLASS_INLINE void dequantize_multiply(int begin, int end, ChannelParameters const& parameters, float const* a,
                                           int64_t a_stride, int64_t m, float* sums) const {
    multiply(Dequantized(*this, parameters), a, a_stride, m, begin, end, sums);
  }

 private:
  using Vector = ChannelVector<kLanes>;
  using Half = Vectors<layout::kTileN / 2>::Int;

  static_assert(kLanes == layout::kTileN || kLanes == layout::kTileN / 2);

  static constexpr int kMaxRows = kLanes / 2;  ///< eight registers of sums: as many as chains of additions hide latency
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

  /// Weights of a column: as they lie there, or from codes.
  struct Stored {
    TileMath const& tile;

    QCUTLASS_INLINE explicit Stored(TileMath const& tile) : tile(tile) {}
    QCUTLASS_INLINE Vector operator()(int k) const {
      Vector weight;
      weight.load(tile.weights_[k]);
      return weight;
    }
  };
  struct Dequantized {
    TileMath const& tile;
    Vector scale, zero;

    QCUTLASS_INLINE Dequantized(TileMath const& tile, ChannelParameters const& parameters) : tile(tile) {
      scale.load(parameters.scales);
      zero.load(parameters.zeros);
    }
    QCUTLASS_INLINE Vector operator()(int k) const {
      Vector weight;
      weight.load(tile.weights_[k]);
      weight.dequantize(zero, scale);
      return weight;
    }
  };

  template <class Weight>
  static QCUTLASS_INLINE void multiply(Weight const& weight, float const* a, int64_t a_stride, int64_t m, int begin,
                                       int end, float* sums) {
    auto const rows = [&](auto count) {
      constexpr int kRows = decltype(count)::value;
      for (; m >= kRows; m -= kRows, a += kRows * a_stride, sums += kRows * layout::kTileN) {
        multiply_rows<kRows>(weight, a, a_stride, begin, end, sums);
      }
    };
    if constexpr (kMaxRows >= 8) rows(std::integral_constant<int, 8>{});
    rows(std::integral_constant<int, 4>{});
    rows(std::integral_constant<int, 2>{});
    rows(std::integral_constant<int, 1>{});
  }

  template <int kRows, class Weight>
  static QCUTLASS_INLINE void multiply_rows(Weight const& weight, float const* __restrict a, int64_t a_stride,
                                            int begin, int end, float* __restrict sums) {
    constexpr int kSplit = kMaxRows / kRows;
    Vector partial[kSplit][kRows];
    auto const add = [&](int split, int k) {
      Vector const column = weight(k);
      for (int row = 0; row < kRows; ++row) partial[split][row].add_product(column, a[row * a_stride + k]);
    };
    int k = begin;
    for (; k + kSplit <= end; k += kSplit) {
      for (int split = 0; split < kSplit; ++split) add(split, k + split);
    }
    for (; k < end; ++k) add(0, k);
    for (int row = 0; row < kRows; ++row) {
      Vector sum;
      sum.load(sums + row * layout::kTileN);
      for (int split = 0; split < kSplit; ++split) sum.add(partial[split][row]);
      sum.store(sums + row * layout::kTileN);
    }
  }

  alignas(64) float weights_[kTileK][layout::kTileN];
};

}  // namespace qcutlass::host
