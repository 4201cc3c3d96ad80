// The product of 8-bit activations by weights of 8 bits.
#pragma once

#include "qcutlass/gemm.h"

namespace qcutlass::host {

void gemm_w8a8(GemmArguments const& arguments, int threads);

}  // namespace qcutlass::host
