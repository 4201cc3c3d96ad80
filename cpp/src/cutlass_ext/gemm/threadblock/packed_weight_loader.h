// Global -> shared copies of the packed weights of a stage.
#pragma once

#include "cutlass/arch/memory_sm80.h"
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

  /// The packed tensor is tiles_n x tiles_k; this block copies from (first_strip, first_tile) on, `tiles` tiles of k in
  /// all.
  CUTLASS_DEVICE
  PackedWeightLoader(uint8_t const* packed, int tiles_n, int tiles_k, int first_strip, int first_tile, int tiles)
      : strip_stride_(tiles_k * Layout::kTileBytes), strips_left_(tiles_n - first_strip) {
    int const thread = threadIdx.x;
    pointer_ = packed + int64_t(first_strip + thread / kChunks) * strip_stride_ +
               int64_t(first_tile) * Layout::kTileBytes + thread % kChunks * 16;
    clip(tiles);
  }

  /// Chunk `i` of this thread; zeros beyond the tensor. (The plain predicated copy would do, but ptxas puts three dummy
  /// shared loads before every predicated cp.async on sm_90, none before the zero-filling form.)
  CUTLASS_DEVICE void copy(uint8_t* stage, int i) const {
    int const strip = i / kChunksAThread * kStripStep, chunk = i % kChunksAThread * kThreads;
    arch::cp_async_zfill<16, arch::CacheOperation::Global>(stage + (threadIdx.x + i * kThreads) * 16,
                                                           pointer_ + int64_t(strip) * strip_stride_ + chunk * 16,
                                                           mask_ >> i & 1);
  }

  /// `tiles`: what is left of k.
  CUTLASS_DEVICE void next_stage(int tiles) {
    pointer_ += kStripBytes;
    if (tiles < kTilesK) clip(tiles);
  }

 private:
  static constexpr int kChunksATile = Layout::kTileBytes / 16;
  static constexpr int kStripStep =
      kThreads > kChunks ? kThreads / kChunks : 1;  // strips between two chunks of a thread
  static constexpr int kChunksAThread = kChunks > kThreads ? kChunks / kThreads : 1;  // chunks of a thread in one strip

  CUTLASS_DEVICE void clip(int tiles) {
    int const thread = threadIdx.x, strips = strips_left_ - thread / kChunks;
    tiles -= thread % kChunks / kChunksATile;
    mask_ = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kIterations; ++i)
      if (i / kChunksAThread * kStripStep < strips && i % kChunksAThread * kThreads / kChunksATile < tiles)
        mask_ |= 1u << i;
  }

  uint8_t const* pointer_;
  int strip_stride_, strips_left_;
  unsigned mask_;  // bit i: chunk i exists
};

}  // namespace cutlass::gemm::threadblock
