// The multistage main loop of blockwise products. The sums of every block of k are scaled into fp32 ones by the CUDA
// cores, so a block's products are made output by output, not step by step: only a few outputs have block sums at a
// time. Operand B of a whole slice stays in registers, the strips of operand A pass by.
#pragma once

#include "cutlass_ext/gemm/threadblock/multistage_ring.h"
#include "cutlass_ext/gemm/warp/block_promotion.h"

namespace cutlass::gemm::threadblock {

template <class Shape, class WarpShape, int Stages, class Element, qcutlass::Packing kPacking,
          qcutlass::ScaleMode kMode>
class MmaPackedBlockwise : public MultistageRing<Shape, WarpShape, Stages, Element, kPacking, kMode> {
 public:
  using Ring = MultistageRing<Shape, WarpShape, Stages, Element, kPacking, kMode>;
  using Ring::kColumns, Ring::kSlices, Ring::kStages, Ring::kSteps, Ring::kStrips;
  using typename Ring::Arguments, typename Ring::ArchMma, typename Ring::FragmentC, typename Ring::SharedStorage;
  static_assert(Ring::LayoutA::kSteps == 1, "a tile of codes is the fragment of a step");
  static_assert(kStrips % 2 == 0, "strips alternate between two buffers, across stages too");

  using Ring::Ring;

  /// Accumulates the block's share of k, after prefetch_weights(). Shared memory is free for other uses when it
  /// returns.
  CUTLASS_DEVICE void operator()(FragmentC& accumulators) {
    this->fill();
    load_first(0);
    accumulators.clear();
    this->for_each_stage([&](int place) { stage(accumulators, place); });
    this->drain();
  }

 private:
  /// Outputs (n8 blocks) of a strip that are made together: their MMAs take turns, one alone would wait for itself.
  static constexpr int kTogether = kColumns < 4 || kStrips > 4 ? 2 : 4;
  static constexpr int kTurns = kColumns / kTogether;
  static constexpr int kPromotedSteps = qcutlass::promoted_k(kMode) / Ring::Traits::kStepK;
  static constexpr int kPromotions = kSteps / kPromotedSteps;
  /// One strip's sums of one block of k, of kTogether columns.
  static constexpr int kUnits = kStrips * kPromotions * kTurns;
  static constexpr int kStripUnits = kUnits / kStrips;
  /// The scales of a stage fit registers: the channels of a warp, whose tile is aligned, lie within one block, which
  /// has one scale for its even strips and one for the odd ones.
  static constexpr bool kHoldsScales = kMode == qcutlass::ScaleMode::kBlock;
  static_assert(!kHoldsScales || 128 % WarpShape::kM == 0);

  CUTLASS_DEVICE void load_tokens(int place, int n) {
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kSteps; ++step) Ring::load_tokens(frag_b_[step], place, step, n);
  }

  CUTLASS_DEVICE void load_strip(int place, int m) {
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kSteps; ++step) Ring::load_codes(frag_a_[m % 2][step], place, step, m);
  }

  /// Loads the operands of the first unit of a stage.
  CUTLASS_DEVICE void load_first(int place) {
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kColumns; n += 2) load_tokens(place, n);
    load_strip(place, 0);
  }

  /// The scales of block `promotion` of the slice, for strip m of the warp and the lane's two tokens of column n.
  CUTLASS_DEVICE float2 scales(int place, int promotion, int n, int m) const {
    int const row = this->slice_ * kPromotions + promotion;
    float const* words =
        reinterpret_cast<float const*>(this->storage_.blocks(place) + row * Ring::BlockLoader::kRowBytes);
    float2 const tokens =
        *reinterpret_cast<float2 const*>(words + this->warp_n_ * WarpShape::kN + n * 8 + this->lane_ % 4 * 2);
    float const strip = words[Shape::kN + this->warp_m_ * kStrips + m];
    return {tokens.x * strip, tokens.y * strip};
  }

  using Blocks = typename ArchMma::FragmentC[kTogether];
  using Sums = Array<float, 4>;
  using Promotion = warp::BlockPromotion<typename Ring::Traits::Product>;

  /// Each unit's sums are promoted while the next unit's are made.
  CUTLASS_DEVICE void stage(FragmentC& accumulators, int place) {
    int const next_place = (place + 1) % kStages;
    Blocks blocks[2];
    if constexpr (kHoldsScales) {
      CUTLASS_PRAGMA_UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        CUTLASS_PRAGMA_UNROLL
        for (int n = 0; n < kColumns; ++n) scales_[odd][n] = scales(place, 0, n, odd);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int unit = 0; unit <= kUnits; ++unit) {
      int const m = unit / kStripUnits, promotion = unit % kStripUnits / kTurns, n = unit % kTurns * kTogether;
      if (unit < kUnits) {
        bool const first = unit % kStripUnits == 0, last_strip = m == kStrips - 1;
        if (first && !last_strip) load_strip(place, m + 1);
        if (first && last_strip && kHoldsScales) {  // all of this stage is in registers, or on its way to them
          this->wait_for_next();
          load_strip(next_place, 0);
        }
        multiply(blocks[unit % 2], m, promotion, n);
        if (unit == 0) this->refill(place);
        if (last_strip && kHoldsScales) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kTogether; i += 2) load_tokens(next_place, n + i);
        }
      }
      if (unit > 0) promote(accumulators, blocks[(unit - 1) % 2], place, unit - 1);
    }
    if constexpr (!kHoldsScales) {
      this->wait_for_next();
      load_first(next_place);
    }
  }

  CUTLASS_DEVICE void multiply(Blocks& blocks, int m, int promotion, int n) {
    using A = typename ArchMma::FragmentA;
    using B = typename ArchMma::FragmentB;
    auto const start = Promotion::start();
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < kPromotedSteps; ++s) {
      int const step = promotion * kPromotedSteps + s;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTogether; ++i)
        mma_(blocks[i], reinterpret_cast<A const&>(frag_a_[m % 2][step]),
             reinterpret_cast<B const&>(frag_b_[step][n + i]), s == 0 ? start : blocks[i]);
    }
  }

  CUTLASS_DEVICE void promote(FragmentC& accumulators, Blocks const& blocks, int place, int unit) const {
    int const m = unit / kStripUnits, promotion = unit % kStripUnits / kTurns, n = unit % kTurns * kTogether;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      float2 const scale = kHoldsScales ? scales_[m % 2][n + i] : scales(place, promotion, n + i, m);
      Promotion::add(reinterpret_cast<Sums*>(&accumulators)[m + (n + i) * kStrips], blocks[i], scale);
    }
  }

  ArchMma mma_;
  uint32_t frag_a_[2][kSteps][4];  // of even and odd strips
  uint32_t frag_b_[kSteps][kColumns][2];
  float2 scales_[2][kColumns];  // of even and odd strips
};

}  // namespace cutlass::gemm::threadblock
