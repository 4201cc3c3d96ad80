#include "plan/fit.h"

#include "plan/cost_model.h"
#include "plan/gpu_class.h"
#include "plan/shared_tiles.h"
#include "qcutlass/error.h"

namespace qcutlass {

bool has_kernel(Problem const& problem, Tactic const& t) {
  return problem.grouped ? is_compiled_for_experts(t, problem.kind) : t.serves(problem.kind);
}

bool fits_output(Problem const& problem, Tactic const& t) {
  if (problem.gated && t.channels % (2 * layout::kTileN) != 0) return false;
  if (problem.loose_residual && problem.kind.product() == kFourByEight && !takes_any_residual(t.tokens)) return false;
  return problem.output.granularity != Granularity::kBlock || t.channels % problem.output.group == 0;
}

bool splittable(Problem const& problem, Tactic const& t, int split_k) {
  if (problem.grouped) return split_k == 1;
  constexpr int kMostShares = 65535;  // the grid's third dimension
  return split_k >= 1 && split_k <= kMostShares &&
         split_k <= layout::ceil_div(problem.k, t.stage_k(problem.kind.packing));
}

/// Tiles of tokens, eight by eight (see the kernels' swizzle), are the grid's second dimension, which has 16 bits.
/// Those of experts are counted in 31; wgmma's boxes of activations are whole where a tile ends before row 2^30.
bool fits_grid(Problem const& problem, Tactic const& t) {
  constexpr int64_t kMostRows = 65535, kSwizzled = 8, kMostTiles = int64_t(1) << 26,
                    kMostBlocks = (int64_t(1) << 31) - 1, kWholeBoxes = int64_t(1) << 30;
  if (problem.grouped && is_wgmma(t.mainloop) && problem.m > kWholeBoxes - t.tokens) return false;
  if (problem.grouped)
    return most_token_tiles(problem.m, problem.groups, t) * layout::ceil_div(problem.n, t.channels) <= kMostBlocks;
  if (is_wgmma(t.mainloop)) return tiles(problem, t) <= kMostTiles;
  return layout::ceil_div(problem.m, t.tokens) <= kMostRows * kSwizzled;
}

void check_plan(Problem const& problem, DeviceTraits const& device, Plan const& plan) {
  Tactic const& t = kTactics[plan.row];
  auto const fits = [&] {
    if (!has_kernel(problem, t) || !fits_output(problem, t) || !fits_grid(problem, t)) return false;
    if (!splittable(problem, t, plan.split_k) || resident_blocks(problem, device, t) == 0) return false;
    if (plan.cluster && plan.split_k > kMaxCluster) return false;
    if (plan.cluster && is_wgmma(t.mainloop) && !may_cluster(t, problem.kind, plan.split_k)) return false;
    SharedTiles const shared(problem, device, t, plan.split_k);
    return plan.shared_channel == shared.first_channel && plan.shared_token == shared.first_token &&
           !(plan.cluster && shared.only_last() && !shared.fits_clusters(device.sm_count, plan.split_k));
  };
  if (!fits())
    throw InvalidArgument("plan: '" + plan.tactic + "' with split_k = " + std::to_string(plan.split_k) +
                          " was made for another product, or for another GPU; call select for this one");
}

}  // namespace qcutlass
