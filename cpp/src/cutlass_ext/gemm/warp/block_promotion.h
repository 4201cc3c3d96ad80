// Blockwise int8: from the int32 sums of a block of k to scaled fp32 sums.
#pragma once

#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "integer_floats.h"

namespace cutlass::gemm::warp {

/// Block sums, below 2^22, start as the bits of a float: see integer_floats.h.
struct BlockPromotion {
  static constexpr int kMostK = 128;
  static_assert(kMostK * 128 * 128 < 1 << 22);

  static CUTLASS_DEVICE Array<int, 4> start() {
    Array<int, 4> sums;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) sums[i] = qcutlass::kIntegerFloatBits;
    return sums;
  }

  static CUTLASS_DEVICE float value(int block) { return __int_as_float(block) - qcutlass::kIntegerFloat; }

  /// sums += block sums * scale. Elements 0 and 2 of an accumulator belong to one token, 1 and 3 to the next.
  static CUTLASS_DEVICE void add(Array<float, 4>& sums, Array<int, 4> const& block, float2 scale) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) sums[i] += value(block[i]) * (i % 2 == 0 ? scale.x : scale.y);
  }
};

}  // namespace cutlass::gemm::warp
