// Register converters: codes of a packed fragment -> one 32-bit register (two 16-bit weights) of the m16n8k16 A
// fragment.
//
// Every converter has
//   Operands               what a lane needs of the scales and zeros of rows g and g + 8 of a 16-channel strip
//   make(...)              builds them; native ones take scales as the 16 bits of the activation type
//   convert<I>(words, op)  register I of the fragment of the k16 step whose codes are `words`; even I belong to row g,
//                          odd I to row g + 8
// and native ones also
//   difference<I>(words, op)  the same without the scale: code - zero, exact
#pragma once

#include <cuda_fp16.h>

#include "cutlass_ext/arch/packed_math.h"

namespace cutlass::arch {

/// fp16 1024 and bf16 128, twice: there the last mantissa bit counts one, so `| v` adds a small integer v.
constexpr uint32_t kHalf1024 = 0x64006400;
constexpr uint32_t kBfloat128 = 0x43004300;

/// The difference code - zero in 16-bit arithmetic, exact.
/// offset(): zeros as integers in [0, 2^Bits] (the range for which all steps are exact is wider and is stated below).
template <class Element, int Bits>
struct NativeDifference;

template <>
struct NativeDifference<half_t, 4> {
  using Math = PairMath<half_t>;
  struct Operands {
    uint32_t scale;   // s(g), s(g + 8)
    uint32_t offset;  // 1024 + z(g), -(64 + z(g + 8)); exact for z in [0, 255]
  };

  static CUTLASS_DEVICE uint32_t offset(uint32_t zero_low, uint32_t zero_high) {
    uint32_t const z = kHalf1024 + make_pair(zero_low, zero_high);
    // low: z * 1 + 0; high: z * -1 + 960 = -(64 + zero). 0x3c00 = 1, 0xbc00 = -1, 0x6380 = 960.
    return Math::fma(z, 0xbc003c00, 0x63800000);
  }

  template <int I>
  static CUTLASS_DEVICE uint32_t difference(uint32_t const* words, Operands const& op) {
    uint32_t const codes = shift_right<I / 2 * 8>(words[0]), offset = broadcast<I % 2>(op.offset);
    return I % 2 == 0
               ? Math::sub(and_or(codes, 0x000f000f, kHalf1024), offset)               // (1024 + q) - (1024 + z)
               : Math::fma(and_or(codes, 0x00f000f0, kHalf1024), 0x2c002c00, offset);  // (1024 + 16 q) / 16 - (64 + z)
  }
};

template <>
struct NativeDifference<half_t, 8> {
  using Math = PairMath<half_t>;
  struct Operands {
    uint32_t scale;   // s(g), s(g + 8)
    uint32_t offset;  // 1024 + z(g), 1024 + z(g + 8); exact for z in [0, 255]
  };

  static CUTLASS_DEVICE uint32_t offset(uint32_t zero_low, uint32_t zero_high) {
    return kHalf1024 + make_pair(zero_low, zero_high);
  }

  template <int I>
  static CUTLASS_DEVICE uint32_t difference(uint32_t const* words, Operands const& op) {
    uint32_t const codes = interleave_bytes<I % 2>(words[I / 2], 0x64);  // 1024 + u: 0x64 is 1024's upper byte
    return Math::sub(codes, broadcast<I % 2>(op.offset));
  }
};

template <>
struct NativeDifference<bfloat16_t, 4> {
  using Math = PairMath<bfloat16_t>;
  struct Operands {
    uint32_t scale;   // s(g), s(g + 8)
    uint32_t offset;  // -(128 + z(g)), -(128 + z(g + 8)); exact for z in [0, 128]
  };

  static CUTLASS_DEVICE uint32_t offset(uint32_t zero_low, uint32_t zero_high) {
    return (kBfloat128 | 0x80008000) + make_pair(zero_low, zero_high);
  }

  template <int I>
  static CUTLASS_DEVICE uint32_t difference(uint32_t const* words, Operands const& op) {
    // Every pair is shifted down: 16 q has no room beside 128 in a mantissa of 8 bits.
    uint32_t const codes = and_or(shift_right<I * 4>(words[0]), 0x000f000f, kBfloat128);
    return Math::add(codes, broadcast<I % 2>(op.offset));
  }
};

template <>
struct NativeDifference<bfloat16_t, 8> {
  using Math = PairMath<bfloat16_t>;
  struct Operands {
    uint32_t scale;   // s(g), s(g + 8)
    uint32_t offset;  // z(g) - 128, z(g + 8) - 128; exact for z in [0, 255]
  };

  static CUTLASS_DEVICE uint32_t offset(uint32_t zero_low, uint32_t zero_high) {
    return centre(make_pair(zero_low, zero_high));
  }

  template <int I>
  static CUTLASS_DEVICE uint32_t difference(uint32_t const* words, Operands const& op) {
    uint32_t const centred = centre(interleave_bytes<I % 2>(words[I / 2], 0));
    return Math::sub(centred, broadcast<I % 2>(op.offset));
  }

 private:
  /// Bytes u in 16-bit lanes -> bf16 u - 128. The mantissa holds 7 bits below 128, so the top bit of u picks the
  /// subtrahend instead: (128 + u % 128) - (u < 128 ? 256 : 128). 0x4300 | 0x80 = 0x4380 is 256.
  static CUTLASS_DEVICE uint32_t centre(uint32_t bytes) {
    return Math::sub(and_or(bytes, 0x007f007f, kBfloat128), and_not_or(bytes, 0x00800080, kBfloat128));
  }
};

/// Weights in 16-bit arithmetic: the difference is exact, the product with the scale rounds once.
template <class Element, int Bits>
struct NativeConverter : NativeDifference<Element, Bits> {
  using Operands = typename NativeDifference<Element, Bits>::Operands;

  static CUTLASS_DEVICE Operands make(uint32_t scale_low, uint32_t scale_high, uint32_t zero_low, uint32_t zero_high) {
    return {make_pair(scale_low, scale_high), NativeDifference<Element, Bits>::offset(zero_low, zero_high)};
  }

  template <int I>
  static CUTLASS_DEVICE uint32_t convert(uint32_t const* words, Operands const& op) {
    return PairMath<Element>::mul(NativeDifference<Element, Bits>::template difference<I>(words, op),
                                  broadcast<I % 2>(op.scale));
  }
};

/// Weights in fp32, RN(RN(code - zero) * scale), rounded once to the activation type: any scale type, real-valued
/// zeros.
template <class Element, int Bits>
struct FloatConverter {
  struct Operands {
    float scale[2];  // rows g, g + 8
    float zero[2];   // or minimum
  };

  template <int I>
  static CUTLASS_DEVICE uint32_t convert(uint32_t const* words, Operands const& op) {
    float2 const q = codes<I>(words);
    float const s = op.scale[I % 2], z = op.zero[I % 2];
    return PairMath<Element>::round(__fmul_rn(__fsub_rn(q.x, z), s), __fmul_rn(__fsub_rn(q.y, z), s));
  }

  /// The codes as exact fp16 integers on their way, whatever Element is: fp16 (unlike bf16) holds 1024 + 255.
  template <int I>
  static CUTLASS_DEVICE float2 codes(uint32_t const* words) {
    // Zeros of 0: 1024, and of every second register -64 (0xd400): see NativeDifference.
    using Difference = NativeDifference<half_t, Bits>;
    constexpr typename Difference::Operands kNoZeros{0, Bits == 4 ? 0xd4006400 : kHalf1024};
    uint32_t const codes = Difference::template difference<I>(words, kNoZeros);
    return __half22float2(reinterpret_cast<__half2 const&>(codes));
  }
};

/// The same with minimums, RN(code * scale - minimum): the exact value, rounded once to fp32.
template <class Element, int Bits>
struct MinimumConverter : FloatConverter<Element, Bits> {
  using Base = FloatConverter<Element, Bits>;

  template <int I>
  static CUTLASS_DEVICE uint32_t convert(uint32_t const* words, typename Base::Operands const& op) {
    float2 const q = Base::template codes<I>(words);
    float const s = op.scale[I % 2], m = op.zero[I % 2];
    return PairMath<Element>::round(__fmaf_rn(q.x, s, -m), __fmaf_rn(q.y, s, -m));
  }
};

}  // namespace cutlass::arch
