// Products of rows with the weights of their experts on the CPU.
#pragma once

#include "qcutlass/gemm.h"

namespace qcutlass::host {

/// A row's result is the same bits whatever other rows there are. Allocates 4 MB of activations, or 16 rows of them.
void gemm_grouped(GemmArguments const& arguments, int threads);

}  // namespace qcutlass::host
