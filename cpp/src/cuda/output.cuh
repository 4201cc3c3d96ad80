// Where the kernels of a launch leave partial sums, and the kernel that adds them finds them.
#pragma once

#include "cuda/family.h"
#include "cutlass_ext/epilogue/output_op.h"

namespace qcutlass::cuda {

template <class Sum>
cutlass::epilogue::thread::PartialSums<Sum> partial_sums(Launch const& launch) {
  return {static_cast<Sum*>(launch.partials), launch.partial_stride, launch.shared_channel, launch.shared_token};
}

}  // namespace qcutlass::cuda
