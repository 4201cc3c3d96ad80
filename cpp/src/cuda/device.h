// The device that calls run on. Its traits are queried once and kept in a table: see device_traits().
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/cuda_check.h"
#include "qcutlass/gemm.h"

namespace qcutlass::cuda {

inline constexpr int kMaxDevices = 64;

inline int current_device() {
  int device = 0;
  QCUTLASS_CUDA_CHECK(cudaGetDevice(&device));
  return device;
}

}  // namespace qcutlass::cuda
