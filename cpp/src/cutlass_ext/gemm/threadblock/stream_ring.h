// The cp.async rings of the streaming mainloop, one a slice. k is dealt out to the block's slices in turns of 128; the
// warps of a slice share a ring of their own and never wait for another slice before the epilogue. With one warp a
// slice the loop has no block-wide barrier. A ring holds the rows of activations that exist, not the tile's.
#pragma once

#include "cutlass_ext/arch/grid_dependency.h"
#include "cutlass_ext/arch/named_barrier.h"
#include "cutlass_ext/gemm/threadblock/packed_mma_base.h"
#include "cutlass_ext/gemm/threadblock/stream_loaders.h"

namespace cutlass::gemm::threadblock {

/// The ring of one slice. Base: the mainloop's PackedMmaBase.
template <class Base>
class StreamRing {
 public:
  using Shape = typename Base::Shape;
  using WarpShape = typename Base::WarpShape;
  using Traits = typename Base::Traits;
  using Arguments = typename Base::Arguments;
  static constexpr int kSlices = Base::kSlices, kStages = Base::kStages;
  static constexpr int kWarpsM = Base::kWarpsM, kWarpsN = Base::kWarpsN;
  static constexpr qcutlass::ScaleMode kMode = Base::kMode;

  static constexpr int kStageK = qcutlass::kStreamK;
  static constexpr int kSetThreads = 32 * kWarpsM * kWarpsN;  // the warps of a slice
  static_assert(WarpShape::kK == kStageK);
  static_assert(kSetThreads == 32 || kSlices <= arch::kNamedBarriers);

  static constexpr int kRows = qcutlass::scale_rows(kMode, kStageK);
  using WeightLoader = StreamWeightLoader<Traits, Shape::kM / 16, kStageK, Shape::kK, kSetThreads>;
  using TokenLoader = StreamActivationLoader<Traits, Shape::kN, kStageK, Shape::kK, kSetThreads>;
  using GroupLoader = StreamGroupLoader<Traits, Shape::kM, kRows, kStageK, kSetThreads>;
  using BlockLoader = BlockScaleLoaderOf<Shape::kM, Shape::kN, kStageK, kMode, kSetThreads>;

  /// One place of a slice's ring. The rows of activations come last: their number is the problem's.
  struct Place {
    static constexpr int kWeights = 0;
    static constexpr int kGroups = kWeights + WeightLoader::kStageBytes;
    static constexpr int kBlocks = kGroups + GroupLoader::kStageBytes;
    static constexpr int kTokens = kBlocks + BlockLoader::kStageBytes;
    static constexpr int kBytes = kTokens + Shape::kN * TokenLoader::kRowBytes;  // with all rows
  };

  struct alignas(16) SharedStorage {
    uint8_t rings[kSlices * kStages * Place::kBytes];
  };

  /// The places of a slice's ring. They lie as far apart as the rows of activations that exist require.
  struct Places {
    int const bytes;
    uint8_t* const first;

    CUTLASS_DEVICE Places(SharedStorage& storage, Arguments const& args, int slice)
        : bytes(Place::kTokens + fast_min(args.tokens, Shape::kN) * TokenLoader::kRowBytes),
          first(storage.rings + slice * kStages * bytes) {}
    CUTLASS_DEVICE uint8_t* operator[](int i) const { return first + i * bytes; }
  };

  /// The block's tile starts at (channel, token), and `tokens` of its tokens exist. The slice's first stage begins at
  /// k, a multiple of kStageK; the block's share of k ends at end_k. `thread`: among those of the slice.
  CUTLASS_DEVICE
  StreamRing(Places const& places, Arguments const& args, int channel, int token, int tokens, int slice, int k,
             int end_k, int thread)
      : StreamRing(places, args, channel, token, tokens, slice, k, k + TokenLoader::column(thread), end_k, thread) {}

  /// Requests the weights, scales and zeros of the first stages, which may be done before the wait for the kernel
  /// before this one.
  CUTLASS_DEVICE void prefetch_weights() {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int s = 0; s < fast_min(kStages - 1, stages_); ++s) copy_weights(places_[s]);
  }

  /// Requests what prefetch_weights() left of the first stages.
  CUTLASS_DEVICE void fill() {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int s = 0; s < kStages - 1; ++s) {
      if (s < stages_) copy_activations(places_[s]);
      arch::cp_async_fence();
    }
  }

  /// Stages of this slice.
  CUTLASS_DEVICE int stages() const { return stages_; }

  /// Where the stage that is read begins; advance() goes on to the next one.
  CUTLASS_DEVICE int k() const { return read_k_; }
  CUTLASS_DEVICE void advance() { read_k_ += Shape::kK; }

  /// Waits for the stage that is read next, and for the warps of the slice to have read the one before it.
  CUTLASS_DEVICE void wait() const {
    arch::cp_async_wait<kStages - 2>();
    if constexpr (kSetThreads == 32)
      __syncwarp();
    else
      arch::named_barrier_sync<kSetThreads>(slice_);
  }

  /// Requests the next stage.
  CUTLASS_DEVICE void refill(uint8_t* place) {
    copy_weights(place);
    copy_activations(place);
  }

  /// Shared memory is free for other uses after it.
  CUTLASS_DEVICE static void drain() {
    arch::cp_async_wait<0>();
    __syncthreads();
  }

 private:
  /// `tokens_k`: the thread's first column of activations.
  CUTLASS_DEVICE
  StreamRing(Places const& places, Arguments const& args, int channel, int token, int tokens, int slice, int k,
             int tokens_k, int end_k, int thread)
      : args_(args),
        slice_(slice),
        places_(places),
        end_k_(end_k),
        weights_k_(k),
        blocks_k_(k),
        read_k_(k),
        stages_(k < end_k ? (end_k - k + Shape::kK - 1) / Shape::kK : 0),
        weights_(args, channel, k, thread),
        activations_(args, token, tokens, tokens_k, thread),
        groups_(args, channel, thread),
        blocks_(args.blocks, channel, args.channels, token, args.tokens, thread) {}

  /// Requests the next stage's weights, scales and zeros; tiles beyond the end of k are zeros.
  CUTLASS_DEVICE void copy_weights(uint8_t* place) {
    weights_.copy(place + Place::kWeights, end_k_ - weights_k_);
    groups_.copy(place + Place::kGroups, weights_k_);
    weights_k_ += Shape::kK;
    weights_.advance();
  }

  /// Requests the next stage's activations and block scales.
  CUTLASS_DEVICE void copy_activations(uint8_t* place) {
    blocks_.copy(place + Place::kBlocks, blocks_k_);
    blocks_k_ += Shape::kK;
    activations_.template copy<Place::kTokens>(place);
    activations_.advance();
  }

  Arguments const& args_;
  int const slice_;
  Places const places_;
  int const end_k_;
  int weights_k_, blocks_k_, read_k_;  // of the next stage to load weights or block scales of, and to read
  int const stages_;
  WeightLoader weights_;
  TokenLoader activations_;
  GroupLoader groups_;
  BlockLoader blocks_;
};

}  // namespace cutlass::gemm::threadblock
