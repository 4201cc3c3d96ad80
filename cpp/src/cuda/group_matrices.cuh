// Scales and zeros of a launch, for kernels that read them by address.
#pragma once

#include "cuda/family.h"
#include "cutlass_ext/gemm/threadblock/scale_loader.h"

namespace qcutlass::cuda {

inline cutlass::gemm::threadblock::GroupMatrix group_matrix(Launch::Groups const& g) {
  return {static_cast<uint8_t const*>(g.data), g.stride_bytes, g.element_bytes, g.row_bytes, g.type};
}

inline cutlass::gemm::threadblock::SuperBlocks super_blocks(Launch const& launch) {
  return {group_matrix(launch.super_scales), group_matrix(launch.super_minimums),
          cutlass::gemm::threadblock::GroupSize(launch.super_block),
          launch.super_rows * launch.super_scales.stride_bytes};
}

}  // namespace qcutlass::cuda
