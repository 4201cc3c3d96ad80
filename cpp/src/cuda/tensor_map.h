// Tensor maps, from which sm_90 copies boxes of matrices to shared memory (TMA). They are plain data that kernels take
// by value, so captured graphs keep their own.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace qcutlass::cuda {

/// A row-major matrix [rows, columns], or with `layers` > 0 a stack of them, in global memory.
struct TensorMapSource {
  void const* data;   // 16-byte aligned
  int element_bytes;  // 1, 2 or 4
  int64_t columns, rows, layers = 0;
  int64_t row_bytes, layer_bytes = 0;  // from one to the next, multiples of 16
};

/// The map of boxes [layers,] rows x columns, which arrive densely, row by row; elements outside the tensor as zeros.
/// `swizzled`: rows are 128 bytes, and their 16-byte chunks permuted as warpgroup MMAs expect them.
CUtensorMap make_tensor_map(TensorMapSource const& source, int box_columns, int box_rows, int box_layers,
                            bool swizzled);

}  // namespace qcutlass::cuda
