// Shared memory -> register operands of the converters of floating codes: group_scales.h for e2m1 and e4m3, which have
// no zeros, and scales of types of their own.
#pragma once

#include "cutlass_ext/arch/dequantize_float.h"
#include "cutlass_ext/gemm/warp/group_scales.h"

namespace cutlass::gemm::warp {

/// What small numbers of e2m1 are multiplied by: scales times their unit, two 16-bit halves at once. In each half a
/// scale of 2 and more keeps its value, or has an even one, and leaves a rest.
template <class Element>
struct SmallNumberScales {
  using Codes = arch::FloatCodes<Element, qcutlass::Packing::kE2M1A16>;
  using Math = arch::PairMath<Element>;
  using Operands = typename arch::NativeFloatConverter<Element, qcutlass::Packing::kE2M1A16>::Operands;
  static constexpr bool kHalf = std::is_same_v<Element, half_t>;
  static constexpr uint32_t kBoth = 0x00010001;

  /// Scales of type Element: bit 14 is the highest of the exponent, which those of 2 and more have.
  static constexpr uint32_t kLargePair = 0x4000 * kBoth;
  static CUTLASS_DEVICE uint32_t of_pair(uint32_t pair) { return Math::mul(pair, Codes::kUnit); }
  static CUTLASS_DEVICE Operands of_large_pair(uint32_t pair) {
    return chosen(pair >> 14 & kBoth, pair, Codes::kUnit, of_pair(pair));
  }

  /// Codes of e8m0, 2^(code - 127). fp16: 2^14 2^(code - 127) has the exponent code - 98, and up to 2^-29, code 98,
  /// where every weight is rounded to 0, scales count as 0. bf16: 2^126 2^(code - 127) has the exponent code + 126.
  static constexpr uint32_t kLargePower = 0x80 * kBoth, kPower15 = 0x7800 * kBoth;
  static CUTLASS_DEVICE uint32_t of_powers(uint32_t codes) {
    if constexpr (kHalf) return (__vmaxu2(codes, 98 * kBoth) - 98 * kBoth) << 10;
    return (codes + 126 * kBoth) << 7;
  }
  /// Of those from 128 on, fp16 has 2^(code - 128) and 2^15, and counts scales from 2^17 on, where every weight but 0
  /// is beyond fp16, as 2^16, code 143. bf16 has the scale and its unit. 255 is NaN.
  static CUTLASS_DEVICE Operands of_large_powers(uint32_t codes) {
    uint32_t const nan = (codes + kBoth) & (0x100 * kBoth), least = of_powers(__vminu2(codes, 127 * kBoth));
    if constexpr (kHalf) {
      uint32_t const large = __vmaxu2(__vminu2(codes, 143 * kBoth), 128 * kBoth) - 113 * kBoth;
      return chosen(codes >> 7 & kBoth, large << 10 | nan * 0x7e, kPower15, least);
    } else {
      return chosen(codes >> 7 & kBoth, codes << 7 | nan >> 2, Codes::kUnit, least);
    }
  }

  /// Scales of e4m3 take 2^9 less, which the sums get: up to 448 they have no rest then, and every weight is exact.
  static constexpr float kSumUnit = 512;
  static CUTLASS_DEVICE uint32_t of_e4m3(uint32_t pair) {
    return Math::mul(pair, (kHalf ? 0x5000 : 0x7a00) * kBoth);  // 2^5, 2^117
  }

 private:
  /// In halves that are `large` a scale and its rest, in others the scale that has none.
  static CUTLASS_DEVICE Operands chosen(uint32_t large, uint32_t scale, uint32_t rest, uint32_t other) {
    uint32_t const mask = large * 0xffff;
    return {(scale & mask) | (other & ~mask), (rest & mask) | (Codes::kOne & ~mask)};
  }
};

/// Converter and operand reader of a scale mode: kNative and, but for e2m1, kFine here.
template <class Element, qcutlass::Packing kPacking, qcutlass::ScaleMode kMode>
struct FloatCodeScales {
  using Converter = arch::NativeFloatConverter<Element, kPacking>;
  using Operands = typename Converter::Operands;

  template <int kCount, class RowOf>
  static CUTLASS_DEVICE void load(Operands (&operands)[kCount], GroupRow const& /*own*/, RowOf const& row_of, int lane,
                                  qcutlass::DType /*scale_type*/, qcutlass::DType /*zero_type*/) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      GroupRow const row = row_of(i);
      uint16_t const* p = reinterpret_cast<uint16_t const*>(row.scales) + row.channel + lane / 4;
      operands[i].scale = arch::make_pair(p[0], p[8]);
    }
  }

  static CUTLASS_DEVICE Operands symmetric() { return {0}; }
};

/// e2m1, whose scales may also be e8m0 and e4m3. The words that they lie in come without a branch and early; operands
/// are made of them when they are needed.
template <class Element>
struct FloatCodeScales<Element, qcutlass::Packing::kE2M1A16, qcutlass::ScaleMode::kFine> {
  using Converter = arch::NativeFloatConverter<Element, qcutlass::Packing::kE2M1A16>;
  using Operands = typename Converter::Operands;
  struct Words {
    uint32_t low, high;  // of channels g and g + 8
  };

  template <int kCount, class RowOf>
  static CUTLASS_DEVICE void load(Words (&words)[kCount], GroupRow const& /*own*/, RowOf const& row_of, int lane,
                                  qcutlass::DType scale_type, qcutlass::DType /*zero_type*/) {
    bool const is_byte = scale_type == qcutlass::DType::kFloat8E8M0 || scale_type == qcutlass::DType::kFloat8E4M3;
    uint32_t const size = is_byte ? 1 : 2;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      GroupRow const row = row_of(i);
      uint8_t const* p = row.scales + (uint32_t(row.channel + lane / 4) * size & ~3u);
      words[i] = {*reinterpret_cast<uint32_t const*>(p), *reinterpret_cast<uint32_t const*>(p + 8 * size)};
    }
  }

  static CUTLASS_DEVICE Operands symmetric() { return {0, 0}; }

  /// Makes operands of them; returns whether these have rests. A vote decides, so that no lane multiplies by rests
  /// where none has any.
  template <int kCount>
  static CUTLASS_DEVICE bool make_operands(Operands (&operands)[kCount], Words const (&words)[kCount], int lane,
                                           qcutlass::DType type) {
    uint32_t pairs[kCount];
    if (type == qcutlass::DType::kFloat8E8M0) {
      uint32_t const selector = 0x0400 + lane / 4 % 4 * 0x0101;  // of the bytes 0 and 2, the others are masked
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) pairs[i] = pair_of(words[i], selector) & 0x00ff00ff;
      return make_operands(operands, pairs, Scales::kLargePower, Scales::of_powers, Scales::of_large_powers);
    }
    if (type == qcutlass::DType::kFloat8E4M3) {
      uint32_t const selector = 0x40 + lane / 4 % 4 * 0x11;  // two bytes
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        uint32_t const codes = pair_of(words[i], selector);
        operands[i].scale = Scales::of_e4m3(E4M3::template numbers<0>(&codes));
      }
      return false;
    }
    uint32_t const selector = 0x5410 + lane / 4 % 2 * 0x2222;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) pairs[i] = pair_of(words[i], selector);
    return make_operands(operands, pairs, Scales::kLargePair, Scales::of_pair, Scales::of_large_pair);
  }

  /// Sums that are complete, in their own unit.
  template <class Sums>
  static CUTLASS_DEVICE void finish(Sums& sums, qcutlass::DType scale_type) {
    if (scale_type != qcutlass::DType::kFloat8E4M3) return;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < int(sizeof(Sums) / sizeof(float)); ++i) sums[i] *= Scales::kSumUnit;
  }

 private:
  using Scales = SmallNumberScales<Element>;
  using E4M3 = arch::FloatCodes<Element, qcutlass::Packing::kE4M3A16>;

  static CUTLASS_DEVICE uint32_t pair_of(Words const& words, uint32_t selector) {
    return arch::permute_bytes(words.low, words.high, selector);
  }

  template <int kCount, class Of, class OfLarge>
  static CUTLASS_DEVICE bool make_operands(Operands (&operands)[kCount], uint32_t const (&pairs)[kCount],
                                           uint32_t large, Of const& of, OfLarge const& of_large) {
    uint32_t bits = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) bits |= pairs[i];
    if (__any_sync(~0u, (bits & large) != 0)) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) operands[i] = of_large(pairs[i]);
      return true;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) operands[i].scale = of(pairs[i]);
    return false;
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

/// What is fetched of a row of scales: operands, or the words that they are made of later.
template <class Scales, bool kHasWords>
struct FetchedScales {
  using Type = typename Scales::Operands;
};
template <class Scales>
struct FetchedScales<Scales, true> {
  using Type = typename Scales::Words;
};

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
