// Passes the transposed accumulators (channels x tokens) of the main loops on row-major, [token][channel].
//
// This goes through shared memory, some token columns at a time. Warps write their fragments transposed, each slice of
// k into a plane of its own. Then each thread adds the planes in order, for 8 consecutive channels of a token. Blocks
// of a cluster that share k also add each other's planes; each block does so for its share of the tokens.
#pragma once

#include "cutlass/epilogue/warp/fragment_iterator_tensor_op.h"
#include "cutlass/layout/matrix.h"
#include "cutlass_ext/arch/cluster.h"

namespace cutlass::epilogue::threadblock {

/// kBlocks: n8 token blocks a warp transposes between two barriers. kRow: fp32 words from one token's row to the next
/// (epilogue_row in plan/footprint.h).
template <class Mma, int kBlocks, int kRow>
class TransposedEpilogue {
 public:
  using Shape = typename Mma::Shape;
  using WarpShape = typename Mma::WarpShape;
  using Sum = typename Mma::Accumulator;
  static_assert(sizeof(Sum) == 4);
  static constexpr int kTokens = Mma::kWarpsN * kBlocks * 8;  // rows of a pass
  static constexpr int kPasses = Mma::kColumns / kBlocks;
  static constexpr int kVector = 8;
  static constexpr int kVectors = Shape::kM / kVector;  // a row
  static_assert(kRow % 32 == 4, "lane (g, t) then writes bank 8t + g: no conflicts");

  struct SharedStorage {
    alignas(16) Sum sums[Mma::kSlices][kTokens][kRow];
  };

  CUTLASS_DEVICE TransposedEpilogue(SharedStorage& storage, int thread, int warp, int lane)
      : storage_(storage), thread_(thread), warp_(warp), lane_(lane) {}

  /// First of the 8 channels, within the block's tile, that this thread passes on.
  CUTLASS_DEVICE int channel() const { return thread_ % kVectors * kVector; }

  /// Calls output(token within the tile, sums of 8 channels) for every token of the tile. If `blocks` > 1 blocks of a
  /// cluster share k, it does so for this block's share of the tokens, with the sums of all blocks. Otherwise it calls
  /// output for kTogether rows of a thread at a time, unrolled, for output operators with much work.
  template <int kTogether = 1, class Output>
  CUTLASS_DEVICE void run(typename Mma::FragmentC const& accumulators, int blocks, int rank, Output const& output) {
    CUTLASS_PRAGMA_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      if (pass > 0) blocks > 1 ? arch::cluster_sync() : __syncthreads();
      write(accumulators, pass);
      __syncthreads();
      if (blocks > 1) {  // one plane a block is what the others read: their memory is far
        if constexpr (Mma::kSlices > 1) fold_slices();
        arch::cluster_sync();
      }
      auto const token = [pass](int row) {
        return row / (kBlocks * 8) * WarpShape::kN + pass * kBlocks * 8 + row % (kBlocks * 8);
      };
      if constexpr (kTogether > 1 && kTokens % (kRowStep * kTogether) == 0) {
        if (blocks == 1) {
          for (int row = first_row(); row < kTokens; row += kRowStep * kTogether) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kTogether; ++i) {
              Sum sum[kVector] = {};
              add_slices(sum, row + i * kRowStep);
              output(token(row + i * kRowStep), sum);
            }
          }
          continue;
        }
      }
      for (int row = first_row() * blocks + rank; row < kTokens; row += kRowStep * blocks) {
        Sum sum[kVector] = {};
        if (blocks > 1)
          for (int block = 0; block < blocks; ++block) add(sum, load(row, 0, block));
        else
          add_slices(sum, row);
        output(token(row), sum);
      }
    }
    if (blocks > 1) arch::cluster_sync();  // the others may still be reading this block's memory
  }

 private:
  static constexpr int kRowStep = Mma::kThreads / kVectors;

  /// A thread stays with its channels and goes from row to row; threads that make no whole row have none.
  CUTLASS_DEVICE int first_row() const { return thread_ < kRowStep * kVectors ? thread_ / kVectors : kTokens; }

  /// FragmentIteratorTensorOp's column-major form yields one n8 block at a time: fragment[i * kOctets + m] is the sum
  /// of channel 8m + g and token 2t + i. CUTLASS has no store iterator to go with it.
  using FragmentIterator =
      warp::FragmentIteratorTensorOp<WarpShape, gemm::GemmShape<16, 8, 16>, Sum, Array<Sum, 4>, layout::ColumnMajor>;

  CUTLASS_DEVICE void write(typename Mma::FragmentC const& accumulators, int pass) {
    constexpr int kOctets = WarpShape::kM / 8;
    int const warp_n = warp_ % Mma::kWarpsN, warp_m = warp_ / Mma::kWarpsN % Mma::kWarpsM;
    int const slice = warp_ / (Mma::kWarpsN * Mma::kWarpsM);
    FragmentIterator fragments(accumulators);
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      typename FragmentIterator::Fragment fragment;
      fragments.load(fragment, pass * kBlocks + block);
      Sum* row =
          &storage_.sums[slice][(warp_n * kBlocks + block) * 8 + lane_ % 4 * 2][warp_m * WarpShape::kM + lane_ / 4];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int m = 0; m < kOctets; ++m) row[i * kRow + m * 8] = fragment[i * kOctets + m];
      }
    }
  }

  using Half = Array<Sum, kVector / 2>;  // one access of 16 bytes
  struct Vector {
    Half halves[2];
  };

  /// This thread's 8 channels of a row of a slice's plane; of block `rank` of the cluster if that is not negative.
  CUTLASS_DEVICE Vector load(int row, int slice, int rank = -1) const {
    Sum const* p = &storage_.sums[slice][row][channel()];
    if (rank >= 0) return {arch::load_from_cluster(p, rank), arch::load_from_cluster(p + 4, rank)};
    uint4 const words[2] = {reinterpret_cast<uint4 const*>(p)[0], reinterpret_cast<uint4 const*>(p)[1]};
    return reinterpret_cast<Vector const&>(words);
  }

  static CUTLASS_DEVICE void add(Sum (&sum)[kVector], Vector const& part) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) sum[i] += part.halves[i / 4][i % 4];
  }

  CUTLASS_DEVICE void add_slices(Sum (&sum)[kVector], int row) const {
    CUTLASS_PRAGMA_UNROLL
    for (int slice = 0; slice < Mma::kSlices; ++slice) add(sum, load(row, slice));
  }

  /// Leaves the sum of all planes in the first.
  CUTLASS_DEVICE void fold_slices() {
    for (int row = first_row(); row < kTokens; row += kRowStep) {
      alignas(16) Sum sum[kVector] = {};
      add_slices(sum, row);
      uint4* p = reinterpret_cast<uint4*>(&storage_.sums[0][row][channel()]);
      p[0] = reinterpret_cast<uint4 const*>(sum)[0];
      p[1] = reinterpret_cast<uint4 const*>(sum)[1];
    }
  }

  SharedStorage& storage_;
  int const thread_, warp_, lane_;
};

}  // namespace cutlass::epilogue::threadblock
