// A tile of codes in the first-level cache, 16 channels across vector lanes: decode, dequantise, multiply.
#pragma once

#include <cstdint>
#include <cstring>

#include "host/channel_parameters.h"
#include "host/channel_vector.h"
#include "host/lane_words.h"
#include "host/multiversion.h"
#include "host/prefetch.h"
#include "host/tile_product.h"
#include "qcutlass/layout.h"

namespace qcutlass::host {

template <Packing kPacking, int kLanes>
class TileMath : public TileProduct<layout::tile_k(kPacking), kLanes> {
  using Base = TileProduct<layout::tile_k(kPacking), kLanes>;

 public:
  using Base::multiply;

  static constexpr int kTileK = layout::tile_k(kPacking);

  /// The numbers of a packed tile's codes as fp32.
  QCUTLASS_INLINE void decode(uint8_t const* packed) {
    prefetch_tile(packed);
    // The codes of a word belong to rows g and g + 8 and to the same k for every g.
    alignas(64) uint32_t x[Base::kWords];
    Base::transpose(packed, x);
#pragma GCC unroll 16
    for (int word = 0; word < Words::kWords; ++word) {
      Half lower;
      std::memcpy(&lower, x + 8 * word, sizeof(lower));
      Half const upper = lower >> Words::kUpperShift;
      typename Vector::Int bits[Vector::kParts];
      Vector::join(lower, upper, bits);
      for (int i = 0; i < Words::kCodes; ++i) {
        Vector codes;
        codes.template extract_codes<kPacking>(bits, 8 * i, Words::kMask);
        codes.store(weights_[Words::kColumn[word * Words::kCodes + i]]);
      }
    }
  }

  /// Turns the codes of columns [begin, end) into weights. kMinimums: what the offsets are.
  template <bool kMinimums>
  QCUTLASS_INLINE void dequantize(int begin, int end, ChannelParameters const& parameters) {
    Dequantized<kMinimums> const weight(*this, parameters);
    for (int k = begin; k < end; ++k) {
      weight(k).store(weights_[k]);
    }
  }

  /// The product with the codes of columns [begin, end), which stay codes: saves few rows a pass over the tile.
  template <bool kMinimums>
  QCUTLASS_INLINE void dequantize_multiply(int begin, int end, ChannelParameters const& parameters, float const* a,
                                           int64_t a_stride, int64_t m, float* sums) const {
    Base::multiply(Dequantized<kMinimums>(*this, parameters), a, a_stride, m, begin, end, sums);
  }

 private:
  using Vector = ChannelVector<kLanes>;
  using Half = typename Vector::Half;
  using Words = LaneWords<kPacking>;
  using Base::weights_;

  /// Weights of a column, from codes.
  template <bool kMinimums>
  struct Dequantized {
    TileMath const& tile;
    Vector scale, offset;

    QCUTLASS_INLINE Dequantized(TileMath const& tile, ChannelParameters const& parameters) : tile(tile) {
      scale.load(parameters.scales);
      offset.load(parameters.offsets);
    }
    QCUTLASS_INLINE Vector operator()(int k) const {
      Vector weight;
      weight.load(tile.weights_[k]);
      if constexpr (kMinimums)
        weight.scale_less(offset, scale);
      else
        weight.dequantize(offset, scale);
      return weight;
    }
  };
};

}  // namespace qcutlass::host
