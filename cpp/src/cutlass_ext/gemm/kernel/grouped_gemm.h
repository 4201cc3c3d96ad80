// The kernel of a mixture of experts: one output tile (channels x tokens of one expert) a threadblock. The main loop
// and the way of its sums are those of PackedGemm; k is not shared, since experts are tiles enough.
#pragma once

#include "cutlass_ext/arch/grid_dependency.h"
#include "cutlass_ext/arch/superseded.h"
#include "cutlass_ext/epilogue/expert_output.h"
#include "cutlass_ext/epilogue/transposed_epilogue.h"
#include "cutlass_ext/gemm/kernel/expert_tiles.h"
#include "cutlass_ext/gemm/threadblock/mma_packed_multistage.h"
#include "cutlass_ext/gemm/threadblock/mma_packed_stream.h"

namespace cutlass::gemm::kernel {

/// kSuperseded: GPUs that run wgmma do without it.
template <class Mma_, int kEpilogueBlocks, int kEpilogueRow, int kMinBlocks, bool kSuperseded>
class GroupedGemm {
 public:
  using Mma = Mma_;
  using Element = typename Mma::Element;
  using Shape = typename Mma::Shape;
  using Epilogue = epilogue::threadblock::TransposedEpilogue<Mma, kEpilogueBlocks, kEpilogueRow>;
  using OutputOp = epilogue::thread::ExpertOutput<Element>;
  static constexpr int MaxThreadsPerBlock = Mma::kThreads;
  static constexpr int MinBlocksPerMultiprocessor = kMinBlocks;

  /// `mma` and `output` are those of the first expert, with all rows.
  struct Params {
    typename Mma::Arguments mma;
    typename OutputOp::Params output;
    ExpertTiles tiles;
    int channel_tiles, token_tiles;  // token_tiles: at most
    int bias_bytes;                  // of an element
    int64_t weight_bytes;            // of an expert
    int64_t scale_bytes, zero_bytes;
    bool prefetch;  // offsets, rows and weights are there before the kernels that precede this one have ended
  };

  union SharedStorage {
    typename Mma::SharedStorage mainloop;
    typename Epilogue::SharedStorage epilogue;
  };

  /// Tiles of tokens side by side before the next tile of channels: their blocks share weights in L2 where they are one
  /// expert's, and their activations stay there meanwhile.
  static constexpr int kSide = 8;

  CUTLASS_DEVICE void operator()(Params const& params, char* shared) {
    if constexpr (kSuperseded && arch::kRunsWgmma) return;
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(shared);
    int const thread = threadIdx.x, warp = canonical_warp_idx_sync(), lane = thread % 32;
    int const group = int(blockIdx.x) / (kSide * params.channel_tiles), first = group * kSide;
    int const side = fast_min(kSide, params.token_tiles - first), rest = int(blockIdx.x) - first * params.channel_tiles;
    int const channel = rest / side * Shape::kM;

    if (!params.prefetch) arch::wait_for_prior_grids();  // the offsets are data
    ExpertTile tile{};
    bool const found = params.tiles.template find<Shape::kN>(first + rest % side, lane, tile);
    typename OutputOp::Params output_params = params.output;
    output_params.tokens = tile.end;
    if (!found || tile.expert < 0) {
      arch::wait_for_prior_grids();  // no block ends before them, so that this kernel's end is theirs
      if (found) clear(output_params, channel, tile.begin, thread);
      return;
    }

    typename Mma::Arguments args = params.mma;
    args.tokens = tile.end;
    args.weights += tile.expert * params.weight_bytes;
    args.scales.data += tile.expert * params.scale_bytes;
    if (args.zeros.data != nullptr) args.zeros.data += tile.expert * params.zero_bytes;
    args.supers.select(tile.expert);
    static_cast<typename Mma::Traits::GlobalScale&>(args) = args.of_expert(tile.expert);
    output_params.bias = static_cast<uint8_t const*>(output_params.bias) +
                         int64_t(tile.expert) * output_params.channels * params.bias_bytes;

    typename Mma::FragmentC accumulators;
    auto const make = [&] { return Mma(storage.mainloop, args, channel, tile.begin, 0, args.k, warp, lane); };
    Mma mma = make();
    mma.prefetch_weights();
    if (params.prefetch) arch::wait_for_prior_grids();
    // Early: behind a product that has read the same offsets, the next one loads weights where SMs have room.
    arch::allow_next_grid();
    mma(accumulators);
    if constexpr (Mma::kMayBeOdd)
      if (Mma::any_odd(accumulators, args.channels - channel, warp, lane)) make().replace_odd(accumulators);

    Epilogue epilogue(storage.epilogue, thread, warp, lane);
    OutputOp const output(output_params, channel + epilogue.channel());
    epilogue.run(accumulators, 1, 0,
                 [&](int row, float(&sum)[OutputOp::kVector]) { output.store(tile.begin + row, sum); });
  }

 private:
  /// Sets the tile's rows, which are nobody's, to zero.
  static CUTLASS_DEVICE void clear(typename OutputOp::Params const& params, int channel, int token, int thread) {
    constexpr int kVectors = Shape::kM / OutputOp::kVector;
    for (int i = thread; i < kVectors * Shape::kN; i += Mma::kThreads)
      OutputOp(params, channel + i % kVectors * OutputOp::kVector).clear(token + i / kVectors);
  }
};

}  // namespace cutlass::gemm::kernel
