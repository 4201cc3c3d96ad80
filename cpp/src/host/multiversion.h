// Run-time dispatch over x86-64 levels for functions that the compiler vectorises.
//
// A function marked QCUTLASS_MULTIVERSION is compiled for each level and chosen when the library is loaded; functions
// that it should be compiled together with are marked QCUTLASS_INLINE. The levels differ in instructions (a fused
// multiply-add may replace a multiplication and an addition), not in the order of operations, so the same error bounds
// hold for each.
//
// Vectors of 16 lanes are worth code of their own, since the compiler splits them badly where registers are narrower: a
// function marked QCUTLASS_AVX512 may be called where has_avx512(). It may cut sums into other parts than the rest
// does, within the same bounds. QCUTLASS_AVX512_VNNI is the same with dot products of integers in one instruction,
// QCUTLASS_AVX2 with registers of 8 lanes. Where QCUTLASS_X86_LEVELS is not defined, these functions are compiled as
// any other, and may not hold instructions of their own.
#pragma once

#define QCUTLASS_INLINE inline __attribute__((always_inline))

#if defined(QCUTLASS_MULTIVERSION)
#elif defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define QCUTLASS_X86_LEVELS
#define QCUTLASS_MULTIVERSION __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define QCUTLASS_AVX2 __attribute__((target("arch=x86-64-v3")))
#define QCUTLASS_AVX512 __attribute__((target("arch=x86-64-v4")))
#define QCUTLASS_AVX512_VNNI __attribute__((target("arch=x86-64-v4,avx512vnni")))
#else
#define QCUTLASS_MULTIVERSION
#endif

namespace qcutlass::host {

#if defined(QCUTLASS_AVX512)
inline bool has_avx2() { return __builtin_cpu_supports("x86-64-v3"); }
inline bool has_avx_vnni() { return has_avx2() && __builtin_cpu_supports("avxvnni"); }
inline bool has_avx512() { return __builtin_cpu_supports("x86-64-v4"); }
inline bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
#else
#define QCUTLASS_AVX2
#define QCUTLASS_AVX512
#define QCUTLASS_AVX512_VNNI
inline bool has_avx2() { return false; }
inline bool has_avx_vnni() { return false; }
inline bool has_avx512_vnni() { return false; }
inline bool has_avx512() {
#if defined(__AVX512F__)
  return true;
#else
  return false;
#endif
}
#endif

/// Instruction sets that have code of their own.
enum class VectorLevel { kBaseline, kAvx2, kAvx512 };

/// The best one that the machine has, or a lower one that a test asks for.
inline VectorLevel& vector_level() {
  static VectorLevel level = has_avx512() ? VectorLevel::kAvx512
                             : has_avx2() ? VectorLevel::kAvx2
                                          : VectorLevel::kBaseline;
  return level;
}

}  // namespace qcutlass::host
