// Shared memory -> register operands of the converters: the scales and zeros of a lane's two rows of each strip.
#pragma once

#include "cutlass/cutlass.h"
#include "cutlass_ext/arch/dequantize.h"
#include "gemm/tactics.h"

namespace cutlass::gemm::warp {

/// One element of any supported type, from shared memory.
CUTLASS_DEVICE float load_as_float(uint8_t const* row, int index, qcutlass::DType type) {
  switch (type) {
    case qcutlass::DType::kFloat16: return float(reinterpret_cast<half_t const*>(row)[index]);
    case qcutlass::DType::kBFloat16: return float(reinterpret_cast<bfloat16_t const*>(row)[index]);
    case qcutlass::DType::kFloat32: return reinterpret_cast<float const*>(row)[index];
    case qcutlass::DType::kUInt8: return float(row[index]);
    case qcutlass::DType::kInt8: return float(reinterpret_cast<int8_t const*>(row)[index]);
    case qcutlass::DType::kInt32: return float(reinterpret_cast<int32_t const*>(row)[index]);
    default: return 0.f;
  }
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
};

template <class Element, int Bits>
struct GroupScales<Element, Bits, qcutlass::ScaleMode::kFloat> {
  using Converter = arch::FloatConverter<Element, Bits>;
  using Operands = typename Converter::Operands;

  static CUTLASS_DEVICE Operands load(uint8_t const* scales, uint8_t const* zeros, int row, qcutlass::DType scale_type,
                                      qcutlass::DType zero_type) {
    Operands op;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      op.scale[i] = load_as_float(scales, row + 8 * i, scale_type);
      op.zero[i] = zero_type == qcutlass::DType::kNone ? float(qcutlass::symmetric_zero(Bits))
                                                       : load_as_float(zeros, row + 8 * i, zero_type);
    }
    return op;
  }
};

}  // namespace cutlass::gemm::warp
