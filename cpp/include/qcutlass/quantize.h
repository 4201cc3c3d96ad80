// Quantising activations and weights to 8 bits, on the host and on a GPU, bit for bit alike (but for the bits of NaN);
// and codes in blocks: back to numbers, and through GELU to other codes.
//
// Every operation is one fp32 operation, rounded to nearest even. With x = a[m, k], or a[m, k] / smooth[k], and range
// one row of x, a block of it, or all of it,
//
//   symmetric    scale = max|range| / largest_code(type);               code = round(x / scale)
//   asymmetric   scale = (hi - lo) / 255, lo = min(range, 0), hi = max(range, 0);
//                azp = -128 - round(lo / scale);                        code = round(x / scale) + azp       (int8)
//
// where round() goes to the nearest code, to the even one of two, and saturates: symmetric int8 at +-127, asymmetric
// at -128 and 127, fp8 at its largest finite values. A scale is at least kLeastScale, and 1 for a range of zeros.
//
// NaN and infinities: with a range's own scale, that scale becomes NaN or infinity, int8 codes and azp 0; fp8 codes
// NaN, or 0 where a finite value meets an infinite scale. With a given scale infinities saturate; fp8 keeps NaN, int8
// makes it 0 + azp and reports a scale of NaN. Either way a product shows it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "qcutlass/types.h"

namespace qcutlass {

/// The largest symmetric codes.
constexpr float largest_code(DType type) {
  return type == DType::kInt8 ? 127.0f : type == DType::kFloat8E4M3 ? 448.0f : 57344.0f;
}
inline constexpr float kAsymmetricSteps = 255.0f;

/// The smallest normal number: quotients by it neither lose bits nor overflow.
inline constexpr float kLeastScale = 0x1p-126f;

/// `scale`, of a range of values up to `extent`, where it is a scale. NaN stays NaN.
constexpr float valid_scale(float extent, float scale) {
  return extent == 0.0f ? 1.0f : scale < kLeastScale ? kLeastScale : scale;
}
/// The scale of a range of values.
constexpr float scale_of(float extent, float steps) { return valid_scale(extent, extent / steps); }

/// One matrix to quantise. Plain data: pointers, sizes and strides in elements; nothing is owned.
struct QuantizeArguments {
  int64_t rows = 0;
  int64_t columns = 0;
  DType a_type = DType::kNone;  ///< fp16, bf16, fp32
  void const* a = nullptr;      ///< [rows, columns], unit stride along columns
  int64_t a_stride = 0;
  float const* smooth = nullptr;  ///< [columns]: a is divided by it first; nullptr: not
  bool per_tensor = false;        ///< one range, and one scale, for all rows
  int64_t block = 0;              ///< columns that share a range: 32, 64, 128, or 0: all. Symmetric, without smooth
  bool square = false;            ///< with block: as many rows share it too, as in weights
  bool powers_of_two = false;     ///< with block: scales are rounded up to powers of two
  bool gated = false;       ///< with block, not square: a is [rows, 2 columns], and x = silu(a[m, k]) a[m, columns + k]
  bool asymmetric = false;  ///< int8 with zero points
  float const* given_scale = nullptr;  ///< [1]: this one, instead of one from a range; with per_tensor
  int32_t const* given_azp = nullptr;  ///< [1], in [-128, 127]: with given_scale and asymmetric
  DType code_type = DType::kNone;      ///< int8, fp8
  void* codes = nullptr;               ///< written: [rows, columns], no gaps
  float* scale = nullptr;     ///< written: [rows], [1] with per_tensor, [rows or their blocks, blocks of columns]
  int32_t* azp = nullptr;     ///< written: likewise, where asymmetric without given_azp
  void* workspace = nullptr;  ///< kQuantizeWorkspaceBytes, aligned to them; on a GPU, with per_tensor
};

inline constexpr size_t kQuantizeWorkspaceBytes = 8;

/// How many scales are written, and zero points where there are some.
constexpr int64_t scales_of(QuantizeArguments const& arguments) {
  if (arguments.per_tensor) return 1;
  if (arguments.block == 0) return arguments.rows;
  auto const blocks = [&](int64_t extent) { return (extent + arguments.block - 1) / arguments.block; };
  return (arguments.square ? blocks(arguments.rows) : arguments.rows) * blocks(arguments.columns);
}

/// Codes of 8 bits, a scale for each block of 1 x size, or with `square` of size x size, of which the last ones may be
/// short.
struct BlockArguments {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t size = 0;  ///< 32, 64 or 128
  bool square = false;
  void const* codes = nullptr;  ///< [rows, columns]
  int64_t codes_stride = 0;
  float const* scales = nullptr;   ///< [rows or their blocks, blocks of columns], no gaps
  DType out_type = DType::kNone;   ///< of dequantize_blocks: fp16, bf16, fp32
  void* out = nullptr;             ///< written: [rows, columns], no gaps; int8 codes by gelu_blocks
  float* out_scales = nullptr;     ///< written by gelu_blocks: like scales
  DType code_type = DType::kInt8;  ///< int8; of dequantize_blocks also float8_e4m3
};

namespace host {

/// Throws InvalidArgument before anything is written. `threads` >= 1.
void quantize(QuantizeArguments const& arguments, int threads);
/// out = code * scale, rounded to fp32, then to out_type.
void dequantize_blocks(BlockArguments const& arguments, int threads);
/// gelu(code * scale), the erf form in fp32, quantised again; not `square`. A block whose scale is not finite gets a
/// scale of NaN and codes of 0.
void gelu_blocks(BlockArguments const& arguments, int threads);

}  // namespace host

namespace cuda {

/// The same on the device that `stream` belongs to, which must be current; pointers are device pointers. The value of
/// given_azp is not checked. With blocks, codes are int8 or float8_e4m3; Unsupported for others. With `gated`, they are
/// float8_e4m3, and SiLU(x) errs by up to 2^-20 |x|. The next kernel in the stream may start as soon as this one has
/// started, and so run beside this kernel's predecessors, too: for products see GemmArguments::settled.
void quantize(QuantizeArguments const& arguments, void* stream);
/// The same bits.
void dequantize_blocks(BlockArguments const& arguments, void* stream);
/// The same but for an error of GELU of up to 2^-20 |code * scale|.
void gelu_blocks(BlockArguments const& arguments, void* stream);

}  // namespace cuda

}  // namespace qcutlass
