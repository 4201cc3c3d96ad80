// Launches of kernels: grids, clusters and early starts.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "cuda/cuda_check.h"
#include "cuda/device.h"

namespace qcutlass::cuda {

struct GridShape {
  dim3 grid, block;
  int shared_memory = 0;   ///< bytes, dynamic
  dim3 cluster = dim3(1);  ///< blocks; more than one from sm_90 on alone
  /// Whether it may be set up while the kernel before it in the stream ends: one that calls wait_for_prior_grids()
  /// before it touches memory that others write.
  bool early = false;
};

/// Whether the code that runs on the current device has the instructions of sm_90: clusters, and waiting for the grid
/// before.
inline bool runs_sm90_code() { return device_traits(current_device()).code_capability >= 90; }

template <class... Params>
void launch_grid(void (*kernel)(Params...), GridShape const& shape, cudaStream_t stream,
                 std::decay_t<Params> const&... params) {
  cudaLaunchAttribute attributes[2];
  unsigned count = 0;
  if (shape.early) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster.x * shape.cluster.y * shape.cluster.z > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {shape.cluster.x, shape.cluster.y, shape.cluster.z};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = size_t(shape.shared_memory);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  QCUTLASS_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, params...));
}

}  // namespace qcutlass::cuda
