// The product of many rows of activations with a strip of 16 channels, k across vector lanes: its weights are
// dequantised some tiles at a time, once for all rows, and added up as LaneProduct's steady sums are, to the same bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "host/lane_product.h"

namespace qcutlass::host {

/// kRows: of a part of the activations, which lie as LaneProduct takes them.
template <class Codes, int kRows>
class LaneStrip {
  static constexpr Packing kPacking = Codes::kPacking;
  static constexpr int kLanes = Codes::kLanes;
  using Words = LaneWords<kPacking>;
  using Float = typename Vectors<kLanes>::Float;
  using Int = typename Vectors<kLanes>::Int;
  using Parameters = StripParameters<kPacking, Codes::kSteps>;
  using Sums = LaneSums<kLanes, kRows>;

  static constexpr int kTiles = Parameters::kTiles;
  static constexpr int kTileFloats = kRows * Words::kTileK;  ///< of activations
  static constexpr int kSplit = LaneProduct<Codes, kRows, true>::kSplit;

  static_assert(Words::kCodes % kSplit == 0);

  /// Sums that fill half of the registers: four of each serve a load of weights, so that loads are not what takes long.
  static constexpr int kChannelsAtOnce = kRows / 2, kRowsAtOnce = 4;

 public:
  /// sums[part][row][channel] = the products of the strip's channels with `count` parts of kRows rows.
  static QCUTLASS_INLINE void multiply(WeightArguments const& weights, float const* const* parts, int64_t count,
                                       int64_t strip, float* sums) {
    int64_t const tiles = layout::tiles_k(kPacking, weights.k);
    uint8_t const* packed = static_cast<uint8_t const*>(weights.packed) + strip * tiles * layout::kTileBytes;
    Parameters parameters(weights, strip);
    LaneStrip of_tiles;
    std::vector<Sums> partial(count);
    for (int64_t tile = 0; tile < tiles; tile += kTiles) {
      int const held = static_cast<int>(std::min<int64_t>(kTiles, tiles - tile));
      Parameters::load(parameters, held);
      uint8_t const* const codes = packed + tile * layout::kTileBytes;
      of_tiles.template add_half<0>(parameters, codes, held, parts, tile * kTileFloats, partial);
      of_tiles.template add_half<1>(parameters, codes, held, parts, tile * kTileFloats, partial);
    }
    for (int64_t part = 0; part < count; ++part) Sums::reduce(partial[part], sums + part * kRows * layout::kTileN);
  }

 private:
  /// Adds the products of channels g, or of g + 8, with all rows, over the tiles that are held.
  template <int kUpper>
  QCUTLASS_INLINE void add_half(Parameters const& parameters, uint8_t const* packed, int tiles,
                                float const* const* parts, int64_t offset, std::vector<Sums>& partial) {
    for (int tile = 0; tile < tiles; ++tile, packed += layout::kTileBytes) {
      for (int g = 0; g < Words::kGroups; ++g) dequantize<kUpper>(parameters, tile, g, packed + g * Words::kWords * 4);
    }
    for (size_t part = 0; part < partial.size(); ++part) {
      for (int row = 0; row < kRows; row += kRowsAtOnce) {
        for (int g = 0; g < Words::kGroups; g += kChannelsAtOnce)
          add(parts[part] + offset, tiles, g, row, partial[part].sums + kUpper * Words::kGroups + g);
      }
    }
  }

  template <int kUpper>
  QCUTLASS_INLINE void dequantize(Parameters const& parameters, int tile, int g, uint8_t const* packed) {
    int const channel = kUpper * Words::kGroups + g;
    if (kUpper == 0) __builtin_prefetch(packed + kTiles * layout::kTileBytes);
    Codes const codes(parameters, tile, channel);
#pragma GCC unroll 4
    for (int word = 0; word < Words::kWords; word += kLanes) {
      Int words;
      std::memcpy(&words, packed + 4 * word, sizeof(words));
      words = Codes::template align<kUpper>(words);
#pragma GCC unroll 4
      for (int code = 0; code < Words::kCodes; ++code) {
        Float weight = codes(words, code);
        if constexpr (!Codes::kScaled) weight = weight * parameters.template scales<kLanes>(tile, channel);
        std::memcpy(weights_[g][tile] + code * Words::kWords + word, &weight, sizeof(weight));
      }
    }
  }

  /// Adds the products of kChannelsAtOnce channels with kRowsAtOnce rows over the tiles that are held.
  QCUTLASS_INLINE void add(float const* activations, int tiles, int g, int row, Float (*partial)[kRows]) const {
    activations += row * Words::kTileK;
    for (int turn = 0; turn < kSplit; ++turn) {
      Float sums[kChannelsAtOnce][kRowsAtOnce] = {};
      for (int tile = 0; tile < tiles; ++tile) {
#pragma GCC unroll 4
        for (int word = 0; word < Words::kWords; word += kLanes) {
#pragma GCC unroll 4
          for (int code = 0; code < Words::kCodes; code += kSplit) {
            int const place = (code + turn) * Words::kWords + word;
            Float weight[kChannelsAtOnce];
            for (int c = 0; c < kChannelsAtOnce; ++c)
              std::memcpy(&weight[c], weights_[g + c][tile] + place, sizeof(Float));
            for (int r = 0; r < kRowsAtOnce; ++r) {
              Float x;
              std::memcpy(&x, activations + tile * kTileFloats + r * Words::kTileK + place, sizeof(x));
              for (int c = 0; c < kChannelsAtOnce; ++c) sums[c][r] += weight[c] * x;
            }
          }
        }
      }
      for (int c = 0; c < kChannelsAtOnce; ++c) {
        for (int r = 0; r < kRowsAtOnce; ++r) partial[c][row + r] += sums[c][r];
      }
    }
  }

  alignas(64) float weights_[Words::kGroups][kTiles][Words::kTileK];  ///< in the order of activations
};

}  // namespace qcutlass::host
