// Launches of kernels that wait for the one before them in the stream themselves, and so may be set up while it ends.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/cuda_check.h"
#include "cuda/device.h"

namespace qcutlass::cuda {

struct EarlyLaunch {
  dim3 grid, block;
  int shared_memory = 0;  ///< bytes, dynamic
  int cluster = 1;        ///< blocks; more than one from sm_90 on alone
};

/// Whether the code that runs on the current device has the instructions of sm_90: clusters, and waiting for the grid
/// before.
inline bool runs_sm90_code() { return device_traits(current_device()).code_capability >= 90; }

/// The kernel calls wait_for_prior_grids() before it touches memory that others write.
template <class Params>
void launch_early(void (*kernel)(Params), EarlyLaunch const& launch, cudaStream_t stream, Params const& params) {
  cudaLaunchAttribute attributes[2];
  unsigned count = 0;
  if (runs_sm90_code()) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (launch.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {unsigned(launch.cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = launch.grid;
  config.blockDim = launch.block;
  config.dynamicSmemBytes = size_t(launch.shared_memory);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  QCUTLASS_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, params));
}

}  // namespace qcutlass::cuda
