// Gates and sums over rows: 16 bytes of a row a thread where addresses allow it.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cuda/launch_grid.cuh"
#include "cuda/quantize/grid.h"
#include "cuda/vector.cuh"
#include "cutlass_ext/arch/grid_dependency.h"
#include "qcutlass/error.h"
#include "qcutlass/moe.h"

namespace qcutlass::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kSlotsAtOnce = 8;  // rows of a token whose loads are on their way together

struct GateTask : GateRowsArguments {
  bool aligned;
};
struct SumTask : SumSlotsArguments {
  bool aligned;
};

/// The vector at `column` of a row of `columns`.
template <class Element>
__device__ Raw<Element> load(Element const* row, int64_t column, int64_t columns, bool aligned) {
  return aligned ? Raw<Element>::load(row + column) : Raw<Element>::load_part(row + column, columns - column);
}

template <class Element, int kCount>
__device__ void store(Element* row, int64_t column, int64_t columns, bool aligned, float const (&values)[kCount]) {
  Vector<Element, kCount> rounded;
#pragma unroll
  for (int i = 0; i < kCount; ++i) rounded.values[i] = Element(values[i]);
  if (aligned) {
    *reinterpret_cast<Vector<Element, kCount>*>(row + column) = rounded;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (column + i < columns) row[column + i] = rounded.values[i];
  }
}

/// Calls visit(row, column) for the first columns of all vectors of [rows, columns].
template <int kCount, class Visit>
__device__ void for_each_vector(int64_t rows, int64_t columns, Visit visit) {
  int64_t const step = int64_t(gridDim.x) * blockDim.x * kCount;
  for (int64_t row = blockIdx.y * int64_t(blockDim.y) + threadIdx.y; row < rows; row += int64_t(gridDim.y) * blockDim.y)
    for (int64_t column = (blockIdx.x * int64_t(blockDim.x) + threadIdx.x) * kCount; column < columns; column += step)
      visit(row, column);
}

/// gate * sigmoid(z) * up. exp() overflows to infinity, and the quotient to 0, where gate is far below 0.
__device__ float gated(GateTask const& task, float gate, float up) {
  gate = gate > task.limit ? task.limit : gate;  // NaN stays, as up does
  up = up > task.limit ? task.limit : up < -task.limit ? -task.limit : up;
  constexpr float kTwiceRoot2OverPi = 1.5957691216f, kCubic = 0.044715f;
  float const z = task.activation == Activation::kSilu ? task.alpha * gate
                                                       : kTwiceRoot2OverPi * (gate + kCubic * gate * gate * gate);
  return gate / (1.0f + expf(-z)) * (up + task.up_offset);
}

template <class Element, bool kInterleaved>
__global__ void __launch_bounds__(kThreads) gate_rows_kernel(__grid_constant__ GateTask const task) {
  constexpr int kCount = Raw<Element>::kCount;
  cutlass::arch::wait_for_prior_grids();
  cutlass::arch::allow_next_grid();
  int64_t const rows = task.live == nullptr ? task.rows : min(task.rows, int64_t(*task.live));
  for_each_vector<kCount>(rows, task.columns, [&](int64_t row, int64_t column) {
    Element const* const x = static_cast<Element const*>(task.x) + row * task.x_stride;
    float out[kCount], first[kCount], second[kCount];
    int64_t const at = kInterleaved ? 2 * column : column, columns = kInterleaved ? 2 * task.columns : task.columns;
    int64_t const next = kInterleaved ? at + kCount : at;
    Element const* const other = kInterleaved ? x : x + task.columns;
    Raw<Element> const here = load(x, at, columns, task.aligned), there = load(other, next, columns, task.aligned);
    here.to_floats(first);
    there.to_floats(second);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kInterleaved) {
        int const place = 2 * i % kCount;
        out[i] = i < kCount / 2 ? gated(task, first[place], first[place + 1])
                                : gated(task, second[place], second[place + 1]);
      } else {
        out[i] = gated(task, first[i], second[i]);
      }
    }
    store(static_cast<Element*>(task.out) + row * task.columns, column, task.columns, task.aligned, out);
  });
}

template <class Element>
__global__ void __launch_bounds__(kThreads) sum_slots_kernel(__grid_constant__ SumTask const task) {
  constexpr int kCount = Raw<Element>::kCount;
  cutlass::arch::wait_for_prior_grids();
  cutlass::arch::allow_next_grid();
  for_each_vector<kCount>(task.tokens, task.columns, [&](int64_t token, int64_t column) {
    int32_t const* const order = task.order + token * task.slots;
    float sum[kCount] = {};
    for (int64_t first = 0; first < task.slots; first += kSlotsAtOnce) {
      int32_t rows[kSlotsAtOnce];
      Raw<Element> y[kSlotsAtOnce];
#pragma unroll
      for (int s = 0; s < kSlotsAtOnce; ++s) rows[s] = first + s < task.slots ? order[first + s] : -1;
#pragma unroll
      for (int s = 0; s < kSlotsAtOnce; ++s)
        if (rows[s] >= 0)
          y[s] =
              load(static_cast<Element const*>(task.y) + rows[s] * task.y_stride, column, task.columns, task.aligned);
#pragma unroll
      for (int s = 0; s < kSlotsAtOnce; ++s) {
        if (rows[s] < 0) continue;
        float values[kCount];
        y[s].to_floats(values);
#pragma unroll
        for (int i = 0; i < kCount; ++i) sum[i] += values[i];
      }
    }
    store(static_cast<Element*>(task.out) + token * task.out_stride, column, task.columns, task.aligned, sum);
  });
}

template <class Task>
void launch_rows(void (*kernel)(Task), int64_t rows, int64_t columns, int count, void* stream, Task const& task) {
  Grid const grid = grid_of(rows, layout::ceil_div(columns, count), kThreads);
  launch_grid(kernel, {grid.blocks, grid.threads, 0, dim3(1), runs_sm90_code()}, static_cast<cudaStream_t>(stream),
              task);
}

template <class Element>
void gate_as(GateRowsArguments const& arguments, void* stream) {
  constexpr int kCount = Raw<Element>::kCount;
  using Words = Vector<Element, kCount>;
  GateTask task{arguments};
  // With rows of whole vectors `up` begins at a multiple of them, too.
  task.aligned = is_aligned<Words, kCount>(task.x, task.rows, task.columns, task.x_stride) &&
                 is_aligned<Words, kCount>(task.out, task.rows, task.columns, task.columns);
  launch_rows(task.interleaved ? gate_rows_kernel<Element, true> : gate_rows_kernel<Element, false>, task.rows,
              task.columns, kCount, stream, task);
}

template <class Element>
void sum_as(SumSlotsArguments const& arguments, void* stream) {
  constexpr int kCount = Raw<Element>::kCount;
  using Words = Vector<Element, kCount>;
  SumTask task{arguments};
  task.aligned = is_aligned<Words, kCount>(task.y, task.tokens * task.slots, task.columns, task.y_stride) &&
                 is_aligned<Words, kCount>(task.out, task.tokens, task.columns, task.out_stride);
  launch_rows(sum_slots_kernel<Element>, task.tokens, task.columns, kCount, stream, task);
}

}  // namespace

void gate_rows(GateRowsArguments const& arguments, void* stream) {
  if (arguments.rows == 0) return;
  switch (arguments.type) {
    case DType::kFloat16: return gate_as<__half>(arguments, stream);
    case DType::kBFloat16: return gate_as<__nv_bfloat16>(arguments, stream);
    default: throw InvalidArgument("type must be float16 or bfloat16");
  }
}

void sum_slots(SumSlotsArguments const& arguments, void* stream) {
  if (arguments.tokens == 0) return;
  switch (arguments.type) {
    case DType::kFloat16: return sum_as<__half>(arguments, stream);
    case DType::kBFloat16: return sum_as<__nv_bfloat16>(arguments, stream);
    default: throw InvalidArgument("type must be float16 or bfloat16");
  }
}

}  // namespace qcutlass::cuda
