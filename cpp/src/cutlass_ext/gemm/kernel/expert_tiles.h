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
    for (int first = 0; first < spans(); first += 32 * kRun) {
      Run const run(*this, first + lane * kRun);
      int const own = run.template tiles<kTokens>();
      int before = own;  // tiles up to this lane's, then those before
      CUTLASS_PRAGMA_UNROLL
      for (int step = 1; step < 32; step *= 2) {
        int const other = __shfl_up_sync(~0u, before, step);
        before += lane >= step ? other : 0;
      }
      unsigned const beyond = __ballot_sync(~0u, before > number);
      if (beyond == 0) {
        number -= __shfl_sync(~0u, before, 31);
        continue;
      }
      ExpertTile found{};  // the owner's is right
      int left = number - (before - own), span = -1;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRun; ++i) {
        int const here = ExpertTiles::tiles<kTokens>(run.ends[i], run.ends[i + 1]);
        if (span < 0 && left < here) {
          span = first + lane * kRun + i;
          found.begin = run.ends[i] + left * kTokens;
          found.end = run.ends[i + 1];
        }
        left -= here;
      }
      found.expert = span == 0 || span > experts ? -1 : span - 1;
      int const owner = __ffs(int(beyond)) - 1;
      tile.expert = __shfl_sync(~0u, found.expert, owner);
      tile.begin = __shfl_sync(~0u, found.begin, owner);
      tile.end = __shfl_sync(~0u, found.end, owner);
      return true;
    }
    return false;
  }

  /// Tiles of kTokens rows that there are. To be called by whole warps.
  template <int kTokens>
  CUTLASS_DEVICE int count(int lane) const {
    int own = 0;
    for (int first = 0; first < spans(); first += 32 * kRun)
      own += Run(*this, first + lane * kRun).template tiles<kTokens>();
    return int(__reduce_add_sync(~0u, unsigned(own)));
  }

 private:
  /// Spans of rows that a lane looks at at once: all offsets of 254 experts are read in the time of one.
  static constexpr int kRun = 8;

  /// Where kRun spans from `first` on end, and before them the one before the first.
  struct Run {
    int ends[kRun + 1];

    CUTLASS_DEVICE Run(ExpertTiles const& all, int first) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i <= kRun; ++i) ends[i] = all.boundary(first + i);
    }
    template <int kTokens>
    CUTLASS_DEVICE int tiles() const {
      int sum = 0;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRun; ++i) sum += ExpertTiles::tiles<kTokens>(ends[i], ends[i + 1]);
      return sum;
    }
  };

  /// Those of the experts, and one of nobody before and after.
  CUTLASS_DEVICE int spans() const { return experts + 2; }

  /// Where span i begins, and the one before it ends.
  CUTLASS_DEVICE int boundary(int i) const {
    if (i == 0) return 0;
    return i >= spans() ? rows : fast_max(0, fast_min(offsets[i - 1], rows));
  }

  template <int kTokens>
  static CUTLASS_DEVICE int tiles(int begin, int end) {
    return end > begin ? (end - begin + kTokens - 1) / kTokens : 0;
  }
};

}  // namespace cutlass::gemm::kernel
