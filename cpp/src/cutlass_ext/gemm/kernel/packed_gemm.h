// The kernel: one output tile (channels x tokens), or one share of its k extent, a threadblock.
#pragma once

#include "cutlass/gemm/threadblock/threadblock_swizzle.h"
#include "cutlass_ext/arch/grid_dependency.h"
#include "cutlass_ext/arch/superseded.h"
#include "cutlass_ext/epilogue/output_op.h"
#include "cutlass_ext/epilogue/transposed_epilogue.h"
#include "cutlass_ext/gemm/threadblock/mma_packed_blockwise.h"
#include "cutlass_ext/gemm/threadblock/mma_packed_groups.h"
#include "cutlass_ext/gemm/threadblock/mma_packed_multistage.h"
#include "cutlass_ext/gemm/threadblock/mma_packed_stream.h"

namespace cutlass::gemm::kernel {

/// kSuperseded: GPUs that run wgmma do without it.
template <class Mma_, int kEpilogueBlocks, int kEpilogueRow, int kMinBlocks, bool kSuperseded>
class PackedGemm {
 public:
  using Mma = Mma_;
  using Element = typename Mma::Element;
  using Shape = typename Mma::Shape;
  using Epilogue = epilogue::threadblock::TransposedEpilogue<Mma, kEpilogueBlocks, kEpilogueRow>;
  using Sum = typename Mma::Accumulator;
  using OutputOp = epilogue::thread::OutputOpOf<Element, Sum, Mma::kMode>;
  /// Neighbouring blocks share activations and weights in L2: 8 tiles of tokens side by side.
  using Swizzle = gemm::threadblock::GemmIdentityThreadblockSwizzle<8>;
  static constexpr int MaxThreadsPerBlock = Mma::kThreads;
  static constexpr int MinBlocksPerMultiprocessor = kMinBlocks;

  struct Params {
    typename Mma::Arguments mma;
    typename OutputOp::Params output;
    GemmCoord tiles;                  // grid in tiles: channels, tokens, shares of k
    int log_tile;                     // of the swizzle
    int stages_a_share, stages_left;  // of k, and the remainder of their division by the shares
    bool prefetch;  // weights, scales and zeros are there before the kernels that precede this one have ended
    bool cluster;   // the shares of k of a tile form a cluster, which adds them
    epilogue::thread::PartialSums<Sum> partials;  // when k is shared without a cluster
  };

  union SharedStorage {
    typename Mma::SharedStorage mainloop;
    typename Epilogue::SharedStorage epilogue;
  };

  CUTLASS_DEVICE void operator()(Params const& params, char* shared) {
    if constexpr (!Mma::Traits::kIsSupported || (kSuperseded && arch::kRunsWgmma)) return;
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(shared);
    GemmCoord const tile = Swizzle::get_tile_offset(params.log_tile);
    if (tile.m() >= params.tiles.m() || tile.n() >= params.tiles.n()) return;

    int const thread = threadIdx.x, warp = canonical_warp_idx_sync(), lane = thread % 32;
    int const channel = tile.m() * Shape::kM, token = tile.n() * Shape::kN;
    // The first shares take a stage more where the stages do not divide evenly.
    int const first = tile.k() * params.stages_a_share + fast_min(tile.k(), params.stages_left);
    int const last = first + params.stages_a_share + (tile.k() < params.stages_left);

    typename Mma::FragmentC accumulators;
    auto const make = [&] {
      return Mma(storage.mainloop, params.mma, channel, token, first * Shape::kK,
                 fast_min(params.mma.k, last * Shape::kK), warp, lane);
    };
    Mma mma = make();
    if (!params.prefetch) arch::wait_for_prior_grids();
    mma.prefetch_weights();
    if (params.prefetch) arch::wait_for_prior_grids();
    mma(accumulators);
    if constexpr (Mma::kMayBeOdd)
      if (Mma::any_odd(accumulators, params.mma.channels - channel, warp, lane)) make().replace_odd(accumulators);
    arch::allow_next_grid();  // late, when nothing is left to load: its blocks take the places that become free

    Epilogue epilogue(storage.epilogue, thread, warp, lane);
    int const c = channel + epilogue.channel();
    OutputOp const output(params.output, c);
    auto const store = [&](int row, Sum(&sum)[OutputOp::kVector]) {
      if (params.partials.data == nullptr) {
        output.store(token + row, sum);
      } else if (token + row < params.mma.tokens && c < params.partials.stride) {
        auto const own = params.partials.of(tile.k(), params.mma.tokens);
        epilogue::thread::store_channels(own.data + (token + row) * own.stride + c, sum, OutputOp::kVector, true);
      }
    };
    // Quantising is a chain of dependent steps: several rows of a thread take turns.
    constexpr int kTogether = std::is_same_v<OutputOp, epilogue::thread::BlockwiseOutput> ? 4 : 1;
    epilogue.template run<kTogether>(accumulators, params.cluster ? params.tiles.k() : 1, params.cluster ? tile.k() : 0,
                                     store);
  }
};

}  // namespace cutlass::gemm::kernel
