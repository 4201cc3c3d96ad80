// The wgmma kernel of a mixture of experts: persistent blocks that go from tile to tile of the experts' rows, which one
// of their warps finds. Main loop and epilogue are those of PackedGemmWgmma; k is not shared.
//
// A tile's box of activations goes on into the next expert's rows where its own end: tensor maps know nothing of
// experts. The columns of sums that come of it are computed and not stored.
#pragma once

#include "cutlass/arch/reg_reconfig.h"
#include "cutlass_ext/arch/grid_dependency.h"
#include "cutlass_ext/gemm/kernel/expert_schedule.h"
#include "cutlass_ext/gemm/kernel/warpgroup_registers.h"
#include "cutlass_ext/gemm/threadblock/mma_packed_wgmma_rs.h"

namespace cutlass::gemm::kernel {

template <class Mma_>
class GroupedGemmWgmma {
 public:
  using Mma = Mma_;
  using Element = typename Mma::Element;
  using Shape = typename Mma::Shape;
  using Epilogue = typename Mma::Epilogue;
  using Sum = typename Mma::Accumulator;
  using OutputOp = typename Epilogue::Output;
  using Schedule = ExpertSchedule<Shape, Mma::kWarpgroups * 4 + 1>;  // for the consumers, and the producer
  static constexpr int MaxThreadsPerBlock = Mma::kThreads;
  static constexpr int MinBlocksPerMultiprocessor = 1;

  /// `output` is that of the first expert, with all rows.
  struct Params {
    typename Mma::Arguments mma;
    typename OutputOp::Params output;
    ExpertTiles tiles;
    int channel_tiles, token_tiles;  // token_tiles: at most, whatever the offsets are
    int stages;
    int bias_bytes;  // of an element
    bool prefetch;   // offsets and weights are there before the kernels that precede this one have ended
  };

  struct SharedStorage {
    typename Mma::SharedStorage mainloop;  // first: swizzled operands lie at multiples of 1 KB
    typename Epilogue::SharedStorage epilogue;
    typename Mma::Barriers barriers;
    typename Schedule::SharedStorage schedule;
  };

  CUTLASS_DEVICE void operator()(Params const& params, char* shared) {
    if (cute::cast_smem_ptr_to_uint(shared) != arch::kSharedBase) __trap();
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(shared);
    int const warp = canonical_warp_idx_sync(), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
      storage.barriers.initialize(Mma::freeing_warps(params.mma));
      storage.schedule.initialize();
    }
    __syncthreads();
    if (warp / 4 == Mma::kWarpgroups) {
      arch::warpgroup_reg_dealloc<Registers::kProducer>();
      if (!params.prefetch) arch::wait_for_prior_grids();  // the offsets are data
      if (warp % 4 == 0) produce(params, storage, lane);
      if (warp % 4 == 1)
        Schedule::find(storage.schedule, params.tiles, params.channel_tiles, params.token_tiles,
                       params.output.row_scale, lane);
    } else {
      arch::warpgroup_reg_alloc<Registers::kConsumer>();
      arch::wait_for_prior_grids();
      consume(params, storage, warp, lane);
    }
  }

 private:
  using Registers = WarpgroupRegisters<Mma::kWarpgroups>;

  static CUTLASS_DEVICE void produce(Params const& params, SharedStorage& storage, int lane) {
    typename Mma::Producer producer(storage.mainloop, storage.barriers, params.mma);
    typename Schedule::Reader tiles(storage.schedule, lane);
    ExpertWork work;
    bool more = tiles.next(work);
    if (params.prefetch && more && lane == 0 && work.rows.expert >= 0) {
      producer.select_expert(work.rows.expert);
      producer.prefetch_weights(work.channel, work.rows.begin, 0, params.stages);
    }
    if (params.prefetch) arch::wait_for_prior_grids();
    arch::allow_next_grid();  // behind the wait, as in PackedGemmWgmma
    for (; more; more = tiles.next(work)) {
      if (lane == 0 && work.rows.expert >= 0) {
        producer.select_expert(work.rows.expert);
        producer.load(work.channel, work.rows.begin, 0, params.stages);
      }
      __syncwarp();
    }
  }

  static CUTLASS_DEVICE void consume(Params const& params, SharedStorage& storage, int warp, int lane) {
    typename Mma::Consumer mma(storage.mainloop, storage.barriers, params.mma, warp / 4, warp % 4, lane);
    Epilogue epilogue(storage.epilogue, warp / 4, threadIdx.x % arch::kWarpgroupThreads);
    typename Schedule::Reader tiles(storage.schedule, lane);
    for (ExpertWork work; tiles.next(work);) {
      typename OutputOp::Params output = params.output;
      output.tokens = work.rows.end;
      if (work.rows.expert < 0) {
        clear(output, work);
        continue;
      }
      output.bias =
          static_cast<uint8_t const*>(output.bias) + int64_t(work.rows.expert) * output.channels * params.bias_bytes;
      typename Mma::FragmentC sums;
      mma.select_expert(work.rows.expert);
      mma(sums, 0, params.stages);
      epilogue.run(output, work.channel, work.rows.begin, sums, nullptr, 1, -1, epilogue::thread::PartialSums<Sum>{},
                   [] {});
    }
  }

  /// Sets the tile's rows, which are nobody's, to zero.
  static CUTLASS_DEVICE void clear(typename OutputOp::Params const& params, ExpertWork const& work) {
    constexpr int kVectors = Shape::kM / OutputOp::kVector;
    for (int i = threadIdx.x; i < kVectors * Shape::kN; i += Mma::kWarpgroups * arch::kWarpgroupThreads)
      OutputOp(params, work.channel + i % kVectors * OutputOp::kVector).clear(work.rows.begin + i / kVectors);
  }
};

}  // namespace cutlass::gemm::kernel
