// Which block of a cluster that shares k finishes which parts of a tile, and where it gets the other blocks' sums.
#pragma once

#include "cutlass/cutlass.h"

namespace cutlass::epilogue::threadblock {

/// A tile of kParts parts: each block finishes a run of them.
template <int kParts>
struct ClusterShares {
  static CUTLASS_DEVICE int owner_of(int part, int blocks) { return blocks == 1 ? 0 : part * blocks / kParts; }
  static CUTLASS_HOST_DEVICE constexpr int most_parts(int blocks) { return (kParts + blocks - 1) / blocks; }

  static CUTLASS_DEVICE int first_part(int owner, int blocks) { return (owner * kParts + blocks - 1) / blocks; }

  /// Slot of block `owner` for what another block, `source`, has of a part.
  static CUTLASS_DEVICE int slot_of(int part, int owner, int source, int blocks) {
    return (source - (source > owner)) * most_parts(blocks) + part - first_part(owner, blocks);
  }
};

}  // namespace cutlass::epilogue::threadblock
