// Weight-only products of strips, 16 channels that lie across vector lanes, and what follows their sums.
#pragma once

#include <cstdint>

#include "qcutlass/gemm.h"

namespace qcutlass::host {

/// Adds the products of a strip with m rows of activations to sums [m][16].
using MultiplyStrip = void (*)(WeightArguments const& weights, float const* activations, int64_t m, int64_t strip,
                               float* sums);

/// The function for such weights on this machine.
MultiplyStrip multiply_strip(WeightArguments const& weights);

/// Finishes the sums [m][16] of a strip and writes them.
void store_strip(GemmArguments const& arguments, int64_t strip, float* sums);

}  // namespace qcutlass::host
