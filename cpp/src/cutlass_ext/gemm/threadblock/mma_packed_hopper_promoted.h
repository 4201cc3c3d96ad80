// The sm_90a mainloop of products whose MMAs' sums are not those of the product: as MmaPackedHopper, but every stage's
// sums begin anew, and CUDA cores add them to fp32 sums ("promotion") while the other warpgroup's MMAs run.
//
// fp8: wgmma aligns the products of a step with what they are added to and keeps some 14 bits. Errors of that size do
// not grow beyond a stage.
//
// Blockwise int8: a stage is a block of k, whose int32 sums are scaled. Warps beside the producing thread multiply the
// scales of the block's tokens with that of the tile's channels, which are one block, and put them into the ring.
#pragma once

#include "cutlass_ext/gemm/threadblock/mma_packed_hopper.h"

namespace cutlass::gemm::threadblock {

template <class Shape, int kWarpgroups, int kStages, class Element, qcutlass::Packing kPacking,
          qcutlass::ScaleMode kMode>
class MmaPackedHopperPromoted
    : public MmaPackedHopper<Shape, kWarpgroups, kStages, 4, false, Element, kPacking, kMode> {
 public:
  using Base = MmaPackedHopper<Shape, kWarpgroups, kStages, 4, false, Element, kPacking, kMode>;
  using Base::kSteps, Base::kBlockwise;
  using typename Base::Arguments, typename Base::Barriers, typename Base::SharedStorage, typename Base::Wgmma;
  static constexpr int kStageK = 128;
  static_assert(Shape::kK == kStageK);
  static_assert(!kBlockwise || (qcutlass::promoted_k(kMode) == kStageK && Shape::kM == kStageK));
  static_assert(kStages % 2 == 0, "a stage's fragment buffer is a constant");

  using FragmentC = float[Wgmma::kSums];          // in the order of the instruction's sums
  static constexpr int kTokens = Shape::kN / 32;  // whose scales a lane of the scaling warp writes

  /// The token whose scale has the place `slot` in a stage: a consuming lane t of a quad finds those of its tokens 2t
  /// and 2t + 1 of two n8 blocks side by side.
  CUTLASS_DEVICE static int token_of(int slot) {
    return slot / 16 * 16 + slot % 16 / 4 * 2 + slot % 2 + slot / 2 % 2 * 8;
  }

  /// One of the warps that scale, each every other stage: what a stage needs is on its way while the one before waits
  /// for its place.
  class Scaler {
   public:
    static constexpr int kWarps = 2;
    static_assert(kStages % kWarps == 0, "a place has one of them");

    CUTLASS_DEVICE Scaler(SharedStorage& storage, Barriers& barriers, Arguments const& args, int warp, int lane)
        : storage_(storage),
          barriers_(barriers),
          scales_(args.blocks),
          tokens_(args.tokens),
          warp_(warp),
          lane_(lane) {}

    CUTLASS_DEVICE void load(int channel, int token, int first_k, int stages) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTokens; ++i)  // tokens beyond the last have the scales of the first ones
        of_tokens_[i] = scales_.tokens +
                        unsigned(token + token_of(lane_ * kTokens + i)) % unsigned(tokens_) * scales_.token_stride +
                        first_k / kStageK;
      of_channels_ = scales_.channels + channel / kStageK * scales_.channel_stride + first_k / kStageK;
      int place = warp_;
      if (warp_ < stages) request(warp_);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int stage = warp_; stage < stages; stage += kWarps) {
        Array<float, kTokens> scales;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kTokens; ++i) scales[i] = token_scales_[i] * channel_scale_;
        if (stage + kWarps < stages) request(stage + kWarps);
        barriers_.empty[place].wait(~phases_ >> place & 1);
        reinterpret_cast<Array<float, kTokens>*>(storage_.blocks(place))[lane_] = scales;
        __syncwarp();
        if (lane_ == 0) barriers_.full[place].arrive();
        phases_ ^= 1u << place;
        place = place + kWarps < kStages ? place + kWarps : warp_;
      }
    }

   private:
    CUTLASS_DEVICE void request(int stage) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTokens; ++i) token_scales_[i] = of_tokens_[i][stage];
      channel_scale_ = of_channels_[stage];
    }

    SharedStorage& storage_;
    Barriers& barriers_;
    BlockScaleMatrices const& scales_;
    int const tokens_, warp_, lane_;
    float const *of_tokens_[kTokens], *of_channels_;
    float token_scales_[kTokens], channel_scale_;
    uint32_t phases_ = 0;  // bit `place`: parity of the next phase that fills it
  };

  /// A consuming warpgroup.
  class Consumer {
   public:
    CUTLASS_DEVICE Consumer(SharedStorage& storage, Barriers& barriers, Arguments const&, int warpgroup, int warp,
                            int lane)
        : storage_(storage), barriers_(barriers), strip_(warpgroup * 4 + warp), lane_(lane) {
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
    template <int... kPlaces>
    CUTLASS_DEVICE bool round(FragmentC& sums, int& left, std::integer_sequence<int, kPlaces...>) {
      return (stage<kPlaces>(sums, left) && ...);
    }

    template <int kPlace>
    CUTLASS_DEVICE bool stage(FragmentC& sums, int& left) {
      typename Wgmma::Sums block;
      multiply(block, kPlace);
      if (left > 1) load_codes((kPlace + 1) % kStages, (kPlace + 1) % 2);
      Array<float, kBlockwise ? Shape::kN / 4 : 1> scales;  // of the lane's two tokens of each n8 block
      if constexpr (kBlockwise) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Shape::kN / 16; ++i)
          reinterpret_cast<float4*>(&scales)[i] =
              reinterpret_cast<float4 const*>(storage_.blocks(kPlace))[i * 4 + lane_ % 4];
      }
      cute::warpgroup_wait<0>();
      arch::fence_registers(block);
      if (lane_ == 0) barriers_.empty[kPlace].arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Wgmma::kSums; ++i) {  // [n8 block][row g or g + 8][token 2t or 2t + 1]
        if constexpr (kBlockwise)
          sums[i] += float(int(block[i])) * scales[i / 4 * 2 + i % 2];
        else
          sums[i] += block[i];
      }
      return --left > 0;
    }

    /// Issues the MMAs of a stage. The two warpgroups fall out of step by themselves; turns cost more than they bring.
    CUTLASS_DEVICE void multiply(typename Wgmma::Sums& block, int place) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i) arch::fence_registers(fragments_[place % 2][i]);
      arch::fence_registers(block);
      cute::warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i) {
        uint64_t const tokens = arch::swizzled_operand(place * Shape::kN * Base::kChunkBytes + i * 32);
        Wgmma::issue(block, fragments_[place % 2][i], tokens, i == 0);
      }
      cute::warpgroup_commit_batch();
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
    int const strip_, lane_;
    uint32_t phases_ = 0;  // bit `place`: parity of the next phase that fills it
    uint32_t fragments_[2][kSteps][4];
  };
};

}  // namespace cutlass::gemm::threadblock
