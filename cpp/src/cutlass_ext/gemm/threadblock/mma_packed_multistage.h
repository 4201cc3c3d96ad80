// The multistage main loop of products whose weights get their scales, if any, before the multiplication: they are
// dequantised in registers, one step ahead, evenly between the MMAs.
#pragma once

#include "cutlass_ext/gemm/threadblock/multistage_ring.h"

namespace cutlass::gemm::threadblock {

template <class Shape, class WarpShape, int Stages, class Element, qcutlass::Packing kPacking,
          qcutlass::ScaleMode kMode, bool kGathers = false>
class MmaPackedMultistage : public MultistageRing<Shape, WarpShape, Stages, Element, kPacking, kMode, kGathers> {
 public:
  using Ring = MultistageRing<Shape, WarpShape, Stages, Element, kPacking, kMode, kGathers>;
  using Ring::kColumns, Ring::kSliceRows, Ring::kSlices, Ring::kStages, Ring::kSteps, Ring::kStrips;
  using typename Ring::Arguments, typename Ring::ArchMma, typename Ring::FragmentC, typename Ring::SharedStorage;
  using LayoutA = typename Ring::LayoutA;
  using Scales = typename Ring::Traits::Scales;
  using Converter = typename Scales::Converter;
  using Operands = typename Scales::Operands;
  static constexpr int kRowSteps = kSliceRows > 0 ? kSteps / kSliceRows : 0;  // steps that one row of scales serves

  CUTLASS_DEVICE
  MmaPackedMultistage(SharedStorage& storage, Arguments const& args, int channel, int token, int first_k, int end_k,
                      int warp, int lane)
      : Ring(storage, args, channel, token, first_k, end_k, warp, lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < kStrips; ++m) operands_[m] = Scales::symmetric();
  }

  /// Accumulates the block's share of k, after prefetch_weights(). Shared memory is free for other uses when it
  /// returns.
  CUTLASS_DEVICE void operator()(FragmentC& accumulators) {
    this->fill();
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kColumns; n += 2) load_tokens(0, 0, n);
    load_codes(0, 0);
    load_operands(0, 0);
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRegistersA; ++r) dequantize(0, r);
    accumulators.clear();
    this->for_each_stage([&](int place) { stage(accumulators, place); });
    this->drain();
    if constexpr (Ring::Traits::kHasSmallNumbers) Scales::finish(accumulators, this->args_.scales.type);
    this->args_.apply(accumulators);
  }

 private:
  static constexpr int kRegistersA = kStrips * 4;  // per step
  /// Wide warp tiles have no registers for two fragments, and time enough between the last use of a part of one and the
  /// first use of the part that takes its place.
  static constexpr int kBuffersB = kColumns >= 16 ? 1 : 2;

  CUTLASS_DEVICE void load_tokens(int place, int step, int n) {
    Ring::load_tokens(frag_b_[step % kBuffersB], place, step, n);
  }

  CUTLASS_DEVICE void load_codes(int place, int tile) {
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < kStrips; ++m) Ring::load_codes(codes_[m], place, tile, m);
  }

  CUTLASS_DEVICE void load_operands(int place, int row) {
    if constexpr (kSliceRows > 0) {
      uint8_t const* scales =
          this->storage_.groups(place) + (this->slice_ * kSliceRows + row) * Ring::GroupLoader::kRowBytes;
      auto const row_of = [&](int strip) {
        uint8_t const* first = this->storage_.groups(place) + super_byte(Shape::kM);
        return warp::GroupRow{scales, scales + Ring::GroupLoader::kZeros, this->warp_m_ * WarpShape::kM + strip * 16,
                              first, first + Ring::GroupLoader::kZeros};
      };
      qcutlass::DType const type = this->args_.scales.type;
      if constexpr (Ring::Traits::kHasSmallNumbers) {
        Scales::with_type(type, [&](auto scales) {
          typename Scales::Words words[kStrips];
          CUTLASS_PRAGMA_UNROLL
          for (int m = 0; m < kStrips; ++m) words[m] = Scales::template load<decltype(scales)>(row_of(m), this->lane_);
          has_rests_ = Scales::template make_operands<decltype(scales)>(operands_, words);
        });
      } else {
        Scales::load(operands_, row_of(fast_min(this->lane_ / 8, kStrips - 1)), row_of, this->lane_, type,
                     this->args_.zeros.type);
      }
    }
  }

  /// Register `r` of the A fragment of step `step`. All indices are constants after unrolling.
  CUTLASS_DEVICE void dequantize(int step, int r) {
    switch (r % 4) {
      case 0: return dequantize<0>(step, r / 4);
      case 1: return dequantize<1>(step, r / 4);
      case 2: return dequantize<2>(step, r / 4);
      case 3: return dequantize<3>(step, r / 4);
    }
  }
  template <int kRegister>
  CUTLASS_DEVICE void dequantize(int step, int strip) {
    uint32_t const* words = codes_[strip] + step % LayoutA::kSteps * LayoutA::kWords;
    uint32_t& out = frag_a_[step % 2][strip][kRegister];
    out = Converter::template convert<kRegister>(words, operands_[strip]);
    if constexpr (Ring::Traits::kHasSmallNumbers)
      if (has_rests_) out = Converter::template times_rest<kRegister>(out, operands_[strip]);
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

      if (k == 0) this->refill(place);
      if (k + 2 == kSteps) this->wait_for_next();  // the next step reads the next stage
    }
  }

  ArchMma mma_;
  uint32_t frag_a_[2][kStrips][4];  // of even and odd steps
  uint32_t frag_b_[kBuffersB][kColumns][2];
  uint32_t codes_[kStrips][4];
  Operands operands_[kStrips];
  bool has_rests_ = false;  // of small numbers
};

}  // namespace cutlass::gemm::threadblock
