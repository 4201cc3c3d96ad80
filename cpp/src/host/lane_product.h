// The product of few rows of activations with a strip of 16 channels, k across vector lanes: codes go from memory
// through registers into sums, 16 k of one channel at a time. Activations are brought into the order of the codes once
// a call (LaneActivations), so that no code moves.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "host/channel_vector.h"
#include "host/lane_words.h"
#include "host/multiversion.h"
#include "host/strip_parameters.h"
#include "qcutlass/layout.h"

namespace qcutlass::host {

/// One value for each step of a tile, for every word of a vector.
template <int kLanes>
QCUTLASS_INLINE typename Vectors<kLanes>::Float repeat_quad(float const* quad) {
  // As 128-bit integers: a broadcast. The compiler makes shuffles of vectors of several widths through memory.
  __int128 x;
  std::memcpy(&x, quad, sizeof(x));
  using Float = typename Vectors<kLanes>::Float;
  if constexpr (kLanes == 16) {
    typename Vectors<kLanes>::Quads const quads = {x, x, x, x};
    return bit_cast<Float>(quads);
  } else {
    typename Vectors<kLanes>::Quads const quads = {x, x};
    return bit_cast<Float>(quads);
  }
}

/// Codes of one channel minus its zeros, by arithmetic: a code is converted where it lies in its word, and the power of
/// two that this is too large goes into the subtraction.
template <Packing kPacking_, int kLanes_>
struct ConvertedCodes {
  static constexpr Packing kPacking = kPacking_;
  static constexpr int kLanes = kLanes_;
  using Words = LaneWords<kPacking>;
  using Float = typename Vectors<kLanes>::Float;
  using Int = typename Vectors<kLanes>::Int;

  Float zero;

  QCUTLASS_INLINE explicit ConvertedCodes(float const* zeros) : zero(repeat_quad<kLanes>(zeros)) {}

  template <int kUpper>
  static QCUTLASS_INLINE Int align(Int words) {
    return kUpper ? words >> Words::kUpperShift : words;
  }
  QCUTLASS_INLINE Float operator()(Int words, int code) const {
    float const unit = 1.0f / static_cast<float>(1 << 8 * code);
    return __builtin_convertvector(words & Words::kMask << 8 * code, Float) * unit - zero;
  }
};

/// The same by table lookup. A table of 16 weights is a vector; all words have the zero of the first.
struct LookedUpCodes {
  static constexpr Packing kPacking = Packing::kW4A16;
  static constexpr int kLanes = 16;
  using Float = Vectors<kLanes>::Float;
  using Int = Vectors<kLanes>::Int;

  Float table;

  QCUTLASS_INLINE explicit LookedUpCodes(float const* zeros)
      : table(Float{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} - zeros[0]) {}

  template <int kUpper>
  static QCUTLASS_INLINE Int align(Int words) {
    return kUpper ? words >> LaneWords<kPacking>::kUpperShift : words;
  }
  QCUTLASS_INLINE Float operator()(Int words, int code) const { return __builtin_shuffle(table, words >> 8 * code); }
};

template <class Codes, int kRows>
class LaneProduct {
  static constexpr Packing kPacking = Codes::kPacking;
  static constexpr int kLanes = Codes::kLanes;
  using Words = LaneWords<kPacking>;
  using Float = typename Vectors<kLanes>::Float;
  using Int = typename Vectors<kLanes>::Int;

 public:
  /// Tiles whose parameters and activations stay in the first-level cache while the codes of each channel pass.
  static constexpr int kBlock = 8;
  static constexpr int kRowFloats = Words::kTileK;
  static constexpr int kTileFloats = kRows * kRowFloats;

  /// sums[row][channel] = the products of the strip's channels with kRows rows.
  static QCUTLASS_INLINE void multiply(WeightArguments const& weights, float const* activations, int64_t strip,
                                       float* sums) {
    int64_t const tiles = layout::tiles_k(kPacking, weights.k);
    uint8_t const* packed = static_cast<uint8_t const*>(weights.packed) + strip * tiles * layout::kTileBytes;
    StripParameters<kPacking, kBlock> parameters(weights, strip);
    alignas(64) Float partial[layout::kTileN][kRows] = {};
    for (int64_t first = 0; first < tiles; first += kBlock) {
      int const count = static_cast<int>(std::min<int64_t>(kBlock, tiles - first));
      parameters.load(count);
      for (int g = 0; g < Words::kGroups; ++g) {
        add_channel<0>(parameters, g, packed, activations, count, partial[g]);
        add_channel<1>(parameters, g, packed, activations, count, partial[Words::kGroups + g]);
      }
      packed += kBlock * layout::kTileBytes;
      activations += kBlock * kTileFloats;
    }
    reduce(partial, sums);
  }

 private:
  /// Whether sums of a tile are scaled or its weights, whichever are fewer.
  static constexpr bool kScaleSums = kRows <= Words::kCodes;

  template <int kUpper>
  static QCUTLASS_INLINE void add_channel(StripParameters<kPacking, kBlock> const& parameters, int g,
                                          uint8_t const* packed, float const* activations, int count,
                                          Float (&partial)[kRows]) {
    int const channel = kUpper * Words::kGroups + g;
    Float sums[kRows];
    for (int row = 0; row < kRows; ++row) sums[row] = partial[row];
    for (int tile = 0; tile < count; ++tile) {
      uint8_t const* const words_of_tile = packed + tile * layout::kTileBytes + g * Words::kWords * 4;
      if (kUpper == 0) __builtin_prefetch(words_of_tile + kBlock * layout::kTileBytes);
      float const* const a = activations + tile * kTileFloats;
      Codes const codes(parameters.zero(tile, channel));
      Float const scale = repeat_quad<kLanes>(parameters.scale(tile, channel));
      Float tile_sums[kRows] = {};
#pragma GCC unroll 2
      for (int word = 0; word < Words::kWords; word += kLanes) {
        Int words;
        std::memcpy(&words, words_of_tile + 4 * word, sizeof(words));
        words = Codes::template align<kUpper>(words);
#pragma GCC unroll 4
        for (int code = 0; code < Words::kCodes; ++code) {
          Float weight = codes(words, code);
          if (!kScaleSums) weight *= scale;
#pragma GCC unroll 8
          for (int row = 0; row < kRows; ++row) {
            Float x;
            std::memcpy(&x, a + row * kRowFloats + code * Words::kWords + word, sizeof(x));
            (kScaleSums ? tile_sums : sums)[row] += weight * x;
          }
        }
      }
      if (!kScaleSums) continue;
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) sums[row] += tile_sums[row] * scale;
    }
    for (int row = 0; row < kRows; ++row) partial[row] = sums[row];
  }

  /// Sums across lanes.
  static QCUTLASS_INLINE void reduce(Float const (&partial)[layout::kTileN][kRows], float* sums) {
    for (int row = 0; row < kRows; ++row) {
      for (int channel = 0; channel < layout::kTileN; ++channel) {
        float sum = 0;
        for (int lane = 0; lane < kLanes; ++lane) sum += partial[channel][row][lane];
        sums[row * layout::kTileN + channel] = sum;
      }
    }
  }
};

}  // namespace qcutlass::host
