// A launch's output as the epilogue takes it: for the kernels, and for the sum of their partial products.
#pragma once

#include "cuda/family.h"
#include "cutlass_ext/epilogue/output_op.h"

namespace qcutlass::cuda {

/// The parameters of an output operator.
template <class OutputOp>
typename OutputOp::Params output_params(Launch const& launch) {
  typename OutputOp::Params params{};
  if constexpr (std::is_same_v<OutputOp, cutlass::epilogue::thread::ScaledSums<typename OutputOp::Sum>>) {
    params.output_type = launch.output_type;
    params.scales = launch.sums;
  }
  if constexpr (std::is_same_v<OutputOp, cutlass::epilogue::thread::BlockwiseOutput>) {
    params.output_type = launch.output_type;
    params.quantized = launch.quantized;
  }
  params.output = static_cast<decltype(params.output)>(launch.output);
  params.stride = launch.output_stride;
  params.tokens = launch.tokens;
  params.channels = launch.channels;
  params.vectors = launch.output_vectors;
  params.bias = launch.bias;
  params.bias_type = launch.bias_type;
  params.activation = launch.activation;
  return params;
}

template <class Sum>
cutlass::epilogue::thread::PartialSums<Sum> partial_sums(Launch const& launch) {
  return {static_cast<Sum*>(launch.partials), launch.partial_stride, launch.shared_channel, launch.shared_token};
}

}  // namespace qcutlass::cuda
