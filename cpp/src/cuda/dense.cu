// Dense products of dequantised weights: their activations before them, their epilogue after them.
#include "cuda/copy_rows.cuh"
#include "cuda/cuda_check.h"
#include "cuda/output.cuh"
#include "qcutlass/error.h"
#include "qcutlass/gemm.h"

namespace qcutlass::cuda {
namespace {

template <class Element>
void prepare(GemmArguments const& a, void* out, int64_t out_stride, cudaStream_t stream) {
  gather_activations<Element><<<row_grid(out_stride, a.m), kCopyThreads, 0, stream>>>(
      static_cast<Element const*>(a.a), a.a_stride, a.perm, a.act_scale, a.act_scale_type, a.m, a.weights.k,
      static_cast<Element*>(out), out_stride);
  QCUTLASS_CUDA_CHECK(cudaGetLastError());
}

template <class Element>
void finish(GemmArguments const& a, float const* sums, int64_t sums_stride, int64_t begin, int64_t end,
            cudaStream_t stream) {
  bool const gated = a.gate != Gate::kNone;
  if (gated && (begin % (2 * layout::kTileN) != 0 || end % (2 * layout::kTileN) != 0))
    throw InvalidArgument("begin, end: expected multiples of 32 with a gate, got " + std::to_string(begin) + " and " +
                          std::to_string(end));
  GemmArguments part = a;  // channels begin .. end - 1
  int64_t const first = gated ? begin / 2 : begin;
  part.weights.n = end - begin;
  part.out = static_cast<Element*>(a.out) + first;
  if (a.residual != nullptr) part.residual = static_cast<Element const*>(a.residual) + first;
  if (a.bias != nullptr) part.bias = static_cast<char const*>(a.bias) + begin * size_of(a.bias_type);
  using OutputOp = cutlass::epilogue::thread::BiasActivation<Element>;
  reduce_partials<OutputOp><<<row_grid(sums_stride / OutputOp::kVector, a.m), kCopyThreads, 0, stream>>>(
      cutlass::epilogue::thread::PartialSums<float const>{sums, sums_stride, 0, 0}, 1,
      typename OutputOp::Params(output_arguments(part, a.a_type)));
  QCUTLASS_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void prepare_activations(GemmArguments const& a, void* a_out, int64_t a_out_stride, void* stream_handle) {
  if (a.m == 0) return;
  auto const stream = static_cast<cudaStream_t>(stream_handle);
  switch (a.a_type) {
    case DType::kFloat16: prepare<cutlass::half_t>(a, a_out, a_out_stride, stream); break;
    case DType::kBFloat16: prepare<cutlass::bfloat16_t>(a, a_out, a_out_stride, stream); break;
    default: {  // 8 bits: nothing to scale or permute
      copy_rows<<<row_grid(a_out_stride, a.m), kCopyThreads, 0, stream>>>(
          static_cast<uint8_t const*>(a.a), a.a_stride, a.m, a.weights.k, static_cast<uint8_t*>(a_out), a_out_stride);
      QCUTLASS_CUDA_CHECK(cudaGetLastError());
    }
  }
}

void finish(GemmArguments const& a, float const* sums, int64_t sums_stride, int64_t begin, int64_t end,
            void* stream_handle) {
  if (a.m == 0 || begin == end) return;
  auto const stream = static_cast<cudaStream_t>(stream_handle);
  a.a_type == DType::kBFloat16 ? finish<cutlass::bfloat16_t>(a, sums, sums_stride, begin, end, stream)
                               : finish<cutlass::half_t>(a, sums, sums_stride, begin, end, stream);
}

}  // namespace qcutlass::cuda
