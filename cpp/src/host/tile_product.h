// A tile of fp32 weights in the first-level cache, 16 channels across vector lanes, and its product with rows of
// activations.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "host/channel_vector.h"
#include "host/multiversion.h"
#include "qcutlass/layout.h"

namespace qcutlass::host {

/// The base of the tiles of all packings. `kTileColumns`: k extent; `kLanes`: channels that a vector register holds.
template <int kTileColumns, int kLanes>
class TileProduct {
 public:
  /// sums[m][channel] += sum of a[m][k] * weight[k][channel] over the first `count` columns.
  QCUTLASS_INLINE void multiply(float const* a, int64_t a_stride, int64_t m, int count, float* sums) const {
    multiply(Stored(*this), a, a_stride, m, 0, count, sums);
  }

 protected:
  using Vector = ChannelVector<kLanes>;

  static_assert(kLanes == layout::kTileN || kLanes == layout::kTileN / 2);

  static constexpr int kMaxRows = kLanes / 2;  ///< eight registers of sums: as many as chains of additions hide latency
  static constexpr int kWords = layout::kTileBytes / 4;

  /// The 32-bit words of a packed tile, [8 g][16 words], as [16 words][8 g]: three perfect shuffles.
  static QCUTLASS_INLINE void transpose(uint8_t const* packed, uint32_t* __restrict out) {
    alignas(64) uint32_t source[kWords], other[kWords];
    std::memcpy(source, packed, sizeof(source));
    shuffle(source, out);
    shuffle(out, other);
    shuffle(other, out);
  }

  /// Bit of a word where the code of (row, k) starts, and the word among those of its tile.
  static constexpr int shift_of(Packing packing, int row, int k) {
    layout::Position const p = layout::position_in_tile(packing, row, k);
    return static_cast<int>(p.byte % 4 * 8 + p.bit);
  }
  static constexpr int word_of(Packing packing, int row, int k) {
    return static_cast<int>(layout::position_in_tile(packing, row, k).byte / 4);
  }

  /// The same over columns [begin, end), weight(k) being the weights of column k.
  template <class Weight>
  static QCUTLASS_INLINE void multiply(Weight const& weight, float const* a, int64_t a_stride, int64_t m, int begin,
                                       int end, float* sums) {
    // A function of its own would not have the instructions of its caller.
    auto const rows = [&](auto count) __attribute__((always_inline)) {
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

  alignas(64) float weights_[kTileColumns][layout::kTileN];

 private:
  /// Weights of a column as they lie there.
  struct Stored {
    TileProduct const& tile;

    QCUTLASS_INLINE explicit Stored(TileProduct const& tile) : tile(tile) {}
    QCUTLASS_INLINE Vector operator()(int k) const {
      Vector weight;
      weight.load(tile.weights_[k]);
      return weight;
    }
  };

  static QCUTLASS_INLINE void shuffle(uint32_t const* __restrict in, uint32_t* __restrict out) {
    for (int i = 0; i < kWords / 2; ++i) {
      out[2 * i] = in[i];
      out[2 * i + 1] = in[i + kWords / 2];
    }
  }
};

}  // namespace qcutlass::host
