// Which configurations, and which plans, can run a product.
#pragma once

#include "plan/tactics.h"

namespace qcutlass {

/// Whether there is a kernel, be it one that fits no GPU.
bool has_kernel(Problem const& problem, Tactic const& tactic);

/// Blocks of channels that are quantised together lie within a tile, and so do gates with what they multiply.
bool fits_output(Problem const& problem, Tactic const& tactic);

bool splittable(Problem const& problem, Tactic const& tactic, int split_k);

/// Whether the kernel's counters and grids hold all tiles.
bool fits_grid(Problem const& problem, Tactic const& tactic);

/// Throws InvalidArgument unless select makes such a plan for such a product on such a GPU: kernels take for granted
/// what it has seen to. The plan is one of a kernel.
void check_plan(Problem const& problem, DeviceTraits const& device, Plan const& plan);

}  // namespace qcutlass
