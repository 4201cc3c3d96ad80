// The wgmma configurations of one kernel family that are built for the rows of experts, too: see family_wgmma.cuh.
#pragma once

#include "cuda/family_wgmma.cuh"
#include "cutlass_ext/gemm/kernel/grouped_gemm_wgmma.h"

namespace qcutlass::cuda {

template <DType kType, Packing kPacking, ScaleMode kMode>
struct WgmmaGroupedFamily<kType, kPacking, kMode>::Impl {
  using Dense = typename WgmmaFamily<kType, kPacking, kMode>::Impl;

  template <int kIndex>
  struct Configuration : Dense::template MainloopOf<kIndex, true> {
    using Base = typename Dense::template MainloopOf<kIndex, true>;
    using Base::kTactic, typename Base::Mma;
    using Kernel = cutlass::gemm::kernel::GroupedGemmWgmma<Mma>;
    static_assert(sizeof(typename Kernel::SharedStorage) == Base::kSharedMemory,
                  "footprint.h states what the kernel uses");
  };

  template <class C>
  static void run(Launch const& launch, cudaStream_t stream) {
    using Kernel = typename C::Kernel;
    using Shape = typename C::Mma::Shape;
    ExpertRows const& experts = launch.experts;
    typename Kernel::Params params{};
    params.mma = Dense::template arguments<typename C::Mma>(launch);
    params.output = {launch.output, experts.row_scale};
    // Without activations, which only products of nobody's rows have, no row may be an expert's.
    params.tiles = {experts.offsets, experts.a_rows > 0 ? int(experts.count) : 0, launch.tokens};
    params.channel_tiles = int(layout::ceil_div(launch.channels, Shape::kM));
    params.stages = int(layout::ceil_div(launch.k, Shape::kK));
    params.bias_bytes = size_of(launch.output.bias_type);
    params.token_tiles = int(most_token_tiles(launch.tokens, experts.count, C::kTactic));
    params.prefetch = launch.prefetch;
    dim3 const grid(unsigned(std::min(int64_t(params.channel_tiles) * params.token_tiles, int64_t(launch.sm_count))));
    launch_kernel(cutlass::device_kernel<Kernel>, launch,
                  {grid, dim3(1), C::kTactic.threads(), C::kSharedMemory, C::kSharedMemory}, stream, params);
  }

  template <int kIndex>
  static constexpr LaunchFunction entry() {
    constexpr Tactic kTactic = kTactics[kIndex];
    constexpr Kind kKind = {kType, kPacking, kMode};
    if constexpr (is_wgmma(kTactic.mainloop) && is_compiled_for_experts(kTactic, kKind))
      return run<Configuration<kIndex>>;
    return nullptr;
  }
};

template <DType kType, Packing kPacking, ScaleMode kMode>
void WgmmaGroupedFamily<kType, kPacking, kMode>::launch(int tactic, Launch const& launch, void* stream) {
  LaunchFunction const run = launch_function<Impl>(tactic, std::make_integer_sequence<int, kTacticCount>{});
  run(launch, static_cast<cudaStream_t>(stream));
}

}  // namespace qcutlass::cuda
