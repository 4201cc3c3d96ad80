// exp() that the compiler can vectorise.
#pragma once

#include <cstdint>

#include "host/multiversion.h"
#include "host/numeric.h"

namespace qcutlass::host {

/// exp(x), to within 2^-22 of it where it is a normal number; 0 or infinity beyond, NaN for NaN.
QCUTLASS_INLINE float exponential(float x) {
  constexpr float kLargest = 88.72283f;       // log of the largest number
  constexpr float kSmallest = -87.33654f;     // log of the smallest normal one
  constexpr float kRounding = 0x1.8p23f;      // adding it rounds to an integer, left in the low bits
  constexpr float kUpperLog2 = 0.693145752f;  // ln 2 to 15 bits, so that its multiples up to 2^8 are exact
  constexpr float kLowerLog2 = 1.42860677e-6f;
  float const shifted = x * 1.44269504f + kRounding;
  float const n = shifted - kRounding;
  float const r = (x - n * kUpperLog2) - n * kLowerLog2;  // in [-ln 2 / 2, ln 2 / 2]
  // Taylor's series: the first term that is left out, r^8 / 8!, is 5e-9.
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // 2^n in two factors: n may be 128.
  uint32_t const whole = bit_cast<uint32_t>(shifted) - bit_cast<uint32_t>(kRounding);
  auto const half = static_cast<int32_t>(whole) >> 1;
  float const first = bit_cast<float>(static_cast<uint32_t>(half + 127) << 23);
  float const second = bit_cast<float>((whole - static_cast<uint32_t>(half) + 127) << 23);
  float const result = p * first * second;
  return x > kLargest ? __builtin_inff() : x < kSmallest ? 0.0f : result;
}

}  // namespace qcutlass::host
