// All configurations of one kernel family (activation type, packing, scale mode), instantiated from the table of
// tactics, but those of family_wgmma.cuh. One translation unit a family: see cpp/cmake/instances.cmake.
#pragma once

#include <algorithm>

#include "cuda/block_scales.cuh"
#include "cuda/family.h"
#include "cuda/launch_kernel.cuh"
#include "cutlass_ext/element_type.h"
#include "cutlass_ext/gemm/kernel/packed_gemm.h"
#include "plan/footprint.h"

namespace qcutlass::cuda {

template <DType kType, Packing kPacking, ScaleMode kMode>
struct Family<kType, kPacking, kMode>::Impl {
  using Element = decltype(element_of<kType>());
  static constexpr Kind kKind = {kType, kPacking, kMode};

  template <int kIndex>
  struct Configuration {
    static constexpr Tactic kTactic = kTactics[kIndex];
    using Shape = cutlass::gemm::GemmShape<kTactic.channels, kTactic.tokens, kTactic.stage_k(kPacking)>;
    using WarpShape = cutlass::gemm::GemmShape<kTactic.warp_channels, kTactic.warp_tokens, kTactic.slice_k(kPacking)>;
    using Stream =
        cutlass::gemm::threadblock::MmaPackedStream<Shape, WarpShape, kTactic.stages, Element, kPacking, kMode>;
    using Multistage = std::conditional_t<
        is_promoted(kMode),
        cutlass::gemm::threadblock::MmaPackedBlockwise<Shape, WarpShape, kTactic.stages, Element, kPacking, kMode>,
        cutlass::gemm::threadblock::MmaPackedMultistage<Shape, WarpShape, kTactic.stages, Element, kPacking, kMode>>;
    using Mma = std::conditional_t<kTactic.mainloop == Mainloop::kStream, Stream, Multistage>;
    using Kernel = cutlass::gemm::kernel::PackedGemm<Mma, epilogue_blocks(kTactic, kKind), epilogue_row(kTactic),
                                                     kTactic.min_blocks>;
    static constexpr int kSharedMemory = shared_memory_bytes(kTactic, kKind, kTactic.tokens);
    static_assert(sizeof(typename Kernel::SharedStorage) == kSharedMemory, "footprint.h states what the kernel uses");
    static_assert(Mma::kThreads == kTactic.threads());
  };

  template <class C>
  static LaunchShape prepare(typename C::Kernel::Params& params, Launch const& launch) {
    using Swizzle = typename C::Kernel::Swizzle;
    using Shape = typename C::Shape;
    params.mma = {static_cast<uint8_t const*>(launch.weights),
                  static_cast<Element const*>(launch.activations),
                  int(launch.activation_stride),
                  launch.channels,
                  launch.tokens,
                  launch.k,
                  launch.tiles_n,
                  launch.tiles_k,
                  cutlass::gemm::threadblock::GroupSize(launch.group_size),
                  group_matrix(launch.scales),
                  group_matrix(launch.zeros),
                  block_scales(launch)};
    params.tiles = Swizzle::get_tiled_shape({launch.channels, launch.tokens, launch.k},
                                            {Shape::kM, Shape::kN, Shape::kK}, launch.split_k);
    params.log_tile = Swizzle::get_log_tile(params.tiles);
    return {Swizzle::get_grid_shape(params.tiles), dim3(1, 1, unsigned(launch.cluster ? launch.split_k : 1)),
            C::kTactic.threads(), shared_memory_bytes(C::kTactic, kKind, launch.tokens),
            std::min(C::kSharedMemory, launch.shared_memory_limit)};
  }

  static cutlass::gemm::threadblock::GroupMatrix group_matrix(Launch::Groups const& g) {
    return {static_cast<uint8_t const*>(g.data), g.stride_bytes, g.element_bytes, g.row_bytes, g.type};
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
