// Scales and offsets of a strip's channels for some neighbouring tiles.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "host/channel_parameters.h"
#include "host/channel_vector.h"
#include "host/multiversion.h"
#include "qcutlass/layout.h"

namespace qcutlass::host {

/// Reads the tiles of a strip in their order, up to kTiles at a time. `kSteps`: parts of a tile that have parameters of
/// their own, 1, 2 or 4; no group ends inside one.
template <Packing kPacking, int kSteps>
class StripParameters {
  static constexpr int kTileK = layout::tile_k(kPacking), kStepK = kTileK / kSteps;
  static constexpr bool kHasQuads = kSteps == 4;

 public:
  /// Tiles whose parameters and activations stay in the first-level cache while the codes of each channel pass.
  static constexpr int kTiles = 8;

  static bool can_hold(WeightArguments const& weights) {
    return weights.groups() == 1 || weights.group_size % kStepK == 0;
  }

  StripParameters(WeightArguments const& weights, int64_t strip) : weights_(weights), strip_(strip) {}

  /// Loads the parameters of the next `count` tiles.
  static QCUTLASS_MULTIVERSION void load(StripParameters& parameters, int count) { parameters.load(count); }

  QCUTLASS_INLINE float scale(int tile, int step, int channel) const { return steps_[tile][step]->scales[channel]; }
  QCUTLASS_INLINE float offset(int tile, int step, int channel) const { return steps_[tile][step]->offsets[channel]; }

  /// Values of one channel for every word of a vector, as a scalar if they are one.
  template <int kLanes>
  QCUTLASS_INLINE auto scales(int tile, int channel) const {
    if constexpr (kHasQuads) {
      return repeat<kLanes>(scales_[tile][channel]);
    } else {
      static_assert(kSteps == 1);
      return scale(tile, 0, channel);
    }
  }
  template <int kLanes>
  QCUTLASS_INLINE auto offsets(int tile, int channel) const {
    if constexpr (kHasQuads) {
      return repeat<kLanes>(offsets_[tile][channel]);
    } else {
      static_assert(kSteps == 1);
      return offset(tile, 0, channel);
    }
  }

 private:
  using Quad = Vectors<4>::Float;  ///< one value for each step, as words w and w + 4 of a lane group have it
  using Quads = Quad[layout::kTileN];

  template <int kLanes>
  static QCUTLASS_INLINE typename Vectors<kLanes>::Float repeat(Quad const& quad) {
    if constexpr (kLanes == 4) return quad;
    // As 128-bit integers: a broadcast. The compiler makes shuffles of vectors of several widths through memory.
    __int128 const x = bit_cast<__int128>(quad);
    if constexpr (kLanes == 16) {
      Vectors<16>::Quads const quads = {x, x, x, x};
      return bit_cast<Vectors<16>::Float>(quads);
    } else if constexpr (kLanes == 8) {
      Vectors<8>::Quads const quads = {x, x};
      return bit_cast<Vectors<8>::Float>(quads);
    }
  }

  QCUTLASS_INLINE void load(int count) {
    int64_t const first_group = group_, last_group = weights_.groups() - 1;
    int64_t const to_come = end_ + count * kTileK - group_end_;
    int64_t const more = to_come <= 0 ? 0 : (to_come - 1) / weights_.group_size + 1;
    load_groups(weights_, {strip_, 1}, first_group, 1 + std::min(more, last_group - first_group), /*implied=*/true,
                groups_);
    for (int tile = 0; tile < count; ++tile) {
      for (int step = 0; step < kSteps; ++step) {
        end_ += kStepK;
        if (end_ > group_end_ && group_ < last_group) {
          ++group_;
          group_end_ += weights_.group_size;
        }
        steps_[tile][step] = groups_ + (group_ - first_group);
      }
      if constexpr (kHasQuads) {
        transpose(tile, &ChannelParameters::scales, scales_[tile]);
        transpose(tile, &ChannelParameters::offsets, offsets_[tile]);
      }
    }
  }

  /// Quads from values of one step each, four channels at a time.
  QCUTLASS_INLINE void transpose(int tile, float (ChannelParameters::*values)[layout::kTileN], Quads& out) const {
    for (int channel = 0; channel < layout::kTileN; channel += 4) {
      Quad in[4];
      for (int step = 0; step < 4; ++step) std::memcpy(&in[step], steps_[tile][step]->*values + channel, sizeof(Quad));
      Quad const low02 = __builtin_shufflevector(in[0], in[2], 0, 4, 1, 5);
      Quad const low13 = __builtin_shufflevector(in[1], in[3], 0, 4, 1, 5);
      Quad const high02 = __builtin_shufflevector(in[0], in[2], 2, 6, 3, 7);
      Quad const high13 = __builtin_shufflevector(in[1], in[3], 2, 6, 3, 7);
      out[channel] = __builtin_shufflevector(low02, low13, 0, 4, 1, 5);
      out[channel + 1] = __builtin_shufflevector(low02, low13, 2, 6, 3, 7);
      out[channel + 2] = __builtin_shufflevector(high02, high13, 0, 4, 1, 5);
      out[channel + 3] = __builtin_shufflevector(high02, high13, 2, 6, 3, 7);
    }
  }

  WeightArguments const& weights_;
  int64_t const strip_;
  int64_t end_ = 0;                                      ///< of the steps so far
  int64_t group_ = 0, group_end_ = weights_.group_size;  ///< of the last step; the last group has what follows, too
  ChannelParameters groups_[kTiles * kSteps + 1];
  ChannelParameters const* steps_[kTiles][kSteps];
  Quads scales_[kHasQuads ? kTiles : 1], offsets_[kHasQuads ? kTiles : 1];
};

}  // namespace qcutlass::host
