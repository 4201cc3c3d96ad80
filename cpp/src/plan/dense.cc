#include "plan/dense.h"

#include <algorithm>
#include <cmath>

#include "plan/costs.h"
#include "plan/workspace.h"

namespace qcutlass::dense {
namespace {

/// Granularity at which dense products fill the GPU: the vendor's library has a tile for every size. Fitted on sm_90.
constexpr int kTile = 64;
/// Microseconds of starting, of launching both kernels for a slice, and of one that copies activations or finishes
/// outputs, beside their traffic. With next to no work one slice takes 5.0 on an H100, to which kStart was fitted.
constexpr double kStart = 2.5, kSliceLaunches = 2.5, kCopyLaunch = 2.0;

/// Most rows of a slice, a multiple of kSliceRows; 0 if not one such fits.
int64_t max_slice(Problem const& p) {
  int64_t const weights = kMaxSliceBytes / (p.k * size_of(p.activations.type));
  int64_t const sums = p.finishes ? kMaxSliceBytes / (std::max<int64_t>(p.m, 1) * int64_t(sizeof(float))) : weights;
  int64_t const rows = std::min({weights, sums, round_up(p.n, kSliceRows)});
  return rows / kSliceRows * kSliceRows;
}

/// Microseconds of the dense product [m, k] x [k, rows] with weights in L2: whole waves of tiles, and beside them the
/// activations that are read and the outputs that are written; sums in fp32 are counted where they are finished.
double product(Problem const& p, DeviceTraits const& device, GpuClass const& gpu, int64_t rows) {
  int64_t const tiles = layout::ceil_div(p.m, kTile) * layout::ceil_div(rows, kTile);
  double const waves = static_cast<double>(layout::ceil_div(tiles, device.sm_count));
  double const arithmetic = waves * 2.0 * kTile * kTile * static_cast<double>(p.k) / (gpu.dense_rate * 1e6);
  double const traffic = static_cast<double>(p.m * (p.k + (p.finishes ? 0 : rows))) * 2 / (gpu.dram_rate * 1e6);
  return std::max(arithmetic, traffic) + weight_only_costs().exposed * std::min(arithmetic, traffic);
}

}  // namespace

Cost predict(Problem const& p, DeviceTraits const& device, GpuClass const& gpu, int64_t slice) {
  double const m = static_cast<double>(p.m), n = static_cast<double>(p.n), k = static_cast<double>(p.k);
  int64_t const whole = p.n / slice, rest = p.n % slice, slices = layout::ceil_div(p.n, slice);
  Cost cost;
  cost.load =
      std::max(n * k * p.kind.weight_bits() / 8 / (gpu.dram_rate * 1e6), n * k * 2 / (gpu.dequantize_rate * 1e6));
  cost.compute = static_cast<double>(whole) * product(p, device, gpu, slice);
  if (rest > 0) cost.compute += product(p, device, gpu, rest);
  cost.fixed = kStart + static_cast<double>(slices) * kSliceLaunches;
  if (p.finishes)  // sums are written and read, outputs written
    cost.fixed += static_cast<double>(slices) * kCopyLaunch + m * n * (4 + 4 + 2) / (gpu.l2_rate * 1e6);
  if (p.gathers) cost.fixed += kCopyLaunch + m * k * (2 + 2) / (gpu.dram_rate * 1e6);
  cost.total = cost.load + cost.compute + cost.fixed;  // one after the other
  return cost;
}

namespace {

size_t workspace_bytes(Problem const& p, int64_t slice) {
  auto const part = [](int64_t bytes) { return static_cast<size_t>(round_up(bytes, 256)); };
  int64_t const row = p.k * size_of(p.activations.type);
  size_t bytes = part(slice * row);
  if (p.finishes) bytes += part(p.m * round_up(slice, 8) * int64_t(sizeof(float)));
  if (p.gathers) bytes += part(p.m * row);
  return bytes;
}

}  // namespace

bool fits(Problem const& problem) { return problem.kind.dequantises() && max_slice(problem) > 0; }

std::string tactic(Problem const& problem) { return problem.kind.prefix() + "dequantize_dense"; }

Candidate candidate(Problem const& problem, DeviceTraits const& device) {
  constexpr int64_t kChoices = 64;
  int64_t const n = problem.n, widest = max_slice(problem);
  int64_t const step = round_up(layout::ceil_div(widest, kChoices), kSliceRows);
  GpuClass const gpu = gpu_class(device).of_sms(device.sm_count);
  Candidate best;
  for (int64_t rows = widest; rows > 0; rows -= step) {
    int64_t const slice = std::min(rows, n);
    Cost const cost = predict(problem, device, gpu, slice);
    if (best.plan.slice == 0 || cost.total < best.cost.total) best.cost = cost, best.plan.slice = slice;
  }
  best.plan.tactic = tactic(problem);
  best.plan.dense = true;
  best.plan.workspace_bytes = workspace_bytes(problem, best.plan.slice);
  return best;
}

}  // namespace qcutlass::dense
