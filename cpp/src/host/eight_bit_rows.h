// How products of 8-bit activations on the CPU are cut, and both their operands as they are read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "qcutlass/gemm.h"
#include "qcutlass/layout.h"

namespace qcutlass::host {

/// Products that one range of a parallel loop should at least hold: some 10 microseconds.
inline constexpr int64_t kGrainOperations = int64_t{1} << 19;

/// The number of rows that stay in cache, widened, while all weights pass by.
inline int64_t rows_of_a_block(int64_t k) {
  constexpr int64_t kElements = int64_t{1} << 18, kLeastRows = 16;
  return std::max(kLeastRows, kElements / k);
}

/// Strips of 16 channels that one range of the loop over them should at least hold.
inline int64_t strips_of_a_grain(int64_t k, int64_t rows) {
  return kGrainOperations / (layout::kTileN * k) / (rows / 4 + 1);
}

/// Consecutive rows of activations, widened to int16 or fp32 and padded with zeros to whole tiles.
template <class Element>
struct Rows {
  int64_t begin, count, stride;
  std::vector<Element> elements;
};

template <class Element>
Rows<Element> load_rows(GemmArguments const& arguments, int64_t begin, int64_t count, int threads);

/// The tiles of a strip of 16 channels.
inline uint8_t const* strip_of(WeightArguments const& weights, int64_t strip) {
  int64_t const bytes = layout::tiles_k(Packing::kW8A8, weights.k) * layout::kTileBytes;
  return static_cast<uint8_t const*>(weights.packed) + strip * bytes;
}

}  // namespace qcutlass::host
