// fp32 to fp8, round to nearest even and saturating, as bit operations that the compiler can vectorise.
#pragma once

#include <cstdint>

#include "host/numeric.h"

namespace qcutlass::host {

/// The largest finite value for all beyond it, infinities included; the NaN of all ones for NaN.
template <int kMantissaBits, int kBias, uint32_t kLargest>
QCUTLASS_INLINE uint8_t saturated_float8(float value) {
  constexpr int kShift = 23 - kMantissaBits;
  constexpr uint32_t kRebias = uint32_t(127 - kBias) << 23;
  constexpr uint32_t kLeastNormal = kRebias + (1u << 23);
  // Its unit in the last place is that of the subnormals, so that adding it rounds as they do.
  constexpr uint32_t kSubnormal = uint32_t(127 + 24 - kBias - kMantissaBits) << 23;
  uint32_t const bits = bit_cast<uint32_t>(value);
  uint32_t const magnitude = bits & 0x7fffffffu;
  uint32_t const subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + bit_cast<float>(kSubnormal)) - kSubnormal;
  uint32_t const normal = (magnitude + (1u << (kShift - 1)) - 1 + (magnitude >> kShift & 1u) - kRebias) >> kShift;
  uint32_t const rounded = magnitude < kLeastNormal ? subnormal : normal;
  uint32_t const finite = (rounded < kLargest ? rounded : kLargest) | (bits >> 24 & 0x80u);
  return static_cast<uint8_t>(magnitude > 0x7f800000u ? 0x7fu : finite);
}

QCUTLASS_INLINE void from_float(float value, Float8E4M3* out) { out->bits = saturated_float8<3, 7, 0x7e>(value); }
QCUTLASS_INLINE void from_float(float value, Float8E5M2* out) { out->bits = saturated_float8<2, 15, 0x7b>(value); }

}  // namespace qcutlass::host
