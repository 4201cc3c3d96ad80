// Codes in blocks: to numbers, and those of int8 through GELU to other codes.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "cuda/cuda_check.h"
#include "cuda/quantize/block_kernels.cuh"
#include "cuda/quantize/gelu.h"
#include "cuda/quantize/grid.h"
#include "qcutlass/quantize.h"

namespace qcutlass::cuda {

namespace {

constexpr int kGeluCodes = 16;       // of a load
constexpr int kGeluVectors = 2;      // loads of a thread at a time
constexpr int kGeluBlocksPerSm = 3;  // thread blocks that have registers

/// Codes of a thread at a time, as many as fill a store of 16 bytes.
template <class Out>
inline constexpr int kDequantizedCodes = 16 / int(sizeof(Out));

struct BlockTask : BlockArguments {
  bool codes_aligned, out_aligned;
};

/// Neighbouring codes, in whole registers.
template <int kCount>
struct CodeVector {
  using Words = Vector<uint32_t, kCount / 4>;

  Words words = {};

  /// `valid` codes, zeros after them.
  __device__ static CodeVector load(void const* from, int64_t valid, bool aligned) {
    CodeVector result;
    int8_t const* const data = static_cast<int8_t const*>(from);
    if (aligned) {
      if (valid > 0) result.words = *reinterpret_cast<Words const*>(data);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (i < valid) result.words.values[i / 4] |= uint32_t(uint8_t(data[i])) << i % 4 * 8;
    }
    return result;
  }

  __device__ void store(int8_t* data, int64_t valid, bool aligned) const {
    if (aligned) {
      if (valid > 0) *reinterpret_cast<Words*>(data) = words;
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (i < valid) data[i] = int8_t(words.values[i / 4] >> i % 4 * 8);
    }
  }

  /// The codes times `factor`, a power of 2 or its negative. Bytes are put into the last bits of 2^23, offset by 128,
  /// which is subtracted with it: exact.
  __device__ void to_floats(float* x, float factor = 1.0f) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      uint32_t const shifted = words.values[i / 4] ^ 0x80808080u;
      x[i] =
          __fmaf_rn(__uint_as_float(__byte_perm(shifted, 0x4b000000u, 0x7540 | i % 4)), factor, -8388736.0f * factor);
    }
  }

  /// The e4m3 numbers that the codes are: exact.
  __device__ void from_e4m3(float* x) const {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      auto const pair = __nv_fp8x2_storage_t(words.values[i / 4] >> i % 4 * 8);
      float2 const numbers = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
      x[i] = numbers.x, x[i + 1] = numbers.y;
    }
  }

  /// The integers nearest to x * factor, of at most 127.
  __device__ void round(float const* x, float factor) {
    auto const code = [&](int i) { return __float_as_uint(__fmaf_rn(x[i], factor, kIntegerFloat)); };
#pragma unroll
    for (int i = 0; i < kCount; i += 4)
      words.values[i / 4] = pack_bytes(code(i), code(i + 1), code(i + 2), code(i + 3));
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
    float const twice = 2.0f * fminf(scale, kGeluFar);
    float power = twice;
#pragma unroll
    for (int i = 0; i < kGeluTerms; ++i, power *= twice) terms_[i] = gelu_log2(i) * power;
  }

  /// In place, of halves of codes; returns the largest magnitude. Numbers go through each step together: none waits
  /// for another, and the operand that they share is read once. The compiler on its own takes one after the other.
  template <int kCount>
  __device__ float operator()(float (&numbers)[kCount]) const {
    constexpr int kTogether = 16;
    float largest = 0.0f;
#pragma unroll
    for (int first = 0; first < kCount; first += kTogether) {
      float* const x = numbers + first;
      float power[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) power[i] = terms_[kGeluTerms - 1];
#pragma unroll
      for (int term = kGeluTerms - 2; term >= 0; --term)
#pragma unroll
        for (int i = 0; i < kTogether; ++i) power[i] = __fmaf_rn(power[i], fabsf(x[i]), terms_[term]);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) power[i] = exp2_approx(__fmul_rn(power[i], fabsf(x[i])));
#pragma unroll
      for (int i = 0; i < kTogether; ++i) x[i] = __fmaf_rn(fabsf(x[i]), __fsub_rn(1.0f, power[i]), x[i]);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) largest = fmaxf(largest, fabsf(x[i]));
    }
    return largest;
  }

 private:
  float terms_[kGeluTerms];
};

/// Blocks of columns, numbered from row to row, a few threads each, which take several in turn: arithmetic is what
/// takes the time, and loads of the next block are under way meanwhile. `kWhole`: whole blocks of one row, aligned.
template <int kSize, bool kWhole>
__global__ void __launch_bounds__(kBlockThreads, kGeluBlocksPerSm) gelu(__grid_constant__ BlockTask const task) {
  constexpr int kCount = kGeluCodes, kThreads = kSize / (kCount * kGeluVectors), kStep = kThreads * kCount;
  using Codes16 = CodeVector<kCount>;
  int const thread = threadIdx.x % kThreads, group = threadIdx.x / kThreads;
  int64_t const across = layout::ceil_div(task.columns, kSize), blocks = kWhole ? across : task.rows * across;
  int64_t const turn = gridDim.x * int64_t(kBlockThreads / kThreads);
  bool const aligned = kWhole || (task.codes_aligned && task.out_aligned);

  /// Calls visit(row, column, columns left from there on) for what this thread has of a block.
  auto const locate = [&](int64_t block, auto visit) {
    int64_t const row = kWhole ? 0 : block / across;
    int64_t const column = (block - row * across) * kSize + thread * kCount;
    visit(row, column, kWhole ? kSize : task.columns - column);
  };
  Codes16 codes[kGeluVectors];
  float scale = 0.0f;
  auto const read = [&](int64_t block) {
    if (block >= blocks) return;
    scale = task.scales[block];
    locate(block, [&](int64_t row, int64_t column, int64_t left) {
      int8_t const* const data = static_cast<int8_t const*>(task.codes) + row * task.codes_stride + column;
#pragma unroll
      for (int v = 0; v < kGeluVectors; ++v) codes[v] = Codes16::load(data + v * kStep, left - v * kStep, aligned);
    });
  };
  auto const write = [&](int64_t block, Codes16 const(&rounded)[kGeluVectors]) {
    locate(block, [&](int64_t row, int64_t column, int64_t left) {
      int8_t* const data = static_cast<int8_t*>(task.out) + row * task.columns + column;
#pragma unroll
      for (int v = 0; v < kGeluVectors; ++v) rounded[v].store(data + v * kStep, left - v * kStep, aligned);
    });
  };

  int64_t block = blockIdx.x * int64_t(kBlockThreads / kThreads) + group;
  read(block);
  for (; block - group % (kWarp / kThreads) < blocks; block += turn) {  // whole warps
    float const size = fabsf(scale), half = copysignf(0.5f, scale);
    float y[kGeluVectors * kCount];
#pragma unroll
    for (int v = 0; v < kGeluVectors; ++v) codes[v].to_floats(y + v * kCount, half);
#pragma unroll
    for (float& number : y) asm volatile("" : "+f"(number));  // all of them now: the next codes take these registers
    read(block + turn);
    float largest = ScaledGelu(size)(y);  // y is divided by the size of the scale
    largest = reduce_group<kThreads>(largest, [](float a, float b) { return fmaxf(a, b); });
    bool const finite = isfinite(size);
    float const extent = finite ? __fmul_rn(largest, size) : __int_as_float(0x7fc00000);
    float const out_scale = valid_scale(extent, __fmul_rn(extent, 1.0f / largest_code(DType::kInt8)));
    float const factor = finite ? size * reciprocal_approx(out_scale) : 0.0f;  // of 2^-126 to 2^121
    Codes16 rounded[kGeluVectors];
#pragma unroll
    for (int v = 0; v < kGeluVectors; ++v) rounded[v].round(y + v * kCount, factor);
    if (block < blocks) {
      if (thread == 0) task.out_scales[block] = out_scale;
      write(block, rounded);
    }
  }
}

/// The grid has [rows, vectors of columns] of threads.
template <class Out, DType kType, int kSize, bool kSquare>
__global__ void __launch_bounds__(kBlockThreads) dequantize(__grid_constant__ BlockTask const task) {
  constexpr int kCount = kDequantizedCodes<Out>;
  int64_t const blocks = layout::ceil_div(task.columns, kSize), step = int64_t(gridDim.x) * blockDim.x * kCount;
  for (int64_t row = blockIdx.y * int64_t(blockDim.y) + threadIdx.y; row < task.rows;
       row += int64_t(gridDim.y) * blockDim.y) {
    uint8_t const* const codes = static_cast<uint8_t const*>(task.codes) + row * task.codes_stride;
    float const* const scales = task.scales + (kSquare ? row / kSize : row) * blocks;
    Out* const out = static_cast<Out*>(task.out) + row * task.columns;
    for (int64_t first = (blockIdx.x * int64_t(blockDim.x) + threadIdx.x) * kCount; first < task.columns;
         first += step) {
      float x[kCount];
      auto const vector = CodeVector<kCount>::load(codes + first, task.columns - first, task.codes_aligned);
      kType == DType::kInt8 ? vector.to_floats(x) : vector.from_e4m3(x);
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

template <class Out, DType kType>
void dequantize_to(BlockArguments const& arguments, cudaStream_t stream) {
  constexpr int kCount = kDequantizedCodes<Out>;
  BlockTask const task = make_task<kCount, Out>(arguments);
  Grid const grid = grid_of(task.rows, layout::ceil_div(task.columns, kCount), kBlockThreads);
  with_block_size(task.size, [&](auto constant) {
    constexpr int kSize = constant;
    if (task.square) {
      dequantize<Out, kType, kSize, true><<<grid.blocks, grid.threads, 0, stream>>>(task);
    } else {
      dequantize<Out, kType, kSize, false><<<grid.blocks, grid.threads, 0, stream>>>(task);
    }
  });
  QCUTLASS_CUDA_CHECK(cudaGetLastError());
}

template <class Out>
void dequantize_to(BlockArguments const& arguments, cudaStream_t stream) {
  switch (arguments.code_type) {
    case DType::kInt8: return dequantize_to<Out, DType::kInt8>(arguments, stream);
    case DType::kFloat8E4M3: return dequantize_to<Out, DType::kFloat8E4M3>(arguments, stream);
    default: throw InvalidArgument("code_type must be int8 or float8_e4m3fn");
  }
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
  if (arguments.rows == 0 || arguments.columns == 0) return;
  BlockTask const task = make_task<kGeluCodes, int8_t>(arguments);
  with_block_size(task.size, [&](auto constant) {
    constexpr int kSize = constant, kAtOnce = kBlockThreads * kGeluVectors * kGeluCodes / kSize;  // of a thread block
    int64_t const across = layout::ceil_div(task.columns, kSize);
    int64_t const work = layout::ceil_div(task.rows * across, kAtOnce);
    bool const whole = task.rows == 1 && task.columns % kSize == 0 && task.codes_aligned && task.out_aligned;
    auto const kernel = whole ? gelu<kSize, true> : gelu<kSize, false>;
    auto const thread_blocks = unsigned(std::min(work, blocks_in_turn(kGeluBlocksPerSm)));
    kernel<<<thread_blocks, kBlockThreads, 0, static_cast<cudaStream_t>(stream)>>>(task);
  });
  QCUTLASS_CUDA_CHECK(cudaGetLastError());
}

}  // namespace qcutlass::cuda
