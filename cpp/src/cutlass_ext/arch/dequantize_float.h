// Register converters of codes that are floating numbers, e2m1 and e4m3: see dequantize.h.
//
// The bits of a code, put where a 16-bit type has the sign and the ends of its exponent and mantissa, are the number
// times a power of two, subnormals included, for exponents differ by their bias alone: e2m1 is 2^-14 of itself as fp16
// and 2^-126 as bf16. One multiplication by that power makes the number, exactly; another one scales it.
#pragma once

#include <cuda_fp16.h>

#include "cutlass_ext/arch/dequantize.h"

namespace cutlass::arch {

template <int kBits>
CUTLASS_DEVICE uint32_t shift_left(uint32_t a) {
  if constexpr (kBits == 0) return a;
  if constexpr (kBits < 0) return shift_right<-kBits>(a);
  uint32_t r;
  asm volatile("shl.b32 %0, %1, %2;" : "=r"(r) : "r"(a), "n"(kBits < 0 ? 0 : kBits));
  return r;
}

CUTLASS_DEVICE uint32_t masked(uint32_t a, uint32_t mask) {
  uint32_t r;
  asm volatile("and.b32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(mask));
  return r;
}

/// Codes of register I of a fragment as numbers of type Element, exact.
template <class Element, qcutlass::Packing kPacking>
struct FloatCodes;

template <>
struct FloatCodes<half_t, qcutlass::Packing::kE2M1A16> {
  static constexpr uint32_t kUnit = 0x74007400;  // 2^14, twice: what its bits are too small by

  /// Numbers times 2^-14.
  template <int I>
  static CUTLASS_DEVICE uint32_t small_numbers(uint32_t const* words) {
    uint32_t const magnitude = masked(shift_left<9 - 4 * I>(words[0]), 0x0e000e00);  // bits 11 to 9
    return and_or(shift_left<12 - 4 * I>(words[0]), 0x80008000, magnitude);
  }
  template <int I>
  static CUTLASS_DEVICE uint32_t numbers(uint32_t const* words) {
    return PairMath<half_t>::mul(small_numbers<I>(words), kUnit);
  }
};

template <>
struct FloatCodes<bfloat16_t, qcutlass::Packing::kE2M1A16> {
  template <int I>
  static CUTLASS_DEVICE uint32_t numbers(uint32_t const* words) {
    constexpr uint32_t kUnit = 0x7e807e80;                                           // 2^126, twice
    uint32_t const magnitude = masked(shift_left<6 - 4 * I>(words[0]), 0x01c001c0);  // bits 8 to 6
    return PairMath<bfloat16_t>::mul(and_or(shift_left<12 - 4 * I>(words[0]), 0x80008000, magnitude), kUnit);
  }
};

template <>
struct FloatCodes<half_t, qcutlass::Packing::kE4M3A16> {
  template <int I>
  static CUTLASS_DEVICE uint32_t numbers(uint32_t const* words) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint32_t r;
    if constexpr (I % 2 == 0)
      asm volatile("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l;}" : "=r"(r) : "r"(words[I / 2]));
    else
      asm volatile("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(r) : "r"(words[I / 2]));
    return r;
#else
    constexpr uint32_t kUnit = 0x5c005c00;  // 2^8, twice
    uint32_t r;                             // codes above zero bytes
    asm volatile("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(words[I / 2]), "r"(0), "n"(I % 2 == 0 ? 0x1404 : 0x3424));
    uint32_t const magnitude = masked(r, 0x7f007f00);
    // 0x7f, the NaN, reaches the code's sign bit, from where it goes to the highest bit of the exponent.
    uint32_t const nan = masked(shift_right<1>(magnitude + 0x01000100), 0x40004000);
    return PairMath<half_t>::mul(and_or(r, 0x80008000, shift_right<1>(magnitude)) | nan, kUnit);
#endif
  }
};

/// By way of fp16 and fp32, which hold every number.
template <>
struct FloatCodes<bfloat16_t, qcutlass::Packing::kE4M3A16> {
  template <int I>
  static CUTLASS_DEVICE uint32_t numbers(uint32_t const* words) {
    uint32_t const halves = FloatCodes<half_t, qcutlass::Packing::kE4M3A16>::numbers<I>(words);
    float2 const x = __half22float2(reinterpret_cast<__half2 const&>(halves));
    return PairMath<bfloat16_t>::round(x.x, x.y);
  }
};

/// Weights in 16-bit arithmetic: numbers are exact, the product with the scale rounds once.
template <class Element, qcutlass::Packing kPacking>
struct NativeFloatConverter {
  using Codes = FloatCodes<Element, kPacking>;
  struct Operands {
    uint32_t scale;  // s(g), s(g + 8)
  };

  template <int I>
  static CUTLASS_DEVICE uint32_t difference(uint32_t const* words, Operands const&) {
    return Codes::template numbers<I>(words);
  }
  template <int I>
  static CUTLASS_DEVICE uint32_t convert(uint32_t const* words, Operands const& op) {
    return PairMath<Element>::mul(Codes::template numbers<I>(words), broadcast<I % 2>(op.scale));
  }
};

/// e2m1 as fp16, with a unit of its own for each scale: the numbers' bits times the unit are exact, and unit times
/// scale reaches powers of two that no fp16 scale is.
template <>
struct NativeFloatConverter<half_t, qcutlass::Packing::kE2M1A16> {
  using Codes = FloatCodes<half_t, qcutlass::Packing::kE2M1A16>;
  struct Operands {
    uint32_t scale;  // s(g), s(g + 8), together with the units 2^14 times what it stands for
    uint32_t unit;
  };

  template <int I>
  static CUTLASS_DEVICE uint32_t convert(uint32_t const* words, Operands const& op) {
    uint32_t const numbers = PairMath<half_t>::mul(Codes::small_numbers<I>(words), broadcast<I % 2>(op.unit));
    return PairMath<half_t>::mul(numbers, broadcast<I % 2>(op.scale));
  }
};

/// Weights in fp32, rounded once to the activation type: scales of any floating type.
template <class Element, qcutlass::Packing kPacking>
struct FloatFloatConverter {
  struct Operands {
    float scale[2];  // rows g, g + 8
  };

  template <int I>
  static CUTLASS_DEVICE uint32_t convert(uint32_t const* words, Operands const& op) {
    uint32_t const halves = FloatCodes<half_t, kPacking>::template numbers<I>(words);
    float2 const x = __half22float2(reinterpret_cast<__half2 const&>(halves));
    return PairMath<Element>::round(__fmul_rn(x.x, op.scale[I % 2]), __fmul_rn(x.y, op.scale[I % 2]));
  }
};

}  // namespace cutlass::arch
