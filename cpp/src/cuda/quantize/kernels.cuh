// The kernels: one row a warp or block, held in registers between its range and its codes, or read twice where it is
// too long for that; and a whole matrix in two passes, of which a given scale needs the second alone.
#pragma once

#include "cuda/quantize/arithmetic.cuh"
#include "cutlass_ext/arch/grid_dependency.h"

namespace qcutlass::cuda {

/// The arguments of a kernel: the call's, and which of its tensors allow vector accesses.
struct QuantizeTask : QuantizeArguments {
  bool a_aligned, codes_aligned, smooth_aligned;
};

constexpr int kWarp = 32;

/// Lets the kernel behind this one, a product, have its first weights come meanwhile, and waits for those before.
__device__ inline void begin_beside_next() {
  cutlass::arch::allow_next_grid();
  cutlass::arch::wait_for_prior_grids();
}

/// Threads of an SM, as many as have registers for a row: the speed of a copy takes many loads in flight.
template <class Codes, bool kSmooth>
inline constexpr int kThreadsPerSm = kSmooth || Codes::kAsymmetric ? 1024 : 1536;

/// A pass over a whole matrix: threads of a block, blocks of an SM, vectors of a thread at a time.
inline constexpr int kTensorThreads = 256, kTensorBlocksPerSm = 4, kTensorVectors = 4;

/// Values x of one row, in vectors; zeros past its end.
template <class In, bool kSmooth>
class RowReader {
 public:
  static constexpr int kCount = Raw<In>::kCount;
  using Floats = float[kCount];
  /// The values of a row as they are kept: as read, or, not to divide twice, divided by the smoothing factors.
  using Held = std::conditional_t<kSmooth, Vector<float, kCount>, Raw<In>>;

  __device__ RowReader(QuantizeTask const& task, int64_t row)
      : task_(task), row_(static_cast<In const*>(task.a) + row * task.a_stride) {}

  /// The vectors at columns first + v * step. All loads come first, so that they need not wait for each other.
  template <int kVectors>
  __device__ void read(int64_t first, int64_t step, Held (&held)[kVectors]) const {
    Raw<In> raw[kVectors];
    if (task_.a_aligned) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        if (first + v * step < task_.columns) raw[v] = Raw<In>::load(row_ + first + v * step);
    } else {
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        raw[v] = Raw<In>::load_part(row_ + first + v * step, task_.columns - (first + v * step));
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kSmooth)
        divide(raw[v], first + v * step, held[v]);
      else
        held[v] = raw[v];
    }
  }

  /// Has the compiler convert what it holds once more: kept in fp32 from one use to the next, it would take twice the
  /// registers.
  template <int kVectors>
  static __device__ void convert_anew(Held (&held)[kVectors]) {
    if constexpr (!kSmooth) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(held[v].words[i]));
    }
  }

  static __device__ void to_floats(Raw<In> const& held, Floats& x) { held.to_floats(x); }
  static __device__ void to_floats(Vector<float, kCount> const& held, Floats& x) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = held.values[i];
  }

 private:
  __device__ void divide(Raw<In> const& raw, int64_t begin, Vector<float, kCount>& quotients) const {
    Vector<float, kCount> smooth;
    if (task_.smooth_aligned && begin < task_.columns) {
      smooth = *reinterpret_cast<Vector<float, kCount> const*>(task_.smooth + begin);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) smooth.values[i] = begin + i < task_.columns ? task_.smooth[begin + i] : 1.0f;
    }
    Floats x;
    raw.to_floats(x);
#pragma unroll
    for (int i = 0; i < kCount; ++i) quotients.values[i] = __fdiv_rn(x[i], smooth.values[i]);
  }

  QuantizeTask const& task_;
  In const* row_;
};

template <bool kAsymmetric, class Reader, int kVectors>
__device__ void include(Range& range, typename Reader::Held const (&held)[kVectors]) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    typename Reader::Floats x;
    Reader::to_floats(held[v], x);
#pragma unroll
    for (int i = 0; i < Reader::kCount; ++i) range.include<kAsymmetric>(x[i]);
  }
}

/// Quantises and stores the vectors at columns first + v * step; returns whether a NaN was made an integer.
template <class Reader, class Rounding, int kVectors>
__device__ bool store_codes(QuantizeTask const& task, int64_t row, int64_t first, int64_t step,
                            typename Reader::Held const (&held)[kVectors], Rounding const& round) {
  bool found = false;
  uint8_t* const out = static_cast<uint8_t*>(task.codes) + row * task.columns;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    int64_t const begin = first + v * step;
    if (begin >= task.columns) break;
    typename Reader::Floats x;
    Reader::to_floats(held[v], x);
    Vector<uint32_t, Reader::kCount / 4> codes;
#pragma unroll
    for (int i = 0; i < Reader::kCount / 4; ++i) codes.values[i] = round(x + 4 * i, found);
    if (task.codes_aligned) {
      *reinterpret_cast<decltype(codes)*>(out + begin) = codes;
    } else {
#pragma unroll
      for (int i = 0; i < Reader::kCount; ++i)
        if (begin + i < task.columns) out[begin + i] = uint8_t(codes.values[i / 4] >> i % 4 * 8);
    }
  }
  return found;
}

template <class Codes, bool kBounded, class Reader, int kVectors>
__device__ bool finish(QuantizeTask const& task, int64_t row, int64_t first, int64_t step,
                       typename Reader::Held const (&held)[kVectors], Divisor const& divisor, int azp) {
  if (divisor.is_moderate())
    return store_codes<Reader>(task, row, first, step, held, Rounding<Codes, kBounded, true>(divisor, azp));
  return store_codes<Reader>(task, row, first, step, held, Rounding<Codes, kBounded, false>(divisor, azp));
}

/// The largest of all threads of a warp, or of a block of kThreads, in each of them.
template <bool kAsymmetric, int kThreads>
__device__ Range reduce(Range range) {
  range.high = int(__reduce_max_sync(~0u, unsigned(range.high)));
  if (kAsymmetric) range.low = int(__reduce_max_sync(~0u, unsigned(range.low)));
  if constexpr (kThreads > kWarp) {
    constexpr int kWarps = kThreads / kWarp;
    __shared__ Range of_warps[kWarps];
    int const lane = threadIdx.x % kWarp;
    __syncthreads();  // the last result has been read
    if (lane == 0) of_warps[threadIdx.x / kWarp] = range;
    __syncthreads();
    range = lane < kWarps ? of_warps[lane] : Range{};
    range.high = int(__reduce_max_sync(~0u, unsigned(range.high)));
    if (kAsymmetric) range.low = int(__reduce_max_sync(~0u, unsigned(range.low)));
  }
  return range;
}

/// The scale of a row, which one of its threads stores.
template <class Codes>
__device__ Quantizer finish_range(QuantizeTask const& task, int64_t row, Range const& range, bool stores) {
  Quantizer const quantizer = quantizer_of<Codes>(range);
  if (stores) {
    task.scale[row] = quantizer.scale;
    if (Codes::kAsymmetric) task.azp[row] = quantizer.azp;
  }
  return quantizer;
}

/// Rows of up to kThreads * kVectors vectors. kThreads: of a row, a warp or the block of kBlock.
template <class In, class Codes, bool kSmooth, int kBlock, int kThreads, int kVectors>
__global__ void __launch_bounds__(kBlock, kThreadsPerSm<Codes, kSmooth> / kBlock)
    quantize_rows(__grid_constant__ QuantizeTask const task) {
  static_assert(kThreads == kWarp || kThreads == kBlock, "only these are reduced");
  using Reader = RowReader<In, kSmooth>;
  constexpr int kRows = kBlock / kThreads;
  begin_beside_next();
  int const thread = threadIdx.x % kThreads;
  for (int64_t row = blockIdx.x * int64_t(kRows) + threadIdx.x / kThreads; row < task.rows;
       row += gridDim.x * int64_t(kRows)) {
    constexpr int64_t kStep = kThreads * Reader::kCount;
    int64_t const first = thread * Reader::kCount;
    typename Reader::Held held[kVectors];
    Reader(task, row).read(first, kStep, held);
    Range range;
    include<Codes::kAsymmetric, Reader>(range, held);
    range = reduce<Codes::kAsymmetric, kThreads>(range);
    Quantizer const quantizer = finish_range<Codes>(task, row, range, thread == 0);
    Reader::convert_anew(held);
    finish<Codes, true, Reader>(task, row, first, kStep, held, Divisor(quantizer.scale), quantizer.azp);
  }
}

/// Rows of any length, a block each: read again for their codes.
template <class In, class Codes, bool kSmooth, int kBlock, int kVectors>
__global__ void __launch_bounds__(kBlock) quantize_long_rows(__grid_constant__ QuantizeTask const task) {
  using Reader = RowReader<In, kSmooth>;
  constexpr int64_t kStep = kBlock * Reader::kCount;
  begin_beside_next();
  for (int64_t row = blockIdx.x; row < task.rows; row += gridDim.x) {
    Reader const reader(task, row);
    typename Reader::Held held[kVectors];
    int64_t const begin = threadIdx.x * Reader::kCount;
    Range range;
    for (int64_t k = begin; k < task.columns; k += kVectors * kStep) {
      reader.read(k, kStep, held);
      include<Codes::kAsymmetric, Reader>(range, held);
    }
    range = reduce<Codes::kAsymmetric, kBlock>(range);
    Quantizer const quantizer = finish_range<Codes>(task, row, range, threadIdx.x == 0);
    Divisor const divisor(quantizer.scale);
    for (int64_t k = begin; k < task.columns; k += kVectors * kStep) {
      reader.read(k, kStep, held);
      finish<Codes, true, Reader>(task, row, k, kStep, held, divisor, quantizer.azp);
    }
  }
}

/// Calls visit(row, first, step, held) for all vectors of a matrix, kTensorVectors at a time: those at columns
/// first + v * step. The grid may be smaller than the matrix.
template <class Reader, class Visit>
__device__ void for_each_vectors(QuantizeTask const& task, Visit visit) {
  int64_t const step = int64_t(blockDim.x) * Reader::kCount, of_block = kTensorVectors * step;
  for (int64_t row = blockIdx.y * int64_t(blockDim.y) + threadIdx.y; row < task.rows;
       row += int64_t(gridDim.y) * blockDim.y) {
    Reader const reader(task, row);
    for (int64_t first = blockIdx.x * of_block + threadIdx.x * Reader::kCount; first < task.columns;
         first += gridDim.x * of_block) {
      typename Reader::Held held[kTensorVectors];
      reader.read(first, step, held);
      visit(row, first, step, held);
    }
  }
}

/// The extremes of the whole matrix into the two words at task.workspace, which are zero before.
template <class In, bool kAsymmetric, bool kSmooth>
__global__ void __launch_bounds__(kTensorThreads, kTensorBlocksPerSm)
    find_range(__grid_constant__ QuantizeTask const task) {
  Range range;
  using Reader = RowReader<In, kSmooth>;
  for_each_vectors<Reader>(
      task, [&](int64_t, int64_t, int64_t, auto const& held) { include<kAsymmetric, Reader>(range, held); });
  range = reduce<kAsymmetric, kWarp>(range);
  // The order of the atomic operations makes no difference to their result. Most find that it is there already.
  if ((threadIdx.y * blockDim.x + threadIdx.x) % kWarp == 0) {
    int* const extremes = static_cast<int*>(task.workspace);
    if (range.high > __ldcg(extremes)) atomicMax(extremes, range.high);
    if (kAsymmetric && range.low > __ldcg(extremes + 1)) atomicMax(extremes + 1, range.low);
  }
}

/// The codes of the whole matrix, by the given scale, which task.scale holds too where codes are integers, or by that
/// of find_range's result.
template <class In, class Codes, bool kSmooth>
__global__ void __launch_bounds__(kTensorThreads, kTensorBlocksPerSm)
    quantize_tensor(__grid_constant__ QuantizeTask const task) {
  begin_beside_next();
  bool const given = task.given_scale != nullptr;
  bool const stores = blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0 && threadIdx.y == 0;
  Quantizer quantizer;
  if (given) {
    quantizer = {*task.given_scale, Codes::kAsymmetric ? *task.given_azp : 0};
    if (!Codes::kInteger && stores) *task.scale = quantizer.scale;  // no block reports NaN there
  } else {
    int const* const extremes = static_cast<int const*>(task.workspace);
    quantizer = finish_range<Codes>(task, 0, {extremes[0], extremes[1]}, stores);
  }
  Divisor const divisor(quantizer.scale);
  bool found = false;
  using Reader = RowReader<In, kSmooth>;
  for_each_vectors<Reader>(task, [&](int64_t row, int64_t first, int64_t step, auto const& held) {
    found |= finish<Codes, false, Reader>(task, row, first, step, held, divisor, quantizer.azp);
  });
  if (found && given) *task.scale = __int_as_float(0x7fc00000);
}

}  // namespace qcutlass::cuda
