// The expected time of a product: a pure function of waves, bytes, issue slots and fixed costs. Its constants are
// those of gpu_class.h and costs.h.
#pragma once

#include "plan/costs.h"
#include "plan/gpu_class.h"
#include "plan/tactics.h"

namespace qcutlass {

/// Prediction for one configuration and split.
Cost predict(Problem const& problem, DeviceTraits const& device, Tactic const& tactic, int split_k, bool cluster);

/// The same with other constants and rates.
Cost predict(Problem const& problem, DeviceTraits const& device, Tactic const& tactic, int split_k, bool cluster,
             ProductCosts const& costs, GpuClass const& gpu);

/// An estimate of the blocks of a configuration that an SM holds at once, by its shared memory, warps and launch
/// bounds; 0 if not even one fits.
int resident_blocks(Problem const& problem, DeviceTraits const& device, Tactic const& tactic);

}  // namespace qcutlass
