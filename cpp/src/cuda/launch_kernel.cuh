// What launches of all main loops have in common.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/cuda_check.h"
#include "cuda/output.cuh"

namespace qcutlass::cuda {

/// How the k extent is shared, and where the shares' sums go.
template <class Params>
void set_shares(Params& params, Launch const& launch, int stage_k) {
  int const stages = int(layout::ceil_div(launch.k, stage_k));
  params.stages_a_share = stages / launch.split_k;
  params.stages_left = stages % launch.split_k;
  params.prefetch = launch.prefetch;
  params.cluster = launch.cluster;
  params.partials = partial_sums<typename decltype(params.partials)::Sum>(launch);
}

struct LaunchShape {
  dim3 grid, cluster;  // of blocks; a cluster of one is none
  int threads;
  int shared_memory, most_shared_memory;  // bytes of this launch, and of any
};

template <class... Params>
void launch_kernel(void (*kernel)(Params...), Launch const& launch, LaunchShape const& shape, cudaStream_t stream,
                   Params const&... params) {
  if (launch.first_use && shape.most_shared_memory > 0)
    QCUTLASS_CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.most_shared_memory));
  cudaLaunchAttribute attributes[2];
  int count = 0;
  if (launch.programmatic) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster.x * shape.cluster.y * shape.cluster.z > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {shape.cluster.x, shape.cluster.y, shape.cluster.z};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(unsigned(shape.threads));
  config.dynamicSmemBytes = size_t(shape.shared_memory);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = unsigned(count);
  QCUTLASS_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, params...));
}

}  // namespace qcutlass::cuda
