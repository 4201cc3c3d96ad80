// Every CUDA runtime call is checked.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "qcutlass/error.h"

namespace qcutlass::cuda {

inline void check(cudaError_t status, char const* call) {
  if (status != cudaSuccess) throw CudaError(std::string(call) + " failed: " + cudaGetErrorString(status));
}

}  // namespace qcutlass::cuda

#define QCUTLASS_CUDA_CHECK(call) ::qcutlass::cuda::check((call), #call)
