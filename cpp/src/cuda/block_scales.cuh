// The scales of blocks as main loops take them.
#pragma once

#include "cuda/family.h"
#include "cutlass_ext/gemm/threadblock/block_scale_loader.h"

namespace qcutlass::cuda {

inline cutlass::gemm::threadblock::BlockScaleMatrices block_scales(Launch const& launch) {
  BlockScales const& blocks = launch.blocks;
  int log_size = 0;
  while ((int64_t(1) << log_size) < blocks.size) ++log_size;
  int const log_channels = blocks.up_offset != 0 ? log_size + 1 : log_size;
  int const blocks_of_k = ((launch.k - 1) >> log_size) + 1;
  return {blocks.a, blocks.w, blocks.a_stride, blocks.w_stride, blocks.up_offset, log_size, log_channels, blocks_of_k};
}

}  // namespace qcutlass::cuda
