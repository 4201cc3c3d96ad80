// Neighbouring elements of a row: 16 bytes of activations in one load where addresses allow it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace qcutlass::cuda {

template <class Element, int kCount>
struct alignas(kCount * sizeof(Element) < 16 ? kCount * sizeof(Element) : 16) Vector {
  Element values[kCount];
};

/// 16 bytes of activations, in whole registers: elements apart would take one each.
template <class Element>
struct alignas(16) Raw {
  static constexpr int kCount = 16 / int(sizeof(Element));

  uint32_t words[4] = {};

  __device__ static Raw load(Element const* data) {
    Raw result;
    *reinterpret_cast<uint4*>(result.words) = *reinterpret_cast<uint4 const*>(data);
    return result;
  }

  /// `valid` elements, zeros after them, from any address.
  __device__ static Raw load_part(Element const* data, int64_t valid) {
    using Bits = std::conditional_t<sizeof(Element) == 2, uint16_t, uint32_t>;
    constexpr int kPerWord = kCount / 4;
    Raw result;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      uint32_t const bits = i < valid ? reinterpret_cast<Bits const*>(data)[i] : 0;
      result.words[i / kPerWord] |= bits << (i % kPerWord * 16);
    }
    return result;
  }

  __device__ void to_floats(float (&x)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = float(reinterpret_cast<Element const*>(words)[i]);
  }
};

/// Whether the vectors of a matrix lie at multiples of their alignment and fill its rows.
template <class VectorType, int kCount>
bool is_aligned(void const* data, int64_t rows, int64_t columns, int64_t stride) {
  constexpr int64_t kAlignment = alignof(VectorType), kElement = sizeof(VectorType) / kCount;
  return reinterpret_cast<uintptr_t>(data) % kAlignment == 0 && columns % kCount == 0 &&
         (rows <= 1 || stride * kElement % kAlignment == 0);
}

}  // namespace qcutlass::cuda
