// The row of the activations that a token of a product is.
#pragma once

#include "cutlass/fast_math.h"

namespace cutlass::gemm::threadblock {

/// Its own.
struct OwnRows {
  CUTLASS_DEVICE int operator()(int token) const { return token; }
};

/// The one that an index names. Indices are data that nothing has checked: they are clamped.
struct GatheredRows {
  int const* rows;  // nullptr: its own
  int count;        // rows of the activations, at least 1

  CUTLASS_DEVICE int operator()(int token) const {
    int const row = rows == nullptr ? token : rows[token];
    return fast_max(0, fast_min(row, count - 1));
  }
};

}  // namespace cutlass::gemm::threadblock
