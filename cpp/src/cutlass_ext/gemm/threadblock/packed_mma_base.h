// The tiles of a mainloop of warp-level MMAs, as CUTLASS's MmaBase has them: the block's, a warp's, and the
// instructions that a warp's tile takes.
#pragma once

#include "cutlass_ext/gemm/threadblock/packed_mma.h"

namespace cutlass::gemm::threadblock {

/// Shape: channels x tokens x k of a stage. WarpShape: channels x tokens x a slice of k; Shape::kK / WarpShape::kK
/// warps share a warp tile, one slice of each stage a warp. The epilogue adds their partial sums.
template <class Shape_, class WarpShape_, int Stages_, class Element_, qcutlass::Packing kPacking_,
          qcutlass::ScaleMode kMode_, bool kGathers = false>
class PackedMmaBase {
 public:
  using Shape = Shape_;
  using WarpShape = WarpShape_;
  using Element = Element_;
  static constexpr int kStages = Stages_;
  static constexpr qcutlass::ScaleMode kMode = kMode_;
  using Traits = PackedMma<Element, kPacking_, kMode, kGathers>;
  using Arguments = typename Traits::Arguments;
  using Accumulator = typename Traits::Accumulator;
  using LayoutA = typename Traits::LayoutA;
  using ArchMma = typename Traits::ArchMma;

  static constexpr int kWarpsM = Shape::kM / WarpShape::kM;
  static constexpr int kWarpsN = Shape::kN / WarpShape::kN;
  static constexpr int kSlices = Shape::kK / WarpShape::kK;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN * kSlices;
  static constexpr int kStrips = WarpShape::kM / 16;  // per warp
  static constexpr int kColumns = WarpShape::kN / 8;  // n8 blocks per warp
  static constexpr int kSteps = WarpShape::kK / Traits::kStepK;

  /// Whether sums may have to be computed again; main loops that do this override it.
  static constexpr bool kMayBeOdd = false;

  using FragmentC = Array<Accumulator, kStrips * kColumns * 4>;  // [column][strip], as CUTLASS orders accumulators
};

}  // namespace cutlass::gemm::threadblock
