// All configurations of one kernel family (activation type, packing, scale mode), instantiated from the table of
// tactics, but those of family_wgmma.cuh. One translation unit a family: see cpp/cmake/instances.cmake.
#pragma once

#include <algorithm>

#include "cuda/family.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/mainloop_of.cuh"
#include "cutlass_ext/gemm/kernel/packed_gemm.h"
#include "plan/footprint.h"

namespace qcutlass::cuda {

template <DType kType, Packing kPacking, ScaleMode kMode>
struct Family<kType, kPacking, kMode>::Impl {
  static constexpr Kind kKind = {kType, kPacking, kMode};

  template <int kIndex>
  struct Configuration : MainloopOf<kType, kPacking, kMode, kIndex> {
    using Base = MainloopOf<kType, kPacking, kMode, kIndex>;
    using Base::kTactic, typename Base::Mma;
    using Kernel = cutlass::gemm::kernel::PackedGemm<Mma, epilogue_blocks(kTactic, kKind), epilogue_row(kTactic),
                                                     kTactic.min_blocks, is_superseded(kTactic, kKind, false)>;
    static_assert(sizeof(typename Kernel::SharedStorage) == Base::kSharedMemory,
                  "footprint.h states what the kernel uses");
  };

  template <class C>
  static LaunchShape prepare(typename C::Kernel::Params& params, Launch const& launch) {
    using Swizzle = typename C::Kernel::Swizzle;
    using Shape = typename C::Shape;
    params.mma = mma_arguments<typename C::Mma>(launch);
    params.tiles = Swizzle::get_tiled_shape({launch.channels, launch.tokens, launch.k},
                                            {Shape::kM, Shape::kN, Shape::kK}, launch.split_k);
    params.log_tile = Swizzle::get_log_tile(params.tiles);
    int const needed = shared_memory_bytes(C::kTactic, kKind, launch.tokens);
    // The largest of all launches, for which the kernel's limit is raised once: one block an SM is asked for as two.
    int const most = std::max(C::kSharedMemory, spread_shared_memory(1, launch.shared_memory_limit));
    return {Swizzle::get_grid_shape(params.tiles), dim3(1, 1, unsigned(launch.cluster ? launch.split_k : 1)),
            C::kTactic.threads(), std::max(needed, launch.least_shared_memory),
            std::min(most, launch.shared_memory_limit)};
  }

  template <int kIndex>
  static constexpr LaunchFunction entry() {
    if constexpr (!is_wgmma(kTactics[kIndex].mainloop) && is_compiled(kTactics[kIndex], kKind))
      return launch_configuration<Impl, Configuration<kIndex>>;
    return nullptr;  // selection knows that it fits no GPU
  }
};

template <DType kType, Packing kPacking, ScaleMode kMode>
void Family<kType, kPacking, kMode>::launch(int tactic, Launch const& launch, void* stream) {
  LaunchFunction const run = launch_function<Impl>(tactic, std::make_integer_sequence<int, kTacticCount>{});
  run(launch, static_cast<cudaStream_t>(stream));
}

}  // namespace qcutlass::cuda
