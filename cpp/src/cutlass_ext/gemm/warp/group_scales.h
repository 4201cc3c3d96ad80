// Shared memory -> register operands of the converters: the scales, and zeros or minimums, of a lane's two rows of each
// strip.
#pragma once

#include "cutlass/arch/memory_sm75.h"
#include "cutlass/fast_math.h"
#include "cutlass_ext/arch/dequantize.h"
#include "cutlass_ext/gemm/warp/sum_scales.h"
#include "plan/footprint.h"

namespace cutlass::gemm::warp {

/// Where the scales and zeros of a strip for one group lie: a row of each, and the strip's first channel in them; and
/// the rows of its super-block, if there are two levels.
struct GroupRow {
  uint8_t const *scales, *zeros;
  int channel;
  uint8_t const *super_scales, *super_minimums;
};

// One branch for all elements, so that they come from shared memory together, and for scales, which are floats, three
// cases alone: unrolled loops hold many copies, and the time of ptxas grows faster than their branches.

/// Numbers of type T of a lane's rows g and g + 8 of several strips or groups, from one of the rows of each.
template <class T, class Operands, int kCount, class RowOf>
CUTLASS_DEVICE void load_numbers(Operands (&operands)[kCount], float (Operands::*numbers)[2],
                                 uint8_t const* GroupRow::*bytes, RowOf const& row_of, int lane) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kCount; ++i) {
    GroupRow const row = row_of(i);
    T const* p = reinterpret_cast<T const*>(row.*bytes) + row.channel + lane / 4;
    (operands[i].*numbers)[0] = float(p[0]), (operands[i].*numbers)[1] = float(p[8]);
  }
}

/// Scales of any supported type.
template <class Operands, int kCount, class RowOf>
CUTLASS_DEVICE void load_scales(Operands (&operands)[kCount], RowOf const& row_of, int lane, qcutlass::DType type) {
  auto const to = &Operands::scale;
  auto const from = &GroupRow::scales;
  switch (type) {
    case qcutlass::DType::kFloat16: return load_numbers<half_t>(operands, to, from, row_of, lane);
    case qcutlass::DType::kBFloat16: return load_numbers<bfloat16_t>(operands, to, from, row_of, lane);
    default: return load_numbers<float>(operands, to, from, row_of, lane);
  }
}

/// The same of zeros; where there are none, `symmetric`.
template <class Operands, int kCount, class RowOf>
CUTLASS_DEVICE void load_zeros(Operands (&operands)[kCount], RowOf const& row_of, int lane, qcutlass::DType type,
                               float symmetric) {
  auto const to = &Operands::zero;
  auto const from = &GroupRow::zeros;
  switch (type) {
    case qcutlass::DType::kFloat16: return load_numbers<half_t>(operands, to, from, row_of, lane);
    case qcutlass::DType::kBFloat16: return load_numbers<bfloat16_t>(operands, to, from, row_of, lane);
    case qcutlass::DType::kFloat32: return load_numbers<float>(operands, to, from, row_of, lane);
    case qcutlass::DType::kUInt8: return load_numbers<uint8_t>(operands, to, from, row_of, lane);
    case qcutlass::DType::kInt8: return load_numbers<int8_t>(operands, to, from, row_of, lane);
    case qcutlass::DType::kInt32: return load_numbers<int32_t>(operands, to, from, row_of, lane);
    default:
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) operands[i].zero[0] = operands[i].zero[1] = symmetric;
  }
}

/// Of two levels: the bit that turns signed integers q of groups into q + 128.
CUTLASS_DEVICE uint32_t level_flip(qcutlass::DType type) { return type == qcutlass::DType::kInt8 ? 0x80 : 0; }

/// A byte of a group, flipped so, times the number of its super-block, rounded once: byte kByte of `bytes`. 0x4b000000
/// is 2^23, whose last bit counts one; selectors 4 to 7 of the permutation name its bytes.
template <int kByte>
CUTLASS_DEVICE float level_number(uint32_t bytes, uint32_t flip, float super) {
  return (__uint_as_float(__byte_perm(bytes, 0x4b000000, 0x7440 + kByte)) - (0x1p23f + float(flip))) * super;
}

/// Converter and operand reader of a scale mode.
template <class Element, int Bits, qcutlass::ScaleMode kMode>
struct GroupScales {
  using Converter = arch::NativeConverter<Element, Bits>;
  using Operands = typename Converter::Operands;

  /// Rows `row` and `row + 8` of the block's channels.
  static CUTLASS_DEVICE Operands load(uint8_t const* scales, uint8_t const* zeros, int row,
                                      qcutlass::DType /*scale_type*/, qcutlass::DType zero_type) {
    uint16_t const* s = reinterpret_cast<uint16_t const*>(scales) + row;
    uint32_t z[2] = {qcutlass::symmetric_zero(Bits), qcutlass::symmetric_zero(Bits)};
    if (zero_type != qcutlass::DType::kNone) {
      z[0] = zeros[row];
      z[1] = zeros[row + 8];
    }
    return Converter::make(s[0], s[8], z[0], z[1]);
  }

  /// The same for several strips or groups: row_of(i) is where those of operand i lie, `own` is that of operand
  /// lane / 8 or, where there are fewer, the last. Operands that are the same for every group are there from
  /// symmetric().
  template <int kCount, class RowOf>
  static CUTLASS_DEVICE void load(Operands (&operands)[kCount], GroupRow const& own, RowOf const& row_of, int lane,
                                  qcutlass::DType /*scale_type*/, qcutlass::DType zero_type) {
    // A transposing ldmatrix over rows of 8 scales gives lane 4g + t the elements g of rows 2t and 2t + 1. With the
    // strip's first 8 scales as every even row and the others as every odd one, that is the pair s(g), s(g + 8).
    constexpr int kMatrices = kCount == 3 ? 4 : kCount;
    Array<unsigned, kMatrices> pairs;
    arch::ldsm<layout::ColumnMajor, kMatrices>(pairs, own.scales + (own.channel + lane % 2 * 8) * 2);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) operands[i].scale = pairs[i];
    if (zero_type == qcutlass::DType::kNone) return;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      GroupRow const row = row_of(i);
      uint8_t const* z = row.zeros + row.channel + lane / 4;
      operands[i].offset = Converter::offset(z[0], z[8]);
    }
  }

  static CUTLASS_DEVICE Operands symmetric() {
    return Converter::make(0, 0, qcutlass::symmetric_zero(Bits), qcutlass::symmetric_zero(Bits));
  }
};

template <class Element, int Bits>
struct GroupScales<Element, Bits, qcutlass::ScaleMode::kFloat> {
  using Converter = arch::FloatConverter<Element, Bits>;
  using Operands = typename Converter::Operands;

  template <int kCount, class RowOf>
  static CUTLASS_DEVICE void load(Operands (&operands)[kCount], GroupRow const& /*own*/, RowOf const& row_of, int lane,
                                  qcutlass::DType scale_type, qcutlass::DType zero_type) {
    load_scales(operands, row_of, lane, scale_type);
    load_zeros(operands, row_of, lane, zero_type, float(qcutlass::symmetric_zero(Bits)));
  }

  static CUTLASS_DEVICE Operands symmetric() { return {}; }
};

/// Minimums are read as real-valued zeros are. Of two levels each lane multiplies one number, of a channel's scale or,
/// lanes 16 and up, minimum, and hands it to the four that it belongs to: half of what they would do themselves.
template <class Element, int Bits>
struct GroupScales<Element, Bits, qcutlass::ScaleMode::kMinimum>
    : GroupScales<Element, Bits, qcutlass::ScaleMode::kFloat> {
  using Base = GroupScales<Element, Bits, qcutlass::ScaleMode::kFloat>;
  using Converter = arch::MinimumConverter<Element, Bits>;
  using Operands = typename Converter::Operands;

  template <int kCount, class RowOf>
  static CUTLASS_DEVICE void load(Operands (&operands)[kCount], GroupRow const& own, RowOf const& row_of, int lane,
                                  qcutlass::DType scale_type, qcutlass::DType zero_type) {
    bool const has_levels = scale_type == qcutlass::DType::kInt8 || scale_type == qcutlass::DType::kUInt8;
    if (has_levels)
      load_levels(operands, row_of, lane, scale_type, zero_type);
    else
      Base::load(operands, own, row_of, lane, scale_type, zero_type);
  }

 private:
  template <int kCount, class RowOf>
  static CUTLASS_DEVICE void load_levels(Operands (&operands)[kCount], RowOf const& row_of, int lane,
                                         qcutlass::DType scale_type, qcutlass::DType minimum_type) {
    bool const has_minimums = minimum_type != qcutlass::DType::kNone, is_minimum = lane >= 16 && has_minimums;
    uint32_t const flip = level_flip(is_minimum ? minimum_type : scale_type);
    uint32_t integers[kCount];
    half_t supers[kCount];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      GroupRow const row = row_of(i);
      int const channel = row.channel + lane % 16;
      integers[i] = (is_minimum ? row.zeros : row.scales)[channel];
      supers[i] = reinterpret_cast<half_t const*>(is_minimum ? row.super_minimums : row.super_scales)[channel];
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      float const number = level_number<0>(integers[i] ^ flip, flip, float(supers[i]));
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 2; ++j) {
        float const scale = __shfl_sync(~0u, number, lane / 4 + 8 * j);
        operands[i].scale[j] = scale;
        // Symmetric codes: 2^(Bits - 1) scale, exact, so that the fused step rounds (code - 2^(Bits - 1)) scale.
        operands[i].zero[j] = has_minimums ? __shfl_sync(~0u, number, lane / 4 + 8 * j + 16)
                                           : scale * float(qcutlass::symmetric_zero(Bits));
      }
    }
  }
};

/// 4-by-8-bit products: weights are codes less their zeros, and scales those of sums.
template <class Element>
struct GroupScales<Element, 4, qcutlass::ScaleMode::kGroup> : SumScales<Element> {
  using SumScales<Element>::SumScales;
};
template <class Element>
struct GroupScales<Element, 4, qcutlass::ScaleMode::kGroup32> : SumScales<Element> {
  using SumScales<Element>::SumScales;
};

/// Weights that are operands as they are.
template <class Element, int Bits>
struct GroupScales<Element, Bits, qcutlass::ScaleMode::kNone> {
  struct Operands {};
  struct Converter {
    template <int kRegister>
    static CUTLASS_DEVICE uint32_t convert(uint32_t const* words, Operands const&) {
      return words[kRegister];
    }
  };
  static CUTLASS_DEVICE Operands symmetric() { return {}; }
};
template <class Element, int Bits>
struct GroupScales<Element, Bits, qcutlass::ScaleMode::kBlock>
    : GroupScales<Element, Bits, qcutlass::ScaleMode::kNone> {};
template <class Element, int Bits>
struct GroupScales<Element, Bits, qcutlass::ScaleMode::kBlock64>
    : GroupScales<Element, Bits, qcutlass::ScaleMode::kNone> {};
template <class Element, int Bits>
struct GroupScales<Element, Bits, qcutlass::ScaleMode::kBlock32>
    : GroupScales<Element, Bits, qcutlass::ScaleMode::kNone> {};

}  // namespace cutlass::gemm::warp
