// The kernel of the wgmma main loops: persistent blocks that go from tile to tile, alone or in pairs of neighbours that
// share weights; the last tiles, or all of them, may have blocks that share their k extent, in clusters or alone.
#pragma once

#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/fast_math.h"
#include "cutlass_ext/arch/grid_dependency.h"
#include "cutlass_ext/epilogue/output_op.h"
#include "cutlass_ext/gemm/kernel/warpgroup_registers.h"
#include "cutlass_ext/gemm/threadblock/mma_packed_wgmma_groups.h"
#include "cutlass_ext/gemm/threadblock/mma_packed_wgmma_rs.h"
#include "cutlass_ext/gemm/threadblock/mma_packed_wgmma_ss.h"

namespace cutlass::gemm::kernel {

template <class Mma_>
class PackedGemmWgmma {
 public:
  using Mma = Mma_;
  using Element = typename Mma::Element;
  using Shape = typename Mma::Shape;
  using Epilogue = typename Mma::Epilogue;
  using Sum = typename Mma::Accumulator;
  using OutputOp = typename Epilogue::Output;
  static constexpr int MaxThreadsPerBlock = Mma::kThreads;
  static constexpr int MinBlocksPerMultiprocessor = 1;

  /// From an item, a tile or a share of the k extent of one, to its place. Some tiles of tokens, or pairs of them, side
  /// by side are taken before the next tile of channels. The first `whole` tiles are not shared.
  /// Divisions are by constants of the launch: they are part of every tile's end, when nothing multiplies.
  struct TileOrder {
    int token_tiles, items;  // pairs of token tiles where pairs of blocks share weights
    int whole;               // tiles that are not shared
    FastDivmod shares;       // of k of the others
    FastDivmod side, last;   // tiles of tokens of a group, and of the last one
    FastDivmod group;        // tiles: those by all of channels

    TileOrder() = default;
    TileOrder(int channel_tiles, int token_tiles, int whole, int shares)
        : token_tiles(token_tiles),
          items(whole + (channel_tiles * token_tiles - whole) * shares),
          whole(whole),
          shares(shares),
          side(qcutlass::wgmma_side(token_tiles)),
          last((token_tiles - 1) % side.divisor + 1),
          group(side.divisor * channel_tiles) {}

    struct Place {
      int channel, token;  // of tiles
      int share, shares;   // of k; one of one is all of it
    };
    CUTLASS_DEVICE Place operator()(int item) const {
      int tile = item, number, rest;
      Place place;
      place.share = 0;
      place.shares = 1;
      if (item >= whole) {
        place.shares = shares.divisor;
        shares(tile, place.share, item - whole);
        tile += whole;
      }
      group(number, rest, tile);
      int const first = number * side.divisor;
      (first + side.divisor <= token_tiles ? side : last)(place.channel, place.token, rest);
      place.token += first;
      return place;
    }
  };

  struct Params {
    typename Mma::Arguments mma;
    typename OutputOp::Params output;
    TileOrder order;
    int stages_a_share, stages_left;  // of k, and the remainder of their division by the shares
    bool prefetch;  // weights, scales and zeros are there before the kernels that precede this one have ended
    bool cluster;   // blocks that share the k of a tile form a cluster, which adds them: a share is a block's last item
    epilogue::thread::PartialSums<Sum> partials;  // when k is shared without a cluster
  };

  struct SharedStorage {
    typename Mma::SharedStorage mainloop;  // first: swizzled operands lie at multiples of 1 KB
    typename Epilogue::SharedStorage epilogue;
    typename Mma::Barriers barriers;
  };

  /// Whether the memory of the ring holds what a cluster of so many blocks exchanges.
  static constexpr bool has_room_to_exchange(int blocks) {
    return Epilogue::exchange_bytes(blocks) <= int(sizeof(SharedStorage::mainloop));
  }

  CUTLASS_DEVICE void operator()(Params const& params, char* shared) {
    if (cute::cast_smem_ptr_to_uint(shared) % (1u << 24) != arch::kSharedBase)
      __trap();  // upper bits: rank in the cluster
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(shared);
    int const warp = canonical_warp_idx_sync(), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) storage.barriers.initialize(Mma::freeing_warps(params.mma), fillers());
    bool const paired = Mma::sharers(params.mma) > 1;
    if (paired)
      arch::cluster_sync();
    else
      __syncthreads();
    if (warp / 4 == Mma::kWarpgroups) {
      arch::warpgroup_reg_dealloc<Registers::kProducer>();
      if (warp % 4 == 0 && lane == 0) produce(params, storage);
      if constexpr (kMakesOperands)
        if (warp % 4 != 0) make_operands(params, storage, warp % 4 - 1, lane);
      __syncwarp();
      if (params.cluster && ends_with_share(params)) {  // as the consumers, around their exchange
        arch::cluster_sync();
        arch::cluster_sync();
      }
    } else {
      arch::warpgroup_reg_alloc<Registers::kConsumer>();
      arch::wait_for_prior_grids();
      consume(params, storage, warp, lane);
    }
    if (paired) arch::cluster_sync();  // nobody leaves while the other may still write to its barriers
  }

 private:
  static constexpr bool kMakesOperands = Mma::kMakesOperands;
  using Registers = WarpgroupRegisters<Mma::kWarpgroups, kMakesOperands>;

  /// Share of the k extent of a tile.
  struct Work {
    int channel, token, share, shares, first_k, stages;

    CUTLASS_DEVICE Work(Params const& params, int item) {
      auto const place = params.order(item);
      int const sharers = Mma::sharers(params.mma);
      channel = place.channel * Shape::kM;
      token = (place.token * sharers + int(blockIdx.x) % sharers) * Shape::kN;
      share = place.share;
      shares = place.shares;
      // The first shares take a stage more where the stages do not divide evenly.
      first_k = (share * params.stages_a_share + fast_min(share, params.stages_left)) * Shape::kK;
      stages = params.stages_a_share + (share < params.stages_left);
      if (shares == 1) stages = params.stages_a_share * params.order.shares.divisor + params.stages_left;
    }
  };

  /// Blocks that share weights go together.
  static CUTLASS_DEVICE int first_item(Params const& params) { return int(blockIdx.x) / Mma::sharers(params.mma); }
  static CUTLASS_DEVICE int step(Params const& params) { return int(gridDim.x) / Mma::sharers(params.mma); }
  /// Whether this block's last item is a share of a tile; the same for all blocks of a cluster.
  static CUTLASS_DEVICE bool ends_with_share(Params const& params) {
    int const first = first_item(params), last = params.order.items - 1;
    return last - (last - first) % step(params) >= params.order.whole;
  }

  static CUTLASS_DEVICE void produce(Params const& params, SharedStorage& storage) {
    typename Mma::Producer producer(storage.mainloop, storage.barriers, params.mma);
    if (!params.prefetch) arch::wait_for_prior_grids();
    int item = first_item(params);
    Work work(params, item);
    producer.prefetch_weights(work.channel, work.token, work.first_k, work.stages);
    if (params.prefetch) arch::wait_for_prior_grids();
    // Early: a block of this kernel leaves no room on its SM, so that the next kernel's can only take idle ones. But
    // after the wait, so that what ended before this kernel's predecessor has ended for the next one too.
    arch::allow_next_grid();
    for (;;) {
      producer.load(work.channel, work.token, work.first_k, work.stages);
      item += step(params);
      if (item >= params.order.items) break;
      work = Work(params, item);
    }
  }

  /// Arrivals that a full stage takes: one of the producing thread, and those of operands.
  static CUTLASS_DEVICE constexpr int fillers() {
    if constexpr (kMakesOperands)
      return 1 + Mma::OperandProducer::kArrivals;
    else
      return 1;
  }

  static CUTLASS_DEVICE void make_operands(Params const& params, SharedStorage& storage, int warp, int lane) {
    typename Mma::OperandProducer producer(storage.mainloop, storage.barriers, params.mma, params.mma.group_size, warp,
                                           lane);
    if (!params.prefetch) arch::wait_for_prior_grids();
    for (int item = first_item(params); item < params.order.items; item += step(params)) {
      Work const work(params, item);
      producer.load(work.channel, work.first_k, work.stages);
    }
  }

  static CUTLASS_DEVICE void consume(Params const& params, SharedStorage& storage, int warp, int lane) {
    typename Mma::Consumer mma(storage.mainloop, storage.barriers, params.mma, warp / 4, warp % 4, lane);
    Epilogue epilogue(storage.epilogue, warp / 4, threadIdx.x % arch::kWarpgroupThreads);
    int const blocks = params.cluster ? params.order.shares.divisor : 1;
    int item = first_item(params);
    Work next(params, item);
    auto const begin_next = [&] {
      mma.begin(next.channel, next.token, next.first_k, next.stages);
      epilogue.request(params.output, next.channel, next.token);
    };
    begin_next();
    for (bool more = true; more;) {
      Work const work = next;
      typename Mma::FragmentC sums;
      mma(sums, work.first_k, work.stages);
      uint4* const slots = reinterpret_cast<uint4*>(&storage.mainloop);      // nothing more is loaded after a share
      int const rank = params.cluster && work.shares > 1 ? work.share : -1;  // among blocks that add their sums
      if (rank >= 0) {
        arch::cluster_sync();
        epilogue.send(sums, slots, blocks, work.share);
        arch::cluster_sync();
      }
      auto const meanwhile = [&] {
        item += step(params);
        more = item < params.order.items;
        if (!more) return;
        next = Work(params, item);
        begin_next();
      };
      auto partials = params.partials;
      if (work.shares == 1) partials.data = nullptr;
      if (partials.data != nullptr) partials = partials.of(work.share, params.output.tokens);
      epilogue.run(params.output, work.channel, work.token, sums, slots, blocks, rank, partials, meanwhile);
    }
  }
};

}  // namespace cutlass::gemm::kernel
