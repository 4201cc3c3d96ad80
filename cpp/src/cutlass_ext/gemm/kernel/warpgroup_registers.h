// How the threads of a wgmma kernel share an SM's registers.
#pragma once

#include "cutlass/cutlass.h"

namespace cutlass::gemm::kernel {

/// A launch gives every thread the same share of an SM's 65536 registers, a multiple of 8; the producers, a warpgroup
/// beside kWarpgroups consumers, leave most of theirs to those: fewer where some of them make operands, and none beside
/// four, which need no more than their share.
template <int kWarpgroups, bool kMakesOperands = false>
struct WarpgroupRegisters {
  static constexpr int kShare = 65536 / (128 * (kWarpgroups + 1)) / 8 * 8;
  static constexpr int kProducer = kWarpgroups == 2 ? (kMakesOperands ? 72 : 40) : kMakesOperands ? 96 : 32;
  static constexpr int kConsumer = (kShare * (kWarpgroups + 1) - kProducer) / kWarpgroups;
  static_assert(kConsumer % 8 == 0 && kConsumer <= 240, "as setmaxnreg takes them");
};

}  // namespace cutlass::gemm::kernel
