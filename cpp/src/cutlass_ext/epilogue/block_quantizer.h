// The quantiser of qcutlass/quantize.h for outputs in blocks, with a reciprocal in place of quotients: next to half a
// code, the other one may be chosen. A tile's main loop waits for its epilogue, so instructions count.
#pragma once

#include <math_constants.h>

#include "cutlass/fast_math.h"
#include "integer_floats.h"
#include "qcutlass/quantize.h"

namespace cutlass::epilogue::thread {

/// Quantises the values of one block to int8: its extent, its scale, its codes.
class BlockQuantizer {
 public:
  /// max |value|, as bits: magnitudes are ordered as their bits are, and NaN is the largest.
  struct Extent {
    int bits = 0;
    CUTLASS_DEVICE void include(float value) { bits = fast_max(bits, __float_as_int(fabsf(value))); }
  };

  CUTLASS_DEVICE explicit BlockQuantizer(Extent extent) {
    scale_ = scale_of(__int_as_float(extent.bits));
    reciprocal_ = __fdividef(1.f, scale_);
    kept_ = scale_ < CUDART_INF_F ? ~0u : 0u;
  }

  CUTLASS_DEVICE float scale() const { return scale_; }

  /// Codes of four values; 0 where the scale is infinite or NaN, as values were.
  CUTLASS_DEVICE uint32_t codes(float a, float b, float c, float d) const {
    return qcutlass::pack_bytes(code(a), code(b), code(c), code(d)) & kept_;
  }

 private:
  static constexpr float kLargest = qcutlass::largest_code(qcutlass::DType::kInt8);

  /// qcutlass::scale_of, its quotient by a constant by a product and one step of Newton's: correctly rounded.
  static CUTLASS_DEVICE float scale_of(float extent) {
    constexpr float kInverse = 1.f / kLargest;
    float const rough = extent * kInverse, quotient = fmaf(fmaf(-rough, kLargest, extent), kInverse, rough);
    float const scale = quotient < qcutlass::kLeastScale ? qcutlass::kLeastScale : quotient;  // NaN stays
    return extent == 0.f ? 1.f : extent < CUDART_INF_F ? scale : extent;
  }

  /// The code of a value, in the lowest byte.
  CUTLASS_DEVICE uint32_t code(float value) const {
    return __float_as_uint(fmaf(value, reciprocal_, qcutlass::kIntegerFloat));
  }

  float scale_, reciprocal_;
  uint32_t kept_;
};

}  // namespace cutlass::epilogue::thread
