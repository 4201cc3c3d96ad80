// From fp32 to int8 codes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "host/multiversion.h"
#include "host/numeric.h"
#include "integer_floats.h"
#include "qcutlass/quantize.h"

namespace qcutlass::host {

/// The bits of `largest` or of the largest magnitude, whose order is that of their integers: NaN is the largest.
QCUTLASS_INLINE int32_t largest_magnitude(float const* __restrict x, int64_t count, int32_t largest = 0) {
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, bit_cast<int32_t>(x[i]) & 0x7fffffff);
  return largest;
}

/// Codes of quotients; returns whether one of them is NaN, which becomes 0.
QCUTLASS_INLINE bool round_to_int8(float const* __restrict x, int64_t count, int32_t azp, int32_t least,
                                   int8_t* __restrict codes) {
  constexpr float kFar = 1024.0f;  // past every int8, whatever the zero point
  int32_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    bool const is_nan = (bit_cast<int32_t>(x[i]) & 0x7fffffff) > 0x7f800000;
    float const near = x[i] < -kFar ? -kFar : x[i] > kFar ? kFar : x[i];
    int32_t const rounded = is_nan ? 0 : bit_cast<int32_t>(near + kIntegerFloat) - kIntegerFloatBits;
    codes[i] = static_cast<int8_t>(std::min(std::max(rounded + azp, least), 127));
    found |= is_nan;
  }
  return found != 0;
}

/// Symmetric codes of x, which becomes quotients.
QCUTLASS_INLINE void divide_and_round(float* __restrict x, int64_t count, float scale, int8_t* __restrict codes) {
  for (int64_t i = 0; i < count; ++i) x[i] /= scale;
  round_to_int8(x, count, 0, -127, codes);
}

/// Quantises x with its own scale, which is returned.
QCUTLASS_INLINE float quantize_block(float* __restrict x, int64_t count, int8_t* __restrict codes) {
  float const scale = scale_of(bit_cast<float>(largest_magnitude(x, count)), largest_code(DType::kInt8));
  divide_and_round(x, count, scale, codes);
  return scale;
}

}  // namespace qcutlass::host
