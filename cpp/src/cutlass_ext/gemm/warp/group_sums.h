// Sums of groups that are scaled instead of the weights: with few tokens cheaper, and nothing is rounded.
//
// A weight is (q - z) s or q s - m, with a zero z or a minimum m of its group. MMAs take c = q - middle, an exact
// integer, or the number that a floating code is, and a group adds
//     s * sum(c a) + o * sum(a)      with o = (middle - z) s or middle s - m
// to the sums of a token. The middle of the codes' range keeps both terms as small as they can be. Sums of activations
// come from MMAs with ones.
#pragma once

#include "cutlass_ext/gemm/warp/float_code_scales.h"
#include "cutlass_ext/gemm/warp/number_pair.h"

namespace cutlass::gemm::warp {

template <class Element, qcutlass::Packing kPacking, qcutlass::ScaleMode kMode>
class GroupSums {
 public:
  static constexpr bool kFloatCodes = qcutlass::has_float_codes(kPacking);
  static constexpr int kBits = qcutlass::bits_of(kPacking);
  static constexpr bool kHasOffsets = !kFloatCodes && qcutlass::takes_any_type(kMode);
  static constexpr bool kHasMinimums = kMode == qcutlass::ScaleMode::kMinimum;
  /// 1, twice.
  static constexpr uint32_t kOnes = std::is_same_v<Element, half_t> ? 0x3c003c00 : 0x3f803f80;

  using Scales = NumberPair<qcutlass::takes_any_type(kMode) ? NumberTypes::kFloats : NumberTypes::kScales>;
  using Offsets = NumberPair<kHasMinimums ? NumberTypes::kFloats : NumberTypes::kAny>;
  struct Words {
    typename Scales::Words scales;
    typename Offsets::Words offsets;
  };

  /// `index`: the lane's row g in the first strip of its warp. No offsets: `offset_type` is kNone.
  CUTLASS_DEVICE GroupSums(int index, qcutlass::DType scale_type, qcutlass::DType offset_type)
      : scales_(index, scale_type),
        offsets_(index, offset_type),
        has_offsets_(kHasOffsets && offset_type != qcutlass::DType::kNone) {
    if constexpr (!kFloatCodes) middle_ = Difference::offset(kMiddle, kMiddle);
  }

  CUTLASS_DEVICE bool has_offsets() const { return has_offsets_; }
  /// Whether scales are powers of two, e8m0, for which there is code of its own.
  CUTLASS_DEVICE bool has_powers() const { return kPacking == qcutlass::Packing::kE2M1A16 && scales_.are_powers(); }

  /// What an MMA takes for the codes of register I.
  template <int I>
  CUTLASS_DEVICE uint32_t code(uint32_t const* words) const {
    if constexpr (kIsSmall)
      return Codes::template small_numbers<I>(words);
    else if constexpr (kFloatCodes)
      return Codes::template numbers<I>(words);
    else
      return Difference::template difference<I>(words, {0, middle_});
  }

  /// Of a group's rows of scales and offsets, those of a strip.
  CUTLASS_DEVICE Words load(uint8_t const* scales, uint8_t const* offsets, int strip) const {
    Words words;
    words.scales = scales_.load(scales, strip);
    if constexpr (kHasOffsets) words.offsets = offsets_.load(offsets, strip);
    return words;
  }

  /// Adds a group's sums, scaled. `tokens`: the sums of its activations, of the lane's two tokens.
  template <bool kPowers>
  CUTLASS_DEVICE void add(Array<float, 4>& sums, Array<float, 4> const& group, Words const& words,
                          float2 tokens) const {
    float2 const scale = scales_.template numbers<kPowers>(words.scales);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) sums[i] = fmaf(i / 2 == 0 ? scale.x : scale.y, group[i], sums[i]);
    if constexpr (kHasOffsets) {
      if (!has_offsets_) return;
      float2 const given = offsets_.numbers(words.offsets);
      float2 const offset = {weight_of_middle(scale.x, given.x), weight_of_middle(scale.y, given.y)};
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i)
        sums[i] = fmaf(i / 2 == 0 ? offset.x : offset.y, i % 2 == 0 ? tokens.x : tokens.y, sums[i]);
    }
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
  struct NoCodes {};
  template <bool kFloats, class = void>
  struct Exact {
    using Codes = NoCodes;
    using Difference = arch::NativeDifference<Element, kBits>;
  };
  template <class Void>
  struct Exact<true, Void> {
    using Codes = arch::FloatCodes<Element, kPacking>;
    using Difference = NoCodes;
  };
  using Codes = typename Exact<kFloatCodes>::Codes;
  using Difference = typename Exact<kFloatCodes>::Difference;

  static constexpr int kMiddle = kFloatCodes ? 0 : qcutlass::symmetric_zero(kBits);
  /// fp16 holds the bits of e2m1 codes as 2^-14 of the numbers, which spares a multiplication.
  static constexpr bool kIsSmall = kPacking == qcutlass::Packing::kE2M1A16 && std::is_same_v<Element, half_t>;
  static constexpr float kSmall = 16384;

  static CUTLASS_DEVICE float weight_of_middle(float scale, float offset) {
    return kHasMinimums ? fmaf(float(kMiddle), scale, -offset) : (float(kMiddle) - offset) * scale;
  }

  Scales const scales_;
  Offsets const offsets_;
  bool const has_offsets_;
  uint32_t middle_;
};

}  // namespace cutlass::gemm::warp
