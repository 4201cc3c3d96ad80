// The product of few rows of activations with a strip of 16 channels, k across vector lanes: codes go from memory
// through registers into sums, so many k of one channel at a time as a vector has 32-bit lanes. Activations lie in the
// order of the codes, so that no code moves (few_rows.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "host/channel_vector.h"
#include "host/lane_words.h"
#include "host/multiversion.h"
#include "host/prefetch.h"
#include "host/strip_parameters.h"
#include "qcutlass/layout.h"

namespace qcutlass::host {

/// Weights of one channel by arithmetic, not yet scaled: an integer is converted where it lies in its word, and the
/// power of two that this is too large goes into the subtraction of the zero.
template <Packing kPacking_, int kLanes_, int kSteps_>
struct ConvertedCodes {
  static constexpr Packing kPacking = kPacking_;
  static constexpr int kLanes = kLanes_;
  static constexpr int kSteps = kSteps_;
  static constexpr bool kScaled = false;
  using Words = LaneWords<kPacking>;
  using Float = typename Vectors<kLanes>::Float;
  using Int = typename Vectors<kLanes>::Int;

  using Parameters = StripParameters<kPacking, kSteps>;

  decltype(std::declval<Parameters>().template offsets<kLanes>(0, 0)) zero;

  QCUTLASS_INLINE ConvertedCodes(Parameters const& parameters, int tile, int channel)
      : zero(parameters.template offsets<kLanes>(tile, channel)) {}

  template <int kUpper>
  static QCUTLASS_INLINE Int align(Int words) {
    return kUpper ? words >> Words::kUpperShift : words;
  }
  QCUTLASS_INLINE Float operator()(Int words, int code) const {
    if constexpr (kPacking == Packing::kE4M3A16) return decode_e4m3<Float>(words >> 8 * code);
    if constexpr (kPacking == Packing::kE2M1A16) return decode_e2m1<Float>(words >> 8 * code);
    float const unit = 1.0f / static_cast<float>(1 << 8 * code);
    return __builtin_convertvector(words & Words::kMask << 8 * code, Float) * unit - zero;
  }
};

/// The weights themselves by arithmetic, where minimums are taken off scaled codes.
template <Packing kPacking_, int kLanes_, int kSteps_>
struct ScaledCodes {
  using Converted = ConvertedCodes<kPacking_, kLanes_, kSteps_>;
  static constexpr Packing kPacking = kPacking_;
  static constexpr int kLanes = kLanes_, kSteps = kSteps_;
  static constexpr bool kScaled = true;
  using Words = LaneWords<kPacking>;
  using Float = typename Vectors<kLanes>::Float;
  using Int = typename Vectors<kLanes>::Int;
  using Parameters = StripParameters<kPacking, kSteps>;

  decltype(std::declval<Parameters>().template scales<kLanes>(0, 0)) scale;
  decltype(std::declval<Parameters>().template offsets<kLanes>(0, 0)) minimum;

  QCUTLASS_INLINE ScaledCodes(Parameters const& parameters, int tile, int channel)
      : scale(parameters.template scales<kLanes>(tile, channel)),
        minimum(parameters.template offsets<kLanes>(tile, channel)) {}

  template <int kUpper>
  static QCUTLASS_INLINE Int align(Int words) {
    return Converted::template align<kUpper>(words);
  }
  QCUTLASS_INLINE Float operator()(Int words, int code) const {
    float const unit = 1.0f / static_cast<float>(1 << 8 * code);
    return __builtin_convertvector(words & Words::kMask << 8 * code, Float) * (scale * unit) - minimum;
  }
};

/// Whether the compiler shuffles by a vector of indices.
#if defined(__clang__)
inline constexpr bool kHasLookups = false;
#else
inline constexpr bool kHasLookups = true;
#endif

/// The weights themselves by table lookup: a vector holds those of all 16 codes, two vectors those of two groups.
template <Packing kPacking_, int kSteps_, bool kMinimums>
struct LookedUpCodes {
  static constexpr Packing kPacking = kPacking_;
  static constexpr int kLanes = 16, kSteps = kSteps_;
  static constexpr bool kScaled = true;
  using Words = LaneWords<kPacking>;
  using Float = Vectors<kLanes>::Float;
  using Int = Vectors<kLanes>::Int;

  static_assert(kSteps == 1 || kSteps == 2);

  Float table[kSteps];

  QCUTLASS_INLINE LookedUpCodes(StripParameters<kPacking, kSteps> const& parameters, int tile, int channel) {
    Float const integers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Float const floats = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    Float const codes = kPacking == Packing::kE2M1A16 ? floats : integers;
    for (int step = 0; step < kSteps; ++step) {
      float const scale = parameters.scale(tile, step, channel), offset = parameters.offset(tile, step, channel);
      if constexpr (kMinimums)
        table[step] = codes * scale - offset;
      else
        table[step] = (codes - offset) * scale;
    }
  }

  /// With two tables bit 4 of an index picks one: words 2 and 3 of each four lie in the second half of the tile.
  template <int kUpper>
  static QCUTLASS_INLINE Int align(Int words) {
    if (kUpper) words >>= Words::kUpperShift;
    if constexpr (kSteps == 1) return words;
    constexpr int kCodeBits = 0x0f0f0f0f, kSecond = 0x10101010;
    return (words & kCodeBits) |
           Int{0, 0, kSecond, kSecond, 0, 0, kSecond, kSecond, 0, 0, kSecond, kSecond, 0, 0, kSecond, kSecond};
  }
  QCUTLASS_INLINE Float operator()(Int words, int code) const {
    // Indices are taken modulo the number of weights: higher bits of the word do not matter.
    if constexpr (kSteps == 1) return __builtin_shuffle(table[0], words >> 8 * code);
    return __builtin_shuffle(table[0], table[kSteps - 1], words >> 8 * code);
  }
};

/// Sums of each channel and row, whose lanes are still to be added.
template <int kLanes, int kRows>
struct alignas(4 * kLanes) LaneSums {
  using Float = typename Vectors<kLanes>::Float;

  Float sums[layout::kTileN][kRows];

  static QCUTLASS_MULTIVERSION void reduce(LaneSums const& lanes, float* out) {
    for (int row = 0; row < kRows; ++row) {
      for (int channel = 0; channel < layout::kTileN; ++channel) {
        float sum = 0;
        for (int lane = 0; lane < kLanes; ++lane) sum += lanes.sums[channel][row][lane];
        out[row * layout::kTileN + channel] = sum;
      }
    }
  }
};

/// kSteady: a row's sums are the same bits for every kRows.
template <class Codes, int kRows, bool kSteady = false>
class LaneProduct {
  static constexpr Packing kPacking = Codes::kPacking;
  static constexpr int kLanes = Codes::kLanes;
  using Words = LaneWords<kPacking>;
  using Float = typename Vectors<kLanes>::Float;
  using Int = typename Vectors<kLanes>::Int;
  using Parameters = StripParameters<kPacking, Codes::kSteps>;

  static constexpr int kTileFloats = kRows * Words::kTileK;  ///< of activations

  /// Whether sums of a tile are scaled or its weights, whichever are fewer.
  static constexpr bool kScaleSums = !kSteady && !Codes::kScaled && kRows <= Words::kCodes;

 public:
  /// Sums of a row that take turns: an addition waits for the one before it, for four cycles.
  static constexpr int kSplit = kSteady ? 2 : kScaleSums || kRows > 4 ? 1 : kRows > 1 ? 2 : 4;

  /// sums[row][channel] = the products of the strip's channels with kRows rows.
  static QCUTLASS_INLINE void multiply(WeightArguments const& weights, float const* activations, int64_t strip,
                                       float* sums) {
    int64_t const tiles = layout::tiles_k(kPacking, weights.k);
    uint8_t const* packed = static_cast<uint8_t const*>(weights.packed) + strip * tiles * layout::kTileBytes;
    Parameters parameters(weights, strip);
    LaneSums<kLanes, kRows> partial = {};
    for (int64_t tile = 0; tile < tiles; tile += Parameters::kTiles) {
      int const count = static_cast<int>(std::min<int64_t>(Parameters::kTiles, tiles - tile));
      Parameters::load(parameters, count);
      for (int g = 0; g < Words::kGroups; ++g) {
        add_channel<0>(parameters, g, packed, activations, count, partial.sums[g]);
        add_channel<1>(parameters, g, packed, activations, count, partial.sums[Words::kGroups + g]);
      }
      packed += Parameters::kTiles * layout::kTileBytes;
      activations += Parameters::kTiles * kTileFloats;
    }
    LaneSums<kLanes, kRows>::reduce(partial, sums);
  }

 private:
  template <int kUpper>
  static QCUTLASS_INLINE void add_channel(Parameters const& parameters, int g, uint8_t const* packed,
                                          float const* activations, int count, Float (&partial)[kRows]) {
    int const channel = kUpper * Words::kGroups + g;
    Float sums[kSplit][kRows] = {};
    packed += g * Words::kWords * 4;
    for (int tile = 0; tile < count; ++tile, packed += layout::kTileBytes, activations += kTileFloats) {
      if (kUpper == 0) prefetch_once(packed + Parameters::kTiles * layout::kTileBytes);
      Codes const codes(parameters, tile, channel);
      if constexpr (Codes::kScaled) {
        add_tile<kUpper>(codes, 1.0f, packed, activations, sums);
      } else {
        auto const scale = parameters.template scales<kLanes>(tile, channel);
        if constexpr (kScaleSums) {
          Float tile_sums[1][kRows] = {};
          add_tile<kUpper>(codes, scale, packed, activations, tile_sums);
#pragma GCC unroll 8
          for (int row = 0; row < kRows; ++row) sums[0][row] += tile_sums[0][row] * scale;
        } else {
          add_tile<kUpper>(codes, scale, packed, activations, sums);
        }
      }
    }
    for (int row = 0; row < kRows; ++row) {
      for (int i = 0; i < kSplit; ++i) partial[row] += sums[i][row];
    }
  }

  /// `scale`: of the weights, unless they have it or their sums get it.
  template <int kUpper, class Scale>
  static QCUTLASS_INLINE void add_tile(Codes const& codes, Scale scale, uint8_t const* packed, float const* activations,
                                       Float (&sums)[kSplit][kRows]) {
#pragma GCC unroll 4
    for (int word = 0; word < Words::kWords; word += kLanes) {
      Int words;
      std::memcpy(&words, packed + 4 * word, sizeof(words));
      words = Codes::template align<kUpper>(words);
#pragma GCC unroll 4
      for (int code = 0; code < Words::kCodes; ++code) {
        Float weight = codes(words, code);
        if constexpr (!Codes::kScaled && !kScaleSums) weight = weight * scale;
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          Float x;
          std::memcpy(&x, activations + row * Words::kTileK + code * Words::kWords + word, sizeof(x));
          sums[code % kSplit][row] += weight * x;
        }
      }
    }
  }
};

}  // namespace qcutlass::host
