// Which tiles of a launch have blocks that share their k extent.
#pragma once

#include <algorithm>

#include "plan/footprint.h"

namespace qcutlass {

/// The tiles of a product whose k is shared: a rectangle at the end of channels and tokens. If the persistent blocks of
/// a wgmma kernel take several waves of tiles, these are the tiles that are left after the full waves; otherwise all
/// tiles. In the order of tiles (see TileOrder) they are the last tiles of channels of the last group of tiles of
/// tokens. Batch-invariant products (one order of sums) share all tiles, however many there are.
struct SharedTiles {
  bool is_one_order;
  int64_t tiles;                               ///< of the product
  int64_t shared;                              ///< of these; none if whole waves leave nothing over
  int64_t first_channel = 0, first_token = 0;  ///< of the shared ones

  SharedTiles(Problem const& p, DeviceTraits const& device, Tactic const& t, int split_k)
      : is_one_order(p.one_order), tiles(qcutlass::tiles(p, t)), shared(tiles) {
    if (split_k == 1 || !persists(device, t)) return;
    int64_t const channel_tiles = layout::ceil_div(p.n, t.channels), token_tiles = layout::ceil_div(p.m, t.tokens),
                  side = (token_tiles - 1) % wgmma_side(token_tiles) + 1,
                  rows = std::min(layout::ceil_div(tiles % device.sm_count, side), channel_tiles);
    shared = rows * side;
    first_channel = (channel_tiles - rows) * t.channels;
    first_token = (token_tiles - side) * t.tokens;
  }

  /// Whether other tiles, whose k is not shared, come before.
  bool only_last() const { return shared < tiles; }

  /// If only_last(): whether the blocks that share a tile may be a cluster. The numbers of SMs and of whole tiles must
  /// be multiples of the cluster's size, so that a block's rank is the number of its share, and a block has at most one
  /// share, its last item.
  bool fits_clusters(int sm_count, int split_k) const {
    return sm_count % split_k == 0 && (tiles - shared) % split_k == 0 && shared * split_k <= sm_count;
  }

  /// If only_last(): the stages that the busiest SM works on, with `stages` a tile. Blocks take whole tiles in turn,
  /// then shares. Either the first block has the most stages, or the first one that takes a share after the last whole
  /// tile.
  double busiest(int sm_count, int split_k, int64_t stages) const {
    int64_t const whole = tiles - shared, items = whole + shared * split_k, begins = whole % sm_count;
    auto const work = [&](int64_t block) {
      int64_t const own = layout::ceil_div(whole - block, sm_count), all = layout::ceil_div(items - block, sm_count);
      return static_cast<double>(own * stages + (all - own) * layout::ceil_div(stages, split_k));
    };
    return std::max(work(0), work(begins));
  }

 private:
  bool persists(DeviceTraits const& device, Tactic const& t) const {
    return is_wgmma(t.mainloop) && tiles > device.sm_count && !is_one_order;
  }
};

}  // namespace qcutlass
