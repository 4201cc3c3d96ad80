// Tensor maps, from which sm_90 copies boxes of matrices to shared memory (TMA). They are plain data that kernels take
// by value, so captured graphs keep their own.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <initializer_list>

namespace qcutlass::cuda {

/// A dimension of a tensor in global memory, and of the boxes that are copied. `stride`: bytes from one element to the
/// next, a multiple of 16; without meaning in the first dimension, whose elements are neighbours.
struct TensorMapDimension {
  int64_t extent;
  int box;
  int64_t stride = 0;
};

/// The map of boxes of a tensor of up to five dimensions, the innermost first, with elements of 1, 2 or 4 bytes from a
/// 16-byte aligned address on. Boxes arrive densely, elements outside the tensor as zeros. `swizzled`: rows are 128
/// bytes, and their 16-byte chunks permuted as warpgroup MMAs expect them.
CUtensorMap make_tensor_map(void const* data, int element_bytes, std::initializer_list<TensorMapDimension> dimensions,
                            bool swizzled = false);

}  // namespace qcutlass::cuda
