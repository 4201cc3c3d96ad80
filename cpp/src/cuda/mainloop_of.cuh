// The main loop of mma.sync of a tactic in a family, and its arguments.
#pragma once

#include "cuda/block_scales.cuh"
#include "cuda/family.h"
#include "cuda/group_matrices.cuh"
#include "cutlass_ext/element_type.h"
#include "cutlass_ext/gemm/threadblock/mma_packed_blockwise.h"
#include "cutlass_ext/gemm/threadblock/mma_packed_groups.h"
#include "cutlass_ext/gemm/threadblock/mma_packed_multistage.h"
#include "cutlass_ext/gemm/threadblock/mma_packed_stream.h"
#include "plan/footprint.h"

namespace qcutlass::cuda {

/// kGathers: tokens are any rows of the activations.
template <DType kType, Packing kPacking, ScaleMode kMode, int kIndex, bool kGathers = false>
struct MainloopOf {
  using Element = decltype(element_of<kType>());
  static constexpr Tactic kTactic = kTactics[kIndex];
  using Shape = cutlass::gemm::GemmShape<kTactic.channels, kTactic.tokens, kTactic.stage_k(kPacking)>;
  using WarpShape = cutlass::gemm::GemmShape<kTactic.warp_channels, kTactic.warp_tokens, kTactic.slice_k(kPacking)>;
  using Stream =
      cutlass::gemm::threadblock::MmaPackedStream<Shape, WarpShape, kTactic.stages, Element, kPacking, kMode, kGathers>;
  using Promoted = std::conditional_t<
      is_blockwise(kMode),
      cutlass::gemm::threadblock::MmaPackedBlockwise<Shape, WarpShape, kTactic.stages, Element, kPacking, kMode>,
      cutlass::gemm::threadblock::MmaPackedGroups<Shape, WarpShape, kTactic.stages, Element, kMode>>;
  using Multistage =
      std::conditional_t<is_promoted(kMode), Promoted,
                         cutlass::gemm::threadblock::MmaPackedMultistage<Shape, WarpShape, kTactic.stages, Element,
                                                                         kPacking, kMode, kGathers>>;
  using Mma = std::conditional_t<kTactic.mainloop == Mainloop::kStream, Stream, Multistage>;
  static constexpr int kSharedMemory = shared_memory_bytes(kTactic, {kType, kPacking, kMode}, kTactic.tokens);
  static_assert(Mma::kThreads == kTactic.threads());
};

template <class Mma>
typename Mma::Arguments mma_arguments(Launch const& launch) {
  typename Mma::Arguments arguments{{},
                                    static_cast<uint8_t const*>(launch.weights),
                                    static_cast<typename Mma::Element const*>(launch.activations),
                                    int(launch.activation_stride),
                                    launch.channels,
                                    launch.tokens,
                                    launch.k,
                                    launch.tiles_n,
                                    launch.tiles_k,
                                    cutlass::gemm::threadblock::GroupSize(launch.group_size),
                                    group_matrix(launch.scales),
                                    group_matrix(launch.zeros),
                                    block_scales(launch),
                                    {},
                                    {},
                                    {}};
  if constexpr (Mma::Traits::kPacking == Packing::kE2M1A16) arguments.global_scale = launch.global_scale;
  if constexpr (takes_super_blocks(Mma::Traits::kMode)) arguments.supers = super_blocks(launch);
  return arguments;
}

}  // namespace qcutlass::cuda
