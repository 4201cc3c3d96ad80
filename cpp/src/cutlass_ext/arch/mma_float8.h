// Products of 8-bit floats, m16n8k32, with sums in fp32.
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

/// Operands and result of CUTLASS's Mma<GemmShape<16, 8, 32>, 32, A, RowMajor, B, ColumnMajor, float, ..>, computed by
/// two fp16 MMAs, whose products are exact and whose sums have the precision of fp32. mma.sync on 8-bit floats has not:
/// on sm_89 its sums keep about 13 bits of mantissa, which is why CUTLASS adds them in stages there
/// (arch::detail::is_sm89_staged_policy_v); and sm_90, which has 8-bit floats in wgmma alone, turns it into these same
/// conversions and MMAs, followed by four additions.
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
  }
};

}  // namespace cutlass::arch
