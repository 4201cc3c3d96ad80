// The product of int8 or e4m3 activations and weights whose blocks have scales of their own.
#pragma once

#include "host/byte_dot.h"
#include "qcutlass/gemm.h"

namespace qcutlass::host {

void gemm_blockwise(GemmArguments const& arguments, int threads, ByteKernels kernels = byte_kernels().back());

}  // namespace qcutlass::host
