#include "plan/dense.h"

#include <algorithm>
#include <cmath>

#include "plan/gpu_class.h"
#include "plan/workspace.h"

namespace qcutlass::dense {
namespace {

/// Granularity at which dense products fill the GPU: the vendor's library has a tile for every size. Fitted on sm_90.
constexpr int kTile = 64;

bool finishes(GemmArguments const& a) { return a.bias_type != DType::kNone || a.activation != Activation::kNone; }

bool gathers(GemmArguments const& a) { return a.perm != nullptr || a.act_scale != nullptr; }

/// Most rows of a slice, a multiple of kSliceRows; 0 if not one such fits.
int64_t max_slice(GemmArguments const& a) {
  int64_t const weights = kMaxSliceBytes / (a.weights.k * size_of(a.a_type));
  int64_t const sums = finishes(a) ? kMaxSliceBytes / (std::max<int64_t>(a.m, 1) * int64_t(sizeof(float))) : weights;
  int64_t const rows = std::min({weights, sums, round_up(a.weights.n, kSliceRows)});
  return rows / kSliceRows * kSliceRows;
}

/// Microseconds of the dense product [m, k] x [k, rows] with operands in L2: whole waves of tiles.
double product(GemmArguments const& a, DeviceTraits const& device, GpuClass const& gpu, int64_t rows) {
  int64_t const tiles = layout::ceil_div(a.m, kTile) * layout::ceil_div(rows, kTile);
  double const waves = static_cast<double>(layout::ceil_div(tiles, device.sm_count));
  return waves * 2.0 * kTile * kTile * static_cast<double>(a.weights.k) / (gpu.dense.product * 1e6);
}

Cost predict(GemmArguments const& a, DeviceTraits const& device, int64_t slice) {
  GpuClass const& gpu = gpu_class(device.compute_capability);
  WeightArguments const& w = a.weights;
  double const m = static_cast<double>(a.m), n = static_cast<double>(w.n), k = static_cast<double>(w.k);
  int64_t const whole = w.n / slice, rest = w.n % slice, slices = layout::ceil_div(w.n, slice);
  Cost cost;
  cost.load = std::max(n * k * w.bits() / 8 / (gpu.memory.dram * 1e6), n * k * 2 / (gpu.dense.dequantize * 1e6));
  cost.compute = static_cast<double>(whole) * product(a, device, gpu, slice);
  if (rest > 0) cost.compute += product(a, device, gpu, rest);
  cost.fixed = static_cast<double>(slices) * gpu.dense.launches;
  if (finishes(a))  // sums are written and read, outputs written
    cost.fixed += static_cast<double>(slices) * gpu.launch.copy + m * n * (4 + 4 + 2) / (gpu.memory.l2 * 1e6);
  if (gathers(a)) cost.fixed += gpu.launch.copy + m * k * (2 + 2) / (gpu.memory.dram * 1e6);
  cost.total = cost.load + cost.compute + cost.fixed;  // one after the other
  return cost;
}

size_t workspace_bytes(GemmArguments const& a, int64_t slice) {
  auto const part = [](int64_t bytes) { return static_cast<size_t>(round_up(bytes, 256)); };
  int64_t const row = a.weights.k * size_of(a.a_type);
  size_t bytes = part(slice * row);
  if (finishes(a)) bytes += part(a.m * round_up(slice, 8) * int64_t(sizeof(float)));
  if (gathers(a)) bytes += part(a.m * row);
  return bytes;
}

}  // namespace

bool fits(GemmArguments const& arguments) {
  return arguments.weights.packing != Packing::kW8A8 && max_slice(arguments) > 0;
}

Candidate candidate(GemmArguments const& arguments, DeviceTraits const& device) {
  constexpr int64_t kChoices = 64;
  int64_t const n = arguments.weights.n, widest = max_slice(arguments);
  int64_t const step = round_up(layout::ceil_div(widest, kChoices), kSliceRows);
  Candidate best;
  for (int64_t rows = widest; rows > 0; rows -= step) {
    int64_t const slice = std::min(rows, n);
    Cost const cost = predict(arguments, device, slice);
    if (best.plan.slice == 0 || cost.total < best.cost.total) best.cost = cost, best.plan.slice = slice;
  }
  best.plan.tactic = dense_tactic(arguments);
  best.plan.dense = true;
  best.plan.workspace_bytes = workspace_bytes(arguments, best.plan.slice);
  return best;
}

}  // namespace qcutlass::dense
