// Norms, gates and rotations between products on a GPU. A kernel of each lets the one behind it start early, so that a
// product's first weights are on their way while it runs.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "cuda/cuda_check.h"
#include "cuda/launch_grid.cuh"
#include "cuda/quantize/kernels.cuh"
#include "cuda/vector.cuh"
#include "cutlass/bfloat16.h"
#include "cutlass/half.h"
#include "cutlass_ext/arch/grid_dependency.h"
#include "cutlass_ext/epilogue/bias_activation.h"
#include "qcutlass/decoder.h"
#include "qcutlass/error.h"

namespace qcutlass::cuda {

namespace {

constexpr int kNormThreads = 512;
constexpr int kGateThreads = 256;
constexpr int kHeld = 2;  // vectors of a row that a thread keeps between the sum of squares and the norm
constexpr int kMostBlocksAcross = 1 << 16;

/// Elements of 16 bytes, or one where rows are not aligned to that.
template <class Element, bool kWhole>
inline constexpr int kVector = kWhole ? 16 / int(sizeof(Element)) : 1;

template <int kCount, class Element>
__device__ Vector<Element, kCount> load_vector(void const* data, int64_t element) {
  return *reinterpret_cast<Vector<Element, kCount> const*>(static_cast<Element const*>(data) + element);
}

template <int kCount, class Element>
__device__ void convert(float (&numbers)[kCount], Vector<Element, kCount> const& vector) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) numbers[i] = float(vector.values[i]);
}

template <int kCount, class Element>
__device__ void load(float (&numbers)[kCount], Element const* data) {
  convert(numbers, load_vector<kCount, Element>(data, 0));
}

template <int kCount, class Element>
__device__ void store(Element* data, float const (&numbers)[kCount]) {
  Vector<Element, kCount> vector;
#pragma unroll
  for (int i = 0; i < kCount; ++i) vector.values[i] = Element(numbers[i]);
  *reinterpret_cast<Vector<Element, kCount>*>(data) = vector;
}

/// The sum over all threads of the block, in an order that depends on nothing else.
__device__ float block_sum(float value) {
  constexpr int kParts = kNormThreads / kWarp;
  static_assert(kParts <= kWarp && (kParts & (kParts - 1)) == 0);
  __shared__ float parts[kParts];
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = parts[threadIdx.x % kParts];  // every lane adds up all of them
#pragma unroll
  for (int distance = kParts / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  __syncthreads();  // the parts are free for the next row
  return value;
}

/// x + residual of a vector, rounded to Element, which is what the stream holds.
template <int kCount, class Element>
__device__ void add_residual(NormArguments const& task, int64_t row, int column, float (&x)[kCount]) {
  load(x, static_cast<Element const*>(task.x) + row * task.x_stride + column);
  if (task.residual == nullptr) return;
  float residual[kCount];
  load(residual, static_cast<Element const*>(task.residual) + row * task.residual_stride + column);
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = float(Element(x[i] + residual[i]));
}

/// `kKeeps`: x becomes its norm, rounded to Element. `weights`: of this vector, where they are of Element (`alike`).
template <bool kKeeps, int kCount, class Element>
__device__ void store_norm(NormArguments const& task, int64_t row, int column, float factor, float (&x)[kCount],
                           bool alike, Vector<Element, kCount> const& weights) {
  int64_t const place = row * task.columns + column;
  if (task.residual != nullptr) store(static_cast<Element*>(task.sum) + place, x);
  float out[kCount];
  if (alike) {
    convert(out, weights);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      out[i] = cutlass::epilogue::thread::load_bias(task.weight, task.weight_type, column + i);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    out[i] *= x[i] * factor;
    if (kKeeps) x[i] = float(Element(out[i]));
  }
  store(static_cast<Element*>(task.out) + place, out);
}

/// Of norms that are not quantised.
struct NoCodes {};

template <class Rounding, int kCount>
__device__ void store_codes_of(uint8_t* codes, float const (&x)[kCount], Rounding const& round, bool& found) {
  if constexpr (kCount == 1) {
    float const alike[4] = {x[0], x[0], x[0], x[0]};
    *codes = uint8_t(round(alike, found));
  } else {
    Vector<uint32_t, kCount / 4> words;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) words.values[i] = round(x + 4 * i, found);
    *reinterpret_cast<decltype(words)*>(codes) = words;
  }
}

/// The codes of a row of norms, of which this thread `held` the first vectors, and has written the others.
template <class Codes, bool kModerate, class Element, int kCount>
__device__ bool store_row_codes(NormArguments const& task, int64_t row, int first, float const (&held)[kHeld][kCount],
                                Divisor const& divisor) {
  constexpr int kStep = kNormThreads * kCount;
  Rounding<Codes, false, kModerate> const round(divisor, 0);
  auto* const codes = static_cast<uint8_t*>(task.codes) + row * task.columns;
  int const columns = int(task.columns);
  bool found = false;
#pragma unroll
  for (int v = 0; v < kHeld; ++v) {
    if (first + v * kStep >= columns) break;
    store_codes_of(codes + first + v * kStep, held[v], round, found);
  }
  for (int column = first + kHeld * kStep; column < columns; column += kStep) {
    float x[kCount];
    load(x, static_cast<Element const*>(task.out) + row * task.columns + column);
    store_codes_of(codes + column, x, round, found);
  }
  return found;
}

/// Quantises a row as store_row_codes() does. `range`: what this thread has seen of it. All threads of the block call
/// it.
template <class Codes, class Element, int kCount>
__device__ void quantize_row(NormArguments const& task, int64_t row, int first, float const (&held)[kHeld][kCount],
                             Range range) {
  bool const is_static = task.given_scale != nullptr;
  float scale;
  if (is_static) {
    scale = *task.given_scale;
    if (!Codes::kInteger && row == 0 && threadIdx.x == 0) *task.scale = scale;  // no row reports NaN there
  } else {
    scale = quantizer_of<Codes>(reduce<false, kNormThreads>(range)).scale;
    if (threadIdx.x == 0) task.scale[row] = scale;
  }
  Divisor const divisor(scale);
  bool const found = divisor.is_moderate() ? store_row_codes<Codes, true, Element>(task, row, first, held, divisor)
                                           : store_row_codes<Codes, false, Element>(task, row, first, held, divisor);
  if (found && is_static) *task.scale = __int_as_float(0x7fc00000);
}

/// Requests a line of memory into the L2 cache. A hint, which reads nothing: it may come before the wait for the
/// kernels that write there.
__device__ void prefetch(void const* data) { asm volatile("prefetch.global.L2 [%0];" ::"l"(data)); }

/// A block has whole rows, in turn. Weights, which nothing has read since the step before, are requested first, and
/// loaded with the first row: a step of one token waits for memory, and for little else. `Quantized`: Codes or NoCodes.
template <class Element, bool kWhole, class Quantized>
__global__ void __launch_bounds__(kNormThreads) add_rms_norm(__grid_constant__ NormArguments const task, bool alike) {
  constexpr bool kQuantized = !std::is_same_v<Quantized, NoCodes>;
  constexpr int kCount = kVector<Element, kWhole>, kStep = kNormThreads * kCount;
  int const first = threadIdx.x * kCount, columns = int(task.columns), weight_size = size_of(task.weight_type);
  if (blockIdx.x == 0)
    for (int column = first; column < columns; column += kStep)
      prefetch(static_cast<char const*>(task.weight) + int64_t(column) * weight_size);
  cutlass::arch::allow_next_grid();  // its blocks take places that this grid's leave: all of these have theirs
  cutlass::arch::wait_for_prior_grids();
  auto const weights_of = [&](int column) { return load_vector<kCount, Element>(task.weight, column); };
  Vector<Element, kCount> weights{};  // of the first vector, the only one of rows that are not long
  if (alike && first < columns) weights = weights_of(first);
  for (int64_t row = blockIdx.x; row < task.rows; row += gridDim.x) {
    float held[kHeld][kCount];
    float squares = 0.f;
    auto const count = [&](float const(&x)[kCount]) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) squares += x[i] * x[i];
    };
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      if (first + v * kStep >= columns) break;
      add_residual<kCount, Element>(task, row, first + v * kStep, held[v]);
      count(held[v]);
    }
    for (int column = first + kHeld * kStep; column < columns; column += kStep) {
      float x[kCount];
      add_residual<kCount, Element>(task, row, column, x);
      count(x);
    }
    float const factor = rsqrtf(block_sum(squares) / float(columns) + task.eps);
    Range range;
    auto const include = [&](float const(&normed)[kCount]) {
      if constexpr (kQuantized) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) range.include<false>(normed[i]);
      }
    };
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      if (first + v * kStep >= columns) break;
      store_norm<kQuantized, kCount, Element>(task, row, first + v * kStep, factor, held[v], alike,
                                              alike && v > 0 ? weights_of(first + v * kStep) : weights);
      include(held[v]);
    }
    for (int column = first + kHeld * kStep; column < columns; column += kStep) {
      float x[kCount];
      add_residual<kCount, Element>(task, row, column, x);
      store_norm<kQuantized, kCount, Element>(task, row, column, factor, x, alike,
                                              alike ? weights_of(column) : Vector<Element, kCount>{});
      include(x);
    }
    if constexpr (kQuantized) quantize_row<Quantized, Element>(task, row, first, held, range);
  }
}

/// The grid has [rows, vectors of columns] of threads.
template <class Element, bool kWhole>
__global__ void __launch_bounds__(kGateThreads) gate_rows(__grid_constant__ GateArguments const task) {
  constexpr int kCount = kVector<Element, kWhole>;
  cutlass::arch::allow_next_grid();
  cutlass::arch::wait_for_prior_grids();
  for (int64_t row = blockIdx.y; row < task.rows; row += gridDim.y) {
    for (int64_t column = (blockIdx.x * int64_t(kGateThreads) + threadIdx.x) * kCount; column < task.columns;
         column += int64_t(gridDim.x) * kGateThreads * kCount) {
      float gate[kCount], up[kCount];
      load(gate, static_cast<Element const*>(task.gate) + row * task.gate_stride + column);
      load(up, static_cast<Element const*>(task.up) + row * task.up_stride + column);
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        gate[i] = cutlass::epilogue::thread::gate_value(gate[i], task.activation) * up[i];
      store(static_cast<Element*>(task.out) + row * task.columns + column, gate);
    }
  }
}

constexpr int kRotaryWarps = 4;  // of a block: one has a head at a time

/// One head of one token, by a warp. `rotates`: or it is copied.
template <class Element>
__device__ void rotate_head(RotaryArguments const& task, RotaryHeads const& part, bool rotates, int64_t batch,
                            int64_t token, int head, int64_t place, int64_t room) {
  int const lane = threadIdx.x % kWarp, size = int(task.size), half = size / 2;
  int64_t const to = token + place;
  if (to < 0 || to >= room) return;
  auto const* const x = static_cast<Element const*>(part.x) + batch * part.batch_stride + token * part.token_stride +
                        head * part.head_stride;
  auto* const out = static_cast<Element*>(part.out) + batch * part.out_batch_stride + to * part.out_token_stride +
                    head * part.out_head_stride;
  if (!rotates) {
    for (int i = lane; i < size; i += kWarp) out[i] = x[i];
    return;
  }
  int64_t const angles = batch * task.angle_batch_stride + token * task.angle_token_stride;
  auto const* const cos = static_cast<Element const*>(task.cos) + angles;
  auto const* const sin = static_cast<Element const*>(task.sin) + angles;
  float factor = 1.f;
  if (part.norm != nullptr) {
    float squares = 0.f;
    for (int i = lane; i < size; i += kWarp) squares += float(x[i]) * float(x[i]);
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) squares += __shfl_xor_sync(~0u, squares, distance);
    factor = rsqrtf(squares / float(size) + task.eps);
  }
  auto const number = [&](int i) {
    float const value = float(x[i]);
    if (part.norm == nullptr) return value;
    return value * factor * cutlass::epilogue::thread::load_bias(part.norm, task.norm_type, i);
  };
  for (int i = lane; i < half; i += kWarp) {
    float const first = number(i), second = number(half + i);
    out[i] = Element(first * float(cos[i]) - second * float(sin[i]));
    out[half + i] = Element(second * float(cos[half + i]) + first * float(sin[half + i]));
  }
}

/// Each warp has a head; the grid's second dimension is tokens.
template <class Element>
__global__ void __launch_bounds__(kRotaryWarps* kWarp) rotate_heads(__grid_constant__ RotaryArguments const task) {
  cutlass::arch::allow_next_grid();
  cutlass::arch::wait_for_prior_grids();
  int64_t const place = task.place == nullptr ? 0 : *task.place;
  int64_t const room = task.place == nullptr ? task.tokens : task.room;
  int const queries = int(task.queries.heads), keys = int(task.keys.heads), values = int(task.values.heads);
  int const head = int(blockIdx.x) * kRotaryWarps + int(threadIdx.x / kWarp);
  for (int64_t index = blockIdx.y; index < task.batch * task.tokens; index += gridDim.y) {
    int64_t const batch = index / task.tokens, token = index % task.tokens;
    if (head < queries)
      rotate_head<Element>(task, task.queries, true, batch, token, head, 0, task.tokens);
    else if (head < queries + keys)
      rotate_head<Element>(task, task.keys, true, batch, token, head - queries, place, room);
    else if (head < queries + keys + values)
      rotate_head<Element>(task, task.values, false, batch, token, head - queries - keys, place, room);
  }
}

/// Whether rows of `columns` elements can be read and written in vectors of 16 bytes.
bool is_aligned(void const* data, int64_t stride, int64_t columns, DType type) {
  auto const whole = [](uint64_t bytes) { return bytes % 16 == 0; };
  return data == nullptr || (whole(reinterpret_cast<uintptr_t>(data)) && whole(uint64_t(stride) * size_of(type)) &&
                             whole(uint64_t(columns) * size_of(type)));
}

/// Without shared memory; older code has no instruction that waits.
GridShape early(dim3 grid, int threads) {
  GridShape shape{grid, dim3(unsigned(threads))};
  shape.early = runs_sm90_code();
  return shape;
}

/// Calls run(an element of the type).
template <class Run>
void with_element(DType type, Run const& run) {
  switch (type) {
    case DType::kFloat16: return run(cutlass::half_t{});
    case DType::kBFloat16: return run(cutlass::bfloat16_t{});
    case DType::kFloat32: return run(float{});
    default: throw InvalidArgument("type must be float16, bfloat16 or float32");
  }
}

/// Calls run(the codes of norms, or NoCodes).
template <class Run>
void with_codes(DType type, Run const& run) {
  switch (type) {
    case DType::kNone: return run(NoCodes{});
    case DType::kInt8: return run(Codes<DType::kInt8>{});
    case DType::kFloat8E4M3: return run(Codes<DType::kFloat8E4M3>{});
    default: throw InvalidArgument("code_type must be int8 or float8_e4m3fn");
  }
}

}  // namespace

void add_rms_norm(NormArguments const& arguments, void* stream) {
  if (arguments.rows == 0) return;
  int64_t const columns = arguments.columns;
  if (columns > (int64_t(1) << 30)) throw Unsupported("x: norms on a GPU take up to 2^30 columns");
  bool const whole = is_aligned(arguments.x, arguments.x_stride, columns, arguments.type) &&
                     is_aligned(arguments.residual, arguments.residual_stride, columns, arguments.type) &&
                     is_aligned(arguments.sum, columns, columns, arguments.type) &&
                     is_aligned(arguments.out, columns, columns, arguments.type) &&
                     reinterpret_cast<uintptr_t>(arguments.codes) % 8 == 0;  // rows are whole vectors of codes, too
  GridShape shape = early(dim3(unsigned(std::min<int64_t>(arguments.rows, kMostBlocksAcross))), kNormThreads);
  auto* const cuda_stream = static_cast<cudaStream_t>(stream);
  if (arguments.given_scale != nullptr && arguments.code_type == DType::kInt8) {
    // A block that finds NaN writes it there, whenever the others begin.
    QCUTLASS_CUDA_CHECK(
        cudaMemcpyAsync(arguments.scale, arguments.given_scale, sizeof(float), cudaMemcpyDeviceToDevice, cuda_stream));
    shape.early = false;  // there is no kernel before it
  }
  with_element(arguments.type, [&](auto element) {
    using Element = decltype(element);
    bool const alike = arguments.weight_type == arguments.type &&
                       is_aligned(arguments.weight, columns, columns, arguments.weight_type);
    with_codes(arguments.code_type, [&](auto codes) {
      using Quantized = decltype(codes);
      launch_grid(whole ? add_rms_norm<Element, true, Quantized> : add_rms_norm<Element, false, Quantized>, shape,
                  cuda_stream, arguments, whole && alike);
    });
  });
}

void gate(GateArguments const& arguments, void* stream) {
  if (arguments.rows == 0 || arguments.columns == 0) return;
  int64_t const columns = arguments.columns;
  bool const whole = is_aligned(arguments.gate, arguments.gate_stride, columns, arguments.type) &&
                     is_aligned(arguments.up, arguments.up_stride, columns, arguments.type) &&
                     is_aligned(arguments.out, columns, columns, arguments.type);
  with_element(arguments.type, [&](auto element) {
    using Element = decltype(element);
    int64_t const of_block = int64_t(kGateThreads) * (whole ? kVector<Element, true> : 1);
    dim3 const grid(unsigned(std::min<int64_t>((columns + of_block - 1) / of_block, kMostBlocksAcross)),
                    unsigned(std::min<int64_t>(arguments.rows, kMostBlocksAcross - 1)));
    launch_grid(whole ? gate_rows<Element, true> : gate_rows<Element, false>, early(grid, kGateThreads),
                static_cast<cudaStream_t>(stream), arguments);
  });
}

void rotate(RotaryArguments const& arguments, void* stream) {
  int64_t const tokens = arguments.batch * arguments.tokens;
  int64_t const heads = arguments.queries.heads + arguments.keys.heads + arguments.values.heads;
  if (tokens == 0 || heads == 0) return;
  constexpr int64_t kMostSize = int64_t(1) << 24;  // offsets within a head and heads are 32-bit in the kernel
  if (arguments.size > kMostSize || heads > kMostSize)
    throw Unsupported("q: rotations on a GPU take up to 2^24 heads of up to 2^24 elements");
  dim3 const grid(unsigned((heads + kRotaryWarps - 1) / kRotaryWarps),
                  unsigned(std::min<int64_t>(tokens, kMostBlocksAcross - 1)));
  with_element(arguments.type, [&](auto element) {
    launch_grid(rotate_heads<decltype(element)>, early(grid, kRotaryWarps * kWarp), static_cast<cudaStream_t>(stream),
                arguments);
  });
}

}  // namespace qcutlass::cuda
