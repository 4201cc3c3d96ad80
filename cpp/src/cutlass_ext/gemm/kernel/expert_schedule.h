// Which tiles a persistent block multiplies: found by a warp of its own, which tells the others through shared memory.
// Finding one takes some 300 instructions and a read of the offsets; in the consuming warps that was a fifth of the
// time of tiles of 256 x 32 and 768 k, in which nothing was multiplied.
#pragma once

#include "cutlass_ext/arch/grid_dependency.h"
#include "cutlass_ext/arch/mbarrier.h"
#include "cutlass_ext/gemm/kernel/expert_tiles.h"

namespace cutlass::gemm::kernel {

/// A tile of the output; rows.expert < 0: to be set to zero.
struct ExpertWork {
  int channel;  ///< -1: there are no more
  ExpertTile rows;
};

/// A ring of tiles that are found and not taken yet. kReaders: warps that take every one.
template <class Shape, int kReaders>
class ExpertSchedule {
 public:
  /// The finding warp runs ahead of the producer, and the producer ahead of the consumers, by the tiles whose operands
  /// the ring holds. With four places no warp has to wait for another.
  static constexpr int kPlaces = 4;

  struct SharedStorage {
    alignas(16) ExpertWork works[kPlaces];
    arch::TransactionBarrier full[kPlaces], empty[kPlaces];

    /// Called by one thread, before all others pass a barrier.
    CUTLASS_DEVICE void initialize() {
      CUTLASS_PRAGMA_UNROLL
      for (int place = 0; place < kPlaces; ++place) {
        full[place].init(1);
        empty[place].init(kReaders);
      }
      cutlass::arch::fence_barrier_init();
    }
  };
  static_assert(sizeof(SharedStorage) == qcutlass::kScheduleBytes, "footprint.h states what the kernel uses");

  /// Finds the block's tiles, one after the other; a whole warp. Tiles of tokens side by side, which are one expert's
  /// or neighbours', are taken before the next tile of channels: their blocks share weights in L2, and their
  /// activations stay there meanwhile.
  static CUTLASS_DEVICE void find(SharedStorage& storage, ExpertTiles const& tiles, int channel_tiles,
                                  int most_token_tiles, float const* row_scale, int lane) {
    constexpr int kSide = 4;  // with which a wave of tiles reads the least, as in wgmma_side()
    int const token_tiles = fast_max(0, fast_min(tiles.template count<Shape::kN>(lane), most_token_tiles));
    int const items = token_tiles * channel_tiles;
    Place place;
    for (unsigned next = blockIdx.x;; next += gridDim.x) {  // less than 2^31 but for the last step
      ExpertWork work{-1, {}};
      if (next < unsigned(items)) {
        int const item = int(next), first = item / (kSide * channel_tiles) * kSide;
        int const rest = item - first * channel_tiles, width = fast_min(kSide, token_tiles - first);
        work.channel = rest / width * Shape::kM;
        tiles.template find<Shape::kN>(first + rest % width, lane, work.rows);
      }
      storage.empty[place.index].wait(place.phase ^ 1);
      if (lane == 0) {
        storage.works[place.index] = work;
        storage.full[place.index].arrive();
      }
      arch::wait_for_prior_grids();  // of which one may have made the scales of rows
      if (work.channel < 0) return;
      if (row_scale != nullptr) prefetch(row_scale, work.rows, lane);
      place.advance();
    }
  }

  /// A warp that takes the tiles.
  class Reader {
   public:
    CUTLASS_DEVICE Reader(SharedStorage& storage, int lane) : storage_(storage), lane_(lane) {}

    /// The next tile; false if there is none.
    CUTLASS_DEVICE bool next(ExpertWork& work) {
      storage_.full[place_.index].wait(place_.phase);
      work = storage_.works[place_.index];
      __syncwarp();
      if (lane_ == 0) storage_.empty[place_.index].arrive();
      place_.advance();
      return work.channel >= 0;
    }

   private:
    SharedStorage& storage_;
    int const lane_;
    typename ExpertSchedule::Place place_;
  };

 private:
  struct Place {
    int index = 0;
    uint32_t phase = 0;  // parity of its next turn

    CUTLASS_DEVICE void advance() {
      index = (index + 1) % kPlaces;
      phase ^= index == 0;
    }
  };

  /// Brings the scales of a tile's rows to L1, 32 of them a lane: its epilogue would wait for them.
  static CUTLASS_DEVICE void prefetch(float const* row_scale, ExpertTile const& rows, int lane) {
    int const row = rows.begin + lane * 32;
    if (rows.expert >= 0 && lane * 32 < Shape::kN + 32 && row < rows.end)
      asm volatile("prefetch.global.L1 [%0];" ::"l"(row_scale + row));
  }
};

}  // namespace cutlass::gemm::kernel
