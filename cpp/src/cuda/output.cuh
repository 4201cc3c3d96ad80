// What operators at the end of a product are told, and where partial sums lie between its kernels.
#pragma once

#include "cuda/family.h"
#include "cutlass_ext/epilogue/output_op.h"
#include "plan/workspace.h"

namespace qcutlass::cuda {

inline cutlass::epilogue::thread::OutputArguments output_arguments(GemmArguments const& a, DType type) {
  return {{a.out, type, a.out_stride, int(a.m), int(a.weights.n), stores_vectors(a, type), a.bias, a.bias_type,
           a.activation, a.gate, a.residual, a.residual_stride},
          a.sums,
          a.quantized};
}

template <class Sum>
cutlass::epilogue::thread::PartialSums<Sum> partial_sums(Launch const& launch) {
  return {static_cast<Sum*>(launch.partials), launch.partial_stride, launch.shared_channel, launch.shared_token};
}

}  // namespace qcutlass::cuda
