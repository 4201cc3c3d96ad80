// The multistage mainloop with packed low-bit weights as operand A: MmaMultistage's skeleton (cp.async ring, ldmatrix,
// one barrier a stage, warps sliced along k) with these differences:
//   - operand A needs one 128-bit shared load for several k16 steps, and is dequantised in registers between the MMAs;
//   - scales and zeros travel in the ring as a third operand;
//   - the ragged end of k lies in the last stage, as in the packed tensor;
//   - the loop is unrolled over the places of the ring. mma.sync overlaps with nothing in its quarter of an SM, so
//     every other instruction costs: with the place a constant, addresses need next to none.
#pragma once

#include "cutlass/arch/memory_sm75.h"
#include "cutlass_ext/gemm/threadblock/activation_loader.h"
#include "cutlass_ext/gemm/threadblock/packed_mma.h"
#include "cutlass_ext/gemm/threadblock/packed_weight_loader.h"

namespace cutlass::gemm::threadblock {

/// Shape: channels x tokens x k of a stage. WarpShape: channels x tokens x a slice of k, which is 128 bytes of a
/// token's row; Shape::kK / WarpShape::kK warps share a warp tile, one slice of each stage a warp. Their partial sums
/// are added by the epilogue.
template <class Shape_, class WarpShape_, int Stages_, class Element_, qcutlass::Packing kPacking_,
          qcutlass::ScaleMode kMode_>
class MmaPackedMultistage {
 public:
  using Shape = Shape_;
  using WarpShape = WarpShape_;
  using Element = Element_;
  static constexpr int kStages = Stages_;
  static constexpr qcutlass::ScaleMode kMode = kMode_;
  using Traits = PackedMma<Element, kPacking_, kMode>;
  using Arguments = typename Traits::Arguments;
  using Accumulator = typename Traits::Accumulator;

  static constexpr int kWarpsM = Shape::kM / WarpShape::kM;
  static constexpr int kWarpsN = Shape::kN / WarpShape::kN;
  static constexpr int kSlices = Shape::kK / WarpShape::kK;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN * kSlices;
  static constexpr int kStrips = WarpShape::kM / 16;  // per warp
  static constexpr int kColumns = WarpShape::kN / 8;  // n8 blocks per warp
  static constexpr int kSteps = WarpShape::kK / Traits::kStepK;

  using LayoutA = typename Traits::LayoutA;
  static constexpr int kStageTiles = Shape::kK / LayoutA::kTileK;
  static constexpr int kSliceTiles = kStageTiles / kSlices;
  using WeightLoader = PackedWeightLoader<LayoutA, Shape::kM / 16, kStageTiles, kThreads>;
  using TokenLoader = ActivationLoader<Element, Shape::kK, Shape::kN, kThreads>;
  static_assert(TokenLoader::kRowK == WarpShape::kK);

  static constexpr int kSliceRows = qcutlass::scale_rows(kMode, WarpShape::kK);
  static constexpr int kRowSteps = kSliceRows > 0 ? kSteps / kSliceRows : 0;  // steps that one row of scales serves
  using GroupLoader = typename GroupRowLoaderOf<Shape::kM, kSlices, kSliceRows, WarpShape::kK, kMode, kThreads>::Type;
  using Scales = typename Traits::Scales;
  using Operands = typename Scales::Operands;

  using ArchMma = typename Traits::ArchMma;
  using FragmentC = Array<Accumulator, kStrips * kColumns * 4>;  // [column][strip], as CUTLASS orders accumulators

  /// Three rings, one after the other; the last one may be empty.
  struct alignas(16) SharedStorage {
    static constexpr int kWeights = kStages * TokenLoader::kStageBytes;
    static constexpr int kGroups = kWeights + kStages * WeightLoader::kStageBytes;
    uint8_t rings[kGroups + kStages * GroupLoader::kStageBytes];

    CUTLASS_DEVICE uint8_t* activations(int place) { return rings + place * TokenLoader::kStageBytes; }
    CUTLASS_DEVICE uint8_t* weights(int place) { return rings + kWeights + place * WeightLoader::kStageBytes; }
    CUTLASS_DEVICE uint8_t* groups(int place) { return rings + kGroups + place * GroupLoader::kStageBytes; }
  };

  /// The block's tile starts at (channel, token), its share of k is [first_k, end_k); first_k is a multiple of
  /// Shape::kK, and so is end_k unless it is the end of the matrix.
  CUTLASS_DEVICE
  MmaPackedMultistage(SharedStorage& storage, Arguments const& args, int channel, int token, int first_k, int end_k,
                      int warp, int lane)
      : storage_(storage),
        args_(args),
        lane_(lane),
        warp_m_(warp / kWarpsN % kWarpsM),
        slice_(warp / (kWarpsN * kWarpsM)),
        load_k_(first_k),
        end_k_(end_k),
        stages_((end_k - first_k + Shape::kK - 1) / Shape::kK),
        weights_(args.weights, args.tiles_n, args.tiles_k, channel / 16, first_k / LayoutA::kTileK,
                 (end_k + LayoutA::kTileK - 1) / LayoutA::kTileK),
        tokens_(args.activations, args.activation_stride, args.tokens, token, first_k, end_k),
        groups_(args.scales, args.zeros, args.group_size, channel) {
    // ldmatrix of 16 tokens x a step: lanes 0-7 and 8-15 name the rows of the two k halves of 8 tokens, 16-31 of the
    // others
    int const row = warp % kWarpsN * WarpShape::kN + lane / 16 * 8 + lane % 8;
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kSteps; ++k)
      token_place_[k] = slice_ * TokenLoader::kSliceBytes + row * TokenLoader::kRowBytes +
                        TokenLoader::swizzled(row, 2 * k + lane / 8 % 2);
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < kStrips; ++m) operands_[m] = Scales::symmetric();
  }

  /// Requests the weights, scales and zeros of the first stages, which may be done before the wait for the kernel
  /// before this one.
  CUTLASS_DEVICE void prefetch_weights() {
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < kStages - 1; ++s) copy_weights(s, s);
  }

  /// Accumulates the block's share of k, after prefetch_weights(). Shared memory is free for other uses when it
  /// returns.
  CUTLASS_DEVICE void operator()(FragmentC& accumulators) {
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < kStages - 1; ++s) {
      tokens_.copy(storage_.activations(s), s);
      arch::cp_async_fence();
    }
    advance(kStages - 1);
    arch::cp_async_wait<kStages - 2>();
    __syncthreads();

    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kColumns; n += 2) load_tokens(0, 0, n);
    load_codes(0, 0);
    load_operands(0, 0);
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRegistersA; ++r) dequantize(0, r);
    accumulators.clear();

    int left = stages_;
    CUTLASS_PRAGMA_NO_UNROLL
    while (round(accumulators, left)) {
    }
    arch::cp_async_wait<0>();
    __syncthreads();
  }

 private:
  static constexpr int kRegistersA = kStrips * 4;  // per step
  /// Wide warp tiles have no registers for two fragments, and time enough between the last use of a part of one and the
  /// first use of the part that takes its place.
  static constexpr int kBuffersB = kColumns >= 16 ? 1 : 2;

  /// Copies into a place of the ring the stage that lies `ahead` of the next one to load.
  CUTLASS_DEVICE void copy_weights(int place, int ahead) {
    weights_.copy(storage_.weights(place), ahead);
    groups_.copy(storage_.groups(place), load_k_ + ahead * Shape::kK, end_k_);
  }

  CUTLASS_DEVICE void advance(int stages) {
    load_k_ += stages * Shape::kK;
    weights_.advance(stages);
    tokens_.advance(stages);
  }

  /// The lane's part of the activations of a step, n8 blocks `n` and `n + 1` of the warp: one ldmatrix.
  CUTLASS_DEVICE void load_tokens(int place, int step, int n) {
    arch::ldsm<layout::RowMajor, 4>(reinterpret_cast<Array<unsigned, 4>&>(frag_b_[step % kBuffersB][n]),
                                    storage_.activations(place) + token_place_[step] + n * 8 * TokenLoader::kRowBytes);
  }

  /// The lane's codes of packed tile `tile` of its slice: one 128-bit load a strip.
  CUTLASS_DEVICE void load_codes(int place, int tile) {
    uint8_t const* w = storage_.weights(place) + warp_m_ * kStrips * WeightLoader::kStripBytes +
                       (slice_ * kSliceTiles + tile) * LayoutA::kTileBytes + lane_ * 16;
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < kStrips; ++m) {
      uint4 const v = *reinterpret_cast<uint4 const*>(w + m * WeightLoader::kStripBytes);
      codes_[m][0] = v.x, codes_[m][1] = v.y, codes_[m][2] = v.z, codes_[m][3] = v.w;
    }
  }

  CUTLASS_DEVICE void load_operands(int place, int row) {
    if constexpr (kSliceRows > 0) {
      uint8_t const* scales = storage_.groups(place) + (slice_ * kSliceRows + row) * GroupLoader::kRowBytes;
      Scales::load(operands_, scales, scales + GroupLoader::kZeros, warp_m_ * WarpShape::kM, lane_, args_.scales.type,
                   args_.zeros.type);
    }
  }

  /// Register `r` of the A fragment of step `step`. All indices are constants after unrolling.
  CUTLASS_DEVICE void dequantize(int step, int r) {
    using Converter = typename Scales::Converter;
    uint32_t const* words = codes_[r / 4] + step % LayoutA::kSteps * LayoutA::kWords;
    Operands const& op = operands_[r / 4];
    uint32_t& out = frag_a_[step % 2][r / 4][r % 4];
    switch (r % 4) {
      case 0: out = Converter::template convert<0>(words, op); break;
      case 1: out = Converter::template convert<1>(words, op); break;
      case 2: out = Converter::template convert<2>(words, op); break;
      case 3: out = Converter::template convert<3>(words, op); break;
    }
  }

  /// A stage in every place of the ring, or the `left` last ones. Returns whether there are more.
  CUTLASS_DEVICE bool round(FragmentC& accumulators, int& left) {
    CUTLASS_PRAGMA_UNROLL
    for (int place = 0; place < kStages; ++place) {
      stage(accumulators, place);
      if (--left == 0) return false;
    }
    advance(kStages);
    return true;
  }

  CUTLASS_DEVICE void stage(FragmentC& accumulators, int place) {
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      // The step whose fragments are made ready during this one's MMAs, and where it lies.
      int const next = (k + 1) % kSteps, next_place = (place + (k + 1) / kSteps) % kStages;
      if (kBuffersB == 2) {
        CUTLASS_PRAGMA_UNROLL
        for (int n = 0; n < kColumns; n += 2) load_tokens(next_place, next, n);
      }
      if (next % LayoutA::kSteps == 0) load_codes(next_place, next / LayoutA::kSteps);
      if constexpr (kSliceRows > 0) {
        if (next % kRowSteps == 0) load_operands(next_place, next / kRowSteps);
      }

      // Row by row over the MMAs, so that operand A stays; between them, evenly, the next A fragment.
      auto* c = reinterpret_cast<typename ArchMma::FragmentC*>(&accumulators);
      auto const* a = reinterpret_cast<typename ArchMma::FragmentA const*>(frag_a_[k % 2]);
      auto const* b = reinterpret_cast<typename ArchMma::FragmentB const*>(frag_b_[k % kBuffersB]);
      constexpr int kMmas = kStrips * kColumns;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kMmas; ++i) {
        int const m = i / kColumns, n = i % kColumns;
        mma_(c[m + n * kStrips], a[m], b[n], c[m + n * kStrips]);
        if (kBuffersB == 1 && m == kStrips - 1 && n % 2) load_tokens(next_place, next, n - 1);
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < kRegistersA; ++r)
          if (r * kMmas / kRegistersA == i) dequantize(next, r);
      }

      if (k == 0) {  // into the place whose last reader passed the barrier of the stage before
        int const free = (place + kStages - 1) % kStages;
        tokens_.copy(storage_.activations(free), place);
        copy_weights(free, place);
        arch::cp_async_fence();
      }
      if (k + 2 == kSteps) {  // everything of this stage has been read, the next step reads the next one
        arch::cp_async_wait<kStages - 2>();
        __syncthreads();
      }
    }
  }

  SharedStorage& storage_;
  Arguments const& args_;
  int const lane_, warp_m_, slice_;
  int load_k_;  // where the next stage to load begins
  int const end_k_, stages_;
  WeightLoader weights_;
  TokenLoader tokens_;
  GroupLoader groups_;
  int token_place_[kSteps];
  ArchMma mma_;
  uint32_t frag_a_[2][kStrips][4];  // of even and odd steps
  uint32_t frag_b_[kBuffersB][kColumns][2];
  uint32_t codes_[kStrips][4];
  Operands operands_[kStrips];
};

}  // namespace cutlass::gemm::threadblock
