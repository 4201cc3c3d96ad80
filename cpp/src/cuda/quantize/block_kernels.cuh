// Quantising blocks of 1 x size columns, and of size x size.
#pragma once

#include "cuda/quantize/kernels.cuh"
#include "qcutlass/layout.h"

namespace qcutlass::cuda {

inline constexpr int kBlockThreads = 256;  // of a thread block here
inline constexpr int kBlockVectors = 4;    // of a block of activations, in the registers of a thread

/// The largest of kThreads neighbouring threads of a warp, a power of two, in each of them. `present`: the threads of
/// the warp that call it.
template <int kThreads, class T, class Max>
__device__ T reduce_group(T value, Max larger, unsigned present = ~0u) {
#pragma unroll
  for (int step = kThreads / 2; step > 0; step /= 2) value = larger(value, __shfl_xor_sync(present, value, step));
  return value;
}

/// The kThreads neighbouring threads of a warp, a power of two, to which this one belongs.
template <int kThreads>
__device__ unsigned group_of_threads() {
  unsigned const lane = (threadIdx.y * blockDim.x + threadIdx.x) % kWarp;
  return kThreads == kWarp ? ~0u : ((1u << kThreads) - 1) << (lane & ~(kThreads - 1u));
}

/// Blocks of one row: a few threads each, in whose registers it stays between its range and its codes. The grid has
/// [rows, columns] of threads.
template <class In, int kSize>
__global__ void __launch_bounds__(kBlockThreads, 1024 / kBlockThreads)
    quantize_blocks(__grid_constant__ QuantizeTask const task) {
  using Reader = RowReader<In, false>;
  using Int8 = Codes<DType::kInt8>;
  constexpr int kThreads = kSize / (Reader::kCount * kBlockVectors);
  constexpr int64_t kStep = kThreads * Reader::kCount;
  int const thread = threadIdx.x % kThreads;
  int64_t const blocks = layout::ceil_div(task.columns, kSize), blocks_across = blockDim.x / kThreads;
  for (int64_t row = blockIdx.y * int64_t(blockDim.y) + threadIdx.y; row < task.rows;
       row += int64_t(gridDim.y) * blockDim.y) {
    Reader const reader(task, row);
    for (int64_t block = blockIdx.x * blocks_across + threadIdx.x / kThreads; block < blocks;
         block += gridDim.x * blocks_across) {
      int64_t const first = block * kSize + thread * Reader::kCount;
      typename Reader::Held held[kBlockVectors];
      reader.read(first, kStep, held);
      Range range;
      include<false, Reader>(range, held);
      range.high =
          reduce_group<kThreads>(range.high, [](int a, int b) { return max(a, b); }, group_of_threads<kThreads>());
      float const scale = quantizer_of<Int8>(range).scale;
      if (thread == 0) task.scale[row * blocks + block] = scale;
      Reader::convert_anew(held);
      finish<Int8, true, Reader>(task, row, first, kStep, held, Divisor(scale), 0);
    }
  }
}

/// Blocks of several rows: a thread block each, which reads it twice.
template <class In, int kSize>
__global__ void __launch_bounds__(kBlockThreads) quantize_squares(__grid_constant__ QuantizeTask const task) {
  using Reader = RowReader<In, false>;
  using Int8 = Codes<DType::kInt8>;
  constexpr int kAcross = kSize / Reader::kCount;  // vectors of a row
  int64_t const across = layout::ceil_div(task.columns, kSize), down = layout::ceil_div(task.rows, kSize);

  auto const for_each_vector = [&](int64_t block_row, int64_t block, auto visit) {
    for (int v = threadIdx.x; v < kSize * kAcross; v += kBlockThreads) {
      int64_t const row = block_row * kSize + v / kAcross, column = block * kSize + v % kAcross * Reader::kCount;
      if (row >= task.rows) break;
      typename Reader::Held held[1];
      Reader(task, row).read(column, 0, held);
      visit(row, column, held);
    }
  };
  for (int64_t block_row = blockIdx.y; block_row < down; block_row += gridDim.y) {
    for (int64_t block = blockIdx.x; block < across; block += gridDim.x) {
      Range range;
      for_each_vector(block_row, block,
                      [&](int64_t, int64_t, auto const& held) { include<false, Reader>(range, held); });
      range = reduce<false, kBlockThreads>(range);
      float const scale = quantizer_of<Int8>(range).scale;
      if (threadIdx.x == 0) task.scale[block_row * across + block] = scale;
      Divisor const divisor(scale);
      for_each_vector(block_row, block, [&](int64_t row, int64_t column, auto const& held) {
        finish<Int8, true, Reader>(task, row, column, 0, held, divisor, 0);
      });
    }
  }
}

}  // namespace qcutlass::cuda
