// Weight-only products of strips, 16 channels that lie across vector lanes, and what follows their sums.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "host/channel_parameters.h"
#include "host/epilogue.h"
#include "host/parallel.h"
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

/// Finishes the sums [strips of the part][rows][16] of a part, of which the first m rows count, and writes them.
void store_part(GemmArguments const& arguments, Parts const& parts, int64_t part, int64_t rows, float const* sums);

using StorePart = decltype(&store_part);

/// Calls multiply(strips, sums) for ranges of at most kStrips strips, or of a part's, which adds to sums
/// [strips][rows][16] of zeros, then `store` for each part. `grain`: strips that one range of the parallel loop should
/// at least hold.
template <int kStrips, class Multiply>
void multiply_ranges(GemmArguments const& arguments, int64_t rows, int64_t grain, int threads, Multiply const& multiply,
                     StorePart store = store_part) {
  Parts const parts(arguments);
  int64_t const at_once = std::max<int64_t>(kStrips / parts.strips(), 1);
  int64_t const sums_of_part = parts.strips() * rows * layout::kTileN;
  parallel_for(parts.count(), grain / parts.strips(), threads, [&](int64_t begin, int64_t end) {
    std::vector<float> sums(at_once * sums_of_part);
    for (int64_t part = begin; part < end; part += at_once) {
      int64_t const count = std::min(at_once, end - part);
      int64_t const first = parts.strip(part, 0), last = parts.strip(part + count - 1, 0);
      std::fill(sums.begin(), sums.end(), 0.0f);
      multiply(StripRange{first, static_cast<int>(last - first + parts.strips(part + count - 1))}, sums.data());
      for (int64_t i = 0; i < count; ++i) store(arguments, parts, part + i, rows, sums.data() + i * sums_of_part);
    }
  });
}

/// The same with multiply(strip, sums) for each strip, which adds to sums [rows][16].
template <class Multiply>
void multiply_strips(GemmArguments const& arguments, int64_t rows, int64_t grain, int threads, Multiply const& multiply,
                     StorePart store = store_part) {
  auto const multiply_all = [&](StripRange strips, float* sums) {
    for (int i = 0; i < strips.count; ++i) multiply(strips.first + i, sums + i * rows * layout::kTileN);
  };
  multiply_ranges<1>(arguments, rows, grain, threads, multiply_all, store);
}

}  // namespace qcutlass::host
