// Shared memory -> register operands of the converters of floating codes: group_scales.h for e2m1 and e4m3, which have
// no zeros, and scales of types of their own.
#pragma once

#include "cutlass_ext/arch/dequantize_float.h"
#include "cutlass_ext/gemm/warp/group_scales.h"

namespace cutlass::gemm::warp {

/// What small numbers of e2m1 are multiplied by: scales times Codes::kUnit (2^14 or 2^126), two 16-bit halves at once.
/// For a scale of 4 and more the product would overflow. All scales of 2 and more, which one bit tells, become two
/// factors, the second of which is the rest: the scale and the unit, or, for powers of two in fp16, half of the scale
/// and 2^15. Scales of each type are a struct: how they are `Stored`, the bits `kLarge` that tell those of 2 and more,
/// and what they become.
template <class Element>
struct SmallNumberScales {
  using Codes = arch::FloatCodes<Element, qcutlass::Packing::kE2M1A16>;
  using Math = arch::PairMath<Element>;
  using Operands = typename arch::NativeFloatConverter<Element, qcutlass::Packing::kE2M1A16>::Operands;
  static constexpr bool kHalf = std::is_same_v<Element, half_t>;
  static constexpr uint32_t kBoth = 0x00010001;

  /// Of the activations' type: bit 14 is the highest of the exponent, which those of 2 and more have.
  struct Native {
    using Stored = uint16_t;
    static constexpr uint32_t kLarge = 0x4000 * kBoth;
    static CUTLASS_DEVICE uint32_t small(uint32_t pair) { return Math::mul(pair, Codes::kUnit); }
    static CUTLASS_DEVICE Operands large(uint32_t pair) {
      return chosen(pair >> 14 & kBoth, pair, Codes::kUnit, small(pair));
    }
  };

  /// e8m0, 2^(code - 127). fp16: 2^14 2^(code - 127) has the exponent code - 98, and up to 2^-29, code 98, where every
  /// weight is rounded to 0, scales count as 0. bf16: 2^126 2^(code - 127) has the exponent code + 126.
  struct Powers {
    using Stored = uint8_t;
    static constexpr uint32_t kLarge = 0x80 * kBoth, kPower15 = 0x7800 * kBoth;
    static CUTLASS_DEVICE uint32_t small(uint32_t codes) {
      if constexpr (kHalf) return (__vmaxu2(codes, 98 * kBoth) - 98 * kBoth) << 10;
      return (codes + 126 * kBoth) << 7;
    }
    /// Of those from 128 on, fp16 has 2^(code - 128) and 2^15, and counts scales from 2^17 on, code 144, where every
    /// weight but 0 is beyond fp16, as 2^16, with 1.5 in both factors, by which 0.5 is beyond it, too. bf16 has the
    /// scale and its unit. 255 is NaN.
    static CUTLASS_DEVICE Operands large(uint32_t codes) {
      uint32_t const nan = (codes + kBoth) & (0x100 * kBoth), least = small(__vminu2(codes, 127 * kBoth));
      if constexpr (kHalf) {
        uint32_t const exponents = __vmaxu2(__vminu2(codes, 143 * kBoth), 128 * kBoth) - 113 * kBoth;
        uint32_t const beyond = ((codes + 112 * kBoth) & (0x100 * kBoth)) << 1;  // 0x200, the mantissa of 1.5
        return chosen(codes >> 7 & kBoth, exponents << 10 | nan * 0x7e | beyond, kPower15 | beyond, least);
      } else {
        return chosen(codes >> 7 & kBoth, codes << 7 | nan >> 2, Codes::kUnit, least);
      }
    }
  };

  /// e4m3 scales are multiplied by 2^9 less than the unit; the sums are multiplied by 2^9 at the end. So scales up to
  /// 448 have no rest, and every weight is exact.
  static constexpr float kSumUnit = 512;
  struct Float8 {
    using Stored = uint8_t;
    static constexpr uint32_t kLarge = 0;
    static CUTLASS_DEVICE uint32_t small(uint32_t codes) {
      uint32_t const both = codes | codes >> 8;
      uint32_t const pair = arch::FloatCodes<Element, qcutlass::Packing::kE4M3A16>::template numbers<0>(&both);
      return Math::mul(pair, (kHalf ? 0x5000 : 0x7a00) * kBoth);  // 2^5, 2^117
    }
  };

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

/// e2m1, whose scales may also be e8m0 and e4m3: with_type() says which, outside of loops. What is loaded early becomes
/// operands when they are needed.
template <class Element>
struct FloatCodeScales<Element, qcutlass::Packing::kE2M1A16, qcutlass::ScaleMode::kFine> {
  using Converter = arch::NativeFloatConverter<Element, qcutlass::Packing::kE2M1A16>;
  using Operands = typename Converter::Operands;
  using Types = SmallNumberScales<Element>;
  struct Words {
    uint32_t low, high;  // of channels g and g + 8
  };

  /// Calls visit(type) with the struct of that type.
  template <class Visit>
  static CUTLASS_DEVICE void with_type(qcutlass::DType type, Visit const& visit) {
    switch (type) {
      case qcutlass::DType::kFloat8E8M0: return visit(typename Types::Powers());
      case qcutlass::DType::kFloat8E4M3: return visit(typename Types::Float8());
      default: return visit(typename Types::Native());
    }
  }

  template <class Type>
  static CUTLASS_DEVICE Words load(GroupRow const& row, int lane) {
    auto const* p = reinterpret_cast<typename Type::Stored const*>(row.scales) + row.channel + lane / 4;
    return {p[0], p[8]};
  }

  static CUTLASS_DEVICE Operands symmetric() { return {0, 0}; }

  /// Returns whether operands have rests. A vote decides, so that no lane multiplies by rests where none has any.
  template <class Type, int kCount>
  static CUTLASS_DEVICE bool make_operands(Operands (&operands)[kCount], Words const (&words)[kCount]) {
    uint32_t pairs[kCount], bits = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      pairs[i] = arch::make_pair(words[i].low, words[i].high);
      bits |= pairs[i];
    }
    if constexpr (Type::kLarge != 0) {
      if (__any_sync(~0u, (bits & Type::kLarge) != 0)) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kCount; ++i) operands[i] = Type::large(pairs[i]);
        return true;
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) operands[i].scale = Type::small(pairs[i]);
    return false;
  }

  /// Sums that are complete, in their own unit.
  template <class Sums>
  static CUTLASS_DEVICE void finish(Sums& sums, qcutlass::DType scale_type) {
    if (scale_type != qcutlass::DType::kFloat8E4M3) return;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < int(sizeof(Sums) / sizeof(float)); ++i) sums[i] *= Types::kSumUnit;
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
