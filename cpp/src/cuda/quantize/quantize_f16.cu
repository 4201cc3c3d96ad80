#include "cuda/quantize/launch.cuh"

template void qcutlass::cuda::quantize_from<__half>(QuantizeArguments const&, cudaStream_t);
