// A tile of fp8 weights in the first-level cache as fp32.
#pragma once

#include <cstdint>
#include <cstring>

#include "host/tile_product.h"

namespace qcutlass::host {

template <int kLanes>
class Float8Tile : public TileProduct<layout::tile_k(Packing::kW8A8), kLanes> {
  using Base = TileProduct<layout::tile_k(Packing::kW8A8), kLanes>;

 public:
  static constexpr int kTileK = layout::tile_k(Packing::kW8A8);

  /// Weights of a packed tile, exactly.
  QCUTLASS_INLINE void decode(uint8_t const* packed) {
    alignas(64) uint32_t x[Base::kWords];
    Base::transpose(packed, x);
#pragma GCC unroll 8
    for (int k = 0; k < kTileK; k += 4) {  // the four columns of a word
      typename Vector::Half lower, upper;
      std::memcpy(&lower, x + kHalf * Base::word_of(Packing::kW8A8, 0, k), sizeof(lower));
      std::memcpy(&upper, x + kHalf * Base::word_of(Packing::kW8A8, kHalf, k), sizeof(upper));
      typename Vector::Int bits[Vector::kParts];
      Vector::join(lower, upper, bits);
      for (int i = 0; i < 4; ++i) {
        Vector weights;
        weights.extract_e4m3(bits, 8 * i);
        weights.store(this->weights_[k + i]);
      }
    }
  }

 private:
  using Vector = typename Base::Vector;

  static constexpr int kHalf = layout::kTileN / 2;

  /// A word holds four columns of one row, and each half of the rows lies in one row of the transposed words.
  static constexpr bool matches_layout() {
    for (int row = 0; row < layout::kTileN; ++row) {
      for (int k = 0; k < kTileK; ++k) {
        int const word = row % kHalf * Base::kWords / kHalf + Base::word_of(Packing::kW8A8, row / kHalf * kHalf, k);
        if (Base::word_of(Packing::kW8A8, row, k) != word) return false;
        if (word != Base::word_of(Packing::kW8A8, row, k / 4 * 4)) return false;
        if (Base::shift_of(Packing::kW8A8, row, k) != k % 4 * 8) return false;
      }
    }
    return true;
  }
  static_assert(matches_layout());
};

}  // namespace qcutlass::host
