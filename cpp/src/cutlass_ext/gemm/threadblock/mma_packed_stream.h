// The stream main loop, for few tokens: the weights pass through at the speed of memory and everything else keeps out
// of their way. Differences from MmaPackedMultistage:
//   - every slice of k has a ring of its own (stream_ring.h);
//   - sums of exact products are scaled in fp32, once a group, where that is cheaper than scaling the weights
//     (scales_sums): of (code - zero) * activation where groups span at least 64 k, else as group_sums.h and
//     minimum_sums.h say.
#pragma once

#include <limits>

#include "cutlass_ext/gemm/threadblock/stream_fragments.h"
#include "cutlass_ext/gemm/threadblock/stream_ring.h"
#include "cutlass_ext/gemm/warp/block_promotion.h"
#include "cutlass_ext/gemm/warp/group_promotion.h"
#include "cutlass_ext/gemm/warp/group_sums.h"
#include "cutlass_ext/gemm/warp/minimum_sums.h"

namespace cutlass::gemm::threadblock {

/// Shape: channels x tokens x (slices * 128). WarpShape: channels x tokens x 128.
template <class Shape, class WarpShape, int Stages, class Element, qcutlass::Packing kPacking,
          qcutlass::ScaleMode kMode, bool kGathers = false>
class MmaPackedStream : public PackedMmaBase<Shape, WarpShape, Stages, Element, kPacking, kMode, kGathers> {
 public:
  using Base = PackedMmaBase<Shape, WarpShape, Stages, Element, kPacking, kMode, kGathers>;
  using Base::kColumns, Base::kStages, Base::kSteps, Base::kStrips;
  using typename Base::Arguments, typename Base::ArchMma, typename Base::FragmentC, typename Base::LayoutA,
      typename Base::Traits;
  using Ring = StreamRing<Base>;
  using Fragments = StreamFragments<Base, Ring>;
  using SharedStorage = typename Ring::SharedStorage;
  static constexpr int kStageK = Ring::kStageK, kRows = Ring::kRows, kStepK = Traits::kStepK;

  /// The block's tile starts at (channel, token), its share of k is [first_k, end_k); first_k is a multiple of
  /// Shape::kK, and so is end_k unless it is the end of the matrix.
  CUTLASS_DEVICE
  MmaPackedStream(SharedStorage& storage, Arguments const& args, int channel, int token, int first_k, int end_k,
                  int warp, int lane)
      : args_(args),
        thread_(threadIdx.x % Ring::kSetThreads),
        slice_(warp / (Base::kWarpsM * Base::kWarpsN)),
        fragments_(warp, lane),
        tokens_(fast_min(args.tokens - token, Shape::kN)),
        places_(storage, args, slice_),
        whole_groups_(args.group_size.is_multiple_of(kStageK)),
        ring_(places_, args, channel, token, tokens_, slice_, first_k + slice_ * kStageK, end_k, thread_),
        group_sums_(fragments_.first_channel(), args.scales.type),
        pairs_of_steps_(args.group_size.is_multiple_of(2 * kStepK)) {
    fragments_.set_tokens(lane, tokens_);
    if constexpr (kNativeSums) {
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < kStrips; ++m) offsets_[m] = Scales::symmetric();
    }
  }

  /// Requests the weights, scales and zeros of the first stages, which may be done before the wait for the kernel
  /// before this one.
  CUTLASS_DEVICE void prefetch_weights() { ring_.prefetch_weights(); }

  /// Whether sums of codes with minimums are scaled, so that sums may be "odd": not finite where a sum of dequantised
  /// weights is, or NaN where that is infinite. The kernel then calls replace_odd() of another object.
  static constexpr bool kMayBeOdd = qcutlass::streams_minimum_sums(kMode, Shape::kN);

  /// Whether any sum of the block's first `channels` channels is not finite. (Sums of channels beyond the last are made
  /// of undefined scales and do not count.) For all threads of the block.
  static CUTLASS_DEVICE bool any_odd(FragmentC const& accumulators, int channels, int warp, int lane) {
    int const first = Fragments(warp, lane).first_channel();
    bool odd = false;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < FragmentC::kElements; ++i) {  // of strip m, and in it of row g, twice, and g + 8
      int const m = i / 4 % kStrips, row = i % 4 / 2 * 8;
      odd |= is_odd(accumulators[i]) && first + m * 16 + row < channels;
    }
    return __syncthreads_or(odd);
  }

  /// Computes the sums that are not finite again, with dequantised weights.
  CUTLASS_DEVICE void replace_odd(FragmentC& accumulators) {
    FragmentC others;
    others.clear();
    prefetch_weights();
    ring_.fill();
    for_each_stage([&](uint8_t const* place) { accumulate(others, place, ring_.k()); });
    ring_.drain();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < FragmentC::kElements; ++i)
      accumulators[i] = is_odd(accumulators[i]) ? others[i] : accumulators[i];
  }

  /// Accumulates the block's share of k, after prefetch_weights(). Shared memory is free for other uses when it
  /// returns.
  CUTLASS_DEVICE void operator()(FragmentC& accumulators) {
    ring_.fill();
    accumulators.clear();
    if constexpr (kMayBeOdd)
      accumulate_scaled_groups(accumulators);
    else if (kHasWholeGroups && whole_groups_)
      for_each_stage([&](uint8_t const* place) { accumulate<kHasWholeGroups>(accumulators, place, ring_.k()); });
    else
      for_each_stage([&](uint8_t const* place) { accumulate(accumulators, place, ring_.k()); });
    ring_.drain();
    group_sums_.finish(accumulators);
    args_.apply(accumulators);
  }

 private:
  using Tokens = typename Fragments::Tokens;
  using Codes = typename Fragments::Codes;
  static constexpr int kPartSteps = Fragments::kPartSteps;
  using PartTokens = uint32_t[kColumns][kPartSteps][2];
  using PartCodes = uint32_t[kPartSteps * LayoutA::kWords];
  using Scales = typename Traits::Scales;
  using Converter = typename Scales::Converter;
  using Operands = typename Scales::Operands;
  using Products = typename ArchMma::FragmentC;  // sums of the instruction
  using Promotion = warp::BlockPromotion<typename Traits::Product>;
  using Sums = Array<typename Base::Accumulator, 4>;

  /// Scale the sums instead of the weights: native ones, with zeros that are taken off codes, or those of GroupSums.
  static constexpr bool kNativeSums = kMode == qcutlass::ScaleMode::kNative;
  static constexpr bool kGroupSums = qcutlass::streams_scaled_groups(kPacking, kMode);
  /// Whether groups that end with stages have a loop of their own. Floating codes have not tried it.
  static constexpr bool kHasWholeGroups = kNativeSums && !qcutlass::has_float_codes(kPacking);
  struct NoGroupSums {
    CUTLASS_DEVICE NoGroupSums(int, qcutlass::DType) {}
    template <class Sums>
    CUTLASS_DEVICE void finish(Sums&) const {}
  };
  using GroupSums = std::conditional_t<kGroupSums, warp::GroupSums<Element, kPacking, kMode>, NoGroupSums>;
  /// Strips whose MMAs take turns: one strip's, with few tokens, would wait for their own results.
  static constexpr int kTogether = kColumns == 1 ? (kStrips % 3 == 0 ? 3 : 2) : kColumns == 2 ? 2 : 1;
  static constexpr int kRowSteps = kRows > 0 ? kSteps / kRows : kSteps;  // steps that one row of scales serves
  /// Blockwise: sums of blocks of k are scaled into the accumulators.
  static constexpr bool kBlockwise = qcutlass::is_promoted(kMode);
  static constexpr int kPromotedSteps = qcutlass::promoted_k(kMode) / kStepK;

  static CUTLASS_DEVICE bool is_odd(float sum) { return !(fabsf(sum) <= std::numeric_limits<float>::max()); }

  /// Calls stage(place) for every stage, which lies in `place`.
  template <class Stage>
  CUTLASS_DEVICE void for_each_stage(Stage const& stage) {
    uint8_t *read = places_[0], *write = places_[kStages - 1];
    CUTLASS_PRAGMA_NO_UNROLL
    for (int left = ring_.stages(); left > 0; --left) {
      ring_.wait();
      if (left >= kStages)
        ring_.refill(write);
      else
        arch::allow_next_grid();  // nothing left to load: the next kernel's weights may come
      arch::cp_async_fence();
      stage(read);
      ring_.advance();
      write = read;  // the place that is free now
      read = read == places_[kStages - 1] ? places_[0] : read + places_.bytes;
    }
  }

  /// The products of the stage at k, strip by strip. kWholeGroups: no group ends within a stage, which groups of 128
  /// make usual. That loop is a fifth shorter than one that asks.
  template <bool kWholeGroups = false>
  CUTLASS_DEVICE void accumulate(FragmentC& accumulators, uint8_t const* place, int k) {
    // Zeros first: behind their branch, the compiler moves the loads of tokens among the products.
    if constexpr (kNativeSums)
      if (args_.zeros.data != nullptr) load_operands(offsets_, place, 0, 0);
    Tokens b;
    fragments_.load_tokens(b, place);
    Sums* const sums = reinterpret_cast<Sums*>(&accumulators);
    if constexpr (kGroupSums) {
      if (pairs_of_steps_ && group_sums_.has_powers())
        accumulate_groups<2, true>(sums, place, b);
      else
        accumulate_groups<1, false>(sums, place, b);
    } else {
      unsigned const starts = kWholeGroups ? 0 : group_starts(k);
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < kStrips; m += kTogether) {
        constexpr int kRest = (kStrips - 1) % kTogether + 1;
        if constexpr (kBlockwise) {
          m + kTogether <= kStrips ? accumulate_blocks<kTogether>(sums + m, place, m, b)
                                   : accumulate_blocks<kRest>(sums + m, place, m, b);
        } else {
          m + kTogether <= kStrips ? accumulate_strips<kTogether, kWholeGroups>(sums + m, place, m, b, starts)
                                   : accumulate_strips<kRest, kWholeGroups>(sums + m, place, m, b, starts);
        }
      }
    }
  }

  /// `kCount` strips of a blockwise product from the warp's strip m on.
  template <int kCount>
  CUTLASS_DEVICE void accumulate_blocks(Sums* sums, uint8_t const* place, int m, Tokens const& b) const {
    Codes codes[kCount];
    Products block[kCount][kColumns];
    Products const start = Promotion::start();
    float const* scales = reinterpret_cast<float const*>(place + Ring::Place::kBlocks);
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < kSteps; ++s) {
      fragments_.load_codes(codes, place, m, s);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int n = 0; n < kColumns; ++n)
          mma(block[i][n], codes[i] + s * LayoutA::kWords, b[n][s], s % kPromotedSteps == 0 ? start : block[i][n]);
      }
      if ((s + 1) % kPromotedSteps != 0) continue;
      CUTLASS_PRAGMA_UNROLL
      for (int n = 0; n < kColumns; ++n) {
        float2 const tokens = fragments_.load_token_scales(scales, n);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kCount; ++i) {
          float const strip = fragments_.load_strip_scale(scales, m + i);
          Promotion::add(sums[i + n * kStrips], block[i][n], {tokens.x * strip, tokens.y * strip});
        }
      }
      scales += Ring::BlockLoader::kRowBytes / 4;
    }
  }

  /// `kCount` strips of any other product.
  template <int kCount, bool kWholeGroups>
  CUTLASS_DEVICE void accumulate_strips(Sums* sums, uint8_t const* place, int m, Tokens const& b,
                                        unsigned starts) const {
    Codes codes[kCount];
    if constexpr (LayoutA::kConverts) {  // plain loads, whose place the compiler chooses; ldmatrix stays where it is
      CUTLASS_PRAGMA_UNROLL
      for (int tile = 0; tile < kStageK / LayoutA::kTileK; ++tile) fragments_.load_codes(codes, place, m, tile);
    }
    Operands op[kCount];
    Sums group[kCount][kColumns];
    Sums zero;
    zero.clear();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i)
      if constexpr (kNativeSums) op[i] = offsets_[m + i];
    if constexpr (!kNativeSums) load_operands(op, place, 0, m);
    auto const multiply = [&](int first, int last) {
      CUTLASS_PRAGMA_UNROLL
      for (int s = first; s < last; ++s) {
        if constexpr (!LayoutA::kConverts) fragments_.load_codes(codes, place, m, s);
        if (s > 0 && s % kRowSteps == 0 && (starts >> s & 1)) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kCount; ++i) {
            if constexpr (kNativeSums) {
              promote(sums + i, group[i], place, s / kRowSteps - 1, m + i);
              clear(group[i]);
            }
          }
          if (!kNativeSums || args_.zeros.data != nullptr) load_operands(op, place, s / kRowSteps, m);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kCount; ++i) {
          uint32_t a[4];
          dequantize(a, codes[i] + s * LayoutA::kWords, op[i]);
          CUTLASS_PRAGMA_UNROLL
          for (int n = 0; n < kColumns; ++n) {
            Sums& sum = kNativeSums ? group[i][n] : sums[i + n * kStrips];
            mma(sum, a, b[n][s], kNativeSums && s == 0 ? zero : sum);
          }
        }
      }
    };
    multiply(0, kSteps / 2);
    // Always true, and a branch, over which ptxas moves no loads: it would request codes of more strips at once than
    // warps of many strips have registers for.
    if (!kWholeGroups || kStrips <= 4 || tokens_ > 0) multiply(kSteps / 2, kSteps);
    if constexpr (kNativeSums) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) promote(sums + i, group[i], place, kRows - 1, m + i);
    }
  }

  /// The products of a stage, of groups of a multiple of kGroupSteps steps.
  template <int kGroupSteps, bool kPowers>
  CUTLASS_DEVICE void accumulate_groups(Sums* sums, uint8_t const* place, Tokens const& b) const {
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < kStrips; m += kTogether) {
      constexpr int kRest = (kStrips - 1) % kTogether + 1;
      m + kTogether <= kStrips ? accumulate_groups_of<kTogether, kGroupSteps, kPowers>(sums + m, place, m, b)
                               : accumulate_groups_of<kRest, kGroupSteps, kPowers>(sums + m, place, m, b);
    }
  }

  /// Those of `kCount` strips from the warp's strip m on.
  template <int kCount, int kGroupSteps, bool kPowers>
  CUTLASS_DEVICE void accumulate_groups_of(Sums* sums, uint8_t const* place, int m, Tokens const& b) const {
    Codes codes[kCount];
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kStageK / LayoutA::kTileK; ++tile) fragments_.load_codes(codes, place, m, tile);
    Products zero;
    zero.clear();
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < kSteps; s += kGroupSteps) {
      typename GroupSums::Words words[kCount];
      Sums group[kCount][kColumns];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) words[i] = load_words(place, s, m + i);
      CUTLASS_PRAGMA_UNROLL
      for (int step = s; step < s + kGroupSteps; ++step) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kCount; ++i) {
          uint32_t const* const code = codes[i] + step * LayoutA::kWords;
          uint32_t const a[4] = {GroupSums::template number<0>(code), GroupSums::template number<1>(code),
                                 GroupSums::template number<2>(code), GroupSums::template number<3>(code)};
          CUTLASS_PRAGMA_UNROLL
          for (int n = 0; n < kColumns; ++n) mma(group[i][n], a, b[n][step], step == s ? zero : group[i][n]);
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int n = 0; n < kColumns; ++n)
          group_sums_.template add<kPowers>(sums[i + n * kStrips], group[i][n], words[i]);
      }
    }
  }

  /// All products of codes with minimums, or with scales of two levels. Each kind has a loop of its own, so that it has
  /// all registers.
  CUTLASS_DEVICE void accumulate_scaled_groups(FragmentC& accumulators) {
    pairs_of_steps_ ? accumulate_scaled_groups<2>(accumulators) : accumulate_scaled_groups<1>(accumulators);
  }
  template <int kGroupSteps>
  CUTLASS_DEVICE void accumulate_scaled_groups(FragmentC& accumulators) {
    bool const has_levels = args_.scales.type == qcutlass::DType::kInt8 || args_.scales.type == qcutlass::DType::kUInt8;
    if (!has_levels)
      accumulate_scaled_groups<kGroupSteps, true>(accumulators, one_level());
    else if (args_.zeros.data != nullptr)
      accumulate_scaled_groups<kGroupSteps, true>(accumulators, two_levels<true>());
    else
      accumulate_scaled_groups<kGroupSteps, false>(accumulators, two_levels<false>());
  }

  /// kGroupSteps: groups are multiples of so many steps. A stage is computed in two halves, as there are no registers
  /// for all of its tokens and codes.
  template <int kGroupSteps, bool kMinimums, class Numbers>
  CUTLASS_DEVICE void accumulate_scaled_groups(FragmentC& accumulators, Numbers const& numbers) {
    Sums* const sums = reinterpret_cast<Sums*>(&accumulators);
    for_each_stage([&](uint8_t const* place) {
      CUTLASS_PRAGMA_NO_UNROLL
      for (int first = 0; first < kSteps; first += kPartSteps) {
        PartTokens b;
        fragments_.load_tokens(b, place, first);
        CUTLASS_PRAGMA_UNROLL
        for (int m = 0; m < kStrips; m += kTogether)
          accumulate_part<kGroupSteps, kMinimums>(sums + m, place, m, first, b, numbers);
      }
    });
  }

  template <int kGroupSteps, bool kMinimums, class Numbers>
  CUTLASS_DEVICE void accumulate_part(Sums* sums, uint8_t const* place, int m, int first, PartTokens const& b,
                                      Numbers const& numbers) const {
    static_assert(kStrips % kTogether == 0 && kColumns == 1);
    using Integers = warp::IntegerOperands<Element, LayoutA::kBits, kMinimums>;
    constexpr int kTileSteps = LayoutA::kTileK / kStepK;
    PartCodes codes[kTogether];
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kPartSteps / kTileSteps; ++tile)
      fragments_.load_codes(codes, place, m, tile, first / kTileSteps);
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < kPartSteps; s += kGroupSteps) {
      warp::GroupNumbers by[kTogether];
      Sums group[kTogether], tokens;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTogether; ++i) by[i] = load_numbers(numbers, place, first + s, m + i);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        multiply_group<kGroupSteps>(group[i], b, s, [&](uint32_t(&a)[4], int step) {
          uint32_t const* const code = codes[i] + step * LayoutA::kWords;
          a[0] = Integers::template number<0>(code), a[1] = Integers::template number<1>(code);
          a[2] = Integers::template number<2>(code), a[3] = Integers::template number<3>(code);
        });
      }
      if constexpr (kMinimums) {
        multiply_group<kGroupSteps>(tokens, b, s,
                                    [](uint32_t(&a)[4], int) { a[0] = a[1] = a[2] = a[3] = Integers::ones(); });
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTogether; ++i) warp::add_group<kMinimums>(sums[i], group[i], tokens, by[i]);
    }
  }

  CUTLASS_DEVICE warp::OneLevel one_level() const {
    return {fragments_.first_channel(), Ring::GroupLoader::kZeros, args_.scales.type, args_.zeros.type};
  }
  template <bool kMinimums>
  CUTLASS_DEVICE warp::TwoLevels<kMinimums> two_levels() const {
    int const lane = int(threadIdx.x) % 32;
    return {fragments_.first_channel() - lane / 4,
            lane,
            super_byte(Shape::kM),
            Ring::GroupLoader::kZeros,
            args_.scales.type,
            args_.zeros.type};
  }

  template <class Numbers>
  CUTLASS_DEVICE warp::GroupNumbers load_numbers(Numbers const& numbers, uint8_t const* place, int step, int m) const {
    uint8_t const* const scales = place + Ring::Place::kGroups;
    return numbers.load(scales, scales + step / kRowSteps * Ring::GroupLoader::kScaleRowBytes, m);
  }

  /// The sums over the steps of a group from step s on; fill(a, step) makes operand A.
  template <int kGroupSteps, class Fill>
  static CUTLASS_DEVICE void multiply_group(Sums& group, PartTokens const& b, int s, Fill const& fill) {
    Products zero;
    zero.clear();
    CUTLASS_PRAGMA_UNROLL
    for (int step = s; step < s + kGroupSteps; ++step) {
      uint32_t a[4];
      fill(a, step);
      mma(group, a, b[0][step], step == s ? zero : group);
    }
  }

  /// Bit s: step s of the stage at k is the first of a group, or beyond the end of k, though it is not the stage's
  /// first step.
  CUTLASS_DEVICE unsigned group_starts(int stage_k) const {
    unsigned starts = 0;
    bool const ends = !kNativeSums && args_.k - stage_k < kStageK;
    if (kRows > 0 && (!whole_groups_ || ends)) {
      CUTLASS_PRAGMA_UNROLL
      for (int s = kRowSteps; s < kSteps; s += kRowSteps) {
        int const k = stage_k + s * kStepK;
        bool const is_first = args_.group_size.group(k) != args_.group_size.group(k - kStepK);
        if (is_first || (ends && k >= args_.k)) starts |= 1u << s;
      }
    }
    return starts;
  }

  /// The operands of kCount strips from the warp's strip m on.
  template <int kCount>
  CUTLASS_DEVICE void load_operands(Operands (&operands)[kCount], uint8_t const* place, int row, int m) const {
    fragments_.load_operands(operands, place, row, m, args_.scales.type,
                             kNativeSums ? qcutlass::DType::kUInt8 : args_.zeros.type);
  }

  /// What the sums of the group in row `row` are scaled by.
  CUTLASS_DEVICE auto load_words(uint8_t const* place, int row, int m) const {
    return group_sums_.load(place + Ring::Place::kGroups + row * Ring::GroupLoader::kScaleRowBytes, m);
  }

  /// A step's A fragment: the weights, or code - zero where native sums are scaled.
  static CUTLASS_DEVICE void dequantize(uint32_t (&a)[4], uint32_t const* words, Operands const& op) {
    if constexpr (kNativeSums) {
      a[0] = Converter::template difference<0>(words, op), a[1] = Converter::template difference<1>(words, op);
      a[2] = Converter::template difference<2>(words, op), a[3] = Converter::template difference<3>(words, op);
    } else {
      a[0] = Converter::template convert<0>(words, op), a[1] = Converter::template convert<1>(words, op);
      a[2] = Converter::template convert<2>(words, op), a[3] = Converter::template convert<3>(words, op);
    }
  }

  static CUTLASS_DEVICE void clear(Sums (&group)[kColumns]) {
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kColumns; ++n) group[n].clear();
  }

  /// Adds a group's sums of strip m, scaled, to the strip's.
  CUTLASS_DEVICE void promote(Sums* sums, Sums const (&group)[kColumns], uint8_t const* place, int row, int m) const {
    float2 const scale = fragments_.load_scales(place, row, m);
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kColumns; ++n) warp::GroupPromotion::add(sums[n * kStrips], group[n], scale);
  }

  /// d = a * b + c.
  static CUTLASS_DEVICE void mma(Products& d, uint32_t const* a, uint32_t const (&b)[2], Products const& c) {
    ArchMma{}(d, *reinterpret_cast<typename ArchMma::FragmentA const*>(a),
              reinterpret_cast<typename ArchMma::FragmentB const&>(b), c);
  }

  Arguments const& args_;
  int const thread_, slice_;
  Fragments fragments_;
  int const tokens_;  // of the tile that exist
  typename Ring::Places places_;
  bool const whole_groups_;  // no group ends within a stage
  Ring ring_;
  GroupSums group_sums_;
  bool const pairs_of_steps_;                    // no group ends between the two of a pair
  Operands offsets_[kNativeSums ? kStrips : 1];  // zeros of the strips
};

}  // namespace cutlass::gemm::threadblock
