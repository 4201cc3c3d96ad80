// The rule by which packed codes become weights, for every consumer of them.
//
//   w[n, k] = (code[n, k] - zero[g, n]) * scale[g, n],   g = k / group_size
//
// Evaluated as RN32(RN32(code - zero) * scale) in fp32, then rounded once to the type asked for. Integer zeros (to
// 2^24) make the difference exact; with fp16 / bf16 scales the product of an integer zero scheme is exact in fp32 as
// well, so the weight is the correctly rounded one. With minimums instead of zeros
//
//   w[n, k] = code[n, k] * scale[g, n] - minimum[g, n]
//
// of which fp32 keeps RN32 of the exact value (a fused multiply and add): a zero minimum / scale would be rounded, and
// where the scale is 0 there is none.
//
// Scales, and minimums, of two levels are integers, each times the number of its super-block, neighbouring groups of a
// channel: scale[g, n] = super_scale[g / s, n] * integer[g, n], s = super_groups. An fp16 number by one of 8 bits has
// at most 19: the product is exact in fp32.
//
// Floating codes (e2m1, e4m3) have no zeros, and may have a global scale beside those of groups:
//
//   w[n, k] = code[n, k] * RN32(scale[g, n] * global)
//
// The code is exact in fp32, and so is its product with a scale of at most 20 bits (e4m3: 4 bits, e2m1: 2): it is
// rounded once, to the type asked for. NaN codes (e4m3: 0x7f, 0xff) and scales (e4m3; e8m0: 0xff) give NaN. Products
// that scale sums apply the scales, or `global` alone, to those instead.
#pragma once

#include <cstdint>

#include "qcutlass/types.h"

namespace qcutlass {

/// On GPUs super-blocks, if there are several, have a multiple of so many columns: a stage of a main loop lies in one.
inline constexpr int64_t kSuperBlockStep = 128;

/// A matrix [groups, n] of one of the parameters of groups: scales, zeros or minimums.
struct GroupParameters {
  DType type = DType::kNone;
  void const* data = nullptr;
  int64_t stride = 0;            ///< elements from one group's row to the next
  void const* supers = nullptr;  ///< float16 [super-blocks, n] that the elements are times; nullptr: they are numbers
  int64_t super_stride = 0;
  int64_t super_groups = 0;  ///< groups of a super-block
};

/// A packed weight matrix [n, k] with its scales, and zeros or minimums. Pointers are not owned.
struct WeightArguments {
  Packing packing = Packing::kW4A16;
  int64_t n = 0;
  int64_t k = 0;
  /// k elements that share a scale; >= k: one scale a channel. The last group may be short. k with kW8A8.
  int64_t group_size = 0;
  void const* packed = nullptr;
  DType scale_type = DType::kNone;  ///< floating; of floating codes also e8m0 and e4m3
  void const* scales = nullptr;     ///< [groups(), n]
  int64_t scale_stride = 0;         ///< elements from one group's row to the next
  /// kNone: every zero is symmetric_zero(packing). Floating: real-valued zeros. Integer: exact integers.
  DType zero_type = DType::kNone;
  void const* zeros = nullptr;  ///< [groups(), n]
  int64_t zero_stride = 0;
  float const* global_scale = nullptr;  ///< [1], of floating codes, or one an expert; nullptr: 1
  DType minimum_type = DType::kNone;    ///< floating, or kNone: there are none. Those who have them have no zeros.
  void const* minimums = nullptr;       ///< [groups(), n]
  int64_t minimum_stride = 0;
  /// Groups that share a super-block's numbers: scales, and minimums, are integers (uint8, int8) then. 0: one level.
  int64_t super_groups = 0;
  void const* super_scales = nullptr;    ///< float16 [super_blocks(), n]
  void const* super_minimums = nullptr;  ///< float16 [super_blocks(), n], beside minimums
  int64_t super_scale_stride = 0;
  int64_t super_minimum_stride = 0;
  /// On the host: scales, zeros, minimums and the numbers of super-blocks lie in the order in which products read them,
  /// [strips of 16 channels][groups or super-blocks][16], whatever their strides say. Memory has whole strips.
  bool by_strip = false;

  constexpr bool has_minimums() const { return minimum_type != DType::kNone; }
  constexpr bool has_super_blocks() const { return super_groups != 0; }
  constexpr int64_t super_blocks() const {
    return has_super_blocks() ? (groups() + super_groups - 1) / super_groups : 0;
  }
  constexpr GroupParameters group_scales() const {
    return {scale_type, scales, scale_stride, super_scales, super_scale_stride, super_groups};
  }
  /// Minimums, or zeros: what is taken off scaled codes, or off codes.
  constexpr GroupParameters offsets() const {
    if (!has_minimums()) return {zero_type, zeros, zero_stride};
    return {minimum_type, minimums, minimum_stride, super_minimums, super_minimum_stride, super_groups};
  }
  constexpr int bits() const { return bits_of(packing); }
  constexpr int64_t groups() const {
    return scale_type == DType::kNone || group_size >= k ? 1 : (k + group_size - 1) / group_size;
  }
};

/// The zero point of symmetric schemes: 2^(bits - 1), or 0 where codes have signs.
constexpr int symmetric_zero(int bits) { return 1 << (bits - 1); }
constexpr int symmetric_zero(Packing packing) {
  return has_float_codes(packing) ? 0 : symmetric_zero(bits_of(packing));
}

}  // namespace qcutlass
