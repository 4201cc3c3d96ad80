// Sums of groups of floating codes, which are scaled instead of the weights: with few tokens cheaper, for codes are
// operands almost as they are, and nothing is rounded.
#pragma once

#include "cutlass_ext/gemm/warp/float_code_scales.h"
#include "cutlass_ext/gemm/warp/number_pair.h"

namespace cutlass::gemm::warp {

template <class Element, qcutlass::Packing kPacking, qcutlass::ScaleMode kMode>
class GroupSums {
 public:
  using Scales = NumberPair<!qcutlass::takes_any_type(kMode)>;
  using Words = typename Scales::Words;

  /// `index`: the lane's row g in the first strip of its warp.
  CUTLASS_DEVICE GroupSums(int index, qcutlass::DType scale_type) : scales_(index, scale_type) {}

  /// Whether scales are powers of two, e8m0, for which there is code of its own.
  CUTLASS_DEVICE bool has_powers() const { return scales_.are_powers(); }

  /// What an MMA takes for the codes of register I.
  template <int I>
  static CUTLASS_DEVICE uint32_t number(uint32_t const* words) {
    if constexpr (kIsSmall)
      return Codes::template small_numbers<I>(words);
    else
      return Codes::template numbers<I>(words);
  }

  /// What a group's sums of a strip are scaled by, in the group's row.
  CUTLASS_DEVICE Words load(uint8_t const* row, int strip) const { return scales_.load(row, strip); }

  /// Adds a group's sums, scaled.
  template <bool kPowers>
  CUTLASS_DEVICE void add(Array<float, 4>& sums, Array<float, 4> const& group, Words const& words) const {
    float2 const scale = scales_.template numbers<kPowers>(words);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) sums[i] = fmaf(i / 2 == 0 ? scale.x : scale.y, group[i], sums[i]);
  }

  /// Sums that are complete, in their own unit.
  template <int kCount>
  CUTLASS_DEVICE void finish(Array<float, kCount>& sums) const {
    if constexpr (kIsSmall) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) sums[i] *= kSmall;
    }
  }

 private:
  using Codes = arch::FloatCodes<Element, kPacking>;
  /// fp16 holds the bits of e2m1 codes as 2^-14 of the numbers, which spares a multiplication.
  static constexpr bool kIsSmall = kPacking == qcutlass::Packing::kE2M1A16 && std::is_same_v<Element, half_t>;
  static constexpr float kSmall = 16384;

  Scales const scales_;
};

}  // namespace cutlass::gemm::warp
