// A barrier of some of a block's warps. (CUTLASS's NamedBarrier does the same, but traps on anything older than sm_90.)
#pragma once

#include "cutlass/cutlass.h"

namespace cutlass::arch {

/// Barriers 0 and up that kernels leave to __syncthreads and to CUTLASS; of the 16 that a block has.
constexpr int kFirstNamedBarrier = 8, kNamedBarriers = 8;

/// Waits for `kThreads` threads, whole warps, that call it with the same index in [0, kNamedBarriers).
template <int kThreads>
CUTLASS_DEVICE void named_barrier_sync(int index) {
  static_assert(kThreads % 32 == 0);
  asm volatile("bar.sync %0, %1;" ::"r"(kFirstNamedBarrier + index), "n"(kThreads) : "memory");
}

/// Counts as having come to the barrier, without waiting for the others.
template <int kThreads>
CUTLASS_DEVICE void named_barrier_arrive(int index) {
  static_assert(kThreads % 32 == 0);
  asm volatile("bar.arrive %0, %1;" ::"r"(kFirstNamedBarrier + index), "n"(kThreads) : "memory");
}

}  // namespace cutlass::arch
