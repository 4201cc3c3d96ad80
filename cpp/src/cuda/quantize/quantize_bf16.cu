#include "cuda/quantize/launch.cuh"

template void qcutlass::cuda::quantize_from<__nv_bfloat16>(QuantizeArguments const&, cudaStream_t);
