// Global -> shared copies of a slice's stages in the streaming mainloop. Unlike the loaders of the multistage ring they
// serve the threads of one slice, and a slice's stages lie kTurnK columns apart, since slices take turns along k.
#pragma once

#include "cutlass/arch/memory_sm80.h"
#include "cutlass/fast_math.h"
#include "cutlass_ext/gemm/threadblock/packed_mma.h"

namespace cutlass::gemm::threadblock {

/// Copies the packed tiles of kStrips strips of 16 channels over kStageK columns. A strip's tiles are one contiguous
/// run of bytes, in global and in shared memory.
template <class Traits, int kStrips, int kStageK, int kTurnK, int kThreads>
class StreamWeightLoader {
 public:
  using Layout = typename Traits::LayoutA;
  static constexpr int kStripBytes = kStageK / Layout::kTileK * Layout::kTileBytes;
  static constexpr int kStageBytes = kStrips * kStripBytes;

  /// The first stage begins at (channel, k).
  CUTLASS_DEVICE
  StreamWeightLoader(typename Traits::Arguments const& args, int channel, int k, int thread) : thread_(thread) {
    int const first = channel / 16;
    packed_ = args.weights + (int64_t(first) * args.tiles_k + k / Layout::kTileK) * Layout::kTileBytes +
              thread % kChunksAStrip * 16;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kStripsAThread; ++i) {
      // Strips beyond the last are copies of it, whose channels are not stored.
      int const ahead = fast_min(thread / kChunksAStrip + i * kStripStep, args.tiles_n - 1 - first);
      strip_[i] = (args.halves.strip(first + ahead) - first) * args.tiles_k * kChunksATile;
    }
  }

  /// The next stage; zeros from `left` columns on.
  CUTLASS_DEVICE void copy(uint8_t* stage, int left) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      int const chunk = i % kCopiesAStrip * kThreads;  // of the strip, from this thread's first
      int const tile_k = (thread_ % kChunksAStrip / kChunksATile + chunk / kChunksATile) * Layout::kTileK;
      arch::cp_async_zfill<16, arch::CacheOperation::Global>(
          stage + (thread_ + i * kThreads) * 16, packed_ + int64_t(strip_[i / kCopiesAStrip]) * 16 + chunk * 16,
          tile_k < left);
    }
  }

  CUTLASS_DEVICE void advance() { packed_ += kTurnK / Layout::kTileK * Layout::kTileBytes; }

 private:
  static constexpr int kChunksATile = Layout::kTileBytes / 16, kChunksAStrip = kStripBytes / 16;
  static constexpr int kCopies = kStrips * kChunksAStrip / kThreads;
  static_assert(kStrips * kChunksAStrip % kThreads == 0);
  static_assert(kThreads % kChunksAStrip == 0 || kChunksAStrip % kThreads == 0);
  static constexpr int kCopiesAStrip = kChunksAStrip > kThreads ? kChunksAStrip / kThreads : 1;
  static constexpr int kStripStep = kThreads > kChunksAStrip ? kThreads / kChunksAStrip : 1;
  static constexpr int kStripsAThread = kCopies / kCopiesAStrip;

  int const thread_;
  uint8_t const* packed_;      // this thread's first chunk of the next stage in the block's first strip
  int strip_[kStripsAThread];  // chunks from the block's first strip
};

/// Copies the rows of activations that exist, at most kTokens, of kStageK columns.
template <class Traits, int kTokens, int kStageK, int kTurnK, int kThreads>
class StreamActivationLoader {
 public:
  using Element = typename Traits::Element;
  using Arguments = typename Traits::Arguments;
  static constexpr int kRowBytes = kStageK * int(sizeof(Element));

  /// Where row `row` keeps its chunk `chunk` of 16 bytes: ldmatrix reads one chunk of 8 rows, which lie 128 or 256
  /// bytes apart.
  static CUTLASS_DEVICE int swizzled(int row, int chunk) { return chunk ^ row % 8; }

  /// Of a stage, the first column that a thread copies.
  static CUTLASS_DEVICE int column(int thread) { return thread % kChunks * (16 / int(sizeof(Element))); }

  /// `tokens` tokens from `token` on; k: the thread's first column in the first stage.
  CUTLASS_DEVICE
  StreamActivationLoader(Arguments const& args, int token, int tokens, int k, int thread)
      : args_(args), thread_(thread), tokens_(tokens), k_(k) {
    if constexpr (Traits::kGathers) {
      activations_ = args.activations + k_;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCopies; ++i) {
        int const row = thread_ / kChunks + i * kRowStep;
        source_[i] = row < tokens_ ? args.source(token + row) : 0;
      }
    } else {
      activations_ = args.activations + int64_t(token + thread_ / kChunks) * args.activation_stride + k_;
    }
  }

  /// The next stage, from byte kOffset of `place` on; zeros beyond the end of k.
  template <int kOffset>
  CUTLASS_DEVICE void copy(uint8_t* place) const {
    copy_row<kOffset>(place, 0);
    if (tokens_ > kRowStep) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 1; i < kCopies; ++i) copy_row<kOffset>(place, i);
    }
  }

  CUTLASS_DEVICE void advance() {
    k_ += kTurnK;
    activations_ += kTurnK;
  }

 private:
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kRowStep = kThreads / kChunks;
  static constexpr int kCopies = (kTokens + kRowStep - 1) / kRowStep;

  template <int kOffset>
  CUTLASS_DEVICE void copy_row(uint8_t* place, int i) const {
    int const row = thread_ / kChunks + i * kRowStep;
    if (row < tokens_)
      arch::cp_async_zfill<16, arch::CacheOperation::Global>(
          place + kOffset + row * kRowBytes + swizzled(row, thread_ % kChunks) * 16,
          activations_ + int64_t(offset_of(i)) * args_.activation_stride, k_ < args_.k);
  }

  /// Rows from where activations_ points to the thread's row i.
  CUTLASS_DEVICE int offset_of(int i) const {
    if constexpr (Traits::kGathers) return source_[i];
    return i * kRowStep;
  }

  Arguments const& args_;
  int const thread_, tokens_;
  int k_;  // of this thread's chunk in the next stage
  Element const* activations_;
  int source_[Traits::kGathers ? kCopies : 1];  // rows
};

/// Copies the rows of scales and zeros of a stage, kRows each: row r serves k = r * kStageK / kRows and what follows.
/// Numbers of super-blocks come with the first row.
template <class Traits, int kChannels, int kRows, int kStageK, int kThreads>
class StreamGroupLoader {
 public:
  using Arguments = typename Traits::Arguments;
  static constexpr int kScaleRowBytes = kChannels * qcutlass::scale_bytes(Traits::kMode);
  static constexpr int kZeroRowBytes = kChannels * qcutlass::zero_bytes(Traits::kMode);
  static constexpr int kZeros = kRows * kScaleRowBytes;  // where a stage's zeros begin
  static constexpr int kStageBytes = kZeros + kRows * kZeroRowBytes;

  CUTLASS_DEVICE
  StreamGroupLoader(Arguments const& args, int channel, int thread)
      : args_(args),
        thread_(thread),
        scales_(args.scales, args.halves, channel, thread),
        zeros_(args.zeros, args.halves, channel, thread) {
    if constexpr (kLevels) {
      scales_.add(args.supers.scales, args.halves, channel, thread);
      zeros_.add(args.supers.minimums, args.halves, channel, thread);
    }
  }

  /// For the stage at k. Rows beyond the end of k are zeros, as activations are, which times a weight that is infinite
  /// would be NaN; where sums are scaled they are copies of the last, whose group they belong to.
  CUTLASS_DEVICE void copy(uint8_t* stage, int k) const {
    uint32_t supers = 0;
    if constexpr (kLevels) supers = uint32_t(args_.supers.scales.stride);
    copy(stage, scales_, args_.scales, supers, k);
    if constexpr (kLevels) supers = uint32_t(args_.supers.minimums.stride);
    if (args_.zeros.data != nullptr) copy(stage + kZeros, zeros_, args_.zeros, supers, k);
  }

 private:
  static constexpr bool kLevels = qcutlass::takes_super_blocks(Traits::kMode);

  static constexpr int kSuperRow = kRows;  // in place of a row: a chunk of super-blocks

  /// A thread's chunks of 16 bytes in the rows of a matrix.
  template <int kRowBytes>
  struct Rows {
    static constexpr int kChunks = kRowBytes / 16, kCopies = (kRows * kChunks + kThreads - 1) / kThreads;
    uint8_t const* from[kCopies];  // in the first group's row
    int row[kCopies];              // negative: nothing to copy

    template <class Halves>
    CUTLASS_DEVICE Rows(GroupMatrix const& matrix, Halves const& halves, int channel, int thread) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCopies; ++i) {
        int const chunk = thread + i * kThreads, byte = chunk % kChunks * 16;
        int const first_byte = matrix.byte(halves, channel, byte);
        bool const exists = (chunk < kRows * kChunks) & (byte < kChannels * matrix.element_bytes) &
                            (first_byte < matrix.row_bytes);  // no branches
        from[i] = matrix.data + first_byte;
        row[i] = exists ? chunk / kChunks : -1;
      }
    }

    /// The chunks of super-blocks, where integers leave room to them.
    template <class Halves>
    CUTLASS_DEVICE void add(GroupMatrix const& supers, Halves const& halves, int channel, int thread) {
      if (supers.data == nullptr) return;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCopies; ++i) {
        int const chunk = thread + i * kThreads, byte = chunk * 16 - super_byte(kChannels);
        if (chunk >= kChunks || byte < 0) continue;
        int const first_byte = supers.byte(halves, channel, byte);
        from[i] = supers.data + first_byte;
        row[i] = first_byte < supers.row_bytes ? kSuperRow : -1;
      }
    }
  };

  /// `supers`: bytes from one super-block's row to the next.
  template <int kRowBytes>
  CUTLASS_DEVICE void copy(uint8_t* to, Rows<kRowBytes> const& rows, GroupMatrix const& matrix, uint32_t supers,
                           int k) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Rows<kRowBytes>::kCopies; ++i) {
      int const row_k = k + rows.row[i] * (kStageK / kRows);
      unsigned group = args_.group_size.group(fast_min(row_k, args_.k - 1));
      uint32_t stride = uint32_t(matrix.stride);
      bool exists = Traits::kMode == qcutlass::ScaleMode::kNative || row_k < args_.k;
      if constexpr (kLevels)
        if (rows.row[i] == kSuperRow) group = args_.supers.size.group(k), stride = supers, exists = k < args_.k;
      if (rows.row[i] >= 0)
        arch::cp_async_zfill<16, arch::CacheOperation::Global>(to + (thread_ + i * kThreads) * 16,
                                                               rows.from[i] + uint64_t(group) * stride, exists);
    }
  }

  Arguments const& args_;
  int const thread_;
  Rows<kScaleRowBytes> scales_;
  Rows<kZeroRowBytes> zeros_;
};

/// The loader of products without scales of groups.
template <class Traits, int kChannels, int kStageK, int kThreads>
class StreamGroupLoader<Traits, kChannels, 0, kStageK, kThreads> {
 public:
  static constexpr int kStageBytes = 0;
  CUTLASS_DEVICE StreamGroupLoader(typename Traits::Arguments const&, int, int) {}
  CUTLASS_DEVICE void copy(uint8_t*, int) const {}
};

}  // namespace cutlass::gemm::threadblock
