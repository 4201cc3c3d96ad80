// Launches of all main loops: the functions of a family by tactic, the parameters that all kernels take, the launch.
#pragma once

#include <cuda_runtime_api.h>

#include <utility>

#include "cuda/cuda_check.h"
#include "cuda/launch_grid.cuh"
#include "cuda/output.cuh"
#include "cutlass/device_kernel.h"

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
  launch_grid(kernel,
              {shape.grid, dim3(unsigned(shape.threads)), shape.shared_memory, shape.cluster, launch.programmatic},
              stream, params...);
}

/// Launches the kernel of a configuration. Impl::prepare<Configuration>(params, launch) sets the parameters that only
/// kernels of its main loop take, and returns the launch's shape.
template <class Impl, class Configuration>
void launch_configuration(Launch const& launch, cudaStream_t stream) {
  using Kernel = typename Configuration::Kernel;
  typename Kernel::Params params{};
  params.output = typename Kernel::OutputOp::Params(launch.output);
  set_shares(params, launch, Kernel::Shape::kK);
  LaunchShape const shape = Impl::template prepare<Configuration>(params, launch);
  launch_kernel(cutlass::device_kernel<Kernel>, launch, shape, stream, params);
}

using LaunchFunction = void (*)(Launch const&, cudaStream_t);

/// The launch function of a tactic, Impl::entry<tactic>(), which is nullptr where the family has none.
template <class Impl, int... kTactics>
LaunchFunction launch_function(int tactic, std::integer_sequence<int, kTactics...>) {
  static constexpr LaunchFunction table[] = {Impl::template entry<kTactics>()...};
  return table[tactic];
}

}  // namespace qcutlass::cuda
