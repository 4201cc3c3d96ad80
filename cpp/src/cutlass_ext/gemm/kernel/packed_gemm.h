// The kernel: one output tile (channels x tokens), or one share of its k extent, a threadblock.
#pragma once

#include "cutlass/gemm/threadblock/threadblock_swizzle.h"
#include "cutlass_ext/arch/grid_dependency.h"
#include "cutlass_ext/epilogue/transposed_epilogue.h"
#include "cutlass_ext/gemm/threadblock/mma_packed_multistage.h"

namespace cutlass::gemm::kernel {

template <class Mma_, int kEpilogueBlocks, int kEpilogueRow, int kMinBlocks>
class PackedGemm {
 public:
  using Mma = Mma_;
  using Element = typename Mma::Element;
  using Shape = typename Mma::Shape;
  using Epilogue = epilogue::threadblock::TransposedEpilogue<Mma, kEpilogueBlocks, kEpilogueRow>;
  using OutputOp = epilogue::thread::BiasActivation<Element>;
  /// Neighbouring blocks share activations and weights in L2: 8 tiles of tokens side by side.
  using Swizzle = gemm::threadblock::GemmIdentityThreadblockSwizzle<8>;
  static constexpr int MaxThreadsPerBlock = Mma::kThreads;
  static constexpr int MinBlocksPerMultiprocessor = kMinBlocks;

  struct Params {
    typename Mma::Arguments mma;
    typename OutputOp::Params output;
    GemmCoord tiles;  // grid in tiles: channels, tokens, shares of k
    int log_tile;     // of the swizzle
    bool cluster;     // the shares of k of a tile form a cluster, which adds them
    /// fp32 [shares][tokens][partial_stride] when k is shared without a cluster: another kernel adds them, in order.
    float* partials;
    int64_t partial_stride;
  };

  union SharedStorage {
    typename Mma::SharedStorage mainloop;
    typename Epilogue::SharedStorage epilogue;
  };

  CUTLASS_DEVICE void operator()(Params const& params, char* shared) {
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(shared);
    GemmCoord const tile = Swizzle::get_tile_offset(params.log_tile);
    if (tile.m() >= params.tiles.m() || tile.n() >= params.tiles.n()) return;

    int const thread = threadIdx.x, warp = canonical_warp_idx_sync(), lane = thread % 32;
    int const channel = tile.m() * Shape::kM, token = tile.n() * Shape::kN;
    int const stages = (params.mma.k + Shape::kK - 1) / Shape::kK;
    int const first = int(int64_t(stages) * tile.k() / params.tiles.k());
    int const last = int(int64_t(stages) * (tile.k() + 1) / params.tiles.k());

    arch::wait_for_prior_grids();
    typename Mma::FragmentC accumulators;
    Mma mma(storage.mainloop, params.mma, channel, token, first * Shape::kK, fast_min(params.mma.k, last * Shape::kK),
            warp, lane);
    mma(accumulators);
    arch::allow_next_grid();  // late, when nothing is left to load: its blocks take the places that become free

    Epilogue epilogue(storage.epilogue, thread, warp, lane);
    if (params.partials != nullptr) {
      int const c = channel + epilogue.channel();
      float* partials = params.partials + tile.k() * int64_t(params.mma.tokens) * params.partial_stride + c;
      epilogue.template run<false>(accumulators, 1, 0, [&](int row, float const(&sum)[8]) {
        if (token + row >= params.mma.tokens || c >= params.partial_stride) return;
        float4* out = reinterpret_cast<float4*>(partials + (token + row) * params.partial_stride);
        out[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        out[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
      });
      return;
    }
    OutputOp const output(params.output, channel + epilogue.channel());
    auto const store = [&](int row, float const(&sum)[8]) { output.store(token + row, sum); };
    if (params.cluster)
      epilogue.template run<true>(accumulators, params.tiles.k(), tile.k(), store);
    else
      epilogue.template run<false>(accumulators, 1, 0, store);
  }
};

}  // namespace cutlass::gemm::kernel
