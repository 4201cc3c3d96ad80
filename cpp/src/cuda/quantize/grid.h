// Shapes of launches.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/device.h"
#include "qcutlass/error.h"
#include "qcutlass/layout.h"

namespace qcutlass::cuda {

inline constexpr int64_t kMostBlocks = (int64_t(1) << 31) - 1, kMostBlocksDown = 65535;

struct Grid {
  dim3 blocks, threads;
};

/// [rows, columns] of threads, in blocks of `threads` that are wide, or tall where there are few columns, at least
/// `least` threads wide. Rows and columns beyond the largest grid are left to loops.
inline Grid grid_of(int64_t rows, int64_t columns, int threads, int least = 1) {
  unsigned across = unsigned(threads), down = 1;
  for (; across / 2 >= columns && across > unsigned(least); across /= 2) down *= 2;
  auto const blocks = [](int64_t extent, unsigned of, int64_t most) {
    return unsigned(std::min(std::max<int64_t>(layout::ceil_div(extent, of), 1), most));
  };
  return {dim3(blocks(columns, across, kMostBlocks), blocks(rows, down, kMostBlocksDown)), dim3(across, down)};
}

/// How many blocks take work in turn on the current device, where `per_sm` of them run at a time: two rounds, so that
/// one that ends early makes room.
inline int64_t blocks_in_turn(int per_sm) { return 2 * int64_t(per_sm) * device_traits(current_device()).sm_count; }

/// Calls run(std::integral_constant<int, size>).
template <class Run>
void with_block_size(int64_t size, Run const& run) {
  switch (size) {
    case 32: return run(std::integral_constant<int, 32>{});
    case 64: return run(std::integral_constant<int, 64>{});
    case 128: return run(std::integral_constant<int, 128>{});
    default: throw InvalidArgument("block sizes are 32, 64 and 128, got " + std::to_string(size));
  }
}

}  // namespace qcutlass::cuda
