// In which order the blocks and warpgroups of wgmma kernels work, and how many together. The kernels, selection and the
// cost model all use these functions.
#pragma once

#include "plan/tactics.h"

namespace qcutlass {

/// Largest cluster of wgmma kernels; see may_cluster.
inline constexpr int kMostWgmmaCluster = 6;

/// Batch of kWgmmaRs: k steps from one wait for MMAs to the next. Two batches' operands A must fit the registers beside
/// the sums, so tiles of 256 channels and more than 64 tokens have short batches. Up to 192 tokens a stage has at least
/// two batches, since its MMAs are too short to hide the look-up of fine groups' scales. 4-by-8-bit products take all
/// steps of a stage, as the sums of a group leave the MMAs after it.
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

/// Tiles of tokens (or pairs of them) that wgmma kernels take side by side before the next tile of channels. With four
/// a wave of tiles reads the least. It is more if the last group would have one or two tiles, which would read all
/// weights again for little work.
constexpr int wgmma_side(int64_t token_tiles) {
  int side = 4;
  while (side < token_tiles && (token_tiles - 1) % side < 2) ++side;
  return side < token_tiles ? side : int(token_tiles);
}

}  // namespace qcutlass
