// A tile of fp8 weights in the first-level cache as fp32.
#pragma once

#include <cstdint>
#include <cstring>

#include "host/prefetch.h"
#include "host/tile_product.h"

namespace qcutlass::host {

template <int kLanes>
class Float8Tile : public TileProduct<layout::tile_k(Packing::kW8A8), kLanes> {
  using Base = TileProduct<layout::tile_k(Packing::kW8A8), kLanes>;

 public:
  static constexpr int kTileK = layout::tile_k(Packing::kW8A8);

  /// Weights of a packed tile, exactly.
  QCUTLASS_INLINE void decode(uint8_t const* packed) {
    prefetch_tile(packed);
    alignas(64) uint32_t words[Base::kWords];
    transpose(packed, words);
#pragma GCC unroll 8
    for (int word = 0; word < kRowWords; ++word) {
      typename Vector::Int bits[Vector::kParts];
      std::memcpy(bits, words + word * layout::kTileN, sizeof(bits));
      for (int i = 0; i < 4; ++i) {
        Vector weights;
        weights.extract_e4m3(bits, 8 * i);
        weights.store(this->weights_[4 * word + i]);
      }
    }
  }

 private:
  using Vector = typename Base::Vector;

  static constexpr int kRowWords = kTileK / 4;

  /// The words of a packed tile, [16 rows][8], as [8][16 rows] in natural order.
  static QCUTLASS_INLINE void transpose(uint8_t const* packed, uint32_t* __restrict out) {
    constexpr int kQuarter = Base::kWords / 4;
    alignas(64) uint32_t x[Base::kWords];
    Base::transpose(packed, x);  // [even rows, odd rows][chunk][4 words][8 rows]
    uint32_t const *const even = x, *const odd = x + 2 * kQuarter;
    uint32_t *const low = out, *const high = out + 2 * kQuarter;
    for (int i = 0; i < kQuarter; ++i) {
      bool const swapped = i / 2 % 2;
      low[2 * i] = swapped ? even[i + kQuarter] : even[i];
      low[2 * i + 1] = swapped ? odd[i + kQuarter] : odd[i];
      high[2 * i] = swapped ? even[i] : even[i + kQuarter];
      high[2 * i + 1] = swapped ? odd[i] : odd[i + kQuarter];
    }
  }

  /// Words hold four columns of one row each, in chunks of four words that are swapped in rows 4 to 7 and 12 to 15.
  static constexpr bool matches_layout() {
    for (int row = 0; row < layout::kTileN; ++row) {
      for (int k = 0; k < kTileK; ++k) {
        if (Base::word_of(Packing::kW8A8, row, k) != row * kRowWords + (k / 4 ^ row / 4 % 2 * kRowWords / 2))
          return false;
        if (Base::shift_of(Packing::kW8A8, row, k) != k % 4 * 8) return false;
      }
    }
    return true;
  }
  static_assert(matches_layout());
};

}  // namespace qcutlass::host
