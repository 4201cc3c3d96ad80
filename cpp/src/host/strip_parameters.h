// Scales and zeros of a strip's channels for some neighbouring tiles, ordered as the words of a lane group are.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "host/channel_parameters.h"
#include "host/lane_words.h"
#include "host/multiversion.h"
#include "qcutlass/layout.h"

namespace qcutlass::host {

/// Reads the tiles of a strip in their order, up to `kTiles` at a time.
template <Packing kPacking, int kTiles>
class StripParameters {
  using Words = LaneWords<kPacking>;

 public:
  using Quad = float[Words::kSteps];  ///< one value for each step of a tile

  /// Whether each step of a tile has one scale a channel.
  static bool can_hold(WeightArguments const& weights) {
    return weights.groups() == 1 || weights.group_size % Words::kStepK == 0;
  }

  QCUTLASS_INLINE StripParameters(WeightArguments const& weights, int64_t strip) : weights_(weights), strip_(strip) {}

  /// Loads the parameters of the next `count` tiles.
  QCUTLASS_INLINE void load(int count) {
    int slot = -1;
    bool one_group = false;  // in the slot
    for (int tile = 0; tile < count; ++tile, k_ += Words::kTileK) {
      bool const same = one_group && k_ + Words::kTileK <= group_end_;
      if (!same) {
        ++slot;
        one_group = fill(scales_[slot], zeros_[slot]);
      }
      slot_[tile] = slot;
    }
  }

  QCUTLASS_INLINE Quad const& scale(int tile, int channel) const { return scales_[slot_[tile]][channel]; }
  QCUTLASS_INLINE Quad const& zero(int tile, int channel) const { return zeros_[slot_[tile]][channel]; }

 private:
  /// The parameters of the tile at k_. Returns whether its steps have them in common.
  QCUTLASS_INLINE bool fill(Quad (&scales)[layout::kTileN], Quad (&zeros)[layout::kTileN]) {
    alignas(64) float step_scales[Words::kSteps][layout::kTileN], step_zeros[Words::kSteps][layout::kTileN];
    int64_t first_group = group_;
    for (int step = 0; step < Words::kSteps; ++step) {
      if (k_ + step * Words::kStepK >= group_end_) next_group();
      if (step == 0) first_group = group_;
      std::memcpy(step_scales[step], parameters_.scales, sizeof(parameters_.scales));
      std::memcpy(step_zeros[step], parameters_.zeros, sizeof(parameters_.zeros));
    }
    transpose(step_scales[0], scales[0]);
    transpose(step_zeros[0], zeros[0]);
    return first_group == group_;
  }

  QCUTLASS_INLINE void next_group() {
    parameters_.load(weights_, strip_, ++group_);
    group_end_ = group_ == weights_.groups() - 1 ? std::numeric_limits<int64_t>::max() : group_end_ + weights_.group_size;
  }

  /// [4][16] as [16][4]: two perfect shuffles.
  static QCUTLASS_INLINE void transpose(float const* __restrict in, float* __restrict out) {
    alignas(64) float other[Words::kSteps * layout::kTileN];
    shuffle(in, other);
    shuffle(other, out);
  }
  static QCUTLASS_INLINE void shuffle(float const* __restrict in, float* __restrict out) {
    constexpr int kHalf = Words::kSteps * layout::kTileN / 2;
    for (int i = 0; i < kHalf; ++i) {
      out[2 * i] = in[i];
      out[2 * i + 1] = in[i + kHalf];
    }
  }

  WeightArguments const& weights_;
  int64_t const strip_;
  int64_t k_ = 0, group_ = -1, group_end_ = 0;
  ChannelParameters parameters_;  ///< of the group
  alignas(64) Quad scales_[kTiles][layout::kTileN];
  alignas(64) Quad zeros_[kTiles][layout::kTileN];
  int slot_[kTiles];
};

}  // namespace qcutlass::host
