// Sums of groups of codes with minimums, which are scaled instead of the weights: with few tokens cheaper, for codes
// are operands nearly as they are, and nothing is rounded. What minimums take off follows from the sums of the
// activations, which MMAs by ones add up:
//
//   sum_k (q s - m) a = s sum_k q a - m sum_k a
//
// The second product is taken first, and each step is fused, so that a single 1 among zeros gives the weight to the
// bit.
#pragma once

#include <type_traits>

#include "cutlass_ext/arch/dequantize.h"
#include "cutlass_ext/gemm/warp/group_scales.h"
#include "cutlass_ext/gemm/warp/number_pair.h"

namespace cutlass::gemm::warp {

/// What a lane multiplies the sums of a strip by: numbers of rows g and g + 8.
struct GroupNumbers {
  float scale[2], minimum[2];
};

/// Codes of integers as operands: less their middle, where there are no minimums.
template <class Element, int Bits, bool kMinimums>
struct IntegerOperands {
  using Difference = arch::NativeDifference<Element, Bits>;

  /// Register I of operand A.
  template <int I>
  static CUTLASS_DEVICE uint32_t number(uint32_t const* words) {
    constexpr uint32_t kMiddle = kMinimums ? 0 : qcutlass::symmetric_zero(Bits);
    return Difference::template difference<I>(words, {0, Difference::offset(kMiddle, kMiddle)});
  }
  /// Two ones.
  static CUTLASS_DEVICE uint32_t ones() { return std::is_same_v<Element, half_t> ? 0x3c003c00 : 0x3f803f80; }
};

template <bool kMinimums>
CUTLASS_DEVICE void add_group(Array<float, 4>& sums, Array<float, 4> const& group, Array<float, 4> const& tokens,
                              GroupNumbers const& by) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 4; ++i) {
    float const sum = kMinimums ? fmaf(-by.minimum[i / 2], tokens[i], sums[i]) : sums[i];
    sums[i] = fmaf(by.scale[i / 2], group[i], sum);
  }
}

/// Numbers of one level, of floating types, without a branch.
class OneLevel {
 public:
  /// `channel`: the lane's row g in the first strip of its warp. `minimums`: where they begin, from the scales on.
  CUTLASS_DEVICE OneLevel(int channel, int minimums, qcutlass::DType scale_type, qcutlass::DType minimum_type)
      : scales_(channel, scale_type), minimums_(channel, minimum_type), begin_(minimums) {}

  /// Of a group's row of a place's scales.
  CUTLASS_DEVICE GroupNumbers load(uint8_t const* /*scales*/, uint8_t const* row, int strip) const {
    float2 const scale = scales_.template numbers<false>(scales_.load(row, strip)),
                 minimum = minimums_.template numbers<false>(minimums_.load(row + begin_, strip));
    return {{scale.x, scale.y}, {minimum.x, minimum.y}};
  }

 private:
  NumberPair<false> const scales_, minimums_;
  int const begin_;
};

/// Integers times numbers of super-blocks. Each lane multiplies one, of a channel's scale or, lanes 16 and up, minimum,
/// and hands it to the four that it belongs to.
template <bool kMinimums>
class TwoLevels {
 public:
  /// `channel`: the first one of the warp. `supers`, `minimums`: where they begin, from the scales on.
  CUTLASS_DEVICE TwoLevels(int channel, int lane, int supers, int minimums, qcutlass::DType scale_type,
                           qcutlass::DType minimum_type)
      : lane_(lane), byte_(channel + lane % 16), supers_(supers + 2 * byte_) {
    bool const is_minimum = kMinimums && lane >= 16;
    if (is_minimum) byte_ += minimums, supers_ += minimums;
    flip_ = level_flip(is_minimum ? minimum_type : scale_type);
  }

  CUTLASS_DEVICE GroupNumbers load(uint8_t const* scales, uint8_t const* row, int strip) const {
    half_t const super = *reinterpret_cast<half_t const*>(scales + supers_ + strip * 32);
    float const number = level_number<0>(row[byte_ + strip * 16] ^ flip_, flip_, float(super));
    GroupNumbers result;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 2; ++j) {
      result.scale[j] = __shfl_sync(~0u, number, lane_ / 4 + 8 * j);
      result.minimum[j] = kMinimums ? __shfl_sync(~0u, number, lane_ / 4 + 8 * j + 16) : 0.f;
    }
    return result;
  }

 private:
  int const lane_;
  int byte_, supers_;
  uint32_t flip_;
};

}  // namespace cutlass::gemm::warp
