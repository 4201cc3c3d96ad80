// Shared memory -> registers of what 4-by-8-bit products scale their sums by: the scales, and the zeros, of a lane's
// rows g and g + 8, of any type. Bytes are moved to where a type has them by selectors that a lane finds once: a branch
// for each type would be in the way of every group.
#pragma once

#include <math_constants.h>

#include "cutlass_ext/arch/byte_difference.h"
#include "cutlass_ext/gemm/warp/number_pair.h"

namespace cutlass::gemm::warp {

template <class Element>
class SumScales {
 public:
  using Converter = arch::ByteDifference<Element>;

  struct Operands {
    float scale[2];    // of sums of rows g, g + 8, in the converter's units; NaN where there is no exact difference
    uint32_t zero[2];  // in every byte
  };

  /// Of elements `index` and `index + 8`. No zeros are `symmetric` ones.
  CUTLASS_DEVICE SumScales(int index, qcutlass::DType scale_type, qcutlass::DType zero_type)
      : scales_(index, scale_type == qcutlass::DType::kFloat32 ? 4 : 2),
        zeros_(index, zero_type == qcutlass::DType::kInt32 ? 4 : 1),
        half_(scale_type == qcutlass::DType::kFloat16) {
    // Selectors, digit by digit the source of a byte: 0 to 3 the element's word, 4 to 7 another operand.
    uint32_t const s = scales_.byte(), z = zeros_.byte();
    bool const bfloat = scale_type == qcutlass::DType::kBFloat16;
    scale_bytes_ = half_ ? 0x4410 + s * 0x11 : bfloat ? 0x1044 + s * 0x1100 : 0x3210;
    constexpr uint32_t kRepeatsSign = 8;
    zero_bytes_ = zero_type == qcutlass::DType::kInt32   ? 0x3210
                  : zero_type == qcutlass::DType::kUInt8 ? 0x7650 + z
                  : zero_type == qcutlass::DType::kInt8  ? 0x1111 * z + (0x1110 * kRepeatsSign)
                                                         : 0x7654;
  }

  CUTLASS_DEVICE Operands load(uint8_t const* scales, uint8_t const* zeros) const {
    constexpr uint32_t kSymmetric = 8;  // of which the upper bytes are 0
    Operands op;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      uint32_t const bits = arch::permute_bytes(scales_.word(scales, i), 0, scale_bytes_);
      float const scale = half_ ? float(half_t::bitcast(uint16_t(bits))) : __uint_as_float(bits);
      int const zero = int(arch::permute_bytes(zeros_.word(zeros, i), kSymmetric, zero_bytes_));
      constexpr int kLeast = Converter::kLeastZero, kMost = Converter::kMostZero;
      bool const exact = unsigned(zero) - unsigned(kLeast) <= unsigned(kMost - kLeast);
      op.scale[i] = exact ? scale * (1 / Converter::kUnit) : CUDART_NAN_F;
      op.zero[i] = uint32_t(zero) * 0x01010101u;
    }
    return op;
  }

 private:
  ElementPair const scales_, zeros_;
  bool const half_;
  uint32_t scale_bytes_, zero_bytes_;
};

}  // namespace cutlass::gemm::warp
