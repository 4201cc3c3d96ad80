// Warpgroup MMAs (sm_90a) with operand A in registers or in shared memory and operand B in shared memory: CUTLASS's
// instructions, picked by type and size, and the descriptors of operands in shared memory.
#pragma once

#include <utility>

#include "cute/arch/mma_sm90.hpp"
#include "cutlass/cutlass.h"

namespace cutlass::arch {

inline constexpr int kWarpgroupThreads = 128;
/// Rows of one instruction; a warp of the warpgroup holds 16 of them, as in the fragments of m16n8k16 and m16n8k32.
inline constexpr int kWarpgroupRows = 64;

/// Where dynamic shared memory begins in a block's window on sm_90, if there is no static one: the system keeps the
/// first KB. ptxas has the same constant in its code (0x400); kernels check it. With it, descriptors are constants.
inline constexpr int kSharedBase = 1024;

/// Descriptor of a K-major operand whose rows are kRowBytes = 32, 64 or 128 bytes with the swizzle of that width,
/// `offset` bytes into dynamic shared memory (PTX ISA, "Matrix descriptor"): the start address / 16 in bits 0-13; the
/// leading offset from bit 16 on, which such layouts ignore, as 1; the distance of groups of 8 rows / 16 from bit 32
/// on; the swizzle mode (128, 64, 32 bytes: 1, 2, 3) in bits 62-63.
template <int kRowBytes>
CUTLASS_HOST_DEVICE constexpr uint64_t swizzled_operand(int offset) {
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes == 128);
  constexpr uint64_t kMode = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  return kMode << 62 | uint64_t(8 * kRowBytes / 16) << 32 | uint64_t(1) << 16 | uint64_t((kSharedBase + offset) / 16);
}
/// The descriptor moved by so many bytes: along k within the swizzled rows, or to other rows. The address does not
/// carry into the upper word.
CUTLASS_HOST_DEVICE constexpr uint64_t moved_operand(uint64_t operand, int bytes) {
  return operand >> 32 << 32 | (uint32_t(operand) + uint32_t(bytes / 16));
}

/// kTokens columns of sums of 64 channels += A (64 x kStepK) * B (kStepK x kTokens).
template <class ElementA, class ElementB, class Sum, int kTokens, int kStepK>
struct Wgmma {
  using Instruction = decltype(cute::SM90::GMMA::rs_op_selector<
                               ElementA, ElementB, Sum,
                               cute::Shape<cute::Int<kWarpgroupRows>, cute::Int<kTokens>, cute::Int<kStepK>>>());
  /// Lane (g, t) of warp w: [n8 block][row 16 w + g or + 8][token 2t or 2t + 1], as the sums of m16n8 instructions.
  using Sums = typename Instruction::CRegisters;
  static constexpr int kSums = kTokens / 2;
  static_assert(sizeof(Sums) == kSums * 4, "one instruction spans all tokens");

  /// `first`: the sums begin anew, whatever they were.
  static CUTLASS_DEVICE void issue(Sums& sums, uint32_t const (&a)[4], uint64_t b, bool first = false) {
    issue(sums, a, b, first ? ScaleOut::Zero : ScaleOut::One, std::make_integer_sequence<int, kSums>{});
  }

 private:
  using ScaleOut = cute::SM90::GMMA::ScaleOut;

  template <int... kIndices>
  static CUTLASS_DEVICE void issue(Sums& sums, uint32_t const (&a)[4], uint64_t b, ScaleOut scale,
                                   std::integer_sequence<int, kIndices...>) {
    Instruction::fma(a[0], a[1], a[2], a[3], b, sums[kIndices]..., scale);
  }
};

/// 64 x kColumns sums += A (64 x 32) * B (32 x kColumns), 8-bit operands both in shared memory.
template <class ElementA, class ElementB, class Sum, int kColumns>
struct WgmmaShared {
  using Instruction =
      decltype(cute::SM90::GMMA::ss_op_selector<
               ElementA, ElementB, Sum, cute::Shape<cute::Int<kWarpgroupRows>, cute::Int<kColumns>, cute::Int<32>>>());
  /// Lane (g, t) of warp w: [n8 block][row 16 w + g or + 8][column 2t or 2t + 1], as the sums of m16n8 instructions.
  using Sums = typename Instruction::CRegisters;
  static constexpr int kSums = kColumns / 2;
  static_assert(sizeof(Sums) == kSums * 4, "one instruction spans all columns");

  /// `first`: the sums begin anew, whatever they were.
  static CUTLASS_DEVICE void issue(Sums& sums, uint64_t a, uint64_t b, bool first) {
    issue(sums, a, b, first ? ScaleOut::Zero : ScaleOut::One, std::make_integer_sequence<int, kSums>{});
  }

 private:
  using ScaleOut = cute::SM90::GMMA::ScaleOut;

  template <int... kIndices>
  static CUTLASS_DEVICE void issue(Sums& sums, uint64_t a, uint64_t b, ScaleOut scale,
                                   std::integer_sequence<int, kIndices...>) {
    Instruction::fma(a, b, sums[kIndices]..., scale);
  }
};

/// Keeps the compiler from moving accesses to registers of an asynchronous MMA across this point.
template <class Register, int kCount>
CUTLASS_DEVICE void fence_registers(Register (&registers)[kCount]) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(registers[i]);
}

}  // namespace cutlass::arch
