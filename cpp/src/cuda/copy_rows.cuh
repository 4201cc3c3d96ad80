// Small kernels around a product: operands brought into the alignment the mainloop relies on, and the sum of partial
// results.
#pragma once

#include <math_constants.h>

#include <algorithm>

#include "cutlass_ext/arch/grid_dependency.h"
#include "cutlass_ext/epilogue/output_op.h"
#include "cutlass_ext/gemm/threadblock/row_source.h"
#include "qcutlass/types.h"

namespace qcutlass::cuda {

inline constexpr int kCopyThreads = 256;

/// A grid for kernels that go over columns and rows in steps of it.
inline dim3 row_grid(int64_t columns, int64_t rows) {
  constexpr int64_t kMostColumns = 1024, kMostRows = 32768;
  return dim3(unsigned(std::min((columns + kCopyThreads - 1) / kCopyThreads, kMostColumns)),
              unsigned(std::min(rows, kMostRows)));
}

/// Copies [rows, columns] into rows of `out_stride` >= columns elements, the rest zero. Strides in elements of Word.
template <class Word>
__global__ void copy_rows(Word const* in, int64_t in_stride, int64_t rows, int64_t columns, Word* out,
                          int64_t out_stride) {
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y)
    for (int64_t c = blockIdx.x * int64_t(kCopyThreads) + threadIdx.x; c < out_stride;
         c += int64_t(gridDim.x) * kCopyThreads)
      out[row * out_stride + c] = c < columns ? in[row * in_stride + c] : Word(0);
}

/// out[r] = in[source(r)]: rows of `columns` words; strides are in words, too.
template <class Word, class Source>
__global__ void gather_rows(Word const* in, int64_t in_stride, Source source, int64_t rows, int64_t columns, Word* out,
                            int64_t out_stride) {
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    Word const* const from = in + source(int(row)) * in_stride;
    for (int64_t c = blockIdx.x * int64_t(kCopyThreads) + threadIdx.x; c < columns;
         c += int64_t(gridDim.x) * kCopyThreads)
      out[row * out_stride + c] = from[c];
  }
}

__device__ inline float load_float(void const* data, DType type, int64_t index) {
  switch (type) {
    case DType::kFloat16: return float(static_cast<cutlass::half_t const*>(data)[index]);
    case DType::kBFloat16: return float(static_cast<cutlass::bfloat16_t const*>(data)[index]);
    default: return static_cast<float const*>(data)[index];
  }
}

/// out[m, k] = round(a[m, p] * act_scale[p]), p = perm[k]; zeros up to out_stride. An index outside a's columns gives
/// NaN: it cannot be reported from here, and must not go unnoticed.
template <class Element>
__global__ void gather_activations(Element const* a, int64_t a_stride, int32_t const* perm, void const* act_scale,
                                   DType act_scale_type, int64_t rows, int64_t columns, Element* out,
                                   int64_t out_stride) {
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y)
    for (int64_t k = blockIdx.x * int64_t(kCopyThreads) + threadIdx.x; k < out_stride;
         k += int64_t(gridDim.x) * kCopyThreads) {
      Element value(0.f);
      if (k < columns) {
        int64_t const p = perm != nullptr ? perm[k] : k;
        bool const valid = p >= 0 && p < columns;
        value = valid ? a[row * a_stride + p] : Element(CUDART_NAN_F);
        if (valid && act_scale != nullptr) value = Element(float(value) * load_float(act_scale, act_scale_type, p));
      }
      out[row * out_stride + k] = value;
    }
}

/// Adds the `shares` partial products in order and finishes the output; for a row_grid() over vectors and tokens.
template <class OutputOp>
__global__ void reduce_partials(cutlass::epilogue::thread::PartialSums<typename OutputOp::Sum const> partials,
                                int shares, typename OutputOp::Params params) {
  using Sum = typename OutputOp::Sum;
  constexpr int kVector = OutputOp::kVector, kWords = kVector * sizeof(Sum) / sizeof(uint4);
  constexpr int kAtOnce = 4;  // loads of so many shares are on their way together
  cutlass::arch::wait_for_prior_grids();
  cutlass::arch::allow_next_grid();
  int const vectors = int(partials.stride) / kVector, tokens = params.tokens - partials.token;
  int64_t const share = tokens * partials.stride;
  for (int token = blockIdx.y; token < tokens; token += gridDim.y)
    for (int v = blockIdx.x * kCopyThreads + threadIdx.x; v < vectors; v += gridDim.x * kCopyThreads) {
      Sum const* const from = partials.data + token * partials.stride + v * kVector;
      Sum sum[kVector] = {};
      for (int first = 0; first < shares; first += kAtOnce) {
        uint4 words[kAtOnce][kWords];
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s)
#pragma unroll
          for (int i = 0; i < kWords; ++i)
            if (first + s < shares) words[s][i] = reinterpret_cast<uint4 const*>(from + (first + s) * share)[i];
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s)
#pragma unroll
          for (int i = 0; i < kVector; ++i)
            if (first + s < shares) sum[i] += reinterpret_cast<Sum const*>(words[s])[i];
      }
      OutputOp(params, partials.channel + v * kVector).store(partials.token + token, sum);
    }
}

}  // namespace qcutlass::cuda
