// A consuming warpgroup's way through the ring of an sm_90a mainloop: stage by stage, and places given back.
#pragma once

#include <utility>

#include "cutlass_ext/arch/wgmma.h"
#include "cutlass_ext/gemm/threadblock/ring_producer.h"

namespace cutlass::gemm::threadblock {

/// Mma, the derived class, has stage<kPlace>(sums, left, ...), which issues the MMAs of the stage in a place, calls
/// release_before<kPlace>() when those of the stage before are done, and returns whether more than one stage was left;
/// and release(place). The loop is unrolled over the places, so that descriptors of operands in shared memory are
/// constants. Every product begins in place 0; phases are kept per place.
template <class Mma, int kStages>
class RingConsumer {
 protected:
  CUTLASS_DEVICE explicit RingConsumer(RingBarriers<kStages>& barriers) : barriers_(barriers) {}

  /// Adds `stages` stages, at least one, to the sums; `tags` say what kind of stages.
  template <class Sums, class... Tags>
  CUTLASS_DEVICE void accumulate(Sums& sums, int stages, Tags... tags) {
    first_ = true;
    int left = stages;
    CUTLASS_PRAGMA_NO_UNROLL
    while (round(std::make_integer_sequence<int, kStages>{}, sums, left, tags...)) {
    }
    cute::warpgroup_wait<0>();
    arch::fence_registers(sums);
    mma().release((stages - 1) % kStages);
  }

  /// Waits until a place is full.
  CUTLASS_DEVICE void await(int place) {
    barriers_.full[place].wait(phases_ >> place & 1);
    phases_ ^= 1u << place;
  }

  /// Gives the place before kPlace back, if it held a stage of this product.
  template <int kPlace>
  CUTLASS_DEVICE void release_before() {
    if (kPlace != 0 || !first_) mma().release((kPlace + kStages - 1) % kStages);
    first_ = false;
  }

  /// Whether no stage of this product has been released yet.
  CUTLASS_DEVICE bool is_first() const { return first_; }

  RingBarriers<kStages>& barriers_;

 private:
  CUTLASS_DEVICE Mma& mma() { return static_cast<Mma&>(*this); }

  /// A stage in every place of the ring, or the `left` last ones. Returns whether there are more. (The compiler does
  /// not unroll a loop with barriers in it.)
  template <int... kPlaces, class Sums, class... Tags>
  CUTLASS_DEVICE bool round(std::integer_sequence<int, kPlaces...>, Sums& sums, int& left, Tags... tags) {
    return (mma().template stage<kPlaces>(sums, left, tags...) && ...);
  }

  uint32_t phases_ = 0;  // bit `place`: parity of the next phase that fills it
  bool first_;
};

}  // namespace cutlass::gemm::threadblock
