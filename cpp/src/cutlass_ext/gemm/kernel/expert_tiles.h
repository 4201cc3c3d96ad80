// Which rows of which expert a block multiplies: found on the device from the experts' offsets.
#pragma once

#include "cutlass/fast_math.h"

namespace cutlass::gemm::kernel {

/// Rows that lie side by side and belong to one expert, or to nobody.
struct ExpertTile {
  int expert;      ///< -1: nobody's, before or after those of all experts
  int begin, end;  ///< end: of the expert's rows, which may lie beyond the tile
};

/// The experts' rows, cut into tiles expert by expert. Offsets are data that nothing has checked: they are clamped to
/// the rows there are, and experts whose offsets decrease have none.
struct ExpertTiles {
  int const* offsets;  ///< [experts + 1]
  int experts, rows;

  /// The tile of kTokens rows with this number; false if there are fewer. To be called by whole warps.
  template <int kTokens>
  CUTLASS_DEVICE bool find(int number, int lane, ExpertTile& tile) const {
    int const own = of_lane<kTokens>(lane), share = spans_a_lane();
    int begin, before = own;  // tiles up to this lane's, then those before
    CUTLASS_PRAGMA_UNROLL
    for (int step = 1; step < 32; step *= 2) {
      int const other = __shfl_up_sync(0xffffffff, before, step);
      before += lane >= step ? other : 0;
    }
    unsigned const beyond = __ballot_sync(0xffffffff, before > number);
    if (beyond == 0) return false;
    before -= own;
    int const owner = __ffs(int(beyond)) - 1;
    number -= __shfl_sync(0xffffffff, before, owner);
    int span = owner * share;
    int end = boundary(span + 1);
    for (begin = boundary(span); number >= tiles<kTokens>(begin, end); end = boundary(++span + 1)) {
      number -= tiles<kTokens>(begin, end);
      begin = end;
    }
    tile = {span == 0 || span > experts ? -1 : span - 1, begin + number * kTokens, end};
    return true;
  }

  /// Tiles of kTokens rows that there are. To be called by whole warps.
  template <int kTokens>
  CUTLASS_DEVICE int count(int lane) const {
    return int(__reduce_add_sync(0xffffffff, unsigned(of_lane<kTokens>(lane))));
  }

 private:
  /// Spans of rows are those of the experts, and one of nobody before and after. A lane counts the tiles of some.
  CUTLASS_DEVICE int spans_a_lane() const { return (experts + 2 + 31) / 32; }

  template <int kTokens>
  CUTLASS_DEVICE int of_lane(int lane) const {
    int const spans = experts + 2, share = spans_a_lane();
    int own = 0, begin = boundary(fast_min(lane * share, spans));
#pragma unroll 4
    for (int i = 0; i < share; ++i) {
      int const end = boundary(fast_min(lane * share + i + 1, spans));
      own += tiles<kTokens>(begin, end);
      begin = end;
    }
    return own;
  }

  /// Where span i begins, and the one before it ends.
  CUTLASS_DEVICE int boundary(int i) const {
    if (i == 0) return 0;
    return i >= experts + 2 ? rows : fast_max(0, fast_min(offsets[i - 1], rows));
  }

  template <int kTokens>
  static CUTLASS_DEVICE int tiles(int begin, int end) {
    return end > begin ? (end - begin + kTokens - 1) / kTokens : 0;
  }
};

}  // namespace cutlass::gemm::kernel
