// The arithmetic of qcutlass/quantize.h on a GPU: ranges, scales, quotients, codes.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "cuda/vector.cuh"
#include "integer_floats.h"
#include "qcutlass/quantize.h"

namespace qcutlass::cuda {

/// A type of codes. `kAsymmetric`: int8 with zero points.
template <DType kType_, bool kAsymmetric_ = false>
struct Codes {
  static constexpr DType kType = kType_;
  static constexpr bool kAsymmetric = kAsymmetric_;
  static constexpr bool kInteger = kType == DType::kInt8;
};

/// The extremes of some values as bits of fp32 magnitudes, whose order is that of their integers: NaN is the largest.
struct Range {
  int high = 0;  ///< max(x, 0), or max|x|
  int low = 0;   ///< max(-x, 0)

  template <bool kAsymmetric>
  __device__ void include(float x) {
    high = max(high, __float_as_int(kAsymmetric ? x : fabsf(x)));
    if (kAsymmetric) low = max(low, __float_as_int(-x));
  }
};

struct Quantizer {
  float scale;
  int azp;
};

template <class Codes>
__device__ Quantizer quantizer_of(Range const& range) {
  float const high = __int_as_float(range.high), low = __int_as_float(range.low);
  if (!Codes::kAsymmetric) return {scale_of(high, largest_code(Codes::kType)), 0};
  float const scale = scale_of(__fadd_rn(high, low), kAsymmetricSteps);
  return {scale, isfinite(scale) ? __float2int_rn(__fdiv_rn(low, scale)) - 128 : 0};
}

/// The least power of two that is not below a scale.
__device__ inline float power_of_two_above(float scale) {
  constexpr int kFraction = 0x7fffff;
  return isfinite(scale) ? __int_as_float((__float_as_int(scale) + kFraction) & ~kFraction) : scale;
}

/// Quotients by one divisor, by Markstein's division, whose reciprocal is computed once. Where the divisor is moderate
/// they are rounded to nearest even, up to those that every type of codes rounds to 0 or saturates.
class Divisor {
 public:
  __device__ explicit Divisor(float divisor) { value_ = divisor, reciprocal_ = __frcp_rn(divisor); }

  __device__ float value() const { return value_; }
  __device__ bool is_moderate() const { return value_ >= 0x1p-60f && value_ <= 0x1p60f; }

  /// The sign of a zero is lost.
  template <bool kBounded>
  __device__ float divide(float x) const {
    float const rough = __fmul_rn(x, reciprocal_);
    float const quotient = refine(x, refine(x, rough));
    return kBounded || fabsf(rough) < kFar ? quotient : rough;  // not NaN from a product that overflows
  }

 private:
  static constexpr float kFar = 0x1p20f;

  /// Two of these: the first brings a quotient to within a unit in the last place, the second rounds it correctly.
  __device__ float refine(float x, float quotient) const {
    return __fmaf_rn(__fmaf_rn(-quotient, value_, x), reciprocal_, quotient);
  }

  float value_, reciprocal_;
};

/// Two codes, saturated. Before compute capability 8.9 software makes them, of which one copy is enough.
template <__nv_fp8_interpretation_t kFormat>
__device__ __noinline__ uint32_t float8_pair_in_software(float x, float y) {
  return __nv_cvt_float2_to_fp8x2(make_float2(x, y), __NV_SATFINITE, kFormat);
}
template <__nv_fp8_interpretation_t kFormat>
__device__ uint32_t float8_pair(float x, float y) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  return float8_pair_in_software<kFormat>(x, y);
#else
  return __nv_cvt_float2_to_fp8x2(make_float2(x, y), __NV_SATFINITE, kFormat);
#endif
}

/// From values x to codes.
///
/// `kBounded`: the scale is that of a range with x: no quotient is far beyond the codes, and where the divisor is
/// moderate, x is finite. `kModerate`: the divisor is.
template <class Codes, bool kBounded, bool kModerate>
class Rounding {
 public:
  __device__ Rounding(Divisor const& divisor, int azp) : divisor_(divisor), azp_(azp) {}

  /// Four codes, in the bytes of the result. Sets `found` where a NaN was made an integer.
  __device__ uint32_t operator()(float const* x, bool& found) const {
    float const q[4] = {divide(x[0], found), divide(x[1], found), divide(x[2], found), divide(x[3], found)};
    if constexpr (Codes::kInteger) {
      return pack_bytes(to_integer(q[0]), to_integer(q[1]), to_integer(q[2]), to_integer(q[3]));
    } else {
      constexpr auto kFormat = Codes::kType == DType::kFloat8E4M3 ? __NV_E4M3 : __NV_E5M2;
      return __byte_perm(float8_pair<kFormat>(q[0], q[1]), float8_pair<kFormat>(q[2], q[3]), 0x5410);
    }
  }

 private:
  __device__ float divide(float x, bool& found) const {
    float quotient = kModerate ? divisor_.template divide<kBounded>(x) : __fdiv_rn(x, divisor_.value());
    if (!Codes::kInteger) return kModerate ? copysignf(quotient, x) : quotient;  // moderate divisors are positive
    if (!(kBounded && kModerate) && isnan(quotient)) quotient = 0.0f, found = true;
    return quotient;
  }

  /// The integer code of a quotient, in the lowest byte.
  __device__ uint32_t to_integer(float quotient) const {
    constexpr float kFar = Codes::kAsymmetric ? 1024.0f : 127.0f;
    float const near = kBounded ? quotient : fminf(fmaxf(quotient, -kFar), kFar);
    int const rounded = __float_as_int(__fadd_rn(near, kIntegerFloat));
    return uint32_t(Codes::kAsymmetric ? min(max(rounded - kIntegerFloatBits + azp_, -128), 127) : rounded);
  }

  Divisor const& divisor_;
  int azp_;
};

}  // namespace qcutlass::cuda
