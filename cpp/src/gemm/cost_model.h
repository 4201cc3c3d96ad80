// What a launch is expected to cost: a printable model of waves, bytes and tensor-core issue slots.
#pragma once

#include "gemm/tactics.h"
#include "qcutlass/gemm.h"

namespace qcutlass {

/// Parts of a prediction, microseconds.
struct Cost {
  double load = 0;     ///< bytes through DRAM, L2 and the copy rings
  double compute = 0;  ///< issue slots of MMAs and dequantisation
  double fixed = 0;    ///< launch, prologue, epilogue, and the second kernel of a split
  double total = 0;
};

Cost predict(GemmArguments const& arguments, DeviceTraits const& device, Tactic const& tactic, int split_k,
             bool cluster);

/// Blocks of a configuration that an SM holds at once; 0 if not even one fits.
int resident_blocks(Tactic const& tactic, Packing packing, ScaleMode mode, DeviceTraits const& device);

}  // namespace qcutlass
