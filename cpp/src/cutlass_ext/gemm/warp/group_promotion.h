// From the sums of a group of k to scaled sums, where scales are those of channels.
#pragma once

#include "cutlass/array.h"
#include "cutlass/cutlass.h"

namespace cutlass::gemm::warp {

struct GroupPromotion {
  /// sums += group sums * scale. Elements 0 and 1 of an accumulator belong to row g, 2 and 3 to row g + 8.
  static CUTLASS_DEVICE void add(Array<float, 4>& sums, Array<float, 4> const& group, float2 scale) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) sums[i] += (i / 2 == 0 ? scale.x : scale.y) * group[i];
  }
};

}  // namespace cutlass::gemm::warp
