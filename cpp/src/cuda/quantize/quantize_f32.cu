#include "cuda/quantize/launch.cuh"

template void qcutlass::cuda::quantize_from<float>(QuantizeArguments const&, cudaStream_t);
