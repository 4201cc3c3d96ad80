// The ring of a wgmma main loop: barriers of its stages, and the thread that keeps it full by TMA.
#pragma once

#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/fast_math.h"
#include "cutlass_ext/arch/mbarrier.h"

namespace cutlass::gemm::threadblock {

template <int kStages>
struct RingBarriers {
  arch::TransactionBarrier full[kStages], empty[kStages];

  /// Called by one thread, before all others pass a barrier. `warps`: the number that free a stage; `fillers`: threads
  /// that say that they have filled it, or what they have requested for it.
  CUTLASS_DEVICE void initialize(int warps, int fillers = 1) {
    CUTLASS_PRAGMA_UNROLL
    for (int place = 0; place < kStages; ++place) {
      full[place].init(fillers);
      empty[place].init(warps);
    }
    cutlass::arch::fence_barrier_init();
  }
};

/// The tensor maps of a product's tiles of kTokens rows of activations. The last tile has a map of its own, with as
/// many rows as tokens exist: TMA would fill other rows with zeros, but at some 16 bytes a clock, slower than MMAs need
/// them. The stale bytes that stay in the ring instead reach only sums of absent tokens.
template <int kTokens>
struct TokenBoxes {
  CUtensorMap whole, last;
  int tokens;

  /// The rows of the tile that begins at `token`; 0 or less if it lies behind the last one.
  CUTLASS_DEVICE int rows(int token) const { return fast_min(tokens - token, kTokens); }
  CUTLASS_DEVICE CUtensorMap const& map(int rows) const { return rows == kTokens ? whole : last; }
};

/// The producing thread. `Loader`, the derived class, has request_weights(place, channel, k), which expects the bytes
/// of a stage, too. SharedStorage has kChunks chunks of 128 bytes of a token's row at activations(place, chunk). Every
/// product begins in place 0; phases are kept per place.
template <class Loader, class SharedStorage, int kStages, int kStageK, class Arguments>
class RingProducer {
 public:
  CUTLASS_DEVICE RingProducer(SharedStorage& storage, RingBarriers<kStages>& barriers, Arguments const& args)
      : storage_(storage), barriers_(barriers), args_(args) {
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&args.activations.whole));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&args.activations.last));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&args.weights));
  }

  /// Requests the weights, with scales and zeros, of a tile's first stages; load() requests the rest.
  CUTLASS_DEVICE void prefetch_weights(int channel, int token, int first_k, int stages) {
    requested_ = fast_min(stages, kStages);
    rows_ = args_.activations.rows(token);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int s = 0; s < requested_; ++s) loader().request_weights(s, channel, first_k + s * kStageK);
  }

  CUTLASS_DEVICE void load(int channel, int token, int first_k, int stages) {
    int place = 0, k = first_k;
    rows_ = args_.activations.rows(token);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int left = stages; left > 0; --left) {
      if (requested_ > 0) {
        --requested_;
      } else {
        barriers_.empty[place].wait(~phases_ >> place & 1);
        loader().request_weights(place, channel, k);
      }
      if (rows_ > 0) request_activations(place, token, k);
      phases_ ^= 1u << place;
      place = place + 1 == kStages ? 0 : place + 1;
      k += kStageK;
    }
  }

 protected:
  CUTLASS_DEVICE uint64_t* barrier(int place) const { return reinterpret_cast<uint64_t*>(&barriers_.full[place]); }

  /// The bytes of activations in a stage.
  CUTLASS_DEVICE int activation_bytes() const { return fast_max(rows_, 0) * (SharedStorage::kChunks * 128); }

  SharedStorage& storage_;
  RingBarriers<kStages>& barriers_;
  Arguments const& args_;

 private:
  CUTLASS_DEVICE Loader& loader() { return static_cast<Loader&>(*this); }

  CUTLASS_DEVICE void request_activations(int place, int token, int k) {
    CUTLASS_PRAGMA_UNROLL
    for (int chunk = 0; chunk < SharedStorage::kChunks; ++chunk)
      cute::SM90_TMA_LOAD_2D::copy(&args_.activations.map(rows_), barrier(place),
                                   uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL), storage_.activations(place, chunk),
                                   k + chunk * (kStageK / SharedStorage::kChunks), token);
  }

  int rows_;             // tokens of the tile that exist
  uint32_t phases_ = 0;  // bit `place`: parity of the next phase that fills it
  int requested_ = 0;    // stages whose weights are on their way already
};

}  // namespace cutlass::gemm::threadblock
