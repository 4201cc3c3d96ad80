// In which order a tactic adds the products of an output element along k: what decides the last bits of its sum.
//
// Read from the kernels. No number that a row of the output depends on belongs to another row, and which rows a tile
// has, or how many, changes neither instructions nor their order: a tactic whose split of k is given has one order.
//
// Several tactics have the same one where sums stay in the tensor cores' fp32 accumulators until the epilogue, which
// adds planes of slices, then shares of k, each from the first to the last (transposed_epilogue.h, reduce_partials):
//   - the multistage loop adds MMAs of step_k from the first k on; with several slices each takes its part of every
//     stage of slices * slice_k. Tiles, warps and the number of stages do not change this (mma_packed_multistage.h);
//   - the streaming loop likewise, slices taking stages of kStreamK in turns, unless it scales sums
//     (mma_packed_stream.h);
//   - wgmma's weight-only loop likewise, without slices. That its instructions add alike whatever their number of
//     tokens is documented nowhere, but they are of one architecture, and a test compares the bits of all
//     (test_batch_invariance.py).
// The weights are the same bits in all of these, by the same converters. Shares of k are cut between stages, so tactics
// that share the slices share the cuts.
//
// Integer sums are the same bits in any order; int8 products finish them by one formula with an explicit fused
// multiply and add (scaled_sums.h).
//
// A tactic has an order of its own where
//   - fp32 code adds scaled sums in the loop, whose multiplications and additions the compiler may fuse, or not, in
//     each kernel anew: streamed groups, blocks, groups of 4 by 8 bits, fp8 by wgmma;
//   - the epilogue has such code: GELU by tanh, and what multiplies sums by e2m1 weights' global scale.
#pragma once

#include "plan/footprint.h"

namespace qcutlass {

struct SumOrder {
  Mainloop mainloop = Mainloop::kStream;
  int slices = 0;
  int split_k = 1;
  int row = -1;  ///< of kTactics, where no other one sums alike

  constexpr bool operator==(SumOrder const& other) const {
    return mainloop == other.mainloop && slices == other.slices && split_k == other.split_k && row == other.row;
  }
};

/// The compiler is free to fuse operations of the epilogue in one way or another.
constexpr bool may_fuse(Activation activation) { return activation == Activation::kGeluTanh; }

/// Whether every tactic and every split give the same bits.
constexpr bool sums_exactly(Kind const& kind, Activation activation) {
  return kind.product() == kInt8 && !may_fuse(activation);
}

/// The order of a row of kTactics whose k is shared by `split_k` blocks in every tile.
constexpr SumOrder sum_order(Kind const& kind, Activation activation, int row, int split_k) {
  Tactic const& t = kTactics[row];
  bool const has_own = kind.is_promoted() || scales_sums(t, kind) ||
                       (is_wgmma(t.mainloop) && (kind.packing == Packing::kE2M1A16 || !kind.dequantises()));
  // Slices of wgmma's stages follow one another; shares of k are cut between stages.
  int const slices = t.mainloop == Mainloop::kWgmmaRs && split_k == 1 ? 1 : t.slices;
  return {t.mainloop, slices, split_k, has_own || may_fuse(activation) ? row : -1};
}

}  // namespace qcutlass
