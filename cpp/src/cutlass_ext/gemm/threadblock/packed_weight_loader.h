// Global -> shared copies of the packed weights of a stage.
#pragma once

#include "cutlass/arch/memory_sm80.h"
#include "cutlass/fast_math.h"
#include "cutlass_ext/layout/packed_weights.h"

namespace cutlass::gemm::threadblock {

/// Copies, stage by stage, the packed tiles of `kStrips` strips of 16 channels over `kTilesK` tiles. To a strip its
/// tiles are one contiguous run of bytes, in global and in shared memory, so a linear copy in 16-byte chunks keeps
/// their order and has no bank conflicts. (CUTLASS's predicated iterators handle a ragged k extent in the first
/// tile; packed tiles have theirs in the last.)
template <class Layout, int kStrips, int kTilesK, int kThreads>
class PackedWeightLoader {
 public:
  static constexpr int kStripBytes = kTilesK * Layout::kTileBytes;
  static constexpr int kStageBytes = kStrips * kStripBytes;
  static constexpr int kChunks = kStripBytes / 16;  // a strip
  static_assert(kStrips * kChunks % kThreads == 0 && (kThreads % kChunks == 0 || kChunks % kThreads == 0),
                "every thread copies the same number of chunks, at a fixed step");

  /// The packed tensor is tiles_n x tiles_k; this block copies from (first_strip, first_tile) on, up to end_tile.
  template <class Halves>
  CUTLASS_DEVICE PackedWeightLoader(uint8_t const* packed, int tiles_n, int tiles_k, Halves const& halves,
                                    int first_strip, int first_tile, int end_tile)
      : left_(end_tile - first_tile - int(threadIdx.x) % kChunks / kChunksATile) {
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < kStripsAThread;
         ++s) {  // strips beyond the last are copies of it, whose channels are not stored
      int const index = fast_min(first_strip + int(threadIdx.x) / kChunks + s * kStripStep, tiles_n - 1);
      int const strip = halves.strip(index);
      pointer_[s] = packed + (int64_t(strip) * tiles_k + first_tile) * Layout::kTileBytes + threadIdx.x % kChunks * 16;
    }
  }

  /// The stage that lies `ahead` of the next one; zeros beyond the end. (The plain predicated copy would do, but the
  /// zero-filling form takes fewer instructions.)
  CUTLASS_DEVICE void copy(uint8_t* stage, int ahead) const {
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < kStripsAThread; ++s) {
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kChunksAThread; ++c)
        arch::cp_async_zfill<16, arch::CacheOperation::Global>(
            stage + (threadIdx.x + (s * kChunksAThread + c) * kThreads) * 16,
            pointer_[s] + ahead * kStripBytes + c * kThreads * 16,
            left_ > ahead * kTilesK + c * kThreads / kChunksATile);
    }
  }

  CUTLASS_DEVICE void advance(int stages) {
    left_ -= stages * kTilesK;
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < kStripsAThread; ++s) pointer_[s] += stages * kStripBytes;
  }

 private:
  static constexpr int kChunksATile = Layout::kTileBytes / 16;
  static constexpr int kStripStep = kThreads > kChunks ? kThreads / kChunks : 1;      // between two chunks of a thread
  static constexpr int kChunksAThread = kChunks > kThreads ? kChunks / kThreads : 1;  // of a strip
  static constexpr int kStripsAThread = kStrips * kChunks / kThreads / kChunksAThread;

  uint8_t const* pointer_[kStripsAThread];  // one a strip: advancing them once a round is cheaper than adding offsets
  int left_;                                // tiles from that of this thread's first chunk to the end
};

}  // namespace cutlass::gemm::threadblock
