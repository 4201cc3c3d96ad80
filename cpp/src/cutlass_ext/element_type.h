// CUTLASS's types of activations, by the library's names of them.
#pragma once

#include <cstdint>

#include "cutlass/bfloat16.h"
#include "cutlass/float8.h"
#include "cutlass/half.h"
#include "qcutlass/types.h"

namespace qcutlass::cuda {

template <DType kType>
constexpr auto element_of() {
  if constexpr (kType == DType::kFloat16) return cutlass::half_t{};
  if constexpr (kType == DType::kBFloat16) return cutlass::bfloat16_t{};
  if constexpr (kType == DType::kInt8) return int8_t{};
  if constexpr (kType == DType::kFloat8E4M3) return cutlass::float_e4m3_t{};
  if constexpr (kType == DType::kFloat8E5M2) return cutlass::float_e5m2_t{};
}

}  // namespace qcutlass::cuda
