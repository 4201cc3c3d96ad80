// Products of 8-bit floats, m16n8k32, on GPUs whose mma.sync has no unit for them.
#pragma once

#include "cutlass/arch/mma.h"
#include "cutlass/gemm/gemm.h"

namespace cutlass::arch {

/// The two halves of four 8-bit floats as pairs of fp16, exactly.
template <class Float8>
CUTLASS_DEVICE void unpack_float8(uint32_t four, uint32_t& low, uint32_t& high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  if constexpr (std::is_same_v<Float8, float_e4m3_t>)
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(low), "=r"(high)
        : "r"(four));
  else  // e5m2 is the upper byte of fp16
    low = __byte_perm(four, 0, 0x1404), high = __byte_perm(four, 0, 0x3424);
#else
  low = high = 0;
#endif
}

/// Operands and result of CUTLASS's Mma<GemmShape<16, 8, 32>, 32, A, RowMajor, B, ColumnMajor, float, ..>. Where
/// mma.sync takes 8-bit floats (sm_89, sm_100 and later) it is that. sm_90 has them in wgmma alone: its compiler turns
/// mma.sync into conversions, two fp16 MMAs into zeroed sums, and four additions of those. Adding in the MMAs saves the
/// additions; the sums of an fp16 MMA have the precision of fp32.
template <class A, class B>
struct MmaFloat8 {
  using Native = Mma<gemm::GemmShape<16, 8, 32>, 32, A, layout::RowMajor, B, layout::ColumnMajor, float,
                     layout::RowMajor, OpMultiplyAdd>;
  using Half = Mma<gemm::GemmShape<16, 8, 16>, 32, half_t, layout::RowMajor, half_t, layout::ColumnMajor, float,
                   layout::RowMajor, OpMultiplyAdd>;
  using FragmentA = typename Native::FragmentA;
  using FragmentB = typename Native::FragmentB;
  using FragmentC = typename Native::FragmentC;

  CUTLASS_DEVICE void operator()(FragmentC& d, FragmentA const& a, FragmentB const& b, FragmentC const& c) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
    // Which k meet in which of the two MMAs does not matter as long as both operands agree: the lower two of the four
    // that a register holds go first.
    uint32_t const* const a_words = reinterpret_cast<uint32_t const*>(&a);
    uint32_t const* const b_words = reinterpret_cast<uint32_t const*>(&b);
    uint32_t a_half[2][4], b_half[2][2];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) unpack_float8<A>(a_words[i], a_half[0][i], a_half[1][i]);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) unpack_float8<B>(b_words[i], b_half[0][i], b_half[1][i]);
    Half const mma;
    mma(d, reinterpret_cast<typename Half::FragmentA const&>(a_half[0]),
        reinterpret_cast<typename Half::FragmentB const&>(b_half[0]), c);
    mma(d, reinterpret_cast<typename Half::FragmentA const&>(a_half[1]),
        reinterpret_cast<typename Half::FragmentB const&>(b_half[1]), d);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    Native{}(d, a, b, c);
#endif  // older GPUs: never selected
  }
};

}  // namespace cutlass::arch
