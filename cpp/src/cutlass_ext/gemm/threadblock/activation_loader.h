// Global -> shared copies of the activations of a stage.
#pragma once

#include "cutlass/arch/memory_sm80.h"
#include "cutlass/fast_math.h"
#include "cutlass/gemm/gemm.h"

namespace cutlass::gemm::threadblock {

/// Copies row-major activations [m, k] to where ldmatrix reads them without bank conflicts: to the product they are
/// operand B, a column-major k x tokens matrix. Rows start at 16-byte boundaries and are whole chunks of 16 bytes. A
/// stage in shared memory is [slice][tokens][128 bytes], and the 16-byte chunks of each row of 128 bytes, which cover
/// all banks once, are permuted as by CUTLASS's ColumnMajorTensorOpMultiplicandCrosswise. (CUTLASS's iterators are not
/// used: the predicated one takes the ragged tile of k first, the packed weights have theirs last, and the position in
/// the ring is a variable to them, here it is a constant.)
template <class Element, int kStageK, int kTokens, int kThreads>
class ActivationLoader {
 public:
  static constexpr int kRowBytes = 128, kRowK = kRowBytes / int(sizeof(Element));
  static constexpr int kSliceBytes = kTokens * kRowBytes;
  static constexpr int kStageBytes = kStageK / kRowK * kSliceBytes;

  /// Where chunk `chunk` of row `row` lies within the row.
  static CUTLASS_DEVICE int swizzled(int row, int chunk) { return (chunk ^ row % 8) * 16; }

  /// Rows from first_row on of a matrix of `rows` rows, columns from first_k to end_k. `source`: where a row lies.
  template <class Source>
  CUTLASS_DEVICE ActivationLoader(Element const* activations, int stride, int rows, int first_row, int first_k,
                                  int end_k, Source const& source) {
    int const thread_row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks, column = first_k + chunk * kChunkK;
    place_ = thread_row * kRowBytes + swizzled(thread_row, chunk);
    left_ = end_k - column;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsAThread; ++i) {
      int const row = first_row + thread_row + i * kRowStep;
      pointer_[i] = activations + int64_t(source(unsigned(row) % unsigned(rows))) * stride + column;
      exists_[i] = kRepeatRows || row < rows;
    }
  }

  /// The stage that lies `ahead` of the next one; zeros beyond the end.
  CUTLASS_DEVICE void copy(uint8_t* stage, int ahead) const {
    CUTLASS_PRAGMA_UNROLL
    for (int slice = 0; slice < kStageK / kRowK; ++slice) {
      bool const inside = left_ > ahead * kStageK + slice * kRowK;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRowsAThread; ++i)
        arch::cp_async_zfill<16, arch::CacheOperation::Global>(
            stage + place_ + slice * kSliceBytes + i * kRowStep * kRowBytes,
            pointer_[i] + ahead * kStageK + slice * kRowK, inside && exists_[i]);
    }
  }

  CUTLASS_DEVICE void advance(int stages) {
    left_ -= stages * kStageK;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowsAThread; ++i) pointer_[i] += stages * kStageK;
  }

 private:
  static constexpr int kChunks = kRowBytes / 16;  // a row
  static constexpr int kChunkK = 16 / int(sizeof(Element));
  static constexpr int kRowStep = kThreads / kChunks;
  static constexpr int kRowsAThread = kTokens / kRowStep;
  static_assert(kTokens % kRowStep == 0, "every thread copies the same number of rows");
  static_assert(kRowStep % 8 == 0, "a thread's rows have the same permutation");
  /// Rows beyond the last, whose results are not stored: copies of the first ones, which takes no predicate, or zeros,
  /// which takes no bandwidth. Small tiles are often mostly empty. (Copies of a single row would all come from one
  /// slice of L2, which at 96 rows made a kernel 1.5 times slower than at 128.)
  static constexpr bool kRepeatRows = kTokens >= 64;

  Element const* pointer_[kRowsAThread];  // one a row: advancing them once a round is cheaper than adding offsets
  bool exists_[kRowsAThread];
  int left_;   // columns from this thread's first one to the end
  int place_;  // of this thread's first chunk in a stage
};

}  // namespace cutlass::gemm::threadblock
