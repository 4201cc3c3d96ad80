// Where the channels of gated experts lie. Weights have all gates, then all channels that these multiply; in a tile
// they take turns, strip by strip, so that a thread has both of a pair, and what products leave is as if weights had
// them so.
#pragma once

#include "cutlass/cutlass.h"
#include "qcutlass/layout.h"

namespace cutlass::layout {

/// Of products without halves: every channel lies where it is.
struct NoHalves {
  CUTLASS_HOST_DEVICE int strip(int index) const { return index; }
};

/// Strip 2 i + j of a product is strip i * pair + j * half of the weights: of halves of n strips 1 and n, of weights as
/// they are 2 and 1. (Without a branch: kernels for few rows compute it for what they have just begun to load.)
struct GateHalves {
  static constexpr int kStripChannels = qcutlass::layout::kTileN;
  int pair = 2, half = 1;

  CUTLASS_HOST_DEVICE int strip(int index) const { return (index >> 1) * pair + (index & 1) * half; }
  CUTLASS_HOST_DEVICE int channel(int index) const {
    return strip(index / kStripChannels) * kStripChannels + index % kStripChannels;
  }
};

}  // namespace cutlass::layout
