// The cp.async ring of the multistage main loops: MmaMultistage's skeleton (one barrier a stage, operands shared by all
// warps of the block, warps sliced along k) with these differences:
//   - weights are operand A, packed so that one shared load brings all that a lane needs of a tile;
//   - scales and zeros, or the scales of blocks, travel in the ring as a third operand;
//   - the ragged end of k lies in the last stage, as in the packed tensor;
//   - the loop is unrolled over the places of the ring. mma.sync overlaps with nothing in its quarter of an SM, so
//     every other instruction costs: with the place a constant, addresses need next to none.
#pragma once

#include "cutlass/arch/memory_sm75.h"
#include "cutlass_ext/gemm/threadblock/activation_loader.h"
#include "cutlass_ext/gemm/threadblock/packed_mma_base.h"
#include "cutlass_ext/gemm/threadblock/packed_weight_loader.h"

namespace cutlass::gemm::threadblock {

/// A slice of k is 128 bytes of a token's row.
template <class Shape, class WarpShape, int Stages, class Element, qcutlass::Packing kPacking,
          qcutlass::ScaleMode kMode, bool kGathers = false>
class MultistageRing : public PackedMmaBase<Shape, WarpShape, Stages, Element, kPacking, kMode, kGathers> {
 public:
  using Base = PackedMmaBase<Shape, WarpShape, Stages, Element, kPacking, kMode, kGathers>;
  using Base::kColumns, Base::kSlices, Base::kStages, Base::kSteps, Base::kStrips, Base::kThreads, Base::kWarpsM,
      Base::kWarpsN;
  using typename Base::Arguments, typename Base::LayoutA, typename Base::Traits;

  static constexpr int kStageTiles = Shape::kK / LayoutA::kTileK;
  static constexpr int kSliceTiles = kStageTiles / kSlices;
  using WeightLoader = PackedWeightLoader<LayoutA, Shape::kM / 16, kStageTiles, kThreads>;
  using TokenLoader = ActivationLoader<Element, Shape::kK, Shape::kN, kThreads>;
  static_assert(TokenLoader::kRowK == WarpShape::kK);

  static constexpr int kSliceRows = qcutlass::scale_rows(kMode, WarpShape::kK);
  using GroupLoader = typename GroupRowLoaderOf<Shape::kM, kSlices, kSliceRows, WarpShape::kK, kMode, kThreads>::Type;
  using BlockLoader = BlockScaleLoaderOf<Shape::kM, Shape::kN, Shape::kK, kMode, kThreads>;

  /// Rings, one after the other; those of scales may be empty.
  struct alignas(16) SharedStorage {
    static constexpr int kWeights = kStages * TokenLoader::kStageBytes;
    static constexpr int kGroups = kWeights + kStages * WeightLoader::kStageBytes;
    static constexpr int kBlocks = kGroups + kStages * GroupLoader::kStageBytes;
    uint8_t rings[kBlocks + kStages * BlockLoader::kStageBytes];

    CUTLASS_DEVICE uint8_t* activations(int place) { return rings + place * TokenLoader::kStageBytes; }
    CUTLASS_DEVICE uint8_t* weights(int place) { return rings + kWeights + place * WeightLoader::kStageBytes; }
    CUTLASS_DEVICE uint8_t* groups(int place) { return rings + kGroups + place * GroupLoader::kStageBytes; }
    CUTLASS_DEVICE uint8_t* blocks(int place) { return rings + kBlocks + place * BlockLoader::kStageBytes; }
  };

  /// The block's tile starts at (channel, token), its share of k is [first_k, end_k); first_k is a multiple of
  /// Shape::kK, and so is end_k unless it is the end of the matrix.
  CUTLASS_DEVICE
  MultistageRing(SharedStorage& storage, Arguments const& args, int channel, int token, int first_k, int end_k,
                 int warp, int lane)
      : storage_(storage),
        args_(args),
        lane_(lane),
        warp_m_(warp / kWarpsN % kWarpsM),
        warp_n_(warp % kWarpsN),
        slice_(warp / (kWarpsN * kWarpsM)),
        lane_byte_(LayoutA::lane_byte(lane)),
        load_k_(first_k),
        end_k_(end_k),
        stages_((end_k - first_k + Shape::kK - 1) / Shape::kK),
        weights_(args.weights, args.tiles_n, args.tiles_k, args.halves, channel / 16, first_k / LayoutA::kTileK,
                 (end_k + LayoutA::kTileK - 1) / LayoutA::kTileK),
        tokens_(args.activations, args.activation_stride, args.tokens, token, first_k, end_k, args.source),
        groups_(args.scales, args.zeros, args.group_size, args.supers, args.halves, channel),
        blocks_(args.blocks, channel, args.channels, token, args.tokens, threadIdx.x) {
    // ldmatrix of 16 tokens x a step: lanes 0-7 and 8-15 name the rows of the two k halves of 8 tokens, 16-31 of the
    // others
    int const row = warp_n_ * WarpShape::kN + lane / 16 * 8 + lane % 8;
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kSteps; ++k)
      token_place_[k] = slice_ * TokenLoader::kSliceBytes + row * TokenLoader::kRowBytes +
                        TokenLoader::swizzled(row, 2 * k + lane / 8 % 2);
  }

  /// Requests the weights, scales and zeros of the first stages, which may be done before the wait for the kernel
  /// before this one.
  CUTLASS_DEVICE void prefetch_weights() {
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < kStages - 1; ++s) copy_weights(s, s);
  }

 protected:
  /// Requests what prefetch_weights() left of the first stages, and waits for the first of them.
  CUTLASS_DEVICE void fill() {
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < kStages - 1; ++s) {
      copy_activations(s, s);
      arch::cp_async_fence();
    }
    advance(kStages - 1);
    wait_for_next();
  }

  /// Calls stage(place) for every stage, `place` being a constant to it.
  template <class Stage>
  CUTLASS_DEVICE void for_each_stage(Stage const& stage) {
    int left = stages_;
    CUTLASS_PRAGMA_NO_UNROLL
    while (round(left, stage)) {
    }
  }

  /// Requests the next stage, into the place before the one that is being read: its last reader passed the barrier of
  /// the stage before.
  CUTLASS_DEVICE void refill(int place) {
    int const free = (place + kStages - 1) % kStages;
    copy_activations(free, place);
    copy_weights(free, place);
    arch::cp_async_fence();
  }

  /// When everything of a stage has been read: lets other warps overwrite it, and this one read the next.
  CUTLASS_DEVICE static void wait_for_next() {
    arch::cp_async_wait<kStages - 2>();
    __syncthreads();
  }

  /// Shared memory is free for other uses after it.
  CUTLASS_DEVICE static void drain() {
    arch::cp_async_wait<0>();
    __syncthreads();
  }

  /// The lane's part of the activations of a step, n8 blocks `n` and `n + 1` of the warp: one ldmatrix.
  CUTLASS_DEVICE void load_tokens(uint32_t (&fragments)[kColumns][2], int place, int step, int n) const {
    arch::ldsm<layout::RowMajor, 4>(reinterpret_cast<Array<unsigned, 4>&>(fragments[n]),
                                    storage_.activations(place) + token_place_[step] + n * 8 * TokenLoader::kRowBytes);
  }

  /// The lane's codes of packed tile `tile` of its slice, strip `m` of the warp.
  CUTLASS_DEVICE void load_codes(uint32_t (&codes)[4], int place, int tile, int m) const {
    int const byte = LayoutA::kConverts ? lane_ * 16 : lane_byte_;  // the former needs no register
    Traits::load_codes(codes, storage_.weights(place) + (warp_m_ * kStrips + m) * WeightLoader::kStripBytes +
                                  (slice_ * kSliceTiles + tile) * LayoutA::kTileBytes + byte);
  }

  SharedStorage& storage_;
  Arguments const& args_;
  int const lane_, warp_m_, warp_n_, slice_;

 private:
  int const lane_byte_;  // of what it names to ldmatrix, in a packed tile

  /// Copies into a place of the ring the stage that lies `ahead` of the next one to load.
  CUTLASS_DEVICE void copy_weights(int place, int ahead) {
    weights_.copy(storage_.weights(place), ahead);
    groups_.copy(storage_.groups(place), load_k_ + ahead * Shape::kK, end_k_);
  }

  CUTLASS_DEVICE void copy_activations(int place, int ahead) {
    tokens_.copy(storage_.activations(place), ahead);
    blocks_.copy(storage_.blocks(place), load_k_ + ahead * Shape::kK);
  }

  CUTLASS_DEVICE void advance(int stages) {
    load_k_ += stages * Shape::kK;
    weights_.advance(stages);
    tokens_.advance(stages);
  }

  /// A stage in every place of the ring, or the `left` last ones. Returns whether there are more.
  template <class Stage>
  CUTLASS_DEVICE bool round(int& left, Stage const& stage) {
    CUTLASS_PRAGMA_UNROLL
    for (int place = 0; place < kStages; ++place) {
      stage(place);
      if (--left == 0) return false;
    }
    advance(kStages);
    return true;
  }

  int load_k_;  // where the next stage to load begins
  int const end_k_, stages_;
  WeightLoader weights_;
  TokenLoader tokens_;
  GroupLoader groups_;
  BlockLoader blocks_;
  int token_place_[kSteps];
};

}  // namespace cutlass::gemm::threadblock
