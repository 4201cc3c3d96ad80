// The product of int8 activations and weights whose blocks have scales of their own.
#pragma once

#include "qcutlass/gemm.h"

namespace qcutlass::host {

void gemm_blockwise(GemmArguments const& arguments, int threads);

}  // namespace qcutlass::host
