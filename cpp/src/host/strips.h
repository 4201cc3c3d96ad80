// Weight-only products of strips, 16 channels that lie across vector lanes, and what follows their sums.
#pragma once

#include <cstdint>

#include "qcutlass/gemm.h"

namespace qcutlass::host {

/// Writes row `row` of m rows of activations into [tile of k][m][column of the tile], what a product of strips reads:
/// rows of a tile that lie in one piece have places of their own in a cache, rows of a matrix may all have the same.
void arrange_row(Packing packing, float const* activations, int64_t k, int64_t m, int64_t row, float* out);

/// Floats that m arranged rows take.
int64_t arranged_size(Packing packing, int64_t k, int64_t m);

/// Adds the products of a strip with m arranged rows of activations to sums [m][16].
using MultiplyStrip = void (*)(WeightArguments const& weights, float const* activations, int64_t m, int64_t strip,
                               float* sums);

/// The function for such weights on this machine.
MultiplyStrip multiply_strip(WeightArguments const& weights);

/// Finishes the sums [m][16] of a strip and writes them.
void store_strip(GemmArguments const& arguments, int64_t strip, float* sums);

}  // namespace qcutlass::host
