// The quantisers' kernels by type of input.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "qcutlass/error.h"
#include "qcutlass/quantize.h"

namespace qcutlass::cuda {

template <class In>
void quantize_from(QuantizeArguments const& arguments, cudaStream_t stream);  // launch.cuh

void quantize(QuantizeArguments const& arguments, void* stream) {
  if (arguments.rows == 0 && !arguments.per_tensor) return;
  auto const cuda_stream = static_cast<cudaStream_t>(stream);
  switch (arguments.a_type) {
    case DType::kFloat16: return quantize_from<__half>(arguments, cuda_stream);
    case DType::kBFloat16: return quantize_from<__nv_bfloat16>(arguments, cuda_stream);
    case DType::kFloat32: return quantize_from<float>(arguments, cuda_stream);
    default: throw InvalidArgument("a_type must be float16, bfloat16 or float32");
  }
}

}  // namespace qcutlass::cuda
