// In which order, and how many together, the blocks and warpgroups of wgmma kernels work. Kernels, selection and the
// cost model have it from here.
#pragma once

#include "plan/tactics.h"

namespace qcutlass {

/// Largest cluster of wgmma kernels; see may_cluster.
inline constexpr int kMostWgmmaCluster = 6;

/// k steps from one wait of kWgmmaRs for its MMAs to the next: no more than two sets of their operands A leave
/// registers for beside the sums; and two batches of a stage where MMAs are too short to hide looking up fine groups'
/// scales. All steps of a stage where the sums of a group leave the MMAs.
constexpr int wgmma_batch(Tactic const& t, Packing packing) {
  if (packing == Packing::kW4A8) return t.stage_k(packing) / step_k(packing);
  if (t.channels == 256 && t.tokens > 64) return t.tokens > 96 ? 1 : 2;
  return t.slices == 1 && t.tokens <= 192 ? 2 : 4;
}
/// Whether its warpgroups take turns.
constexpr bool wgmma_turns(Tactic const& t) { return t.channels == 128 && t.tokens == 128; }

/// Blocks of kWgmmaSs that share weights, neighbours along the tokens: pairs, where few of them are without a
/// neighbour.
constexpr int wgmma_sharers(Mainloop mainloop, int64_t token_tiles, int split_k) {
  constexpr int64_t kMany = 8;
  return mainloop == Mainloop::kWgmmaSs && split_k == 1 && (token_tiles % 2 == 0 || token_tiles > kMany) ? 2 : 1;
}

/// Tiles of tokens of wgmma kernels side by side, or pairs of them, before the next tile of channels: four, with which
/// a wave of tiles reads the least; or some more, if a last group of one or two would read all weights again for
/// little.
constexpr int wgmma_side(int64_t token_tiles) {
  int side = 4;
  while (side < token_tiles && (token_tiles - 1) % side < 2) ++side;
  return side < token_tiles ? side : int(token_tiles);
}

}  // namespace qcutlass
