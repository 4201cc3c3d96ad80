// The multistage main loop of 4-by-8-bit products. As in mma_packed_wgmma_groups.h, operand A is the codes minus their
// zeros, in 8 bits, exactly; and after each group of k the sums leave the MMAs' registers to be scaled and added in
// fp32. As in mma_packed_blockwise.h, the loop goes strip by strip, with operand B of a whole slice in registers. Codes
// are converted one step ahead, between the MMAs.
#pragma once

#include "cutlass_ext/gemm/threadblock/multistage_ring.h"
#include "cutlass_ext/gemm/warp/block_promotion.h"
#include "cutlass_ext/gemm/warp/group_promotion.h"

namespace cutlass::gemm::threadblock {

template <class Shape, class WarpShape, int Stages, class Element, qcutlass::ScaleMode kMode>
class MmaPackedGroups : public MultistageRing<Shape, WarpShape, Stages, Element, qcutlass::Packing::kW4A8, kMode> {
 public:
  using Ring = MultistageRing<Shape, WarpShape, Stages, Element, qcutlass::Packing::kW4A8, kMode>;
  using Ring::kColumns, Ring::kSliceRows, Ring::kSlices, Ring::kSliceTiles, Ring::kStages, Ring::kSteps, Ring::kStrips;
  using typename Ring::Arguments, typename Ring::ArchMma, typename Ring::FragmentC, typename Ring::LayoutA,
      typename Ring::SharedStorage;
  using Scales = typename Ring::Traits::Scales;
  using Converter = typename Scales::Converter;
  static_assert(kSteps % 2 == 0, "steps alternate between two buffers, across strips and stages too");

  CUTLASS_DEVICE
  MmaPackedGroups(SharedStorage& storage, Arguments const& args, int channel, int token, int first_k, int end_k,
                  int warp, int lane)
      : Ring(storage, args, channel, token, first_k, end_k, warp, lane),
        sum_scales_(this->warp_m_ * WarpShape::kM + lane / 4, args.scales.type, args.zeros.type),
        codes_byte_(LayoutA::codes_byte(lane)),
        bytes_of_k_(LayoutA::bytes_of_k(lane)) {}

  /// Accumulates the block's share of k, after prefetch_weights(). Shared memory is free for other uses when it
  /// returns.
  CUTLASS_DEVICE void operator()(FragmentC& accumulators) {
    this->fill();
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kSteps; ++step) load_tokens(0, step);
    load_operands(0, 0);
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) convert(0, half);
    accumulators.clear();
    this->for_each_stage([&](int place) { stage(accumulators, place); });
    this->drain();
  }

 private:
  static constexpr int kStageSteps = kStrips * kSteps;   // of a stage, strip by strip
  static constexpr int kRowSteps = kSteps / kSliceRows;  // whose sums are scaled together, by one row of scales
  static_assert(kRowSteps * Ring::Traits::kStepK == qcutlass::promoted_k(kMode));

  /// A unit: the outputs (n8 blocks) of a strip whose sums over kRowSteps steps are computed together, all of them.
  /// With a single step two are enough, since no MMA has to wait for the result of another.
  static constexpr int kTogether = kRowSteps == 1 ? 2 : kColumns, kTurns = kColumns / kTogether;
  using Blocks = typename ArchMma::FragmentC[kTogether];
  using Sums = Array<float, 4>;
  using Promotion = warp::BlockPromotion<typename Ring::Traits::Product>;

  /// Operand B of a step of every strip.
  CUTLASS_DEVICE void load_tokens(int place, int step) {
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kColumns; n += 2) Ring::load_tokens(frag_b_[step], place, step, n);
  }

  /// What the conversions of a step of the stage need: codes where it begins a tile, scales where it begins a row.
  CUTLASS_DEVICE void load_operands(int place, int step) {
    int const m = step / kSteps, k = step % kSteps;
    if (k % LayoutA::kSteps == 0) load_codes(place, m, k / LayoutA::kSteps);
    if (k % kRowSteps == 0) load_scales(place, m, k / kRowSteps);
  }

  CUTLASS_DEVICE void load_codes(int place, int m, int tile) {
    uint8_t const* const bytes = this->storage_.weights(place) + strip(m) * Ring::WeightLoader::kStripBytes +
                                 (this->slice_ * kSliceTiles + tile) * LayoutA::kTileBytes + codes_byte_;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i)
      reinterpret_cast<uint4&>(codes_[i]) = *reinterpret_cast<uint4 const*>(bytes + i * qcutlass::layout::kLaneBytes);
  }

  CUTLASS_DEVICE void load_scales(int place, int m, int row) {
    uint8_t const* const bytes =
        this->storage_.groups(place) + (this->slice_ * kSliceRows + row) * Ring::GroupLoader::kRowBytes;
    int scale_strip = this->args_.scales.element_bytes * 16, zero_strip = this->args_.zeros.element_bytes * 16;
    asm volatile("" : "+r"(scale_strip), "+r"(zero_strip));  // addresses of all strips would stay in registers
    auto const operands = sum_scales_.load(bytes + m * scale_strip, bytes + Ring::GroupLoader::kZeros + m * zero_strip);
    scale_ = {operands.scale[0], operands.scale[1]};
    zero_[0] = operands.zero[0], zero_[1] = operands.zero[1];
  }

  CUTLASS_DEVICE int strip(int m) const { return this->warp_m_ * kStrips + m; }

  /// The part of operand A of a step of the stage that has 16 of its k, both of a lane's rows.
  CUTLASS_DEVICE void convert(int step, int half) {
    int const word = step % LayoutA::kSteps * LayoutA::kWords + half;
    uint32_t(&fragment)[4] = frag_a_[step % 2];
    Converter::convert(fragment[half * 2], fragment[half * 2 + 1],
                       arch::permute_bytes(codes_[0][word], codes_[1][word], bytes_of_k_), zero_);
  }

  /// Each unit's sums are promoted while the next unit's are made.
  CUTLASS_DEVICE void stage(FragmentC& accumulators, int place) {
    constexpr int kUnits = kStageSteps / kRowSteps * kTurns;
    int const next_place = (place + 1) % kStages;
    Blocks blocks[2];
    float2 scales[2]{};  // of rows; the front end does not see that each is set before its first use
    auto const promote_unit = [&](int unit) {
      promote(accumulators, blocks[unit % 2], scales[unit / kTurns % 2], unit);
    };
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kStageSteps; ++step) {
      int const row = step / kRowSteps, k = step % kSteps, left = kStageSteps - step;
      bool const first = step % kRowSteps == 0;
      if (first) scales[row % 2] = scale_;
      load_operands(left == 1 ? next_place : place, (step + 1) % kStageSteps);
      if (left == 2) {  // all of this stage is in registers
        this->wait_for_next();
        CUTLASS_PRAGMA_UNROLL
        for (int before = 0; before < k; ++before) load_tokens(next_place, before);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int turn = 0; turn < kTurns; ++turn) {
        int const unit = row * kTurns + turn;
        multiply(blocks[unit % 2], step, turn * kTogether, first);
        if (first && unit > 0) promote_unit(unit - 1);
      }
      if (step == 0) this->refill(place);
      if (left <= 2) load_tokens(next_place, k);
    }
    promote_unit(kUnits - 1);
  }

  /// The MMAs of a step from column `from` on, and between them its share of the next step's conversions.
  CUTLASS_DEVICE void multiply(Blocks& blocks, int step, int from, bool first) {
    using A = typename ArchMma::FragmentA;
    using B = typename ArchMma::FragmentB;
    constexpr int kHalf = kColumns / 2;
    auto const start = Promotion::start();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      int const n = from + i;
      mma_(blocks[i], reinterpret_cast<A const&>(frag_a_[step % 2]),
           reinterpret_cast<B const&>(frag_b_[step % kSteps][n]), first ? start : blocks[i]);
      if (n % kHalf == kHalf - 1) convert((step + 1) % kStageSteps, n / kHalf);
    }
  }

  static CUTLASS_DEVICE void promote(FragmentC& accumulators, Blocks const& blocks, float2 scale, int unit) {
    int const m = unit / kTurns * kRowSteps / kSteps, from = unit % kTurns * kTogether;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      Sums values;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 4; ++j) values[j] = Promotion::value(blocks[i][j]);
      warp::GroupPromotion::add(reinterpret_cast<Sums*>(&accumulators)[m + (from + i) * kStrips], values, scale);
    }
  }

  ArchMma mma_;
  Scales const sum_scales_;
  int const codes_byte_;       // in a tile, of the two lanes whose codes this one has
  uint32_t const bytes_of_k_;  // of their words
  uint32_t codes_[2][4];       // of the tile that is converted
  float2 scale_;               // of its row of scales, of rows g and g + 8
  uint32_t zero_[2];           // likewise, in every byte
  uint32_t frag_a_[2][4];      // of even and odd steps
  uint32_t frag_b_[kSteps][kColumns][2];
};

}  // namespace cutlass::gemm::threadblock
