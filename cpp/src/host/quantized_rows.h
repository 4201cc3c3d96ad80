// Quantises activations of weight-only products to int8 in blocks of columns, and arranges them in the order of packed
// codes. int8 activations of the caller are arranged in the same way.
//
//   scale = max |a'| of a block / 127 (1 for a block of zeros);   a_q = round(a' / scale), to nearest even
//
// as in quantize.h, of the activations a' of gemm.h. Blocks begin at multiples of their size, whatever the groups of
// the weights; the last one may be short.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "qcutlass/layout.h"

namespace qcutlass::host {

/// Columns that share a scale: as many as the smallest usual group of weights. Larger blocks have larger errors, and
/// save one multiplication of four to eight.
inline constexpr int kActivationBlock = 32;

/// k of a step of the packed layouts; a group of weights is whole steps.
inline constexpr int kStepK = 16;

/// The columns of a step in the order of its codes' bytes: those of lane 0, of lane 1, ...
constexpr std::array<uint8_t, kStepK> step_order(Packing packing) {
  std::array<uint8_t, kStepK> order{};
  for (int k = 0; k < kStepK; ++k) {
    int64_t const byte = layout::position_in_tile(packing, 0, k).byte, lane = byte / layout::kLaneBytes;
    // Of 8-bit codes every other pair of bytes belongs to the other row of the lane.
    int64_t const place = bits_of(packing) == 4 ? byte % 4 : byte % 8 / 4 * 2 + byte % 2;
    order[lane * 4 + place] = static_cast<uint8_t>(k);
  }
  return order;
}

/// Rows of int8 codes in blocks (byte_product.h).
struct QuantizedRows {
  /// Columns with one scale whose codes are added up: a block, or a step of it.
  struct Run {
    float scale;
    float sum;  ///< of the codes
  };

  int run = kActivationBlock;  ///< columns of a Run
  int64_t count = 0;
  int64_t stride = 0;           ///< k, padded with zeros to whole tiles
  int64_t runs = 0;             ///< of a row
  std::vector<int8_t> codes;    ///< of each block [stride / 4][rows][4], each step in step_order()
  std::vector<Run> parameters;  ///< of each block [runs][rows]
};

/// Quantises `m` rows of `k` activations that lie together. `run`: kActivationBlock or kStepK columns.
QuantizedRows quantize_rows(Packing packing, float const* activations, int64_t m, int64_t k, int run, int threads);

/// Arranges `m` rows of `k` codes as 4-bit weights meet them. `run`: columns, a power of two that divides the extent of
/// whole tiles; every run has scale 1.
QuantizedRows arrange_rows(int8_t const* codes, int64_t stride, int64_t m, int64_t k, int run, int threads);

}  // namespace qcutlass::host
