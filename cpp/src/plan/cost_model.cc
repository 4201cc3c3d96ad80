#include "plan/cost_model.h"

#include <algorithm>
#include <cmath>

#include "plan/gpu_class.h"
#include "plan/shared_tiles.h"

namespace qcutlass {
namespace {

MainloopCosts const& mainloop_costs(GpuClass const& gpu, Tactic const& t) {
  return t.mainloop == Mainloop::kStream ? gpu.stream : gpu.multistage;
}

/// How the blocks of a launch spread over the GPU.
struct Waves {
  double blocks;
  int sharers;             ///< of weights
  double busiest;          ///< blocks that the busiest SM runs, one after the other or together
  double resident;         ///< blocks that an SM holds at once
  double stages;           ///< of a block
  double shared;           ///< outputs of tiles whose k is shared
  bool only_last = false;  ///< only those of the last wave are

  Waves(GemmArguments const& a, DeviceTraits const& device, Tactic const& t, int split_k, bool cluster)
      : blocks(static_cast<double>(tiles(a, t)) * split_k),
        sharers(t.mainloop == Mainloop::kWgmma
                    ? wgmma_sharers(a.weights.packing, layout::ceil_div(a.m, t.tokens), split_k)
                    : 1),
        busiest(cluster ? std::ceil(pairs(a, t) / std::max(1, resident_clusters(device.sm_count, split_k)))
                        : std::ceil(pairs(a, t) * split_k / std::max(1, device.sm_count / sharers))),
        resident(resident_blocks(a, device, t)),
        stages(static_cast<double>(layout::ceil_div(a.weights.k, t.stage_k(a.weights.packing)))),
        shared(static_cast<double>(a.m) * static_cast<double>(a.weights.n)) {
    SharedTiles const last(a, device, t, split_k);
    if (!last.only_last()) {
      stages = std::ceil(stages / split_k);
      return;
    }
    only_last = true;
    blocks = static_cast<double>(last.tiles);
    busiest = last.busiest(device.sm_count, split_k, static_cast<int64_t>(stages)) / stages;
    shared = static_cast<double>(a.m - last.first_token) * static_cast<double>(a.weights.n - last.first_channel);
  }

 private:
  /// Groups of blocks that share weights, of a share of k.
  double pairs(GemmArguments const& a, Tactic const& t) const {
    int64_t const token_tiles = layout::ceil_div(a.m, t.tokens);
    return static_cast<double>(layout::ceil_div(a.weights.n, t.channels) * layout::ceil_div(token_tiles, sharers));
  }
};

/// Time of two things that overlap, though not perfectly.
double overlapped(double a, double b, GpuClass const& gpu) { return std::max(a, b) + gpu.exposed * std::min(a, b); }

/// The slowest of: distinct bytes through DRAM, all bytes through L2, the copy rings' bytes in flight.
double load(GemmArguments const& a, GpuClass const& gpu, Tactic const& t, Waves const& waves) {
  WeightArguments const& w = a.weights;
  DType const output = a.out_type == DType::kNone ? a.a_type : a.out_type;
  double const rows = static_cast<double>(std::min<int64_t>(a.m, t.tokens));  // tokens beyond m are not read
  int const stage_k = t.stage_k(w.packing), activation_size = activation_bytes(w.packing);
  double const weight_bytes = t.channels * stage_k * w.bits() / 8.0;
  double const scale_bytes = t.channels *
                             std::ceil(stage_k / static_cast<double>(w.groups() == 1 ? w.k : w.group_size)) *
                             (size_of(w.scale_type) + size_of(w.zero_type));
  constexpr int kSector = 32;  // what L2 sends for the scale of a token's block
  double const block_bytes = a.blocks.size != 0 ? rows * kSector * (stage_k / kStreamK) : 0;
  double const stage = weight_bytes + scale_bytes + block_bytes + rows * stage_k * activation_size;
  double const distinct = static_cast<double>(w.n) * static_cast<double>(w.k) * w.bits() / 8 +
                          static_cast<double>(a.m) * static_cast<double>(w.k * activation_size + w.n * size_of(output));
  double const in_flight =
      std::min(waves.resident, waves.busiest) * (stages_of(t, w.packing, scale_mode(a)) - 1) * stage;
  bool const wgmma = t.mainloop == Mainloop::kWgmma;
  double const latency = wgmma ? gpu.wgmma.latency : mainloop_costs(gpu, t).latency;
  double const from_l2 = stage - weight_bytes * (1 - 1.0 / waves.sharers);
  double const again = std::max(0.0, waves.blocks * waves.stages * from_l2 - distinct);
  return std::max({(distinct + mainloop_costs(gpu, t).reread * again) / (gpu.memory.dram * 1e6),
                   waves.blocks * waves.stages * from_l2 / (gpu.memory.l2 * 1e6),
                   waves.busiest * waves.stages * stage / in_flight * latency});
}

/// Instructions per A register (two weights) of the converters, broadcasting folded: see cutlass_ext/arch/dequantize.h.
double convert_instructions(DType type, Packing packing, ScaleMode mode, bool scales) {
  if (mode == ScaleMode::kNone || is_blockwise(mode)) return 0;
  if (mode == ScaleMode::kFloat) return 10;
  double const multiply = scales ? 1 : 0;
  if (type == DType::kFloat16) return multiply + (packing == Packing::kW4A16 ? 2.25 : 2.0);
  return multiply + (packing == Packing::kW4A16 ? 2.75 : 5.0);
}

/// Of the main loop of asynchronous MMAs, all but four warps of whose blocks multiply.
double warpgroups(Tactic const& t) { return t.warps() / 4.0 - 1; }
/// Outputs of a tile that a warpgroup has.
double warpgroup_outputs(Tactic const& t) { return t.channels * t.tokens / warpgroups(t); }

/// A slice of k, 128 bytes of a token's row, takes the tensor cores a clock for every 128 outputs of each of 4 steps,
/// and each warpgroup's warps their issue slots. Both overlap the better the more they differ: measured times go with
/// the root of the sum of their squares.
double wgmma_compute(GemmArguments const& a, GpuClass const& gpu, Tactic const& t, Waves const& waves) {
  constexpr int kSteps = 4, kRegisters = 4;
  double const mmas = kSteps * t.channels * t.tokens / 128.0;
  double const conversions =
      kSteps * kRegisters * convert_instructions(a.a_type, a.weights.packing, scale_mode(a), true);
  double const promotion = a.blocks.size != 0    ? gpu.wgmma.promotion + gpu.wgmma.scaling
                           : is_float8(a.a_type) ? gpu.wgmma.promotion
                                                 : 0;  // the sums stay in the MMAs
  double const promotions = warpgroup_outputs(t) / 128 * promotion;
  double slice = gpu.wgmma.slice + conversions * gpu.wgmma.convert;
  if (a.weights.packing != Packing::kW8A8) slice *= std::sqrt(64.0 / t.tokens);
  double const issued = warpgroups(t) * (slice + promotions);
  return waves.busiest * waves.stages * t.slices * std::hypot(mmas, issued) / (gpu.wgmma.clock * 1e3);
}

double wgmma_fixed(GpuClass const& gpu, Tactic const& t, Waves const& waves, int split_k, bool cluster) {
  double const tile = t.channels * t.tokens, outputs = tile * waves.busiest;
  if (!cluster) return gpu.wgmma.kernel + outputs * gpu.wgmma.output;
  double const shared = waves.only_last ? tile : outputs, own = waves.only_last ? outputs : outputs / split_k;
  return gpu.wgmma.kernel + own * gpu.wgmma.output + (split_k - 1) * gpu.wgmma.cluster +
         (shared - shared / split_k) * gpu.wgmma.exchange;
}

/// Issue slots of the busiest SM's quarters; and, where warps are too few to take turns, each warp's own way.
double compute(GemmArguments const& a, GpuClass const& gpu, Tactic const& t, Waves const& waves) {
  if (t.mainloop == Mainloop::kWgmma) return wgmma_compute(a, gpu, t, waves);
  MainloopCosts const& costs = mainloop_costs(gpu, t);
  ScaleMode const mode = scale_mode(a);
  double const strips = t.warp_channels / 16.0, columns = t.warp_tokens / 8.0;
  double const converting =
      4 * convert_instructions(a.a_type, a.weights.packing, mode, rounds_weights(t, mode)) * gpu.issue.alu;
  double const step = strips * (columns * gpu.issue.mma + converting + costs.strip) + columns * costs.column;
  int const slice_k = t.slice_k(a.weights.packing);
  double const promotions = is_blockwise(mode) ? slice_k / promoted_k(mode) * strips * columns : 0;
  double const slice =
      static_cast<double>(slice_k) / step_k(a.weights.packing) * step + promotions * gpu.promotion + costs.slice;
  double const issued = waves.busiest * waves.stages * slice * std::max(1.0, t.warps() / 4.0);
  double const alone = std::ceil(waves.busiest / waves.resident) * waves.stages * (slice + costs.wait);
  return overlapped(issued, alone, gpu) / (gpu.issue.clock * 1e3);
}

/// Launch, prologue, epilogue, and the exchange of partial sums.
double fixed(GpuClass const& gpu, Tactic const& t, Waves const& waves, int split_k, bool cluster) {
  MainloopCosts const& costs = mainloop_costs(gpu, t);
  bool const wgmma = t.mainloop == Mainloop::kWgmma;
  double const block = wgmma ? wgmma_fixed(gpu, t, waves, split_k, cluster)
                             : costs.kernel + (waves.busiest - 1) * gpu.launch.block +
                                   t.tokens * t.channels * t.slices * waves.busiest * costs.output;
  if (split_k == 1) return block;
  double const last = waves.only_last ? gpu.wgmma.last : 0;
  if (cluster) return block + (wgmma ? last : (split_k - 1) * gpu.launch.cluster);
  double const passes = waves.only_last ? gpu.wgmma.last_passes : 2;  // written and read
  return block + (wgmma ? gpu.wgmma.split : gpu.launch.split) + last +
         waves.shared * 4 * split_k * passes / (gpu.memory.l2 * 1e6);
}

}  // namespace

int resident_blocks(GemmArguments const& arguments, DeviceTraits const& device, Tactic const& tactic) {
  if (!tactic.serves(arguments.weights.packing, scale_mode(arguments), arguments.a_type)) return 0;
  if (tactic.mainloop == Mainloop::kWgmma && !device.wgmma) return 0;
  int const shared =
      shared_memory_bytes(tactic, arguments.weights.packing, scale_mode(arguments), std::max<int64_t>(arguments.m, 1));
  if (shared > std::min(device.shared_memory_per_block, kMostSharedMemory)) return 0;
  constexpr int kReserved = 1024;  // the system's share of every block
  int const by_memory = (device.shared_memory_per_block + kReserved) / (shared + kReserved);
  int const capability = device.compute_capability;
  bool const few_warps = (capability > 80 && capability < 90) || capability >= 120;  // 48 an SM, not 64
  int const by_warps = (few_warps ? 48 : 64) / tactic.warps();
  return std::max(1, std::min({by_memory, by_warps, 2 * tactic.min_blocks}));
}

Cost predict(GemmArguments const& arguments, DeviceTraits const& device, Tactic const& tactic, int split_k,
             bool cluster) {
  GpuClass gpu = gpu_class(device.compute_capability);
  if (arguments.weights.packing == Packing::kW8A8)
    gpu = for_eight_bits(gpu, arguments.blocks.size != 0 ? kBlockwiseCosts : kEightByEightCosts,
                         is_float8(arguments.a_type));
  Waves const waves(arguments, device, tactic, split_k, cluster);
  Cost cost;
  cost.load = load(arguments, gpu, tactic, waves);
  cost.compute = compute(arguments, gpu, tactic, waves);
  cost.fixed = fixed(gpu, tactic, waves, split_k, cluster);
  cost.total = overlapped(cost.load, cost.compute, gpu) + cost.fixed;
  return cost;
}

}  // namespace qcutlass
