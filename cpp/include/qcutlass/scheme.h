// The rule by which packed codes become weights, for every consumer of them.
//
//   w[n, k] = (code[n, k] - zero[g, n]) * scale[g, n],   g = k / group_size
//
// Evaluated as RN32(RN32(code - zero) * scale) in fp32, then rounded once to the type asked for. Integer zeros (to
// 2^24) make the difference exact; with fp16 / bf16 scales the product of an integer zero scheme is exact in fp32 as
// well, so the weight is the correctly rounded one.
#pragma once

#include <cstdint>

#include "qcutlass/types.h"

namespace qcutlass {

/// A packed weight matrix [n, k] with its scales and zeros. Pointers are not owned.
struct WeightArguments {
  Packing packing = Packing::kW4A16;
  int64_t n = 0;
  int64_t k = 0;
  /// k elements that share a scale; >= k: one scale a channel. The last group may be short. k with kW8A8.
  int64_t group_size = 0;
  void const* packed = nullptr;
  DType scale_type = DType::kNone;  ///< floating
  void const* scales = nullptr;     ///< [groups(), n]
  int64_t scale_stride = 0;         ///< elements from one group's row to the next
  DType zero_type =
      DType::kNone;  ///< kNone: every zero is 2^(bits - 1). Floating: real-valued zeros. Integer: exact integers.
  void const* zeros = nullptr;  ///< [groups(), n]
  int64_t zero_stride = 0;

  constexpr int bits() const { return bits_of(packing); }
  constexpr int64_t groups() const {
    return scale_type == DType::kNone || group_size >= k ? 1 : (k + group_size - 1) / group_size;
  }
};

/// The zero point of symmetric schemes.
constexpr int symmetric_zero(int bits) { return 1 << (bits - 1); }

}  // namespace qcutlass
