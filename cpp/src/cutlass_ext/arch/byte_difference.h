// Register converters of 4-by-8-bit products: codes less their zero, as 8-bit numbers of the activations' type, exact.
//
// Four codes lie in the low halves of a word's bytes, or in the high ones. Both converters begin with 0x80 + code -
// zero in each byte, which borrows from no neighbour.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "cutlass/float8.h"
#include "cutlass_ext/arch/packed_math.h"

namespace cutlass::arch {

/// kUnit: the difference that a code of 1 stands for. kLeastZero, kMostZero: zeros for which all differences are exact.
template <class Element>
struct ByteDifference;

/// 0x80 + code - zero; `zeros`: in every byte.
template <bool kHigh>
CUTLASS_DEVICE uint32_t offset_difference(uint32_t codes, uint32_t zeros) {
  return and_or(shift_right < kHigh ? 4 : 0 > (codes), 0x0f0f0f0f, 0x80808080) - zeros;
}

template <>
struct ByteDifference<int8_t> {
  static constexpr float kUnit = 1;
  static constexpr int kLeastZero = -112, kMostZero = 128;

  template <bool kHigh>
  static CUTLASS_DEVICE uint32_t convert(uint32_t codes, uint32_t zeros) {
    return offset_difference<kHigh>(codes, zeros) ^ 0x80808080;
  }
};

/// e4m3 numbers of up to 16 units of 2^-9, the least subnormal, are their count of units, bit for bit: 0x00 to 0x07 are
/// subnormals, 0x08 to 0x0f the numbers of the first exponent, whose step is the same, and 0x10 is the next one's
/// first.
template <>
struct ByteDifference<float_e4m3_t> {
  static constexpr float kUnit = 0x1p-9f;
  static constexpr int kLeastZero = -1, kMostZero = 16;

  /// d = 0x80 + difference. Positive, the sign bit of d is set and goes: ~(d ^ 0x7f) has the others as they are.
  /// Negative, ~d = 0x7f - difference is one short of 0x80 + |difference|, the sign and the magnitude.
  template <bool kHigh>
  static CUTLASS_DEVICE uint32_t convert(uint32_t codes, uint32_t zeros) {
    uint32_t const d = offset_difference<kHigh>(codes, zeros);
    uint32_t const positive = repeat_signs(d);
    return ~(d ^ (positive & 0x7f7f7f7f)) + (~positive & 0x01010101);
  }
};

}  // namespace cutlass::arch
