// Shared memory -> register operands of the converters of floating codes: group_scales.h for e2m1 and e4m3, which have
// no zeros, and scales of types of their own.
#pragma once

#include "cutlass_ext/arch/dequantize_float.h"
#include "cutlass_ext/gemm/warp/group_scales.h"

namespace cutlass::gemm::warp {

/// Two e4m3 numbers as a pair of type Element.
template <class Element>
CUTLASS_DEVICE uint32_t e4m3_pair(uint32_t low, uint32_t high) {
  uint32_t const codes = low | high << 8;
  return arch::FloatCodes<Element, qcutlass::Packing::kE4M3A16>::template numbers<0>(&codes);
}

/// Scales of the activations' type, and of e2m1 codes also e8m0 ones, two codes in the halves: as pairs of that type.
template <class Element, qcutlass::Packing kPacking>
struct ScalePairs {
  using Operands = typename arch::NativeFloatConverter<Element, kPacking>::Operands;

  static CUTLASS_DEVICE Operands of_pair(uint32_t pair) { return {pair}; }
};

template <>
struct ScalePairs<bfloat16_t, qcutlass::Packing::kE2M1A16> {
  using Operands = arch::NativeFloatConverter<bfloat16_t, qcutlass::Packing::kE2M1A16>::Operands;

  static CUTLASS_DEVICE Operands of_pair(uint32_t pair) { return {pair}; }
  /// Exponents as they are; with the bit below, 0 is 2^-127, a subnormal, and 255 NaN. Sums carry into bit 8 of a half
  /// for all but 0, and for 255 alone.
  static CUTLASS_DEVICE Operands of_powers(uint32_t codes) {
    uint32_t const zero = ~(codes + 0x00ff00ff) & 0x01000100, nan = (codes + 0x00010001) & 0x01000100;
    return {codes << 7 | (zero | nan) >> 2};
  }
};

template <>
struct ScalePairs<half_t, qcutlass::Packing::kE2M1A16> {
  using Codes = arch::FloatCodes<half_t, qcutlass::Packing::kE2M1A16>;
  using Operands = arch::NativeFloatConverter<half_t, qcutlass::Packing::kE2M1A16>::Operands;

  static CUTLASS_DEVICE Operands of_pair(uint32_t pair) { return {pair, Codes::kUnit}; }
  /// 2^14 2^(code - 127) as a product of two fp16 numbers, both channels' at once: the first one, 1, or 2^15 from code
  /// 128 on, keeps e2m1's small numbers exact. From 2^17 on, where every weight but 0 is beyond fp16, scales count as
  /// 2^16, code 143; up to 2^-29, code 98, where every weight is rounded to 0, as 0.
  static CUTLASS_DEVICE Operands of_powers(uint32_t codes) {
    constexpr uint32_t kBoth = 0x00010001, kLeast = 98, kMost = 143, kExponent = 1 << 10, kLarge = 15 * kExponent;
    uint32_t const within = __vmaxu2(__vminu2(codes, kMost * kBoth), kLeast * kBoth);
    uint32_t const large = within >> 7 & kBoth, nan = (codes + kBoth) & 0x100 * kBoth;  // bit 8 of 255 + 1
    return {within * kExponent - kLeast * kExponent * kBoth - large * kLarge,
            0x3c00 * kBoth + large * kLarge + nan * 6};  // 2^15, 0x7800, and 6 * 0x100 are 0x7e00, a NaN
  }
};

/// Converter and operand reader of a scale mode: kNative and kFine here.
template <class Element, qcutlass::Packing kPacking, qcutlass::ScaleMode kMode>
struct FloatCodeScales {
  using Converter = arch::NativeFloatConverter<Element, kPacking>;
  using Operands = typename Converter::Operands;
  using Pairs = ScalePairs<Element, kPacking>;
  static constexpr bool kHasBytes = kPacking == qcutlass::Packing::kE2M1A16;

  /// The type decides once for all of them: what comes from shared memory comes together.
  template <int kCount, class RowOf>
  static CUTLASS_DEVICE void load(Operands (&operands)[kCount], GroupRow const& /*own*/, RowOf const& row_of, int lane,
                                  qcutlass::DType scale_type, qcutlass::DType /*zero_type*/) {
    if (kHasBytes && (scale_type == qcutlass::DType::kFloat8E8M0 || scale_type == qcutlass::DType::kFloat8E4M3)) {
      uint32_t low[kCount], high[kCount];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) load_two(low[i], high[i], row_of(i), lane, uint8_t());
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        if constexpr (kHasBytes)
          operands[i] = scale_type == qcutlass::DType::kFloat8E8M0
                            ? Pairs::of_powers(arch::make_pair(low[i], high[i]))
                            : Pairs::of_pair(e4m3_pair<Element>(low[i], high[i]));
      }
      return;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      uint32_t low, high;
      load_two(low, high, row_of(i), lane, uint16_t());
      operands[i] = Pairs::of_pair(arch::make_pair(low, high));
    }
  }

  static CUTLASS_DEVICE Operands symmetric() { return Pairs::of_pair(0); }

 private:
  template <class T>
  static CUTLASS_DEVICE void load_two(uint32_t& low, uint32_t& high, GroupRow const& row, int lane, T) {
    T const* p = reinterpret_cast<T const*>(row.scales) + row.channel + lane / 4;
    low = p[0], high = p[8];
  }
};

template <class Element, qcutlass::Packing kPacking>
struct FloatCodeScales<Element, kPacking, qcutlass::ScaleMode::kFloat> {
  using Converter = arch::FloatFloatConverter<Element, kPacking>;
  using Operands = typename Converter::Operands;

  template <int kCount, class RowOf>
  static CUTLASS_DEVICE void load(Operands (&operands)[kCount], GroupRow const& /*own*/, RowOf const& row_of, int lane,
                                  qcutlass::DType scale_type, qcutlass::DType /*zero_type*/) {
    load_scales(operands, row_of, lane, scale_type);
  }

  static CUTLASS_DEVICE Operands symmetric() { return {}; }
};

/// Those of any packing.
template <class Element, qcutlass::Packing kPacking, qcutlass::ScaleMode kMode>
using ScalesOf = std::conditional_t<qcutlass::has_float_codes(kPacking), FloatCodeScales<Element, kPacking, kMode>,
                                    GroupScales<Element, qcutlass::bits_of(kPacking), kMode>>;

/// The scale of all sums, which floating codes may have beside those of groups.
template <bool kExists>
struct GlobalScale {
  template <class Sums>
  CUTLASS_DEVICE void apply(Sums&) const {}
  CUTLASS_DEVICE GlobalScale of_expert(int) const { return {}; }
};
template <>
struct GlobalScale<true> {
  float const* global_scale;  // nullptr: 1; of experts the first one's

  CUTLASS_DEVICE GlobalScale of_expert(int expert) const {
    return {global_scale == nullptr ? nullptr : global_scale + expert};
  }

  /// Scales sums, once they are complete.
  template <class T, int kCount>
  CUTLASS_DEVICE void apply(Array<T, kCount>& sums) const {
    if (global_scale != nullptr) multiply<kCount>(sums);
  }
  template <int kCount>
  CUTLASS_DEVICE void apply(float (&sums)[kCount]) const {
    if (global_scale != nullptr) multiply<kCount>(sums);
  }

 private:
  template <int kCount, class Sums>
  CUTLASS_DEVICE void multiply(Sums& sums) const {
    float const scale = *global_scale;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) sums[i] *= scale;
  }
};

}  // namespace cutlass::gemm::warp
