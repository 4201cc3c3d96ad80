// From the sums of warpgroups whose rows are tokens to vectors of channels, and their addition over the blocks of a
// cluster that share k.
//
// A warp has 16 tokens, eight at a time of which pass through a buffer beside the ring, which the producer already
// fills for the next tile. Where a warp has fewer channels than the largest block that is quantised at once, the warps
// that share tokens share a buffer.
#pragma once

#include "cutlass_ext/arch/cluster.h"
#include "cutlass_ext/arch/named_barrier.h"
#include "cutlass_ext/arch/wgmma.h"
#include "cutlass_ext/epilogue/cluster_shares.h"

namespace cutlass::epilogue::threadblock {

template <class Mma>
class RowEpilogue {
 public:
  using Shape = typename Mma::Shape;
  using Sum = typename Mma::Accumulator;
  using Sums = typename Mma::FragmentC;
  static constexpr int kVector = 8;
  static constexpr int kChunk = 128;  // channels that pass together
  static constexpr int kChunks = Mma::kWarpChannels > kChunk ? Mma::kWarpChannels / kChunk : 1;
  static constexpr int kSharers = Mma::kWarpChannels < kChunk ? kChunk / Mma::kWarpChannels : 1;  // warps of a buffer
  static_assert(Shape::kM % kChunk == 0 && (kSharers == 1 || Shape::kM == kChunk));
  static constexpr int kPassTokens = 8;
  static constexpr int kRow = kChunk + 8;  // half a warp's lanes (g, t) then write 8-byte words 4g + t: no conflicts

  struct SharedStorage {
    alignas(16) Sum sums[Mma::kWarpgroups * 4 / kSharers][kPassTokens][kRow];
  };

  CUTLASS_DEVICE RowEpilogue(SharedStorage& storage, int warpgroup, int thread)
      : buffer_(storage.sums[kSharers == 1 ? warpgroup * 4 + thread / 32 : thread / 32]),
        warpgroup_(warpgroup),
        warp_(thread / 32),
        lane_(thread % 32) {}

  /// First of the 8 channels of a chunk, within the block's tile, that this thread passes on.
  CUTLASS_DEVICE int channel(int chunk) const {
    int const first = kSharers > 1 ? 0 : warpgroup_ * Mma::kWarpChannels % Shape::kM;
    return first + chunk * kChunk + lane_ % kVectors * kVector;
  }

  /// Bytes that a block receives when `blocks` of them exchange sums.
  static constexpr int exchange_bytes(int blocks) { return (blocks - 1) * Shares::most_parts(blocks) * kSlotBytes; }

  /// Where `blocks` > 1 blocks of a cluster share k, each finishes some parts of the tile, eight tokens of a warp each:
  /// sends the sums of the others' parts into their memory at `slots`. Before it and after it all threads of the
  /// cluster must meet.
  CUTLASS_DEVICE void send(Sums const& sums, uint4* slots, int blocks, int rank) const {
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const part = part_of(half), owner = Shares::owner_of(part, blocks);
      if (owner == rank) continue;
      uint4* slot = slots + slot_of(part, owner, rank, blocks);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kWords; ++i) {  // two n8 blocks of a row
        Sum words[4];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4; ++j) words[j] = Sum(sums[index(2 * i + j / 2, half, j % 2)]);
        arch::store_to_cluster(slot + i * kSlotThreads, owner, words);
      }
    }
  }

  /// Calls store(token within the tile, sums of 8 channels, load(token), whether it `activates`) for all tokens of a
  /// chunk of channels that this block finishes, the other blocks' sums added in order. Without an activation, whose
  /// code is long, all calls are written out, so that they do not wait for each other, and all loads come first.
  template <class Load, class Store>
  CUTLASS_DEVICE void run(int chunk, Sums& sums, uint4 const* slots, int blocks, int rank, bool activates,
                          Load const& load, Store const& store) {
    using Token = decltype(load(0));
    Token tokens[2][kSteps];
    if (!activates) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2 * kSteps; ++i) tokens[i / kSteps][i % kSteps] = load(token(i / kSteps, i % kSteps));
    }
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const part = part_of(half);
      if (Shares::owner_of(part, blocks) != rank) continue;
      if (blocks > 1 && chunk == 0) add(sums, half, slots, part, blocks, rank);
      write(sums, chunk, half);
      synchronize();
      if (activates) {
        CUTLASS_PRAGMA_NO_UNROLL
        for (int i = 0; i < kSteps; ++i) pass_on(half, i, load(token(half, i)), std::true_type{}, store);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kSteps; ++i) pass_on(half, i, tokens[half][i], std::false_type{}, store);
      }
      synchronize();
    }
  }

 private:
  static constexpr int kVectors = kChunk / kVector;  // of a token's chunk
  using Shares = ClusterShares<8>;                   // four warps of a warpgroup, two halves
  static constexpr int kBlocks = Mma::kWarpChannels / 8;
  static constexpr int kWords = kBlocks / 2;  // of 16 bytes a thread, of a part
  static constexpr int kSlotThreads = Mma::kWarpgroups * 32;
  static constexpr int kSlotBytes = kWords * 16 * kSlotThreads;
  static constexpr int kThreads = kSharers * 32;  // of a buffer
  static constexpr int kSteps = kPassTokens * kVectors / kThreads;

  /// Of the sum of channel 2t + odd of an n8 block, row g or g + 8.
  static CUTLASS_HOST_DEVICE constexpr int index(int block, int half, int odd) { return block * 4 + half * 2 + odd; }

  CUTLASS_DEVICE void synchronize() const {
    if constexpr (kSharers == 1)
      __syncwarp();
    else
      arch::named_barrier_sync<kThreads>(warp_);
  }

  CUTLASS_DEVICE void write(Sums const& sums, int chunk, int half) const {
    constexpr int kChunkBlocks = kBlocks / kChunks;
    int const first = kSharers > 1 ? warpgroup_ * Mma::kWarpChannels : 0;
    Sum* const row = buffer_[lane_ / 4] + first + lane_ % 4 * 2;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kChunkBlocks; ++i) {
      int const block = chunk * kChunkBlocks + i;
      Array<Sum, 2> const pair = {Sum(sums[index(block, half, 0)]), Sum(sums[index(block, half, 1)])};
      *reinterpret_cast<Array<Sum, 2>*>(row + i * 8) = pair;
    }
  }

  /// Of the buffer, at the i-th of kSteps vectors of this thread.
  CUTLASS_DEVICE int row(int i) const {
    return ((kSharers > 1 ? warpgroup_ * 32 : 0) + lane_) / kVectors + i * (kPassTokens / kSteps);
  }
  /// The token of that vector, within the block's tile.
  CUTLASS_DEVICE int token(int half, int i) const {
    int const first = kSharers > 1 ? 0 : warpgroup_ * arch::kWarpgroupRows % Shape::kN;
    return first + warp_ * 16 + half * 8 + row(i);
  }

  template <class Token, class Activates, class Store>
  CUTLASS_DEVICE void pass_on(int half, int i, Token const& of_token, Activates activates, Store const& store) const {
    uint4 const* p = reinterpret_cast<uint4 const*>(&buffer_[row(i)][lane_ % kVectors * kVector]);
    uint4 const words[2] = {p[0], p[1]};
    Sum sum[kVector];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kVector; ++j) sum[j] = reinterpret_cast<Sum const*>(words)[j];
    store(token(half, i), sum, of_token, activates);
  }

  CUTLASS_DEVICE int part_of(int half) const { return half * 4 + warp_; }
  /// This thread's place for the sums of `part` from block `source` in the memory of block `owner`.
  CUTLASS_DEVICE int slot_of(int part, int owner, int source, int blocks) const {
    return Shares::slot_of(part, owner, source, blocks) * (kSlotBytes / 16) + warpgroup_ * 32 + lane_;
  }

  CUTLASS_DEVICE void add(Sums& sums, int half, uint4 const* slots, int part, int blocks, int rank) const {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int source = 0; source < blocks; ++source) {
      if (source == rank) continue;
      uint4 const* slot = slots + slot_of(part, rank, source, blocks);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kWords; ++i) {
        uint4 const words = slot[i * kSlotThreads];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4; ++j) sums[index(2 * i + j / 2, half, j % 2)] += reinterpret_cast<Sum const*>(&words)[j];
      }
    }
  }

  Sum (*const buffer_)[kRow];
  int const warpgroup_, warp_, lane_;
};

}  // namespace cutlass::epilogue::threadblock
