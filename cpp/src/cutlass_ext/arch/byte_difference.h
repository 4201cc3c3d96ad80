// Register converters of 4-by-8-bit products: codes less their zeros, as 8-bit numbers of the activations' type, exact.
//
// A word has four codes of row g in the lower halves of its bytes, and four of row g + 8 in the upper ones. Converters
// begin with 0x80 + code - zero in each byte, which borrows from no neighbour. Where arithmetic can be done by
// multiplications and additions it is: logic takes a pipe of half their rate, which is the limit of these products.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "cutlass/float8.h"
#include "cutlass_ext/arch/packed_math.h"

namespace cutlass::arch {

/// kUnit: the difference that a code of 1 stands for. kLeastZero, kMostZero: zeros for which all differences are exact.
template <class Element>
struct ByteDifference;

/// 0x80 + code - zero of both rows; `zeros`: in every byte.
CUTLASS_DEVICE void offset_differences(uint32_t& low, uint32_t& high, uint32_t codes, uint32_t const (&zeros)[2]) {
  uint32_t const upper = shift_right<4>(codes) & 0x0f0f0f0f;
  low = upper * -16u + codes + (0x80808080 - zeros[0]);
  high = upper + (0x80808080 - zeros[1]);
}

template <>
struct ByteDifference<int8_t> {
  static constexpr float kUnit = 1;
  static constexpr int kLeastZero = -112, kMostZero = 128;

  static CUTLASS_DEVICE void convert(uint32_t& low, uint32_t& high, uint32_t codes, uint32_t const (&zeros)[2]) {
    offset_differences(low, high, codes, zeros);
    low ^= 0x80808080, high ^= 0x80808080;
  }
};

/// e4m3 numbers of up to 16 units of 2^-9, the least subnormal, are their count of units, bit for bit: 0x00 to 0x07 are
/// subnormals, 0x08 to 0x0f the numbers of the first exponent, whose step is the same, and 0x10 is the next one's
/// first.
template <>
struct ByteDifference<float_e4m3_t> {
  static constexpr float kUnit = 0x1p-9f;
  static constexpr int kLeastZero = -1, kMostZero = 16;

  static CUTLASS_DEVICE void convert(uint32_t& low, uint32_t& high, uint32_t codes, uint32_t const (&zeros)[2]) {
    offset_differences(low, high, codes, zeros);
    low = from_offset(low), high = from_offset(high);
  }

 private:
  /// d = 0x80 + difference, whose sign bit is set unless the difference is negative.
  static CUTLASS_DEVICE uint32_t from_offset(uint32_t d) {
    constexpr uint32_t kOffset = 0x80808080;
    return and_not_or(d, kOffset, byte_distances(d, kOffset));
  }
};

}  // namespace cutlass::arch
