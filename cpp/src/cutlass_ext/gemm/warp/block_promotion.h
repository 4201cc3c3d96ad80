// Blockwise products: from the sums of a block of k to scaled fp32 sums.
#pragma once

#include <type_traits>

#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "integer_floats.h"

namespace cutlass::gemm::warp {

/// Product: the type of block sums. Those of int8, below 2^22, start as the bits of a float: see integer_floats.h.
/// Those of fp8 are floats.
template <class Product>
struct BlockPromotion {
  static constexpr bool kInteger = std::is_same_v<Product, int32_t>;
  static constexpr int kMostK = 128;
  static_assert(kMostK * 128 * 128 < 1 << 22);

  static CUTLASS_DEVICE Array<Product, 4> start() {
    Array<Product, 4> sums;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) sums[i] = kInteger ? Product(qcutlass::kIntegerFloatBits) : Product(0);
    return sums;
  }

  static CUTLASS_DEVICE float value(Product block) {
    if constexpr (kInteger) return __int_as_float(block) - qcutlass::kIntegerFloat;
    return block;
  }

  /// sums += block sums * scale. Elements 0 and 2 of an accumulator belong to one token, 1 and 3 to the next.
  static CUTLASS_DEVICE void add(Array<float, 4>& sums, Array<Product, 4> const& block, float2 scale) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) sums[i] += value(block[i]) * (i % 2 == 0 ? scale.x : scale.y);
  }
};

}  // namespace cutlass::gemm::warp
