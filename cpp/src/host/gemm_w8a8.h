// The product of 8-bit activations by weights of 8 bits.
#pragma once

#include "host/byte_dot.h"
#include "qcutlass/gemm.h"

namespace qcutlass::host {

/// The product of arguments of Packing::kW8A8, which it checks. `kernels`: those for int8 activations.
void gemm_w8a8(GemmArguments const& arguments, int threads, ByteKernels kernels = byte_kernels().back());

}  // namespace qcutlass::host
