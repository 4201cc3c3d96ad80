// Shared memory -> register operands of the converters of floating codes: group_scales.h for e2m1 and e4m3, which have
// no zeros, and scales of types of their own.
#pragma once

#include "cutlass_ext/arch/dequantize_float.h"
#include "cutlass_ext/gemm/warp/group_scales.h"

namespace cutlass::gemm::warp {

/// Scales of the activations' type, and of e2m1 codes also e8m0 and e4m3 ones: as pairs of that type.
template <class Element, qcutlass::Packing kPacking>
struct ScalePairs {
  using Operands = typename arch::NativeFloatConverter<Element, kPacking>::Operands;

  static CUTLASS_DEVICE Operands of_pair(uint32_t pair) { return {pair}; }
  static CUTLASS_DEVICE Operands of_bytes(uint8_t low, uint8_t high, qcutlass::DType) {
    return {arch::make_pair(low, high)};
  }
};

template <>
struct ScalePairs<bfloat16_t, qcutlass::Packing::kE2M1A16> {
  using Operands = arch::NativeFloatConverter<bfloat16_t, qcutlass::Packing::kE2M1A16>::Operands;

  static CUTLASS_DEVICE Operands of_pair(uint32_t pair) { return {pair}; }
  static CUTLASS_DEVICE Operands of_bytes(uint8_t low, uint8_t high, qcutlass::DType type) {
    return {arch::make_pair(bits(low, type), bits(high, type))};
  }

 private:
  static CUTLASS_DEVICE uint32_t bits(uint32_t byte, qcutlass::DType type) {
    if (type == qcutlass::DType::kFloat8E8M0) {
      uint32_t const power = byte == 0 ? 0x40 : byte << 7;  // 0 is 2^-127, a subnormal
      return byte == 0xff ? 0x7fc0 : power;
    }
    bfloat16_t const value(float(float_e4m3_t::bitcast(uint8_t(byte))));
    return value.raw();
  }
};

template <>
struct ScalePairs<half_t, qcutlass::Packing::kE2M1A16> {
  using Codes = arch::FloatCodes<half_t, qcutlass::Packing::kE2M1A16>;
  using Operands = arch::NativeFloatConverter<half_t, qcutlass::Packing::kE2M1A16>::Operands;

  static CUTLASS_DEVICE Operands of_pair(uint32_t pair) { return {pair, Codes::kUnit}; }
  static CUTLASS_DEVICE Operands of_bytes(uint8_t low, uint8_t high, qcutlass::DType type) {
    if (type != qcutlass::DType::kFloat8E8M0) return of_pair(arch::make_pair(e4m3(low), e4m3(high)));
    Power const first(low), second(high);
    return {arch::make_pair(first.scale, second.scale), arch::make_pair(first.unit, second.unit)};
  }

 private:
  static CUTLASS_DEVICE uint32_t e4m3(uint8_t byte) { return half_t(float(float_e4m3_t::bitcast(byte))).raw(); }

  /// 2^14 2^(byte - 127) as a product of two fp16 numbers. The first one, 1 or 2^15, keeps e2m1's small numbers exact.
  /// From 2^17 on, where every weight but 0 is beyond fp16, scales count as 2^16.
  struct Power {
    uint32_t unit, scale;

    CUTLASS_DEVICE explicit Power(int byte) {
      constexpr int kBias = 15, kUnit = 15;
      int const exponent = byte - 127 + 14;
      bool const large = exponent > kBias;
      int const rest = fast_min(large ? exponent - kUnit : exponent, kBias);
      unit = large ? (kUnit + kBias) << 10 : kBias << 10;
      scale = rest > -kBias ? (rest + kBias) << 10 : rest < -24 ? 0 : 1u << (rest + 24);
      if (byte == 0xff) scale = 0x7e00;
    }
  };
};

/// Converter and operand reader of a scale mode: kNative and kFine here.
template <class Element, qcutlass::Packing kPacking, qcutlass::ScaleMode kMode>
struct FloatCodeScales {
  using Converter = arch::NativeFloatConverter<Element, kPacking>;
  using Operands = typename Converter::Operands;
  using Pairs = ScalePairs<Element, kPacking>;
  static constexpr bool kHasBytes = kPacking == qcutlass::Packing::kE2M1A16;

  static CUTLASS_DEVICE Operands load(uint8_t const* scales, uint8_t const* /*zeros*/, int row,
                                      qcutlass::DType scale_type, qcutlass::DType /*zero_type*/) {
    if (kHasBytes && is_byte(scale_type)) return Pairs::of_bytes(scales[row], scales[row + 8], scale_type);
    uint16_t const* s = reinterpret_cast<uint16_t const*>(scales) + row;
    return Pairs::of_pair(arch::make_pair(s[0], s[8]));
  }

  template <int kCount, class RowOf>
  static CUTLASS_DEVICE void load(Operands (&operands)[kCount], GroupRow const& /*own*/, RowOf const& row_of, int lane,
                                  qcutlass::DType scale_type, qcutlass::DType zero_type) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      GroupRow const row = row_of(i);
      operands[i] = load(row.scales, row.zeros, row.channel + lane / 4, scale_type, zero_type);
    }
  }

  static CUTLASS_DEVICE Operands symmetric() { return Pairs::of_pair(0); }

 private:
  static CUTLASS_DEVICE bool is_byte(qcutlass::DType type) {
    return type == qcutlass::DType::kFloat8E8M0 || type == qcutlass::DType::kFloat8E4M3;
  }
};

template <class Element, qcutlass::Packing kPacking>
struct FloatCodeScales<Element, kPacking, qcutlass::ScaleMode::kFloat> {
  using Converter = arch::FloatFloatConverter<Element, kPacking>;
  using Operands = typename Converter::Operands;

  static CUTLASS_DEVICE Operands load(uint8_t const* scales, uint8_t const* /*zeros*/, int row,
                                      qcutlass::DType scale_type, qcutlass::DType /*zero_type*/) {
    Operands op;
    load_scales(op.scale, scales, row, scale_type);
    return op;
  }

  template <int kCount, class RowOf>
  static CUTLASS_DEVICE void load(Operands (&operands)[kCount], GroupRow const& /*own*/, RowOf const& row_of, int lane,
                                  qcutlass::DType scale_type, qcutlass::DType zero_type) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      GroupRow const row = row_of(i);
      operands[i] = load(row.scales, row.zeros, row.channel + lane / 4, scale_type, zero_type);
    }
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
