#include "gemm/cost_model.h"

#include <algorithm>
#include <cmath>

namespace qcutlass {
namespace {

/// Speeds of a class of GPUs. Selection needs their ratios more than their values.
struct GpuClass {
  int compute_capability;
  double clock;  ///< GHz under tensor-core load
  double dram;   ///< TB/s
  double l2;     ///< TB/s
};
constexpr GpuClass kGpuClasses[] = {
    {80, 1.3, 1.8, 4.0}, {86, 1.6, 0.7, 2.5}, {89, 2.2, 0.9, 4.5}, {90, 1.77, 4.5, 6.5}, {100, 1.8, 7.0, 9.0},
};

GpuClass const& gpu_class(int compute_capability) {
  GpuClass const* best = &kGpuClasses[0];
  for (GpuClass const& c : kGpuClasses)
    if (c.compute_capability <= compute_capability) best = &c;
  return *best;
}

// The constants below were fitted to the times of every tactic and split on sm_90, at 4 shapes and M = 1 .. 4096; in
// that sweep the choice was at most 8 % behind the best, mostly equal to it.

/// Issue clocks of one quarter of an SM, measured on sm_90: an m16n8k16 MMA occupies it for 6, and nothing else issues
/// meanwhile.
constexpr double kMmaClocks = 6.0;
constexpr double kAluClocks = 1.7;
/// Instructions per A register (two weights) of the converters, broadcasting folded: see cutlass_ext/arch/dequantize.h.
double convert_instructions(DType type, Packing packing, ScaleMode mode) {
  if (mode == ScaleMode::kFloat) return 10;
  if (type == DType::kFloat16) return packing == Packing::kW4A16 ? 3.3 : 3.0;
  return packing == Packing::kW4A16 ? 3.8 : 6.0;
}
/// Copies, addresses, shared-memory loads and the barrier of a warp's 64-k slice, in clocks.
constexpr double kSliceClocks = 64;
/// Loading an n8 block of the activations' fragments.
constexpr double kColumnClocks = 1.26;
/// Time from a request to its bytes in shared memory, loaded memory system.
constexpr double kLatency = 1.2;
/// Launch, first bytes, last stores; and the epilogue, per output of a block.
constexpr double kFixed = 3.5;
constexpr double kOutput = 2.1e-4;
/// The kernel that adds partial sums, beside its traffic.
constexpr double kSplitFixed = 5.4;
/// Clusters: exchanging sums, per block and peer; and the share of the SMs that clusters beyond pairs can use, since
/// they do not fit every group of SMs that may hold one.
constexpr double kClusterPeer = 0.16;
constexpr double kClusterShare = 0.84;
/// How much of the shorter of load and arithmetic is not hidden behind the longer.
constexpr double kExposed = 0.1;

}  // namespace

int resident_blocks(Tactic const& tactic, Packing packing, ScaleMode mode, DeviceTraits const& device) {
  int const shared = shared_memory_bytes(tactic, packing, mode);
  if (shared > device.shared_memory_per_block) return 0;
  constexpr int kReserved = 1024;  // the system's share of every block
  int const by_memory = (device.shared_memory_per_block + kReserved) / (shared + kReserved);
  int const by_warps = (device.compute_capability == 86 || device.compute_capability == 89 ? 48 : 64) / tactic.warps();
  return std::max(1, std::min({by_memory, by_warps, 2 * tactic.min_blocks}));
}

Cost predict(GemmArguments const& arguments, DeviceTraits const& device, Tactic const& tactic, int split_k,
             bool cluster) {
  WeightArguments const& w = arguments.weights;
  ScaleMode const mode = scale_mode(arguments);
  GpuClass const& gpu = gpu_class(device.compute_capability);
  double const tiles_c = static_cast<double>(layout::ceil_div(w.n, tactic.channels));
  double const tiles_t = static_cast<double>(layout::ceil_div(arguments.m, tactic.tokens));
  double const stages = std::ceil(static_cast<double>(layout::ceil_div(w.k, tactic.stage_k())) / split_k);
  double const blocks = tiles_c * tiles_t * split_k;
  double const resident = resident_blocks(tactic, w.packing, mode, device);
  // Blocks on the busiest SM.
  double const busiest = std::ceil(blocks / (device.sm_count * (cluster && split_k > 2 ? kClusterShare : 1.0)));

  // Loads. Rows of tokens beyond m are not read.
  double const rows = static_cast<double>(std::min<int64_t>(arguments.m, tactic.tokens));
  double const weight_bytes = tactic.channels * tactic.stage_k() * w.bits() / 8.0;
  double const scale_bytes = tactic.channels *
                             std::ceil(tactic.stage_k() / static_cast<double>(std::min(w.group_size, w.k))) *
                             (size_of(w.scale_type) + size_of(w.zero_type));
  double const stage = weight_bytes + scale_bytes + rows * tactic.stage_k() * 2;
  double const distinct = static_cast<double>(w.n) * static_cast<double>(w.k) * w.bits() / 8 +
                          static_cast<double>(arguments.m) * static_cast<double>(w.k + w.n) * 2;
  double const in_flight = std::min(resident, busiest) * (tactic.stages - 1) * stage;
  double const by_latency = busiest * stages * stage / in_flight * kLatency;
  Cost cost;
  cost.load = std::max({distinct / (gpu.dram * 1e6), blocks * stages * stage / (gpu.l2 * 1e6), by_latency});

  // Issue slots of the busiest SM's quarters.
  double const strips = tactic.warp_channels / 16.0, columns = tactic.warp_tokens / 8.0;
  double const step =
      strips * columns * kMmaClocks + strips * 4 * convert_instructions(arguments.a_type, w.packing, mode) * kAluClocks;
  double const slice = kSliceK / kStepK * (step + columns * kColumnClocks) + kSliceClocks;
  cost.compute = busiest * stages * slice * std::max(1.0, tactic.warps() / 4.0) / (gpu.clock * 1e3);

  double const outputs = static_cast<double>(arguments.m) * static_cast<double>(w.n);
  cost.fixed = kFixed + tactic.tokens * tactic.channels * busiest * kOutput;
  if (cluster)
    cost.fixed += kClusterPeer * busiest * (split_k - 1);
  else if (split_k > 1)
    cost.fixed += kSplitFixed + outputs * 4 * split_k * 2 / (gpu.l2 * 1e6);
  cost.total = std::max(cost.load, cost.compute) + kExposed * std::min(cost.load, cost.compute) + cost.fixed;
  return cost;
}

}  // namespace qcutlass
