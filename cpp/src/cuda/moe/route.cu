// Routing: a stable counting sort of slots by expert, in one launch of one block or one cluster.
//
// Each warp has a part of the slots, in order, and counters of its own. After all have counted, the first row of an
// expert follows from the counts of all experts before it; that of a warp's part from the counts of the blocks and
// warps before it. Then each warp goes through its part again, 32 slots at a time, and gives each the next place of its
// expert. Counting is by atomic additions, whose order nothing shows; places depend on no order but that of the slots.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/launch_grid.cuh"
#include "cutlass_ext/arch/cluster.h"
#include "cutlass_ext/arch/grid_dependency.h"
#include "qcutlass/error.h"
#include "qcutlass/layout.h"
#include "qcutlass/moe.h"

namespace qcutlass::cuda {

namespace {

constexpr int kWarp = 32;
constexpr int kMostWarps = 32, kLeastWarps = 4;
constexpr int kAtOnce = 4;                     // slots of a thread whose loads are on their way together
constexpr int kVector = 4;                     // counters that another block's are read by
constexpr int kArrays = 3;                     // counters of a block beside those of its warps
constexpr int kSharedBytes = (48 << 10) - 16;  // what a kernel may have without asking for more, less `placed`
constexpr int kBlocks = 8;                     // of a cluster, as many as every GPU with clusters has room for
constexpr int64_t kSlotsOfABlock = 4096;       // more are shared by a cluster: 4 steps of its warps

struct RouteTask : RouteArguments {
  int total;   ///< slots of all tokens
  int part;    ///< slots of a warp, a multiple of kWarp
  int padded;  ///< experts, rounded up to kVector
};

/// Calls visit(slot, id) for a warp's part, all lanes together; past its end ids are -1.
template <class Id, class Visit>
__device__ void for_each_slot(RouteTask const& task, int begin, int end, Visit visit) {
  auto const* const ids = static_cast<Id const*>(task.ids);
  int const lane = threadIdx.x % kWarp;
  for (int first = begin; first < end; first += kAtOnce * kWarp) {
    Id found[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const slot = first + i * kWarp + lane;
      found[i] = slot < end ? ids[slot] : Id(-1);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      bool const routed = found[i] >= 0 && found[i] < task.experts;
      visit(first + i * kWarp + lane, routed ? int(found[i]) : -1);
    }
  }
}

template <class Id>
__global__ void __launch_bounds__(kMostWarps* kWarp) route_slots(__grid_constant__ RouteTask const task) {
  extern __shared__ __align__(16) int counters[];
  __shared__ int placed;
  int const warps = int(blockDim.x) / kWarp, warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  int const experts = int(task.experts), padded = task.padded, blocks = int(gridDim.x), block = int(blockIdx.x);
  int* const of_block = counters;         // counts of this block
  int* const of_all = counters + padded;  // of all blocks
  int* const start = of_all + padded;     // first row of this block's, by expert
  int* const of_warps = start + padded;   // counts of each warp; then where its part begins in the block's
  int* const mine = of_warps + warp * padded;

  for (int i = threadIdx.x; i < (kArrays + warps) * padded; i += int(blockDim.x)) counters[i] = 0;
  cutlass::arch::wait_for_prior_grids();
  cutlass::arch::allow_next_grid();
  __syncthreads();

  int const begin = min((block * warps + warp) * task.part, task.total), end = min(begin + task.part, task.total);
  for_each_slot<Id>(task, begin, end, [&](int, int id) {
    if (id >= 0) atomicAdd(mine + id, 1);
  });
  __syncthreads();

  for (int expert = threadIdx.x; expert < experts; expert += int(blockDim.x)) {
    int sum = 0;
    for (int w = 0; w < warps; ++w) {
      int const count = of_warps[w * padded + expert];
      of_warps[w * padded + expert] = sum;
      sum += count;
    }
    of_block[expert] = sum;
    if (blocks == 1) of_all[expert] = sum;
  }
  if (blocks > 1) {
    cutlass::arch::cluster_sync();
    for (int expert = int(threadIdx.x) * kVector; expert < padded; expert += int(blockDim.x) * kVector) {
      for (int other = 0; other < blocks; ++other) {
        auto const counts = cutlass::arch::load_from_cluster(of_block + expert, other);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          of_all[expert + i] += counts[i];
          if (other < block) start[expert + i] += counts[i];
        }
      }
    }
    cutlass::arch::cluster_sync();  // no block ends while others read its counts
  }
  __syncthreads();

  if (warp == 0) {
    int rows = 0;  // of the experts before
    for (int first = 0; first < experts; first += kWarp) {
      int const expert = first + lane, count = expert < experts ? of_all[expert] : 0;
      int sum = count;
#pragma unroll
      for (int step = 1; step < kWarp; step *= 2) {
        int const before = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += before;
      }
      if (expert < experts) {
        start[expert] += rows + sum - count;
        if (block == 0) task.offsets[expert] = rows + sum - count;
      }
      rows += __shfl_sync(~0u, sum, kWarp - 1);
    }
    if (lane == 0) {
      placed = rows;
      if (block == 0) task.offsets[experts] = rows;
    }
  }
  __syncthreads();

  unsigned const lanes_before = (1u << lane) - 1;
  for_each_slot<Id>(task, begin, end, [&](int slot, int id) {
    unsigned const alike = __match_any_sync(~0u, id);
    int const before = __popc(alike & lanes_before);
    int const place = id >= 0 ? start[id] + mine[id] + before : -1;
    __syncwarp();
    if (id >= 0 && before == 0) mine[id] += __popc(alike);
    __syncwarp();
    if (slot >= end) return;
    task.order[slot] = place;
    if (place < 0) return;
    task.rows[place] = int(unsigned(slot) / unsigned(task.slots));
    if (task.weights != nullptr) task.row_scale[place] = task.weights[slot];
  });
  for (int place = placed + block * int(blockDim.x) + int(threadIdx.x); place < task.total;
       place += blocks * int(blockDim.x)) {
    task.rows[place] = 0;
    if (task.weights != nullptr) task.row_scale[place] = 0.0f;
  }
}

}  // namespace

void route(RouteArguments const& arguments, void* stream) {
  if (arguments.experts > kMostExperts)
    throw InvalidArgument("experts must be at most " + std::to_string(kMostExperts) + ", got " +
                          std::to_string(arguments.experts));
  RouteTask task{arguments};
  int64_t const total = arguments.tokens * arguments.slots;
  task.total = int(total);
  task.padded = int(layout::ceil_div(arguments.experts, kVector)) * kVector;
  int const room = kSharedBytes / int(sizeof(int)) / task.padded - kArrays;
  static_assert(kSharedBytes / int(sizeof(int)) / kMostExperts > kArrays);
  int const blocks = total > kSlotsOfABlock && runs_sm90_code() ? kBlocks : 1;
  int const needed = std::max(int(layout::ceil_div(total, int64_t(kWarp) * blocks)), kLeastWarps);
  int const warps = std::min({needed, room, kMostWarps});
  task.part = int(layout::ceil_div(total, int64_t(kWarp) * warps * blocks)) * kWarp;
  dim3 const grid{unsigned(blocks)};  // one cluster
  GridShape const shape{grid, dim3(unsigned(warps * kWarp)), int(sizeof(int)) * (kArrays + warps) * task.padded, grid,
                        runs_sm90_code()};
  launch_grid(arguments.id_bytes == 8 ? route_slots<int64_t> : route_slots<int32_t>, shape,
              static_cast<cudaStream_t>(stream), task);
}

}  // namespace qcutlass::cuda
