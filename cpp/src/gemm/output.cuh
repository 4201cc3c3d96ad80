// A launch's output as the epilogue takes it: for the kernels, and for the sum of their partial products.
#pragma once

#include "cutlass_ext/epilogue/bias_activation.h"
#include "gemm/family.h"

namespace qcutlass::cuda {

template <class Element>
typename cutlass::epilogue::thread::BiasActivation<Element>::Params output_params(Launch const& launch) {
  return {static_cast<Element*>(launch.output),
          launch.output_stride,
          launch.tokens,
          launch.channels,
          launch.output_vectors,
          launch.bias,
          launch.bias_type,
          launch.activation};
}

}  // namespace qcutlass::cuda
