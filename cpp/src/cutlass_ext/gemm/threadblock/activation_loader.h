// Global -> shared copies of the activations of a stage.
#pragma once

#include "cutlass/arch/memory_sm80.h"
#include "cutlass/fast_math.h"
#include "cutlass/gemm/gemm.h"
#include "cutlass/layout/tensor_op_multiplicand_sm75.h"
#include "cutlass/transform/pitch_linear_thread_map.h"
#include "cutlass/transform/threadblock/regular_tile_access_iterator_tensor_op.h"

namespace cutlass::gemm::threadblock {

/// Copies row-major activations [m, k] into CUTLASS's XOR-swizzled shared memory, which ldmatrix then reads without
/// conflicts: to the product they are operand B, a column-major k x tokens matrix. Rows start at 16-byte boundaries and
/// k is a multiple of 8. (PredicatedTileAccessIterator is not used: it takes the ragged tile of k first, the packed
/// weights have theirs last.)
template <class Element, int kStageK, int kTokens, int kStages, int kThreads>
class ActivationLoader {
 public:
  static constexpr int kCrosswise = 64;  // elements of one swizzled row: 128 bytes, all banks once
  using Layout = layout::ColumnMajorTensorOpMultiplicandCrosswise<sizeof_bits<Element>::value, kCrosswise>;
  using ThreadMap = transform::PitchLinearWarpRakedThreadMap<layout::PitchLinearShape<kStageK, kTokens>, kThreads,
                                                             layout::PitchLinearShape<8, 4>, 8>;
  using SharedIterator =
      transform::threadblock::RegularTileAccessIterator<MatrixShape<kStageK, kTokens>, Element, Layout, 1, ThreadMap>;
  using TensorRef = TensorRef<Element, Layout>;
  static constexpr int kIterations = ThreadMap::Iterations::kCount;
  static constexpr int kElements = kStageK * kTokens;  // a stage

  static CUTLASS_DEVICE TensorRef reference(Element* storage) {
    return {storage, Layout::packed({kStageK * kStages, kTokens})};
  }

  /// Rows from first_row on of a matrix of `rows` rows, columns from first_k on.
  CUTLASS_DEVICE
  ActivationLoader(Element const* activations, int stride, int rows, int first_row, int first_k,
                   TensorRef const& shared)
      : shared_(shared, threadIdx.x) {
    auto const offset = ThreadMap::initial_offset(threadIdx.x);
    column_ = offset.contiguous();
    pointer_ = activations + int64_t(first_row) * stride + first_k + column_;
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < ThreadMap::Iterations::kStrided; ++s) {
      int const row = offset.strided() + s * ThreadMap::Delta::kStrided, last = rows - 1 - first_row;
      row_[s] = fast_min(row, last) * stride;
      exists_[s] = kRepeatRows || row <= last;
    }
  }

  /// Chunk `i` of this thread, 8 elements; zeros from column `k` on.
  CUTLASS_DEVICE void copy(int i, int k) {
    int const s = i / kContiguous, column = i % kContiguous * ThreadMap::Delta::kContiguous;
    shared_.set_iteration_index(i);
    arch::cp_async_zfill<16, arch::CacheOperation::Global>(shared_.get(), pointer_ + row_[s] + column,
                                                           exists_[s] && column_ + column < k);
  }

  CUTLASS_DEVICE void next_stage() {
    pointer_ += kStageK;
    shared_.add_tile_offset({1, 0});
  }

  /// After the last stage of the ring.
  CUTLASS_DEVICE void wrap() { shared_.add_tile_offset({-kStages, 0}); }

 private:
  static constexpr int kContiguous = ThreadMap::Iterations::kContiguous;
  /// Rows beyond the last, whose results are not stored: copies of it, which takes no predicate, or zeros, which takes
  /// no bandwidth. Small tiles are often mostly empty.
  static constexpr bool kRepeatRows = kTokens >= 64;

  SharedIterator shared_;
  Element const* pointer_;
  int row_[ThreadMap::Iterations::kStrided];  // elements from the block's first row
  bool exists_[ThreadMap::Iterations::kStrided];
  int column_;
};

}  // namespace cutlass::gemm::threadblock
