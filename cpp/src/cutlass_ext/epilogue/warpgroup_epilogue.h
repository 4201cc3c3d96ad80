// From the transposed sums of warpgroups (channels x tokens) to row-major [token][channel], and their addition over the
// blocks of a cluster that share k.
//
// Every warpgroup transposes its own 64 channels, 16 tokens at a time, through two small buffers of its own beside the
// ring, which the producer already fills for the next tile.
#pragma once

#include "cutlass_ext/arch/cluster.h"
#include "cutlass_ext/arch/named_barrier.h"
#include "cutlass_ext/arch/wgmma.h"
#include "cutlass_ext/epilogue/cluster_shares.h"

namespace cutlass::epilogue::threadblock {

template <class Mma>
class WarpgroupEpilogue {
 public:
  using Shape = typename Mma::Shape;
  using Sum = typename Mma::Accumulator;
  using Sums = typename Mma::FragmentC;
  static constexpr int kVector = 8;
  static constexpr int kChunks = 1;
  static constexpr int kPassTokens = 16;
  static constexpr int kPasses = Shape::kN / kPassTokens;
  using Shares = ClusterShares<kPasses>;
  static constexpr int kVectors = arch::kWarpgroupRows / kVector;  // a row
  static_assert(kPassTokens * kVectors == arch::kWarpgroupThreads, "one vector a thread and pass");
  static constexpr int kRow = arch::kWarpgroupRows + 4;  // lane (g, t) then writes bank 8t + g: no conflicts

  struct SharedStorage {
    alignas(16) Sum sums[Mma::kWarpgroups][2][kPassTokens][kRow];
  };

  CUTLASS_DEVICE WarpgroupEpilogue(SharedStorage& storage, int warpgroup, int thread)
      : storage_(storage), warpgroup_(warpgroup), thread_(thread) {}

  /// First of the 8 channels, within the block's tile, that this thread passes on.
  CUTLASS_DEVICE int channel(int /*chunk*/) const {
    return warpgroup_ * arch::kWarpgroupRows + thread_ % kVectors * kVector;
  }

  /// Bytes that a block receives when `blocks` of them exchange sums.
  static constexpr int exchange_bytes(int blocks) { return (blocks - 1) * Shares::most_parts(blocks) * kSlotBytes; }

  /// Where `blocks` > 1 blocks of a cluster share k, each finishes some of the passes: sends the sums of the others'
  /// passes into their memory at `slots`. Before it and after it all threads of the cluster must meet.
  CUTLASS_DEVICE void send(Sums const& sums, uint4* slots, int blocks, int rank) const {
    CUTLASS_PRAGMA_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      int const owner = Shares::owner_of(pass, blocks);
      if (owner == rank) continue;
      uint4* slot = slots + slot_of(pass, owner, rank, blocks);
      arch::store_to_cluster(slot, owner, &sums[pass * 8]);
      arch::store_to_cluster(slot + arch::kWarpgroupThreads, owner, &sums[pass * 8 + 4]);
    }
  }

  /// Calls store(token within the tile, sums of 8 channels, load(token), whether it `activates`) for all that this
  /// block finishes, the other blocks' sums added in order. Registers have no run-time index: without an activation,
  /// whose code is long, all passes are written out; with one, each pass picks its registers out of all.
  template <class Load, class Store>
  CUTLASS_DEVICE void run(int /*chunk*/, Sums& sums, uint4 const* slots, int blocks, int rank, bool activates,
                          Load const& load, Store const& store) {
    auto const passes = std::make_integer_sequence<int, kPasses>{};
    if (!activates) {
      finish_all(sums, slots, blocks, rank, load, store, passes);
      return;
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      if (Shares::owner_of(pass, blocks) != rank) continue;
      transpose_one_of(pass, sums, slots, blocks, rank, passes);
      store_rows(pass, load, store, std::true_type{});
    }
  }

 private:
  static constexpr int kSlotBytes = Shape::kM * kPassTokens * int(sizeof(Sum));  // sums of a pass

  template <class Load, class Store, int... kPass>
  CUTLASS_DEVICE void finish_all(Sums& sums, uint4 const* slots, int blocks, int rank, Load const& load,
                                 Store const& store, std::integer_sequence<int, kPass...>) {
    (finish<kPass>(sums, slots, blocks, rank, load, store), ...);
  }

  template <int kPass, class Load, class Store>
  CUTLASS_DEVICE void finish(Sums& sums, uint4 const* slots, int blocks, int rank, Load const& load,
                             Store const& store) {
    if (Shares::owner_of(kPass, blocks) != rank) return;
    transpose<kPass>(sums, slots, blocks, rank);
    store_rows(kPass, load, store, std::false_type{});
  }

  template <int... kPass>
  CUTLASS_DEVICE void transpose_one_of(int pass, Sums& sums, uint4 const* slots, int blocks, int rank,
                                       std::integer_sequence<int, kPass...>) {
    ((pass == kPass ? transpose<kPass>(sums, slots, blocks, rank) : void()), ...);
  }

  /// Adds the other blocks' sums of a pass and writes them, transposed. One barrier is enough, since a buffer is
  /// written again only after the next one.
  template <int kPass>
  CUTLASS_DEVICE void transpose(Sums& sums, uint4 const* slots, int blocks, int rank) const {
    Sum(&pass_sums)[8] = reinterpret_cast<Sum(&)[8]>(sums[kPass * 8]);
    if (blocks > 1) add(pass_sums, slots, kPass, blocks, rank);
    int const lane = thread_ % 32, warp = thread_ / 32;
    Sum* corner = &storage_.sums[warpgroup_][kPass % 2][lane % 4 * 2][warp * 16 + lane / 4];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i)  // [n8 block][row g or g + 8][token 2t or 2t + 1]
      corner[(i / 4 * 8 + i % 2) * kRow + i / 2 % 2 * 8] = pass_sums[i];
    arch::named_barrier_sync<arch::kWarpgroupThreads>(warpgroup_);
  }

  template <class Load, class Store, class Activates>
  CUTLASS_DEVICE void store_rows(int pass, Load const& load, Store const& store, Activates activates) const {
    int const row = thread_ / kVectors;
    uint4 const* p =
        reinterpret_cast<uint4 const*>(&storage_.sums[warpgroup_][pass % 2][row][thread_ % kVectors * kVector]);
    uint4 const words[2] = {p[0], p[1]};
    Sum sum[kVector];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) sum[i] = reinterpret_cast<Sum const*>(words)[i];
    int const token = pass * kPassTokens + row;
    store(token, sum, load(token), activates);
  }

  /// This thread's place for the sums of `pass` from block `source` in the memory of block `owner`.
  CUTLASS_DEVICE int slot_of(int pass, int owner, int source, int blocks) const {
    return Shares::slot_of(pass, owner, source, blocks) * (kSlotBytes / 16) + warpgroup_ * 2 * arch::kWarpgroupThreads +
           thread_;
  }

  CUTLASS_DEVICE void add(Sum (&sums)[8], uint4 const* slots, int pass, int blocks, int rank) const {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int source = 0; source < blocks; ++source) {
      if (source == rank) continue;
      uint4 const* slot = slots + slot_of(pass, rank, source, blocks);
      uint4 const words[2] = {slot[0], slot[arch::kWarpgroupThreads]};
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; ++i) sums[i] += reinterpret_cast<Sum const*>(words)[i];
    }
  }

  SharedStorage& storage_;
  int const warpgroup_, thread_;
};

}  // namespace cutlass::epilogue::threadblock
