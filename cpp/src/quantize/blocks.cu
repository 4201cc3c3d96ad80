// Int8 codes in blocks: to numbers, and through GELU to other codes.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "gemm/cuda_check.h"
#include "qcutlass/quantize.h"
#include "quantize/block_kernels.cuh"
#include "quantize/gelu.h"
#include "quantize/grid.h"

namespace qcutlass::cuda {

namespace {

constexpr unsigned kMostGeluBlocks = 2048;  // along columns
constexpr int kGeluCodes = 16;              // of a load

/// As many as fill a store.
template <class Out>
inline constexpr int kDequantizedCodes = 16 / int(sizeof(Out));

struct BlockTask : BlockArguments {
  bool codes_aligned, out_aligned;
};

/// Neighbouring codes, in whole registers.
template <int kCount>
struct CodeVector {
  using Words = Vector<uint32_t, kCount / 4>;

  Words data = {};

  /// From the column `first` of a row of `columns`; zeros past its end.
  __device__ static CodeVector load(int8_t const* row, int64_t first, int64_t columns, bool aligned) {
    CodeVector result;
    if (aligned) {
      if (first < columns) result.data = *reinterpret_cast<Words const*>(row + first);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (first + i < columns) result.data.values[i / 4] |= uint32_t(uint8_t(row[first + i])) << i % 4 * 8;
    }
    return result;
  }

  __device__ void store(int8_t* row, int64_t first, int64_t columns, bool aligned) const {
    if (aligned) {
      if (first < columns) *reinterpret_cast<Words*>(row + first) = data;
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (first + i < columns) row[first + i] = int8_t(data.values[i / 4] >> i % 4 * 8);
    }
  }

  /// The codes times `sign`, 1 or -1. Bytes are put into the last bits of 2^23, offset by 128, which is subtracted with
  /// it: exact.
  __device__ void to_floats(float* x, float sign = 1.0f) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      uint32_t const shifted = data.values[i / 4] ^ 0x80808080u;
      x[i] = __fmaf_rn(__uint_as_float(__byte_perm(shifted, 0x4b000000u, 0x7540 | i % 4)), sign, -8388736.0f * sign);
    }
  }

  /// The integers nearest to x * factor, of at most 127.
  __device__ void round(float const* x, float factor) {
    auto const code = [&](int i) { return __float_as_uint(__fmaf_rn(x[i], factor, kIntegerFloat)); };
#pragma unroll
    for (int i = 0; i < kCount; i += 4) data.values[i / 4] = pack_bytes(code(i), code(i + 1), code(i + 2), code(i + 3));
  }
};

__device__ float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ float reciprocal_approx(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// GELU of codes of one scale, divided by that scale, which is positive: it is in the polynomial's coefficients.
class ScaledGelu {
 public:
  __device__ explicit ScaledGelu(float scale) {
    float const near = fminf(scale, kGeluFar);
    float power = near;
#pragma unroll
    for (int i = 0; i < kGeluTerms; ++i, power *= near) terms_[i] = gelu_log2(i) * power;
  }

  __device__ float operator()(float code) const {
    float const size = fabsf(code);
    float log2 = terms_[kGeluTerms - 1];
#pragma unroll
    for (int i = kGeluTerms - 2; i >= 0; --i) log2 = __fmaf_rn(log2, size, terms_[i]);
    return __fmaf_rn(-size, exp2_approx(__fmaf_rn(log2, size, -1.0f)), fmaxf(code, 0.0f));
  }

 private:
  float terms_[kGeluTerms];
};

/// Blocks of columns, a few threads each. Their work between a load and a store is long: a grid that is not much larger
/// than the GPU, whose thread blocks take several in turn.
template <int kSize, bool kAligned>
__global__ void __launch_bounds__(kBlockThreads) gelu(__grid_constant__ BlockTask const task) {
  constexpr int kCount = kGeluCodes, kVectors = 2, kThreads = kSize / (kCount * kVectors);
  using Codes16 = CodeVector<kCount>;
  int const thread = threadIdx.x % kThreads;
  int64_t const blocks = layout::ceil_div(task.columns, kSize), blocks_across = blockDim.x / kThreads;
  for (int64_t row = blockIdx.y * int64_t(blockDim.y) + threadIdx.y; row < task.rows;
       row += int64_t(gridDim.y) * blockDim.y) {
    int8_t const* const codes = task.codes + row * task.codes_stride;
    int8_t* const out = static_cast<int8_t*>(task.out) + row * task.columns;
    for (int64_t block = blockIdx.x * blocks_across + threadIdx.x / kThreads; block < blocks;
         block += gridDim.x * blocks_across) {
      int64_t const first = block * kSize + thread * kCount;
      Codes16 vectors[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        vectors[v] = Codes16::load(codes, first + v * kThreads * kCount, task.columns, kAligned);
      float const scale = task.scales[row * blocks + block];
      ScaledGelu const scaled_gelu(fabsf(scale));
      float y[kVectors][kCount], largest = 0.0f;  // divided by the size of the scale
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        vectors[v].to_floats(y[v], copysignf(1.0f, scale));
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          y[v][i] = scaled_gelu(y[v][i]);
          largest = fmaxf(largest, fabsf(y[v][i]));
        }
      }
      largest = reduce_group<kThreads>(largest, [](float a, float b) { return fmaxf(a, b); });
      bool const finite = isfinite(scale);
      float const extent = finite ? __fmul_rn(largest, fabsf(scale)) : __int_as_float(0x7fc00000);
      float const out_scale = scale_of(extent, largest_code(DType::kInt8));
      float const factor = finite ? fabsf(scale) * reciprocal_approx(out_scale) : 0.0f;  // of 2^-126 to 2^121
      if (thread == 0) task.out_scales[row * blocks + block] = out_scale;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        vectors[v].round(y[v], factor);
        vectors[v].store(out, first + v * kThreads * kCount, task.columns, kAligned);
      }
    }
  }
}

/// The grid has [rows, vectors of columns] of threads.
template <class Out, int kSize, bool kSquare>
__global__ void __launch_bounds__(kBlockThreads) dequantize(__grid_constant__ BlockTask const task) {
  constexpr int kCount = kDequantizedCodes<Out>;
  int64_t const blocks = layout::ceil_div(task.columns, kSize), step = int64_t(gridDim.x) * blockDim.x * kCount;
  for (int64_t row = blockIdx.y * int64_t(blockDim.y) + threadIdx.y; row < task.rows;
       row += int64_t(gridDim.y) * blockDim.y) {
    int8_t const* const codes = task.codes + row * task.codes_stride;
    float const* const scales = task.scales + (kSquare ? row / kSize : row) * blocks;
    Out* const out = static_cast<Out*>(task.out) + row * task.columns;
    for (int64_t first = (blockIdx.x * int64_t(blockDim.x) + threadIdx.x) * kCount; first < task.columns;
         first += step) {
      float x[kCount];
      CodeVector<kCount>::load(codes, first, task.columns, task.codes_aligned).to_floats(x);
      float const scale = scales[first / kSize];
      Vector<Out, kCount> numbers;
#pragma unroll
      for (int i = 0; i < kCount; ++i) numbers.values[i] = Out(__fmul_rn(x[i], scale));
      if (task.out_aligned) {
        *reinterpret_cast<Vector<Out, kCount>*>(out + first) = numbers;
      } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
          if (first + i < task.columns) out[first + i] = numbers.values[i];
      }
    }
  }
}

/// `kCount`: codes of a vector; `Out`: the type of the output.
template <int kCount, class Out>
BlockTask make_task(BlockArguments const& arguments) {
  BlockTask task{arguments};
  bool const has_gaps = arguments.rows > 1 && arguments.codes_stride != arguments.columns;
  if (!arguments.square && arguments.columns % arguments.size == 0 && !has_gaps) {  // one long row is as good
    task.columns *= task.rows;
    task.rows = 1;
    task.codes_stride = task.columns;
  }
  task.codes_aligned =
      is_aligned<typename CodeVector<kCount>::Words, kCount>(task.codes, task.rows, task.columns, task.codes_stride);
  task.out_aligned = is_aligned<Vector<Out, kCount>, kCount>(task.out, task.rows, task.columns, task.columns);
  return task;
}

template <class Out>
void dequantize_to(BlockArguments const& arguments, cudaStream_t stream) {
  constexpr int kCount = kDequantizedCodes<Out>;
  BlockTask const task = make_task<kCount, Out>(arguments);
  Grid const grid = grid_of(task.rows, layout::ceil_div(task.columns, kCount), kBlockThreads);
  with_block_size(task.size, [&](auto constant) {
    constexpr int kSize = constant;
    if (task.square) {
      dequantize<Out, kSize, true><<<grid.blocks, grid.threads, 0, stream>>>(task);
    } else {
      dequantize<Out, kSize, false><<<grid.blocks, grid.threads, 0, stream>>>(task);
    }
  });
  QCUTLASS_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void dequantize_blocks(BlockArguments const& arguments, void* stream) {
  if (arguments.rows == 0) return;
  auto const cuda_stream = static_cast<cudaStream_t>(stream);
  switch (arguments.out_type) {
    case DType::kFloat16: return dequantize_to<__half>(arguments, cuda_stream);
    case DType::kBFloat16: return dequantize_to<__nv_bfloat16>(arguments, cuda_stream);
    case DType::kFloat32: return dequantize_to<float>(arguments, cuda_stream);
    default: throw InvalidArgument("out_type must be float16, bfloat16 or float32");
  }
}

void gelu_blocks(BlockArguments const& arguments, void* stream) {
  if (arguments.rows == 0) return;
  BlockTask const task = make_task<kGeluCodes, int8_t>(arguments);
  with_block_size(task.size, [&](auto constant) {
    constexpr int kSize = constant, kElements = 2 * kGeluCodes;  // of a thread
    int64_t const threads = layout::ceil_div(task.columns, kSize) * (kSize / kElements);
    Grid grid = grid_of(task.rows, threads, kBlockThreads, kSize / kElements);
    grid.blocks.x = std::min(grid.blocks.x, kMostGeluBlocks);
    auto const kernel = task.codes_aligned && task.out_aligned ? gelu<kSize, true> : gelu<kSize, false>;
    kernel<<<grid.blocks, grid.threads, 0, static_cast<cudaStream_t>(stream)>>>(task);
  });
  QCUTLASS_CUDA_CHECK(cudaGetLastError());
}

}  // namespace qcutlass::cuda
