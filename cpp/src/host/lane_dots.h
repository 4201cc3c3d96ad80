// The product of few rows of int8 activations with a strip of 16 channels, k across vector lanes: bytes go from memory
// through registers into integer dot products. Activations lie in the order of the codes, so that no code moves.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "host/byte_dot.h"
#include "host/channel_vector.h"
#include "host/lane_product.h"
#include "host/lane_words.h"
#include "host/multiversion.h"
#include "host/strip_parameters.h"
#include "qcutlass/layout.h"

namespace qcutlass::host {

/// A row's activations for a tile of codes. The four bytes of a word of 8-bit codes belong to two channels, g and
/// g + 8: there are two vectors for them, each with zeros where the other channel's codes are.
template <Packing kPacking>
struct alignas(64) LaneBytes {
  static constexpr int kWords = LaneWords<kPacking>::kWords, kCodes = LaneWords<kPacking>::kCodes;
  static constexpr int kHalves = 4 / kCodes;

  int8_t codes[kHalves][kWords][4];
  float scales[kWords];  ///< of the codes that meet each word
  float sums[kWords];    ///< of these codes

  /// `natural`: codes in the order of k, zeros past its end. `scale_of(k)`: of the code in column k of the tile; one
  /// for all columns that meet a word.
  template <class ScaleOf>
  void arrange(int8_t const* natural, ScaleOf const& scale_of) {
    for (int word = 0; word < kWords; ++word) {
      int32_t sum = 0;
      for (int half = 0; half < kHalves; ++half) std::fill_n(codes[half][word], 4, int8_t{0});
      for (int i = 0; i < kCodes; ++i) {
        int8_t const code = natural[LaneWords<kPacking>::kColumn[word * kCodes + i]];
        for (int half = 0; half < kHalves; ++half) codes[half][word][half * kCodes + i] = code;
        sum += code;
      }
      scales[word] = scale_of(LaneWords<kPacking>::kColumn[word * kCodes]);
      sums[word] = static_cast<float>(sum);
    }
  }
};

/// `Bytes`: a class of byte_dot.h. `kSteps`: as StripParameters has it.
template <class Bytes, Packing kPacking, int kSteps, int kRows>
class LaneDots {
  static constexpr int kLanes = Bytes::kLanes, kBits = bits_of(kPacking);
  using Words = LaneWords<kPacking>;
  using Row = LaneBytes<kPacking>;
  using Float = typename Vectors<kLanes>::Float;
  using Int = typename Bytes::Int;
  using Parameters = StripParameters<kPacking, kSteps>;
  using Sums = LaneSums<kLanes, kRows>;

  static_assert(kBits == 8 ? Words::kUpperShift == 16 : Words::kUpperShift == 4);

 public:
  /// sums[row][channel] = the products of the strip's channels with the rows. `rows`: [tile][kRows].
  static QCUTLASS_INLINE void multiply(WeightArguments const& weights, Row const* rows, int64_t strip, float* sums) {
    int64_t const tiles = layout::tiles_k(kPacking, weights.k);
    uint8_t const* packed = static_cast<uint8_t const*>(weights.packed) + strip * tiles * layout::kTileBytes;
    Parameters parameters(weights, strip);
    Sums partial = {};
    for (int64_t tile = 0; tile < tiles; tile += Parameters::kTiles) {
      int const count = static_cast<int>(std::min<int64_t>(Parameters::kTiles, tiles - tile));
      Parameters::load(parameters, count);
      for (int g = 0; g < Words::kGroups; ++g) add_channels(parameters, g, packed, rows, count, partial);
      packed += Parameters::kTiles * layout::kTileBytes;
      rows += Parameters::kTiles * kRows;
    }
    Sums::reduce(partial, sums);
  }

 private:
  /// Adds the products of channels g and g + 8 with `count` tiles.
  static QCUTLASS_INLINE void add_channels(Parameters const& parameters, int g, uint8_t const* packed, Row const* rows,
                                           int count, Sums& partial) {
    int const upper = Words::kGroups + g;
    Float lower_sums[kRows], upper_sums[kRows];
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      lower_sums[row] = partial.sums[g][row];
      upper_sums[row] = partial.sums[upper][row];
    }
    packed += g * Words::kWords * 4;
    for (int tile = 0; tile < count; ++tile, packed += layout::kTileBytes, rows += kRows) {
      __builtin_prefetch(packed + Parameters::kTiles * layout::kTileBytes);
      auto const lower_scale = parameters.template scales<kLanes>(tile, g);
      auto const lower_zero = parameters.template offsets<kLanes>(tile, g);
      auto const upper_scale = parameters.template scales<kLanes>(tile, upper);
      auto const upper_zero = parameters.template offsets<kLanes>(tile, upper);
#pragma GCC unroll 2
      for (int word = 0; word < Words::kWords; word += kLanes) {
        Int const words = load<Int>(packed + 4 * word);
        Int const lower_codes = kBits == 4 ? words & 0x0f0f0f0f : words;
        Int const upper_codes = kBits == 4 ? (words >> 4) & 0x0f0f0f0f : words;
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
          Row const& a = rows[row];
          Float const scales = load<Float>(a.scales + word), code_sums = load<Float>(a.sums + word);
          Int lower_dots = {}, upper_dots = {};
          Bytes::template add_dot<kBits>(lower_dots, lower_codes, load<Int>(a.codes[0][word]));
          Bytes::template add_dot<kBits>(upper_dots, upper_codes, load<Int>(a.codes[Row::kHalves - 1][word]));
          // The difference first, which is exact where zeros are integers.
          Float const below = __builtin_convertvector(lower_dots, Float) - lower_zero * code_sums;
          Float const above = __builtin_convertvector(upper_dots, Float) - upper_zero * code_sums;
          lower_sums[row] += below * scales * lower_scale;
          upper_sums[row] += above * scales * upper_scale;
        }
      }
    }
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      partial.sums[g][row] = lower_sums[row];
      partial.sums[upper][row] = upper_sums[row];
    }
  }

  template <class Vector>
  static QCUTLASS_INLINE Vector load(void const* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof(vector));
    return vector;
  }
};

}  // namespace qcutlass::host
