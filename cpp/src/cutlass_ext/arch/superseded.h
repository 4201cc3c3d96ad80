// Whether code belongs to a build and an architecture whose GPUs run the kernels of wgmma beside it.
#pragma once

namespace cutlass::arch {

/// QCUTLASS_SM90_ALONE: kernels for sm_90a are built, and code for sm_90 is machine code alone, which no other GPU
/// runs. PTX for compute_90 is what newer GPUs run, which have no wgmma.
#if defined(QCUTLASS_SM90_ALONE) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
inline constexpr bool kRunsWgmma = true;
#else
inline constexpr bool kRunsWgmma = false;
#endif

}  // namespace cutlass::arch
