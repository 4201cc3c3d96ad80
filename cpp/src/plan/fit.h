// Which configurations, and which plans, can run a product.
#pragma once

#include "plan/tactics.h"

namespace qcutlass {

/// Whether a kernel is compiled for such a product, whether or not it fits a GPU.
bool has_kernel(Problem const& problem, Tactic const& tactic);

/// Whether the tile suits the output: blocks of channels that are quantised together lie within a tile, and so do gates
/// and the channels that they multiply; and the kernel takes the residual's alignment.
bool fits_output(Problem const& problem, Tactic const& tactic);

/// Whether so many blocks may share k: each needs at least one stage. Products of experts do not share it.
bool splittable(Problem const& problem, Tactic const& tactic, int split_k);

/// Whether the kernel's counters and grids hold all tiles.
bool fits_grid(Problem const& problem, Tactic const& tactic);

/// Throws InvalidArgument unless select could have made this plan for this product and GPU; kernels rely on the
/// conditions that select checks. Not for dense plans.
void check_plan(Problem const& problem, DeviceTraits const& device, Plan const& plan);

}  // namespace qcutlass
