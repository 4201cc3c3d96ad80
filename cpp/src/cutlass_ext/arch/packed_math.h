// Arithmetic on pairs of 16-bit values in a 32-bit register, one instruction a function.
//
// Every block is `asm volatile` on purpose: volatile asm keeps its order relative to CUTLASS's MMAs (volatile as well),
// so the mainloop decides which dequantisation runs between which MMAs. Plain C++ is gathered into clumps by the
// compiler.
#pragma once

#include "cutlass/bfloat16.h"
#include "cutlass/cutlass.h"
#include "cutlass/half.h"

namespace cutlass::arch {

/// The low (0) or high (1) half of a pair, twice. Not volatile: it becomes the operand selector (.H0_H0, .H1_H1) of its
/// user.
template <int kHalf>
CUTLASS_DEVICE uint32_t broadcast(uint32_t pair) {
  uint32_t r;
  if constexpr (kHalf == 0)
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(r) : "r"(pair));
  else
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(r) : "r"(pair));
  return r;
}

CUTLASS_DEVICE uint32_t make_pair(uint32_t low, uint32_t high) { return low | high << 16; }

/// (a & mask) | bits: LOP3's table for that, from a = 0xf0, b = 0xcc, c = 0xaa, is 0xea.
CUTLASS_DEVICE uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
  uint32_t r;
  asm volatile("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(mask), "r"(bits));
  return r;
}

/// (~a & mask) | bits: table 0xae.
CUTLASS_DEVICE uint32_t and_not_or(uint32_t a, uint32_t mask, uint32_t bits) {
  uint32_t r;
  asm volatile("lop3.b32 %0, %1, %2, %3, 0xae;" : "=r"(r) : "r"(a), "r"(mask), "r"(bits));
  return r;
}

template <int kBits>
CUTLASS_DEVICE uint32_t shift_right(uint32_t a) {
  if constexpr (kBits == 0) return a;
  uint32_t r;
  asm volatile("shr.b32 %0, %1, %2;" : "=r"(r) : "r"(a), "n"(kBits));
  return r;
}

/// Four of the bytes of a, 0 to 3, and b, 4 to 7, as the selector names them, the lowest first.
CUTLASS_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t r;
  asm volatile("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}

/// |a - b| of each unsigned byte.
CUTLASS_DEVICE uint32_t byte_distances(uint32_t a, uint32_t b) {
  uint32_t r;
  asm volatile("vabsdiff4.u32.u32.u32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0));
  return r;
}

/// Bytes 2 * kPair and 2 * kPair + 1 of a, each below the byte `upper`.
template <int kPair>
CUTLASS_DEVICE uint32_t interleave_bytes(uint32_t a, uint32_t upper) {
  uint32_t r;  // selectors 0 .. 3 name a's bytes, 4 the lowest of the second operand
  asm volatile("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(upper), "n"(kPair == 0 ? 0x4140 : 0x4342));
  return r;
}

template <class Element>
struct PairMath;

template <>
struct PairMath<half_t> {
  static CUTLASS_DEVICE uint32_t add(uint32_t a, uint32_t b) {
    uint32_t r;
    asm volatile("add.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
  static CUTLASS_DEVICE uint32_t sub(uint32_t a, uint32_t b) {
    uint32_t r;
    asm volatile("sub.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
  static CUTLASS_DEVICE uint32_t mul(uint32_t a, uint32_t b) {
    uint32_t r;
    asm volatile("mul.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }
  static CUTLASS_DEVICE uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r;
    asm volatile("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
  }
  /// Two fp32 values, each rounded to nearest.
  static CUTLASS_DEVICE uint32_t round(float low, float high) {
    uint32_t r;
    asm volatile("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(r) : "f"(low), "f"(high));
    return r;
  }
};

/// bf16 has only fma on sm_80; fma(a, 1, b), fma(b, -1, a) and fma(a, b, -0) round like add, sub and mul.
template <>
struct PairMath<bfloat16_t> {
  static CUTLASS_DEVICE uint32_t add(uint32_t a, uint32_t b) { return fma(a, 0x3f803f80, b); }
  static CUTLASS_DEVICE uint32_t sub(uint32_t a, uint32_t b) { return fma(b, 0xbf80bf80, a); }
  static CUTLASS_DEVICE uint32_t mul(uint32_t a, uint32_t b) { return fma(a, b, 0x80008000); }
  static CUTLASS_DEVICE uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r;
    asm volatile("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
  }
  static CUTLASS_DEVICE uint32_t round(float low, float high) {
    uint32_t r;
    asm volatile("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(r) : "f"(low), "f"(high));
    return r;
  }
};

}  // namespace cutlass::arch
