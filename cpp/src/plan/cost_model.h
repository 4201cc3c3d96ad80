// What a product is expected to take: a pure function of waves, bytes, issue slots and fixed costs. Its constants are
// those of gpu_class.h.
#pragma once

#include "plan/tactics.h"
#include "qcutlass/gemm.h"

namespace qcutlass {

/// Prediction for one configuration and split.
Cost predict(GemmArguments const& arguments, DeviceTraits const& device, Tactic const& tactic, int split_k,
             bool cluster);

/// Blocks of a configuration that an SM holds at once; 0 if not even one fits.
int resident_blocks(GemmArguments const& arguments, DeviceTraits const& device, Tactic const& tactic);

}  // namespace qcutlass
