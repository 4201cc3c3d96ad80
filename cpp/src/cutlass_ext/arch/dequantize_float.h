// Register converters of codes that are floating numbers, e2m1 and e4m3: see dequantize.h.
//
// The bits of a code, put where a 16-bit type has the sign and the ends of its exponent and mantissa, are the number
// times a power of two, subnormals included, for exponents differ by their bias alone: e2m1 is 2^-14 of itself as fp16
// and 2^-126 as bf16, a "small number". A multiplication by that power, which a scale may contain, makes it whole.
#pragma once

#include <cuda_fp16.h>

#include "cutlass_ext/arch/dequantize.h"

namespace cutlass::arch {

CUTLASS_DEVICE uint32_t masked(uint32_t a, uint32_t mask) {
  uint32_t r;
  asm volatile("and.b32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(mask));
  return r;
}

/// a * kFactor + b on the pipe of floats, which has time where logic is the limit: with a constant the compiler would
/// make it a shift. It does not know that blocks are one thread deep.
template <uint32_t kFactor>
CUTLASS_DEVICE uint32_t multiply_add(uint32_t a, uint32_t b) {
  return a * (kFactor * blockDim.z) + b;
}

/// Codes of register I of a fragment as numbers of type Element, exact.
template <class Element, qcutlass::Packing kPacking>
struct FloatCodes;

/// Four nibbles at a time become bytes: sign, three zeros, magnitude, zero. A nibble's sign, twice, is bit 4, and 0x70
/// carries it into bit 7; what that leaves in bits 6 to 4 is masked with the byte that is another register's.
template <>
struct FloatCodes<half_t, qcutlass::Packing::kE2M1A16> {
  static constexpr uint32_t kUnit = 0x74007400;  // 2^14, twice: what small numbers are too small by
  static constexpr uint32_t kOne = 0x3c003c00;

  /// Numbers times 2^-14.
  template <int I>
  static CUTLASS_DEVICE uint32_t small_numbers(uint32_t const* words) {
    uint32_t nibbles;  // not volatile: two registers share them
    asm("and.b32 %0, %1, 0x0f0f0f0f;" : "=r"(nibbles) : "r"(words[0] >> I % 2 * 4));
    return masked(I < 2 ? multiply_add<512>(nibbles, 0x70707000) : multiply_add<2>(nibbles, 0x70707070), 0x8e008e00);
  }
  template <int I>
  static CUTLASS_DEVICE uint32_t numbers(uint32_t const* words) {
    return PairMath<half_t>::mul(small_numbers<I>(words), kUnit);
  }
};

/// Magnitudes go to bits 8 to 6 and signs to bit 9, from where 0x7e00 carries them into bit 15.
template <>
struct FloatCodes<bfloat16_t, qcutlass::Packing::kE2M1A16> {
  static constexpr uint32_t kUnit = 0x7e807e80;  // 2^126, twice
  static constexpr uint32_t kOne = 0x3f803f80;

  /// Numbers times 2^-126.
  template <int I>
  static CUTLASS_DEVICE uint32_t small_numbers(uint32_t const* words) {
    constexpr int kBit = I % 2 * 4;
    uint32_t const nibbles = masked(I < 2 ? words[0] : words[0] >> 8, 0x000f000f << kBit);
    return masked(multiply_add<1 << (6 - kBit)>(nibbles, 0x7e007e00), 0x81c081c0);
  }
  template <int I>
  static CUTLASS_DEVICE uint32_t numbers(uint32_t const* words) {
    return PairMath<bfloat16_t>::mul(small_numbers<I>(words), kUnit);
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

/// e2m1 by way of small numbers: one multiplication by the scale times their unit. Where that overflows, from scales of
/// 2 on, there is a rest to multiply by, which rounds nothing.
template <class Element>
struct NativeFloatConverter<Element, qcutlass::Packing::kE2M1A16> {
  using Codes = FloatCodes<Element, qcutlass::Packing::kE2M1A16>;
  struct Operands {
    uint32_t scale, rest;  // of rows g and g + 8
  };

  /// Weights but for their rests.
  template <int I>
  static CUTLASS_DEVICE uint32_t convert(uint32_t const* words, Operands const& op) {
    return PairMath<Element>::mul(Codes::template small_numbers<I>(words), broadcast<I % 2>(op.scale));
  }
  template <int I>
  static CUTLASS_DEVICE uint32_t times_rest(uint32_t weights, Operands const& op) {
    return PairMath<Element>::mul(weights, broadcast<I % 2>(op.rest));
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
