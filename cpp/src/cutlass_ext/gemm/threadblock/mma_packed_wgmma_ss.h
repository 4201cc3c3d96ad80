// The wgmma main loop of 8-by-8-bit products: asynchronous MMAs of four warps that read both operands from shared
// memory, since nothing has to be converted. Tokens are the rows of the instruction, so that the sums of a thread are
// of two tokens, whatever the number of channels.
//
//   producer    one thread of a warpgroup of its own keeps a ring of stages full by TMA. The blocks of a pair, which
//               have the same channels, fetch half of the weights each, for both
//   consumers   two warpgroups of 64 tokens by all channels of the tile, or, of a tile of 64 tokens, half of them
//
// int8: the MMAs keep the sums to the end. All others leave the MMAs after every stage of 128 k, for sums in fp32
// ("promotion"), while the MMAs of the next stage or of the other warpgroup run:
//   fp8         wgmma aligns the products of a step with what they are added to and keeps some 14 bits. Errors of that
//               size do not grow beyond a stage
//   blockwise   a stage is a block of k; its sums are scaled
#pragma once

#include "cutlass_ext/epilogue/row_epilogue.h"
#include "cutlass_ext/gemm/threadblock/packed_mma.h"
#include "cutlass_ext/gemm/threadblock/ring_consumer.h"

namespace cutlass::gemm::threadblock {

/// Shape: channels x tokens x k of a stage, 128 bytes of a row. kTurns: in blockwise products, whether gate and up lie
/// in turns of 16 channels and have block scales of their own. That takes three more instructions a stage, and 2 to 4 %
/// of the time from 1024 tokens on.
template <class Shape_, int kWarpChannels_, int kStages_, class Element_, qcutlass::ScaleMode kMode_, bool kTurns_>
class MmaPackedWgmmaSs {
 public:
  using Shape = Shape_;
  using Element = Element_;
  static constexpr int kStages = kStages_;
  static constexpr bool kMakesOperands = false;  // there are no conversions
  static constexpr int kWarpChannels = kWarpChannels_;
  static constexpr qcutlass::ScaleMode kMode = kMode_;
  using Traits = PackedMma<Element, qcutlass::Packing::kW8A8, kMode>;
  using LayoutA = typename Traits::LayoutA;
  using Accumulator = typename Traits::Accumulator;
  static constexpr bool kBlockwise = qcutlass::is_promoted(kMode);
  static constexpr bool kTurns = kTurns_;
  static_assert(kBlockwise || !kTurns);
  static constexpr bool kPromotes = kBlockwise || Traits::kFloat8;

  static constexpr int kWarpgroups = 2;
  static constexpr int kThreads = (kWarpgroups + 1) * arch::kWarpgroupThreads;
  static_assert(Shape::kM * Shape::kN == kWarpgroups * kWarpChannels * arch::kWarpgroupRows);
  static constexpr int kRowBytes = 128;  // of a token, the swizzle's width
  static_assert(Shape::kK == kRowBytes && (!kBlockwise || qcutlass::promoted_k(kMode) == Shape::kK));
  static_assert(!kBlockwise || (Shape::kM == 128 && kWarpChannels % 32 == 0),
                "one scale for all channels of a tile, or one for those of a gate and one for the others");
  static constexpr int kSteps = Shape::kK / Traits::kStepK;
  static constexpr int kTiles = Shape::kK / LayoutA::kTileK;  // packed tiles of a strip and stage, one a step
  static_assert(kTiles == kSteps);

  using Wgmma = arch::WgmmaShared<Element, typename Traits::Weight, typename Traits::Product, kWarpChannels>;
  using FragmentC =  // in the order of the instruction's sums
      std::conditional_t<kPromotes, Accumulator[Wgmma::kSums], typename Wgmma::Sums>;
  using Epilogue = epilogue::threadblock::RowEpilogue<MmaPackedWgmmaSs>;

  struct Arguments {
    TokenBoxes<Shape::kN> activations;  // [tokens][k]
    CUtensorMap weights;                // [tiles_k][tiles_n][128 words]
    uint64_t weight_policy;             // of the L2 cache
    int sharers;                        // blocks of a cluster that share weights: 1, or 2
    BlockScaleMatrices blocks;
  };
  static CUTLASS_DEVICE int sharers(Arguments const& args) { return args.sharers; }

  struct alignas(128) SharedStorage {
    static constexpr int kChunks = 1;
    static constexpr int kTokenBytes = Shape::kN * kRowBytes;
    static constexpr int kTileRow = Shape::kM / 16 * LayoutA::kTileBytes;  // a step's weights
    static constexpr int kStageBytes = kTokenBytes + kTiles * kTileRow;
    static_assert(kTokenBytes % 1024 == 0 && kStageBytes % 1024 == 0, "what the swizzle's pattern repeats after");
    uint8_t ring[kStages * kStageBytes];

    CUTLASS_DEVICE uint8_t* stage(int place) { return ring + place * kStageBytes; }
    CUTLASS_DEVICE uint8_t* activations(int place, int /*chunk*/) { return stage(place); }
  };
  using Barriers = RingBarriers<kStages>;
  /// Warps that free a place of the ring: those of all blocks that share weights, as a fetch fills the place in all.
  static CUTLASS_DEVICE int freeing_warps(Arguments const& args) { return kWarpgroups * 4 * args.sharers; }

  /// The producing thread.
  class Producer : public RingProducer<Producer, SharedStorage, kStages, Shape::kK, Arguments> {
    using Base = RingProducer<Producer, SharedStorage, kStages, Shape::kK, Arguments>;
    using Base::args_, Base::barriers_, Base::storage_, Base::barrier, Base::activation_bytes;
    friend Base;

   public:
    using Base::Base;

   private:
    CUTLASS_DEVICE void request_weights(int place, int channel, int k) {
      barriers_.full[place].arrive_and_expect_tx(kTiles * SharedStorage::kTileRow + activation_bytes());
      uint8_t* const to = storage_.stage(place) + SharedStorage::kTokenBytes;
      int const tile = k / LayoutA::kTileK;
      if (args_.sharers == 1) {
        cute::SM90_TMA_LOAD_3D::copy(&args_.weights, barrier(place), args_.weight_policy, to, 0, channel / 16, tile);
      } else {
        int const first = int(blockIdx.x % 2) * (kTiles / 2);
        cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&args_.weights, barrier(place), uint16_t(0b11), args_.weight_policy,
                                               to + first * SharedStorage::kTileRow, 0, channel / 16, tile + first);
      }
    }
  };

  /// A consuming warpgroup. Its instructions beside the MMAs are what bounds promoted products.
  class Consumer : public RingConsumer<Consumer, kStages> {
    using Base = RingConsumer<Consumer, kStages>;
    using Base::await, Base::barriers_;
    friend Base;

   public:
    CUTLASS_DEVICE Consumer(SharedStorage&, Barriers& barriers, Arguments const& args, int warpgroup, int warp,
                            int lane)
        : Base(barriers),
          args_(args),
          token_(warpgroup * arch::kWarpgroupRows % Shape::kN + warp * 16 + lane / 4),
          tokens_at_(warpgroup * arch::kWarpgroupRows % Shape::kN * kRowBytes),
          weights_at_(warpgroup * kWarpChannels % Shape::kM / 16 * LayoutA::kTileBytes),
          lane_(lane),
          releases_(lane < args.sharers),
          peer_(args.sharers > 1 ? lane : arch::cluster_rank()) {}

    /// Requests the first scales of the next product: before each, since only scales depend on where it begins.
    CUTLASS_DEVICE void begin(int channel, int token, int first_k, int stages) {
      if constexpr (kBlockwise) begin_scales(channel, token, first_k, stages);
    }

    /// The sums over `stages` stages, at least one, for which begin() was called.
    CUTLASS_DEVICE void operator()(FragmentC& sums, int /*first_k*/, int stages) {
      if constexpr (kPromotes) {
        auto const places = std::make_integer_sequence<int, kStages>{};
        int left = stages;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Wgmma::kSums; ++i) sums[i] = 0;
        CUTLASS_PRAGMA_NO_UNROLL
        for (; left >= kStages; left -= kStages) promoted_round(sums, places);
        if (left > 0) promoted_rest(sums, left, places);
      } else {
        this->accumulate(sums, stages);
      }
    }

   private:
    using Sums = typename Wgmma::Sums;
    static_assert(kStages % 2 == 0, "a place has one of the two sets of sums");

    template <int kPlace>
    CUTLASS_DEVICE bool stage(FragmentC& sums, int& left) {
      multiply<kPlace>(sums, kPlace == 0 && this->is_first());
      cute::warpgroup_wait<1>();
      this->template release_before<kPlace>();
      return --left > 0;
    }

    /// One stage in every place of the ring. The sums of a stage are promoted while the MMAs of the next stage run. The
    /// last promotion waits for all MMAs: if sums were read while MMAs are in flight at the end of a loop, or on a path
    /// out of it, ptxas would serialise the MMAs.
    template <int... kPlaces>
    CUTLASS_DEVICE void promoted_round(FragmentC& sums, std::integer_sequence<int, kPlaces...>) {
      Sums blocks[2];
      multiply<0>(blocks[0], true);
      (promoted_stage<kPlaces>(sums, blocks), ...);
    }

    template <int kPlace>
    CUTLASS_DEVICE void promoted_stage(FragmentC& sums, Sums (&blocks)[2]) {
      constexpr int kNext = kPlace + 1;
      if constexpr (kNext < kStages) multiply<kNext>(blocks[kNext % 2], true);
      finish<kPlace, (kNext < kStages)>(sums, blocks[kPlace % 2]);
    }

    /// The `left` < kStages last stages, one after the other.
    template <int... kPlaces>
    CUTLASS_DEVICE void promoted_rest(FragmentC& sums, int left, std::integer_sequence<int, kPlaces...>) {
      (single_stage<kPlaces>(sums, left) && ...);
    }

    template <int kPlace>
    CUTLASS_DEVICE bool single_stage(FragmentC& sums, int& left) {
      Sums block;
      multiply<kPlace>(block, true);
      finish<kPlace, 0>(sums, block);
      return --left > 0;
    }

    /// Waits for a stage's MMAs, the last but kLater, gives its place back and adds its sums.
    template <int kPlace, int kLater>
    CUTLASS_DEVICE void finish(FragmentC& sums, Sums& block) {
      Factors const factors = take_scales();
      cute::warpgroup_wait<kLater>();
      arch::fence_registers(block);
      release(kPlace);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Wgmma::kSums; ++i) {  // [n8 block][row g or g + 8][channel 2t or 2t + 1]
        if constexpr (kBlockwise)
          sums[i] += float(typename Traits::Product(block[i])) * factors[(kTurns ? i / 8 % 2 * 2 : 0) + i / 2 % 2];
        else
          sums[i] += block[i];
      }
    }

    /// Waits for a stage and issues its MMAs.
    template <int kPlace>
    CUTLASS_DEVICE void multiply(Sums& sums, bool first) {
      constexpr int kOffset = kPlace * SharedStorage::kStageBytes;
      constexpr uint64_t kTokens = arch::swizzled_operand<kRowBytes>(kOffset),
                         kWeights = arch::swizzled_operand<LayoutA::kTileK>(kOffset + SharedStorage::kTokenBytes);
      await(kPlace);
      arch::fence_registers(sums);
      cute::warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i)
        Wgmma::issue(sums, arch::moved_operand(kTokens, i * Traits::kStepK + tokens_at_),
                     arch::moved_operand(kWeights, i * SharedStorage::kTileRow + weights_at_), first && i == 0);
      cute::warpgroup_commit_batch();
    }

    /// The places of all blocks that share weights are filled together.
    CUTLASS_DEVICE void release(int place) const {
      if (releases_) barriers_.empty[place].arrive(peer_);
    }

    /// Scales are requested kAhead stages before their use. To save registers the lanes of a quad share the loads: lane
    /// 0 loads the scale of row g, lane 1 that of row g + 8, lanes 2 and 3 those of the channels (of gate and of up, if
    /// these lie in turns).
    CUTLASS_DEVICE void begin_scales(int channel, int token, int first_k, int stages) {
      BlockScaleMatrices const& blocks = args_.blocks;
      // Rows beyond the last have its scale.
      int const row = fast_min(token + token_ + lane_ % 4 * 8, args_.activations.tokens - 1);
      scales_ = lane_ % 4 < 2 ? blocks.tokens + row * blocks.token_stride : blocks.of_strip(channel + lane_ % 2 * 16);
      scales_ += first_k / Shape::kK;
      scales_left_ = stages;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAhead; ++i) request_scale(i);
    }

    CUTLASS_DEVICE void request_scale(int i) {
      if (scales_left_ > 0) scale_[i] = *scales_;
      ++scales_;
      --scales_left_;
    }

    /// [even or odd strip of 16 channels, where they differ][row g or g + 8].
    using Factors = Array<float, kTurns ? 4 : 2>;

    /// The factors of the next stage's sums.
    CUTLASS_DEVICE Factors take_scales() {
      Factors factors{};
      if constexpr (kBlockwise) {
        CUTLASS_PRAGMA_UNROLL
        for (int strip = 0; strip < int(Factors::kElements) / 2; ++strip) {
          float const of_channels = __shfl_sync(~0u, scale_[0], 2 + strip, 4);
          factors[strip * 2] = __shfl_sync(~0u, scale_[0], 0, 4) * of_channels;
          factors[strip * 2 + 1] = __shfl_sync(~0u, scale_[0], 1, 4) * of_channels;
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 1; i < kAhead; ++i) scale_[i - 1] = scale_[i];
        request_scale(kAhead - 1);
      }
      return factors;
    }

    static constexpr int kAhead = 2;

    Arguments const& args_;
    int const token_, tokens_at_, weights_at_, lane_;
    bool const releases_;
    int const peer_;  // whose place a lane releases
    float const* scales_;
    int scales_left_;
    float scale_[kAhead];
  };
};

}  // namespace cutlass::gemm::threadblock
