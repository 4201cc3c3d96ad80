// Global -> shared copies of the packed weights of a stage.
#pragma once

#include "cutlass/arch/memory_sm80.h"
#include "cutlass/fast_math.h"
#include "cutlass_ext/layout/packed_weights.h"

namespace cutlass::gemm::threadblock {

/// Copies, stage by stage, the packed tiles of `kStrips` strips of 16 channels over `kTilesK` tiles. To a strip its
/// tiles are one contiguous run of bytes, in global and in shared memory, so a linear copy in 16-byte chunks keeps
/// fragment order and has no bank conflicts. (CUTLASS's predicated iterators handle a ragged k extent in the first
/// tile; packed tiles have theirs in the last.)
template <class Layout, int kStrips, int kTilesK, int kThreads>
class PackedWeightLoader {
 public:
  static constexpr int kStripBytes = kTilesK * Layout::kTileBytes;
  static constexpr int kStageBytes = kStrips * kStripBytes;
  static constexpr int kChunks = kStripBytes / 16;  // a strip
  static constexpr int kIterations = kStrips * kChunks / kThreads;
  static_assert(kStrips * kChunks % kThreads == 0 && (kThreads % kChunks == 0 || kChunks % kThreads == 0),
                "every thread copies the same number of chunks, at a fixed step");

  /// The packed tensor is tiles_n x tiles_k; this block copies from (first_strip, first_tile) on.
  CUTLASS_DEVICE
  PackedWeightLoader(uint8_t const* packed, int tiles_n, int tiles_k, int first_strip, int first_tile) {
    int const thread = threadIdx.x, chunk = thread % kChunks;
    tile_ = chunk / kChunksATile;
    pointer_ = packed + (int64_t(first_strip) * tiles_k + first_tile) * Layout::kTileBytes + chunk * 16;
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < kStripsAThread; ++s)  // strips beyond the last are copies of it, whose channels are not stored
      strip_[s] = fast_min(thread / kChunks + s * kStripStep, tiles_n - 1 - first_strip) * tiles_k * kChunksATile;
  }

  /// Chunk `i` of this thread, zeros from `tiles` tiles on. (The plain predicated copy would do, but ptxas puts three
  /// dummy shared loads before every predicated cp.async on sm_90, none before the zero-filling form.)
  CUTLASS_DEVICE void copy(uint8_t* stage, int i, int tiles) const {
    int const chunk = i % kChunksAThread * kThreads;
    arch::cp_async_zfill<16, arch::CacheOperation::Global>(
        stage + (threadIdx.x + i * kThreads) * 16, pointer_ + int64_t(strip_[i / kChunksAThread]) * 16 + chunk * 16,
        tile_ + chunk / kChunksATile < tiles);
  }

  CUTLASS_DEVICE void next_stage() { pointer_ += kStripBytes; }

 private:
  static constexpr int kChunksATile = Layout::kTileBytes / 16;
  static constexpr int kStripStep = kThreads > kChunks ? kThreads / kChunks : 1;      // between two chunks of a thread
  static constexpr int kChunksAThread = kChunks > kThreads ? kChunks / kThreads : 1;  // of a strip
  static constexpr int kStripsAThread = kIterations / kChunksAThread;

  uint8_t const* pointer_;
  int strip_[kStripsAThread];  // chunks from the block's first strip
  int tile_;                   // of the stage, that this thread's first chunk belongs to
};

}  // namespace cutlass::gemm::threadblock
