// Argument checks that packing, dequantising and multiplying share. Each names the argument, what was expected and what
// came.
#pragma once

#include <cstdint>
#include <locale>
#include <sstream>
#include <string>
#include <type_traits>

#include "qcutlass/error.h"
#include "qcutlass/layout.h"
#include "qcutlass/scheme.h"
#include "qcutlass/types.h"

namespace qcutlass::host {

template <class... Parts>
[[noreturn]] __attribute__((cold, noinline)) void refuse(Parts... message) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  (text << ... << message);
  throw InvalidArgument(text.str());
}

/// `message`: words and numbers, which follow one another. They become a string where the condition fails alone: some
/// checks are those of each index of an array.
template <class... Parts>
void check(bool condition, Parts... message) {
  static_assert((!std::is_same_v<Parts, std::string> && ...), "a string would be made before the check");
  if (!condition) refuse(message...);
}

inline void check_at_least(char const* name, int64_t value, int64_t minimum) {
  if (value < minimum) {
    throw InvalidArgument(std::string(name) + " must be at least " + std::to_string(minimum) + ", got " +
                          std::to_string(value));
  }
}

inline void check_not_null(char const* name, void const* pointer) {
  if (pointer == nullptr) throw InvalidArgument(std::string(name) + " is a null pointer");
}

inline void check_floating(char const* name, DType type) {
  if (!is_floating(type)) throw InvalidArgument(std::string(name) + " must be float16, bfloat16 or float32");
}

inline void check_block_size(char const* name, int64_t size) {
  check(is_block_size(size), name, " must be 32, 64 or 128, got ", size);
}

inline void check_threads(int threads) { check_at_least("threads", threads, 1); }

/// Integers for the numbers of super-blocks to be times.
inline void check_integers(char const* name, DType type) {
  check(type == DType::kUInt8 || type == DType::kInt8, name, " must be uint8 or int8 beside super-blocks");
}

/// Scales and minimums of two levels.
inline void check_super_blocks(WeightArguments const& weights) {
  check(!has_float_codes(weights.packing) && weights.global_scale == nullptr && weights.zero_type == DType::kNone,
        "super_scales: floating codes, zeros and a global scale do not stand beside super-blocks");
  check_at_least("super_groups", weights.super_groups, 1);
  check_integers("scale_type", weights.scale_type);
  if (weights.has_minimums()) check_integers("minimum_type", weights.minimum_type);
  if (weights.n == 0) return;
  int64_t const least_stride = weights.super_blocks() > 1 && !weights.by_strip ? weights.n : 0;
  check_not_null("super_scales", weights.super_scales);
  check_at_least("super_scale_stride", weights.super_scale_stride, least_stride);
  if (!weights.has_minimums()) return;
  check_not_null("super_minimums", weights.super_minimums);
  check_at_least("super_minimum_stride", weights.super_minimum_stride, least_stride);
}

/// The types of scales, and what floating codes may have beside them.
inline void check_scales(WeightArguments const& weights) {
  if (weights.has_super_blocks()) return check_super_blocks(weights);
  bool const is_e2m1 = weights.packing == Packing::kE2M1A16, has_e4m3 = weights.scale_type == DType::kFloat8E4M3;
  check(weights.global_scale == nullptr || has_e4m3, "global_scale: expected scales of float8_e4m3fn beside it");
  if (is_e2m1 && (has_e4m3 || weights.scale_type == DType::kFloat8E8M0)) return;
  check_floating("scale_type", weights.scale_type);
}

inline void check_weights(WeightArguments const& weights) {
  check(layout::in_fragment_order(weights.packing),
        "packing: weights packed for int8 activations (W8A8) have no zeros and group scales; pack them as W4A16 or "
        "W8A16");
  check_at_least("n", weights.n, 0);
  check_at_least("k", weights.k, 1);
  check_at_least("group_size", weights.group_size, 1);
  check_scales(weights);
  if (weights.n == 0) return;
  check_not_null("packed", weights.packed);
  check_not_null("scales", weights.scales);
  int64_t const minimum_stride = weights.groups() > 1 && !weights.by_strip ? weights.n : 0;
  check_at_least("scale_stride", weights.scale_stride, minimum_stride);
  if (weights.has_minimums()) {
    if (!weights.has_super_blocks()) check_floating("minimum_type", weights.minimum_type);
    check(weights.zero_type == DType::kNone, "zeros: weights with minimums have none");
    check_not_null("minimums", weights.minimums);
    check_at_least("minimum_stride", weights.minimum_stride, minimum_stride);
  }
  if (weights.zero_type == DType::kNone) return;
  check(!has_float_codes(weights.packing), "zero_type: floating codes have no zeros");
  check_not_null("zeros", weights.zeros);
  check_at_least("zero_stride", weights.zero_stride, minimum_stride);
}

}  // namespace qcutlass::host
