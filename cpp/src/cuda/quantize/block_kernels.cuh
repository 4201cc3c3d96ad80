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

/// silu(a[k]) a[columns + k] of one row, in vectors; zeros past the end of k. In fp32, of a fast exponential, whose
/// error codes of 8 bits do not show but next to half a code.
template <class In>
class GatedReader {
 public:
  static constexpr int kCount = Raw<In>::kCount;
  using Floats = float[kCount];
  using Held = Vector<float, kCount>;

  __device__ GatedReader(QuantizeTask const& task, int64_t row)
      : task_(task), row_(static_cast<In const*>(task.a) + row * task.a_stride) {}

  template <int kVectors>
  __device__ void read(int64_t first, int64_t step, Held (&held)[kVectors]) const {
    Raw<In> gate[kVectors], up[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      int64_t const k = first + v * step;
      gate[v] = load(k, task_.columns - k);
      up[v] = load(task_.columns + k, task_.columns - k);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      Floats g, u;
      gate[v].to_floats(g);
      up[v].to_floats(u);
#pragma unroll
      for (int i = 0; i < kCount; ++i) held[v].values[i] = __fmul_rn(silu(g[i]), u[i]);
    }
  }

  template <int kVectors>
  static __device__ void convert_anew(Held (&)[kVectors]) {}

  static __device__ void to_floats(Held const& held, Floats& x) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = held.values[i];
  }

 private:
  /// `valid` elements from column k on.
  __device__ Raw<In> load(int64_t k, int64_t valid) const {
    if (!task_.a_aligned) return Raw<In>::load_part(row_ + k, valid);
    return valid > 0 ? Raw<In>::load(row_ + k) : Raw<In>{};
  }

  /// Where exp(-x) overflows, the quotient is 0, its limit.
  static __device__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

  QuantizeTask const& task_;
  In const* row_;
};

template <class In, bool kGated>
using BlockReader = std::conditional_t<kGated, GatedReader<In>, RowReader<In, false>>;

/// Thread blocks of an SM: a vector of gated values is two in fp32.
template <bool kGated>
inline constexpr int kBlocksPerSm = (kGated ? 512 : 1024) / kBlockThreads;

/// The scale of a block.
template <class Codes>
__device__ float block_scale(QuantizeTask const& task, Range const& range) {
  float const scale = quantizer_of<Codes>(range).scale;
  return task.powers_of_two ? power_of_two_above(scale) : scale;
}

/// Blocks of one row: a few threads each, in whose registers it stays between its range and its codes. The grid has
/// [rows, columns] of threads.
template <class In, class Codes, bool kGated, int kSize>
__global__ void __launch_bounds__(kBlockThreads, kBlocksPerSm<kGated>)
    quantize_blocks(__grid_constant__ QuantizeTask const task) {
  using Reader = BlockReader<In, kGated>;
  constexpr int kThreads = kSize / (Reader::kCount * kBlockVectors);
  constexpr int64_t kStep = kThreads * Reader::kCount;
  begin_beside_next();
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
      float const scale = block_scale<Codes>(task, range);
      if (thread == 0) task.scale[row * blocks + block] = scale;
      Reader::convert_anew(held);
      finish<Codes, true, Reader>(task, row, first, kStep, held, Divisor(scale), 0);
    }
  }
}

/// Blocks of several rows: a thread block each, which reads it twice.
template <class In, class Codes, int kSize>
__global__ void __launch_bounds__(kBlockThreads) quantize_squares(__grid_constant__ QuantizeTask const task) {
  using Reader = RowReader<In, false>;
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
      float const scale = block_scale<Codes>(task, range);
      if (threadIdx.x == 0) task.scale[block_row * across + block] = scale;
      Divisor const divisor(scale);
      for_each_vector(block_row, block, [&](int64_t row, int64_t column, auto const& held) {
        finish<Codes, true, Reader>(task, row, column, 0, held, divisor, 0);
      });
    }
  }
}

}  // namespace qcutlass::cuda
