// Programmatic dependent launch (sm_90): a kernel may be set up while the one before it in the stream still runs.
// CUTLASS's own wrappers of these instructions are enabled for sm_90a only, but they belong to sm_90.
#pragma once

#include "cutlass/cutlass.h"

namespace cutlass::arch {

/// Waits until everything before this kernel in the stream is complete and visible. Before it, nothing of global memory
/// may be touched but what no earlier kernel still writes.
CUTLASS_DEVICE void wait_for_prior_grids() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next kernel start once all blocks have said so. A kernel that waits first leaves its successor nothing but
/// itself to run beside; one that does not leaves it all that it may run beside itself.
CUTLASS_DEVICE void allow_next_grid() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace cutlass::arch
