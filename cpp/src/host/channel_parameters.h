// Scales and zeros of the 16 channels of a strip, as fp32.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host/multiversion.h"
#include "host/numeric.h"
#include "qcutlass/layout.h"
#include "qcutlass/scheme.h"

namespace qcutlass::host {

struct ChannelParameters {
  float scales[layout::kTileN];
  float zeros[layout::kTileN];

  /// Loads group `group` of the strip's channels; channels past n get scale and zero 0.
  QCUTLASS_INLINE void load(WeightArguments const& weights, int64_t strip, int64_t group) {
    int64_t const count = std::min<int64_t>(layout::kTileN, weights.n - strip * layout::kTileN);
    if (count == layout::kTileN) return load_channels(weights, strip, group, layout::kTileN);  // vectors, no loops
    for (float& value : scales) value = 0.0f;
    for (float& value : zeros) value = 0.0f;
    load_channels(weights, strip, group, count);
  }

 private:
  QCUTLASS_INLINE void load_channels(WeightArguments const& weights, int64_t strip, int64_t group, int64_t count) {
    int64_t const n = strip * layout::kTileN;
    load_floats(weights.scale_type, weights.scales, group * weights.scale_stride + n, count, scales);
    if (weights.zero_type == DType::kNone) {
      for (float& value : zeros) value = static_cast<float>(symmetric_zero(weights.bits()));
    } else {
      load_floats(weights.zero_type, weights.zeros, group * weights.zero_stride + n, count, zeros);
    }
  }
};

}  // namespace qcutlass::host
