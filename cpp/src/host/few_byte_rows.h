// The product of few rows of int8 activations.
#pragma once

#include <cstdint>
#include <functional>

#include "host/byte_dot.h"
#include "host/channel_parameters.h"
#include "host/quantized_rows.h"
#include "qcutlass/scheme.h"

namespace qcutlass::host {

/// The most rows for which it pays to multiply packed bytes as they lie: those of more are multiplied by codes that are
/// decoded once for all (byte_tiles.h).
inline constexpr int64_t kFewByteRows = 2;

/// Adds the products of strips to sums [strip][row][channel], the same bits as those of ByteTiles.
using FewByteRows = std::function<void(StripRange strips, float* sums)>;

/// The product of at most kFewByteRows rows with groups of whole steps of the layout. It refers to `weights`.
FewByteRows few_byte_rows(WeightArguments const& weights, QuantizedRows const& rows, ByteKernels kernels);

}  // namespace qcutlass::host
