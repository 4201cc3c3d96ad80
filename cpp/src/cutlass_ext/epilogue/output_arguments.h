// The output of a product, as plain data that every output operator makes its parameters from.
#pragma once

#include "cutlass_ext/layout/gate_halves.h"
#include "qcutlass/gemm.h"

namespace cutlass::epilogue::thread {

/// The output and the element-wise end of a product, for all output operators.
struct OutputTensor {
  void* output;  // [tokens, columns]: a column for each channel, or with a gate for each pair of them
  qcutlass::DType output_type;
  int64_t stride;
  int tokens, channels;
  bool vectors;  // every 8 columns of a row that start at a multiple of 8 are complete and 16-byte aligned
  void const* bias;
  qcutlass::DType bias_type;
  qcutlass::Activation activation;
  qcutlass::Gate gate;
  void const* residual;  // [tokens, columns], of the output's type, `vectors` as the output; nullptr: none
  int64_t residual_stride;

  /// Where a product's channels lie in the weights, in their scales and in the bias.
  CUTLASS_HOST_DEVICE layout::GateHalves halves() const {
    layout::GateHalves halves;
    if (gate == qcutlass::Gate::kHalves) halves = {1, channels / (2 * layout::GateHalves::kStripChannels)};
    return halves;
  }
};

/// With the members that only some operators take.
struct OutputArguments : OutputTensor {
  qcutlass::SumScales scales;
  qcutlass::QuantizedOutput quantized;
};

}  // namespace cutlass::epilogue::thread
