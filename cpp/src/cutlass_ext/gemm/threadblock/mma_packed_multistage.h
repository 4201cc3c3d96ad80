// The multistage mainloop with packed low-bit weights as operand A: MmaMultistage's skeleton (cp.async ring, ldmatrix,
// one barrier a stage, warps sliced along k) with three differences:
//   - operand A needs one 128-bit shared load for several k16 steps, and is dequantised in registers between the MMAs;
//   - scales and zeros travel in the ring as a third operand;
//   - the ragged end of k lies in the last stage, as in the packed tensor.
#pragma once

#include "cutlass/gemm/warp/default_mma_tensor_op.h"
#include "cutlass_ext/gemm/threadblock/activation_loader.h"
#include "cutlass_ext/gemm/threadblock/packed_weight_loader.h"
#include "cutlass_ext/gemm/threadblock/scale_loader.h"
#include "cutlass_ext/gemm/warp/group_scales.h"

namespace cutlass::gemm::threadblock {

/// Shape: channels x tokens x k of a stage. WarpShape: channels x tokens x 64; Shape::kK / 64 warps share a warp tile,
/// one 64-k slice of each stage a warp. Their partial sums are added by the epilogue.
template <class Shape_, class WarpShape_, int Stages_, class Element_, qcutlass::Packing kPacking_,
          qcutlass::ScaleMode kMode_>
class MmaPackedMultistage {
 public:
  using Shape = Shape_;
  using WarpShape = WarpShape_;
  using Element = Element_;
  static constexpr int kStages = Stages_;
  static constexpr qcutlass::Packing kPacking = kPacking_;
  static constexpr qcutlass::ScaleMode kMode = kMode_;

  static constexpr int kWarpsM = Shape::kM / WarpShape::kM;
  static constexpr int kWarpsN = Shape::kN / WarpShape::kN;
  static constexpr int kSlices = Shape::kK / WarpShape::kK;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN * kSlices;
  static constexpr int kStrips = WarpShape::kM / 16;  // per warp
  static constexpr int kColumns = WarpShape::kN / 8;  // n8 blocks per warp
  static constexpr int kSteps = WarpShape::kK / qcutlass::kStepK;
  static_assert(WarpShape::kK == qcutlass::kSliceK);

  using LayoutA = layout::PackedWeights<kPacking>;
  static constexpr int kStageTiles = Shape::kK / LayoutA::kTileK;
  static constexpr int kSliceTiles = kStageTiles / kSlices;
  using WeightLoader = PackedWeightLoader<LayoutA, Shape::kM / 16, kStageTiles, kThreads>;

  using TokenLoader = ActivationLoader<Element, Shape::kK, Shape::kN, kStages, kThreads>;

  static constexpr int kSliceRows = qcutlass::scale_rows(kMode);
  static constexpr int kRowSteps = kSteps / kSliceRows;  // k16 steps that one row of scales serves
  static constexpr int kRowK = WarpShape::kK / kSliceRows;
  /// Measured on sm_90: the branch ends a scheduling region, which helps where registers are scarce (-4 %), and hurts
  /// elsewhere.
  static constexpr bool kSkipIdleWarps = WarpShape::kN >= 128;
  using ScaleLoader =
      GroupRowLoader<Shape::kM, kSlices * kSliceRows, kRowK, qcutlass::scale_bytes(kMode), kThreads, kSkipIdleWarps>;
  using ZeroLoader =
      GroupRowLoader<Shape::kM, kSlices * kSliceRows, kRowK, qcutlass::zero_bytes(kMode), kThreads, kSkipIdleWarps>;
  using Scales = warp::GroupScales<Element, LayoutA::kBits, kMode>;
  using Operands = typename Scales::Operands;

  /// Stock warp operator, for operand B's iterator, the fragments and the instruction. Operand A's layout is never
  /// read. Slices are ours: CUTLASS's iterator partitions k within one swizzled row, a slice here is a whole row of 64.
  using Operator = typename warp::DefaultMmaTensorOp<
      WarpShape, GemmShape<16, 8, 16>, Element, layout::RowMajorTensorOpMultiplicandCrosswise<16, 64>, Element,
      typename TokenLoader::Layout, float, layout::RowMajor, arch::OpMultiplyAdd>::Type;
  using ArchMma = typename Operator::ArchMmaOperator;
  using FragmentC = typename Operator::FragmentC;

  struct alignas(16) SharedStorage {
    uint8_t weights[kStages][WeightLoader::kStageBytes];
    Element activations[kStages * TokenLoader::kElements];
    uint8_t scales[kStages][ScaleLoader::kStageBytes];
    uint8_t zeros[kStages][ZeroLoader::kStageBytes];
  };

  struct Arguments {
    uint8_t const* weights;
    Element const* activations;
    int activation_stride;
    int channels, tokens, k;
    int tiles_n, tiles_k;
    GroupSize group_size;
    GroupMatrix scales, zeros;
  };

  /// The block's tile starts at (channel, token), its share of k is [first_k, end_k); first_k is a multiple of
  /// Shape::kK, and so is end_k unless it is the end of the matrix.
  CUTLASS_DEVICE
  MmaPackedMultistage(SharedStorage& storage, Arguments const& args, int channel, int token, int first_k, int end_k,
                      int warp, int lane)
      : storage_(storage),
        args_(args),
        channel_(channel),
        lane_(lane),
        warp_m_(warp / kWarpsN % kWarpsM),
        slice_(warp / (kWarpsN * kWarpsM)),
        load_k_(first_k),
        end_k_(end_k),
        stages_((end_k - first_k + Shape::kK - 1) / Shape::kK),
        weights_(args.weights, args.tiles_n, args.tiles_k, channel / 16, first_k / LayoutA::kTileK),
        tokens_(args.activations, args.activation_stride, args.tokens, token, first_k,
                TokenLoader::reference(storage.activations)),
        warp_tokens_(TokenLoader::reference(storage.activations), lane) {
    warp_tokens_.add_tile_offset({kSteps * slice_, warp % kWarpsN});
  }

  /// Accumulates the block's share of k. Shared memory is free for other uses when it returns.
  CUTLASS_DEVICE void operator()(FragmentC& accumulators) {
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < kStages - 1; ++s) {
      CUTLASS_PRAGMA_UNROLL
      for (int part = 0; part < kParts; ++part) copy_part(part);
      finish_stage();
    }
    arch::cp_async_wait<kStages - 2>();
    __syncthreads();

    typename Operator::FragmentA frag_a[2];
    typename Operator::FragmentB frag_b[2];
    warp_tokens_.set_kgroup_index(0);
    warp_tokens_.load(frag_b[0]);
    ++warp_tokens_;
    load_codes(0);
    load_operands(0);
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRegistersA; ++r) dequantize(frag_a[0], 0, r);
    accumulators.clear();

    CUTLASS_PRAGMA_NO_UNROLL
    for (int left = stages_; left > 0; --left) stage(accumulators, frag_a, frag_b);
    arch::cp_async_wait<0>();
    __syncthreads();
  }

 private:
  static constexpr int kRegistersA = kStrips * 4;  // per k16 step
  static constexpr int kParts = kSteps - 1;        // of a stage's copies: the last step before the barrier commits them
  static constexpr int kWeightsAPart = (WeightLoader::kIterations + kParts - 1) / kParts;
  static constexpr int kTokensAPart = (TokenLoader::kIterations + kParts - 1) / kParts;

  CUTLASS_DEVICE void copy_part(int part) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = part * kTokensAPart; i < (part + 1) * kTokensAPart; ++i)
      if (i < TokenLoader::kIterations) tokens_.copy(i, end_k_ - load_k_);
    CUTLASS_PRAGMA_UNROLL
    for (int i = part * kWeightsAPart; i < (part + 1) * kWeightsAPart; ++i)
      if (i < WeightLoader::kIterations) weights_.copy(storage_.weights[write_stage_], i, tiles_left());
  }

  /// Packed tiles between load_k_ and the end.
  CUTLASS_DEVICE int tiles_left() const { return (end_k_ - load_k_ + LayoutA::kTileK - 1) / LayoutA::kTileK; }

  CUTLASS_DEVICE void finish_stage() {
    int const left = end_k_ - load_k_;
    ScaleLoader::copy(storage_.scales[write_stage_], args_.scales, args_.group_size, channel_, load_k_, left);
    ZeroLoader::copy(storage_.zeros[write_stage_], args_.zeros, args_.group_size, channel_, load_k_, left);
    arch::cp_async_fence();
    load_k_ += Shape::kK;
    weights_.next_stage();
    tokens_.next_stage();
    if (++write_stage_ == kStages) {
      tokens_.wrap();
      write_stage_ = 0;
    }
  }

  /// The lane's codes of packed tile `tile` of its slice: one 128-bit load a strip.
  CUTLASS_DEVICE void load_codes(int tile) {
    uint8_t const* w = storage_.weights[read_stage_] + warp_m_ * kStrips * WeightLoader::kStripBytes +
                       (slice_ * kSliceTiles + tile) * LayoutA::kTileBytes + lane_ * 16;
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < kStrips; ++m) {
      uint4 const v = *reinterpret_cast<uint4 const*>(w + m * WeightLoader::kStripBytes);
      codes_[m][0] = v.x, codes_[m][1] = v.y, codes_[m][2] = v.z, codes_[m][3] = v.w;
    }
  }

  CUTLASS_DEVICE void load_operands(int row) {
    uint8_t const* s = storage_.scales[read_stage_] + (slice_ * kSliceRows + row) * ScaleLoader::kRowBytes;
    uint8_t const* z = storage_.zeros[read_stage_] + (slice_ * kSliceRows + row) * ZeroLoader::kRowBytes;
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < kStrips; ++m)
      operands_[m] =
          Scales::load(s, z, warp_m_ * WarpShape::kM + m * 16 + lane_ / 4, args_.scales.type, args_.zeros.type);
  }

  /// Register `r` of the A fragment of k16 step `step`. All indices are constants after unrolling.
  CUTLASS_DEVICE void dequantize(typename Operator::FragmentA& fragment, int step, int r) {
    using Converter = typename Scales::Converter;
    uint32_t const* words = codes_[r / 4] + step % LayoutA::kSteps * LayoutA::kWords;
    Operands const& op = operands_[r / 4];
    uint32_t& out = reinterpret_cast<uint32_t*>(&fragment)[r];
    switch (r % 4) {
      case 0: out = Converter::template convert<0>(words, op); break;
      case 1: out = Converter::template convert<1>(words, op); break;
      case 2: out = Converter::template convert<2>(words, op); break;
      case 3: out = Converter::template convert<3>(words, op); break;
    }
  }

  CUTLASS_DEVICE void stage(FragmentC& accumulators, typename Operator::FragmentA (&frag_a)[2],
                            typename Operator::FragmentB (&frag_b)[2]) {
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      int const next = (k + 1) % kSteps;  // the step whose fragments are made ready during this one's MMAs
      warp_tokens_.set_kgroup_index(next);
      warp_tokens_.load(frag_b[(k + 1) % 2]);
      ++warp_tokens_;
      if (next % LayoutA::kSteps == 0) load_codes(next / LayoutA::kSteps);
      if (next % kRowSteps == 0) load_operands(next / kRowSteps);

      // Row-wise serpentine over the MMAs, so that one operand always stays; between them, evenly, the next A fragment.
      auto* c = reinterpret_cast<typename ArchMma::FragmentC*>(&accumulators);
      auto const* a = reinterpret_cast<typename ArchMma::FragmentA const*>(&frag_a[k % 2]);
      auto const* b = reinterpret_cast<typename ArchMma::FragmentB const*>(&frag_b[k % 2]);
      constexpr int kMmas = kStrips * kColumns;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kMmas; ++i) {
        int const m = i / kColumns, n = m % 2 ? kColumns - 1 - i % kColumns : i % kColumns;
        mma_(c[m + n * kStrips], a[m], b[n], c[m + n * kStrips]);
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < kRegistersA; ++r)
          if (r * kMmas / kRegistersA == i) dequantize(frag_a[(k + 1) % 2], next, r);
      }

      if (k < kParts) copy_part(k);
      if (k + 2 == kSteps) {
        finish_stage();
        arch::cp_async_wait<kStages - 2>();
        __syncthreads();
        warp_tokens_.add_tile_offset({(kSlices - 1) * kSteps, 0});  // over the other warps' slices
        if (++read_stage_ == kStages) {
          warp_tokens_.add_tile_offset({-kStages * kSlices * kSteps, 0});
          read_stage_ = 0;
        }
      }
    }
  }

  SharedStorage& storage_;
  Arguments const& args_;
  int const channel_, lane_, warp_m_, slice_;
  int load_k_;  // where the next stage to load begins
  int const end_k_, stages_;
  WeightLoader weights_;
  TokenLoader tokens_;
  typename Operator::IteratorB warp_tokens_;
  ArchMma mma_;
  int write_stage_ = 0, read_stage_ = 0;
  uint32_t codes_[kStrips][4];
  Operands operands_[kStrips];
};

}  // namespace cutlass::gemm::threadblock
