// The configurations of one kernel family that are built for the rows of experts, too: see family.cuh.
#pragma once

#include "cuda/launch_kernel.cuh"
#include "cuda/mainloop_of.cuh"
#include "cutlass_ext/gemm/kernel/grouped_gemm.h"

namespace qcutlass::cuda {

template <DType kType, Packing kPacking, ScaleMode kMode>
struct GroupedFamily<kType, kPacking, kMode>::Impl {
  static constexpr Kind kKind = {kType, kPacking, kMode};

  template <int kIndex>
  struct Configuration : MainloopOf<kType, kPacking, kMode, kIndex, true> {
    using Base = MainloopOf<kType, kPacking, kMode, kIndex, true>;
    using Base::kTactic, typename Base::Mma;
    using Kernel = cutlass::gemm::kernel::GroupedGemm<Mma, epilogue_blocks(kTactic, kKind), epilogue_row(kTactic),
                                                      kTactic.min_blocks, is_superseded(kTactic, kKind, true)>;
    static_assert(sizeof(typename Kernel::SharedStorage) == Base::kSharedMemory,
                  "footprint.h states what the kernel uses");
  };

  template <class C>
  static void run(Launch const& launch, cudaStream_t stream) {
    using Kernel = typename C::Kernel;
    ExpertRows const& experts = launch.experts;
    typename Kernel::Params params{};
    params.mma = mma_arguments<typename C::Mma>(launch);
    params.mma.source = {experts.rows, int(experts.a_rows)};
    params.mma.halves = launch.output.halves();
    params.output = {launch.output, experts.row_scale};
    // Without activations, which only products of nobody's rows have, no row may be an expert's.
    params.tiles = {experts.offsets, experts.a_rows > 0 ? int(experts.count) : 0, launch.tokens};
    params.channel_tiles = int(layout::ceil_div(launch.channels, C::kTactic.channels));
    params.token_tiles = int(most_token_tiles(launch.tokens, experts.count, C::kTactic));
    params.bias_bytes = size_of(launch.output.bias_type);
    params.weight_bytes = int64_t(launch.tiles_n) * launch.tiles_k * layout::kTileBytes;
    params.scale_bytes = launch.scale_rows * launch.scales.stride_bytes;
    params.zero_bytes = launch.scale_rows * launch.zeros.stride_bytes;
    params.prefetch = launch.prefetch;
    dim3 const grid(unsigned(params.channel_tiles * int64_t(params.token_tiles)));
    launch_kernel(cutlass::device_kernel<Kernel>, launch,
                  {grid, dim3(1), C::kTactic.threads(), C::kSharedMemory, C::kSharedMemory}, stream, params);
  }

  template <int kIndex>
  static constexpr LaunchFunction entry() {
    if constexpr (!is_wgmma(kTactics[kIndex].mainloop) && is_compiled_for_experts(kTactics[kIndex], kKind))
      return run<Configuration<kIndex>>;
    return nullptr;
  }
};

template <DType kType, Packing kPacking, ScaleMode kMode>
void GroupedFamily<kType, kPacking, kMode>::launch(int tactic, Launch const& launch, void* stream) {
  LaunchFunction const run = launch_function<Impl>(tactic, std::make_integer_sequence<int, kTacticCount>{});
  run(launch, static_cast<cudaStream_t>(stream));
}

}  // namespace qcutlass::cuda
