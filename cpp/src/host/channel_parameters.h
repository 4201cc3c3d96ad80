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
    int64_t const n = strip * layout::kTileN;
    int64_t const count = std::min<int64_t>(layout::kTileN, weights.n - n);
    for (float& value : scales) value = 0.0f;
    float const zero = weights.zero_type == DType::kNone ? static_cast<float>(symmetric_zero(weights.bits())) : 0.0f;
    for (float& value : zeros) value = zero;
    load_floats(weights.scale_type, weights.scales, group * weights.scale_stride + n, count, scales);
    load_floats(weights.zero_type, weights.zeros, group * weights.zero_stride + n, count, zeros);
  }
};

}  // namespace qcutlass::host
