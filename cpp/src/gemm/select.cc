// Problem -> configuration: a pure function over the table of tactics.
#include <stdexcept>

#include "gemm/cost_model.h"
#include "gemm/workspace.h"
#include "qcutlass/error.h"

namespace qcutlass {
namespace {

/// How many blocks may share k. Clusters of sizes between powers of two fit the groups of SMs badly.
constexpr int kSplits[] = {1, 2, 4, 8, 16};
/// Largest cluster size that every GPU with clusters supports.
constexpr int kMaxCluster = 8;

char const* activation_name(DType type) { return type == DType::kFloat16 ? "f16" : "bf16"; }

std::string tactic_name(GemmArguments const& arguments, Tactic const& t) {
  return std::string(arguments.weights.packing == Packing::kW4A16 ? "w4a16_" : "w8a16_") +
         activation_name(arguments.a_type) + "_" + kScaleModeNames[static_cast<int>(scale_mode(arguments))] +
         "_sm80_n" + std::to_string(t.channels) + "m" + std::to_string(t.tokens) + "k" + std::to_string(t.stage_k()) +
         "_s" + std::to_string(t.stages);
}

/// What the CUDA kernels cover, beyond what the arguments' types already say.
void check_supported(GemmArguments const& arguments) {
  WeightArguments const& w = arguments.weights;
  if (arguments.a_type != DType::kFloat16 && arguments.a_type != DType::kBFloat16)
    throw Unsupported("a: the CUDA kernels take float16 or bfloat16 activations; convert a, or use the CPU");
  if (w.packing == Packing::kW8A8) throw Unsupported("w_packed: int8 activations have their own product, not gemm");
  if (w.group_size < w.k && w.group_size % kStepK != 0)
    throw Unsupported("group_size: the CUDA kernels take multiples of " + std::to_string(kStepK) +
                      " or one group a channel, got " + std::to_string(w.group_size) + "; re-quantise, or use the CPU");
  // Indices of rows, and offsets within a row or between neighbouring ones, are 32-bit in the kernels.
  constexpr int64_t kMaxRows = int64_t(1) << 30, kMaxChannels = int64_t(1) << 28;
  if (arguments.m > kMaxRows || w.n > kMaxChannels || w.k > kMaxStride)
    throw Unsupported(
        "a, w_packed: the CUDA kernels take up to 2^30 rows, 2^28 channels and 2^24 columns; split the product");
}

bool splittable(GemmArguments const& arguments, Tactic const& t, int split_k) {
  return split_k <= layout::ceil_div(arguments.weights.k, t.stage_k());
}

bool uses_cluster(DeviceTraits const& device, int split_k) {
  return split_k > 1 && split_k <= kMaxCluster && device.compute_capability >= 90;
}

std::string limits(DeviceTraits const& device) {
  return "compute capability " + std::to_string(device.compute_capability / 10) + "." +
         std::to_string(device.compute_capability % 10) + ", " + std::to_string(device.shared_memory_per_block) +
         " bytes of shared memory a block";
}

}  // namespace

ScaleMode scale_mode(GemmArguments const& arguments) {
  WeightArguments const& w = arguments.weights;
  bool const native = w.scale_type == arguments.a_type && (w.zero_type == DType::kNone || w.zero_type == DType::kUInt8);
  if (!native) return ScaleMode::kFloat;
  return w.group_size >= w.k || w.group_size % kSliceK == 0 ? ScaleMode::kNative : ScaleMode::kFine;
}

int tactic_index(GemmArguments const& arguments, std::string const& name) {
  for (int i = 0; i < kTacticCount; ++i)
    if (tactic_name(arguments, kTactics[i]) == name) return i;
  throw InvalidArgument("tactic: '" + name + "' is not a configuration for this problem, which has e.g. '" +
                        tactic_name(arguments, kTactics[0]) + "'; qcutlass.tactics() lists them");
}

std::vector<TacticTraits> tactics(GemmArguments const& arguments) {
  check_supported(arguments);
  std::vector<TacticTraits> result;
  for (Tactic const& t : kTactics)
    result.push_back({tactic_name(arguments, t), t.channels, t.tokens, t.stage_k(), t.warps(), t.stages,
                      shared_memory_bytes(t, arguments.weights.packing, scale_mode(arguments)), t.max_registers()});
  return result;
}

Plan select(GemmArguments const& arguments, DeviceTraits const& device, std::string const& tactic, int split_k) {
  check_supported(arguments);
  int const only = tactic.empty() ? -1 : tactic_index(arguments, tactic);
  ScaleMode const mode = scale_mode(arguments);
  int best = -1, best_split = 1;
  double best_cost = 0;
  for (int i = 0; i < kTacticCount; ++i) {
    Tactic const& t = kTactics[i];
    if (only >= 0 && i != only) continue;
    int const resident = resident_blocks(t, arguments.weights.packing, mode, device);
    if (resident == 0) continue;
    for (int candidate : kSplits) {
      int const split = split_k > 0 ? split_k : candidate;
      if (!splittable(arguments, t, split)) break;
      // Sharing k pays where tiles leave SMs idle; over several waves its barriers cost more than a ragged last one.
      if (split_k == 0 && split > 1 &&
          (tiles(arguments, t) > device.sm_count || tiles(arguments, t) * split > device.sm_count * resident))
        break;
      double const cost = predict(arguments, device, t, split, uses_cluster(device, split)).total;
      if (best < 0 || cost < best_cost) best = i, best_split = split, best_cost = cost;
    }
  }
  if (best < 0)
    throw Unsupported("no kernel configuration" + (tactic.empty() ? "" : " '" + tactic + "'") +
                      (split_k > 0 ? " with split_k = " + std::to_string(split_k) : "") +
                      " fits this problem on a GPU of " + limits(device));
  bool const cluster = uses_cluster(device, best_split);
  return {tactic_name(arguments, kTactics[best]), best_split, cluster, Workspace(arguments, best_split, cluster).bytes};
}

}  // namespace qcutlass
