// The product of few rows of int8 activations, quantised here or by the caller.
#pragma once

#include <cstdint>
#include <functional>

#include "host/byte_dot.h"
#include "qcutlass/scheme.h"

namespace qcutlass::host {

/// Rows in the order in which a strip's codes meet them, and what multiplies them.
struct FewByteRows {
  /// The most that pay: for more, codes are decoded once for all rows (byte_tiles.h).
  static constexpr int64_t kMost = 4;

  int64_t count;  ///< of rows of sums: those of the activations, or some more, which are padding
  std::function<void(int64_t strip, float* sums)> multiply;  ///< sums[row][channel] of the 16 channels of a strip

  /// Rows [m][k], quantised as quantize_rows() does. Groups of weights are whole steps of the layout here and below.
  static FewByteRows quantized(WeightArguments const& weights, float const* activations, int64_t m,
                               ByteKernels kernels);

  /// Rows of codes, `stride` apart, whose scales follow.
  static FewByteRows of_codes(WeightArguments const& weights, int8_t const* codes, int64_t stride, int64_t m,
                              ByteKernels kernels);
};

}  // namespace qcutlass::host
