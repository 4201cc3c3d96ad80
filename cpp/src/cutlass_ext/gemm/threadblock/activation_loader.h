// Global -> shared copies of the activations of a stage.
#pragma once

#include "cutlass/arch/memory_sm80.h"
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

  /// Rows from first_row on of a matrix of `rows` rows, `k` columns from first_k on.
  CUTLASS_DEVICE
  ActivationLoader(Element const* activations, int stride, int rows, int first_row, int first_k, int k,
                   TensorRef const& shared)
      : shared_(shared, threadIdx.x), row_step_(stride * ThreadMap::Delta::kStrided), rows_left_(rows - first_row) {
    auto const offset = ThreadMap::initial_offset(threadIdx.x);
    pointer_ = activations + int64_t(first_row + offset.strided()) * stride + first_k + offset.contiguous();
    clip(k);
  }

  /// Chunk `i` of this thread, 8 elements; zeros beyond the matrix.
  CUTLASS_DEVICE void copy(int i) {
    shared_.set_iteration_index(i);
    arch::cp_async_zfill<16, arch::CacheOperation::Global>(
        shared_.get(),
        pointer_ + int64_t(i / kContiguous) * row_step_ + i % kContiguous * ThreadMap::Delta::kContiguous,
        mask_ >> i & 1);
  }

  /// `k`: what is left of it.
  CUTLASS_DEVICE void next_stage(int k) {
    pointer_ += kStageK;
    if (k < kStageK) clip(k);
    shared_.add_tile_offset({1, 0});
  }

  /// After the last stage of the ring.
  CUTLASS_DEVICE void wrap() { shared_.add_tile_offset({-kStages, 0}); }

 private:
  static constexpr int kContiguous = ThreadMap::Iterations::kContiguous;

  CUTLASS_DEVICE void clip(int k) {
    auto const offset = ThreadMap::initial_offset(threadIdx.x);
    mask_ = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kIterations; ++i)
      if (offset.strided() + i / kContiguous * ThreadMap::Delta::kStrided < rows_left_ &&
          offset.contiguous() + i % kContiguous * ThreadMap::Delta::kContiguous < k)
        mask_ |= 1u << i;
  }

  SharedIterator shared_;
  Element const* pointer_;
  int row_step_, rows_left_;
  unsigned mask_;  // bit i: chunk i exists
};

}  // namespace cutlass::gemm::threadblock
