// The sm_90a mainloop of blockwise int8: as MmaPackedHopper, with these differences:
//   - a stage is a block of k, whose int32 sums are scaled into fp32 ones by the CUDA cores, while the other
//     warpgroup's MMAs run;
//   - a warp beside the producing thread multiplies the scales of the block's tokens with that of the tile's channels,
//     which are one block, and puts them into the ring.
#pragma once

#include "cutlass_ext/gemm/threadblock/mma_packed_hopper.h"
#include "cutlass_ext/gemm/warp/block_promotion.h"

namespace cutlass::gemm::threadblock {

template <class Shape, int kWarpgroups, int kStages, class Element, qcutlass::Packing kPacking,
          qcutlass::ScaleMode kMode>
class MmaPackedHopperBlockwise
    : public MmaPackedHopper<Shape, kWarpgroups, kStages, 4, true, Element, kPacking, kMode> {
 public:
  using Base = MmaPackedHopper<Shape, kWarpgroups, kStages, 4, true, Element, kPacking, kMode>;
  using typename Base::Arguments, typename Base::Barriers, typename Base::SharedStorage, typename Base::Wgmma;
  static constexpr int kSteps = Base::kSteps, kBlockK = 128;
  static_assert(qcutlass::promoted_k(kMode) == kBlockK && Shape::kK == kBlockK && Shape::kM == kBlockK);
  static_assert(kStages % 2 == 0, "a stage's fragment buffer is a constant");

  using FragmentC = float[Wgmma::kSums];  // in the order of the instruction's sums

  /// The warp that scales.
  class Scaler {
   public:
    CUTLASS_DEVICE Scaler(SharedStorage& storage, Barriers& barriers, Arguments const& args, int lane)
        : storage_(storage), barriers_(barriers), scales_(args.blocks), tokens_(args.tokens), lane_(lane) {}

    CUTLASS_DEVICE void load(int channel, int token, int first_k, int stages) {
      float const* from[kTokens];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTokens; ++i)  // tokens beyond the last have the scales of the first ones
        from[i] = scales_.tokens + unsigned(token + lane_ * kTokens + i) % unsigned(tokens_) * scales_.token_stride +
                  first_k / kBlockK;
      float const* from_channels = scales_.channels + channel / kBlockK * scales_.channel_stride + first_k / kBlockK;
      int place = 0;
      float next[kTokens];
      read(next, from, from_channels, 0);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int stage = 0; stage < stages; ++stage) {
        Array<float, kTokens> scales;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kTokens; ++i) scales[i] = next[i];
        if (stage + 1 < stages) read(next, from, from_channels, stage + 1);
        barriers_.empty[place].wait(~phases_ >> place & 1);
        reinterpret_cast<Array<float, kTokens>*>(storage_.blocks(place))[lane_] = scales;
        __syncwarp();
        if (lane_ == 0) barriers_.full[place].arrive();
        phases_ ^= 1u << place;
        place = place + 1 == kStages ? 0 : place + 1;
      }
    }

   private:
    static constexpr int kTokens = Shape::kN / 32;  // a lane

    CUTLASS_DEVICE static void read(float (&scales)[kTokens], float const* const (&tokens)[kTokens],
                                    float const* channels, int block) {
      float const of_channels = channels[block];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTokens; ++i) scales[i] = tokens[i][block] * of_channels;
    }

    SharedStorage& storage_;
    Barriers& barriers_;
    BlockScaleMatrices const& scales_;
    int const tokens_, lane_;
    uint32_t phases_ = 0;  // bit `place`: parity of the next phase that fills it
  };

  /// A consuming warpgroup.
  class Consumer {
   public:
    CUTLASS_DEVICE Consumer(SharedStorage& storage, Barriers& barriers, Arguments const&, int warpgroup, int warp,
                            int lane)
        : storage_(storage), barriers_(barriers), warpgroup_(warpgroup), strip_(warpgroup * 4 + warp), lane_(lane) {
      if (warpgroup == 1) arch::named_barrier_arrive<kTurnThreads>(kTurnBarrier);  // the other one begins
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2 * kSteps * 4; ++i) fragments_[i / 4 / kSteps][i / 4 % kSteps][i % 4] = 0;
    }

    /// The sums over `stages` stages, at least one.
    CUTLASS_DEVICE void operator()(FragmentC& sums, int /*first_k*/, int stages) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Wgmma::kSums; ++i) sums[i] = 0;
      load_codes(0, 0);
      int left = stages;
      CUTLASS_PRAGMA_NO_UNROLL
      while (round(sums, left, std::make_integer_sequence<int, kStages>{})) {
      }
    }

   private:
    static constexpr int kTurnBarrier = kWarpgroups, kTurnThreads = 2 * arch::kWarpgroupThreads;

    template <int... kPlaces>
    CUTLASS_DEVICE bool round(FragmentC& sums, int& left, std::integer_sequence<int, kPlaces...>) {
      return (stage<kPlaces>(sums, left) && ...);
    }

    template <int kPlace>
    CUTLASS_DEVICE bool stage(FragmentC& sums, int& left) {
      typename Wgmma::Sums block;
      multiply(block, kPlace);
      if (left > 1) load_codes((kPlace + 1) % kStages, (kPlace + 1) % 2);
      float2 scales[Shape::kN / 8];  // of the lane's two tokens of each n8 block
      CUTLASS_PRAGMA_UNROLL
      for (int n = 0; n < Shape::kN / 8; ++n)
        scales[n] = *reinterpret_cast<float2 const*>(storage_.blocks(kPlace) + n * 8 + lane_ % 4 * 2);
      cute::warpgroup_wait<0>();
      arch::fence_registers(block);
      if (lane_ == 0) barriers_.empty[kPlace].arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Wgmma::kSums; ++i)
        sums[i] += warp::BlockPromotion::value(block[i]) * (i % 2 == 0 ? scales[i / 4].x : scales[i / 4].y);
      return --left > 0;
    }

    /// Issues the MMAs of a stage, in turns with the other warpgroup: while one's run, the other scales its sums.
    CUTLASS_DEVICE void multiply(typename Wgmma::Sums& block, int place) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Wgmma::kSums; ++i) block[i] = warp::BlockPromotion::kStart;
      arch::named_barrier_sync<kTurnThreads>(kTurnBarrier + warpgroup_);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i) arch::fence_registers(fragments_[place % 2][i]);
      arch::fence_registers(block);
      cute::warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i) {
        uint64_t const tokens = arch::swizzled_operand(place * Shape::kN * Base::kChunkBytes + i * 32);
        Wgmma::issue(block, fragments_[place % 2][i], tokens);
      }
      cute::warpgroup_commit_batch();
      arch::named_barrier_arrive<kTurnThreads>(kTurnBarrier + (warpgroup_ ^ 1));
    }

    /// Waits for a stage; the lane's codes of its tiles are the fragments of its steps.
    CUTLASS_DEVICE void load_codes(int place, int buffer) {
      barriers_.full[place].wait(phases_ >> place & 1);
      phases_ ^= 1u << place;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i) {
        uint32_t(&fragment)[4] = fragments_[buffer][i];
        arch::fence_registers(fragment);  // keeps the old one alive until here
        uint4 const v = *reinterpret_cast<uint4 const*>(storage_.weights(place, strip_) +
                                                        i * Base::LayoutA::kTileBytes + lane_ * 16);
        fragment[0] = v.x, fragment[1] = v.y, fragment[2] = v.z, fragment[3] = v.w;
      }
    }

    SharedStorage& storage_;
    Barriers& barriers_;
    int const warpgroup_, strip_, lane_;
    uint32_t phases_ = 0;  // bit `place`: parity of the next phase that fills it
    uint32_t fragments_[2][kSteps][4];
  };
};

}  // namespace cutlass::gemm::threadblock
