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

/// The number of rows that stay in cache, as fp32 if they are fp8, while all weights pass by.
inline int64_t rows_of_a_block(int64_t k) {
  constexpr int64_t kElements = int64_t{1} << 18, kLeastRows = 16;
  return std::max(kLeastRows, kElements / k);
}

/// Strips of 16 channels that one range of the loop over them should at least hold.
inline int64_t strips_of_a_grain(int64_t k, int64_t rows) {
  return kGrainOperations / (layout::kTileN * k) / (rows / 4 + 1);
}

/// Consecutive rows of fp8 activations as fp32, padded with zeros to whole tiles. Rows of zeros follow where products
/// are batch-invariant: sums are cut into parts by how many rows are multiplied together, which then is one number.
struct Float8Rows {
  int64_t begin, count, stride;
  std::vector<float> elements;

  int64_t padded() const { return static_cast<int64_t>(elements.size()) / stride; }
};

Float8Rows load_float8_rows(GemmArguments const& arguments, int64_t begin, int64_t count, int threads);

/// Consecutive rows of int8 activations in blocks (byte_product.h), padded with zeros to whole tiles.
struct Int8Rows {
  int64_t begin, count, stride;
  int64_t runs;                  ///< of `run` columns
  std::vector<int8_t> codes;     ///< of each block [stride / 4][rows][4]
  std::vector<int32_t> offsets;  ///< [count][runs]: -128 times the sum of a run, where sums begin (int8_tiles.h)

  int64_t padded() const { return count; }

  /// sums [count][16] as they are before the products of a run.
  void start(int64_t run, int32_t* sums) const {
    for (int64_t row = 0; row < count; ++row) {
      std::fill_n(sums + row * layout::kTileN, layout::kTileN, offsets[row * runs + run]);
    }
  }
};

Int8Rows load_int8_rows(GemmArguments const& arguments, int64_t begin, int64_t count, int64_t run, int threads);

/// The tiles of a strip of 16 channels.
inline uint8_t const* strip_of(WeightArguments const& weights, int64_t strip) {
  int64_t const bytes = layout::tiles_k(Packing::kW8A8, weights.k) * layout::kTileBytes;
  return static_cast<uint8_t const*>(weights.packed) + strip * bytes;
}

}  // namespace qcutlass::host
