// The wgmma main loop of 4-by-8-bit products. It has the ring and the producer of weight-only products
// (mma_packed_wgmma_rs.h). Operand A is the codes minus their zeros, in 8 bits, which is exact. After each group of k
// the sums leave the MMAs' registers to be scaled and added in fp32 ("promotion"). An MMA covers half of the tokens:
// while the sums of one half are promoted, the MMAs of the other half run.
#pragma once

#include "cutlass_ext/gemm/threadblock/mma_packed_wgmma_rs.h"

namespace cutlass::gemm::threadblock {

/// Shape: channels x tokens x 128 k of a stage, which is a batch of MMAs.
template <class Shape, int kWarpgroups_, int kStages_, class Element, qcutlass::ScaleMode kMode>
class MmaPackedWgmmaGroups : public MmaPackedWgmmaRs<Shape, kWarpgroups_, kStages_, Shape::kK / 32, false, Element,
                                                     qcutlass::Packing::kW4A8, kMode> {
 public:
  using Base =
      MmaPackedWgmmaRs<Shape, kWarpgroups_, kStages_, Shape::kK / 32, false, Element, qcutlass::Packing::kW4A8, kMode>;
  using Base::kRows, Base::kStages, Base::kSteps, Base::kStepK, Base::kTiles;
  using typename Base::Arguments, typename Base::Barriers, typename Base::LayoutA, typename Base::SharedStorage,
      typename Base::Traits;
  static_assert(Shape::kK == Base::kChunkBytes && Base::kChunks == 1);

  static constexpr int kHalfTokens = Shape::kN / 2;
  using HalfWgmma = arch::Wgmma<typename Traits::Weight, Element, typename Traits::Product, kHalfTokens, kStepK>;
  static constexpr int kHalfSums = HalfWgmma::kSums;
  using FragmentC = float[2 * kHalfSums];  // in the order of an instruction of all tokens
  using Output = epilogue::thread::ScaledSums<float>;
  using Epilogue = epilogue::threadblock::WgmmaEpilogue<MmaPackedWgmmaGroups>;

  /// A consuming warpgroup.
  class Consumer : public RingConsumer<Consumer, kStages> {
    using Ring = RingConsumer<Consumer, kStages>;
    using Ring::await, Ring::barriers_;

   public:
    CUTLASS_DEVICE Consumer(SharedStorage& storage, Barriers& barriers, Arguments const& args, int warpgroup, int warp,
                            int lane)
        : Ring(barriers),
          storage_(storage),
          args_(args),
          strip_(warpgroup * 4 + warp),
          lane_(lane),
          sum_scales_(strip_ * 16 + lane / 4, args.scale_type, args.zero_type),
          codes_byte_(LayoutA::codes_byte(lane)),
          bytes_of_k_(LayoutA::bytes_of_k(lane)) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2 * kSteps * 4; ++i) fragments_[i / 4 / kSteps][i / 4 % kSteps][i % 4] = 0;
    }

    /// Requests what the next product needs beside its stages: nothing.
    CUTLASS_DEVICE void begin(int /*channel*/, int /*token*/, int /*first_k*/, int /*stages*/) {}

    /// The sums over `stages` stages from k = first_k on, at least one.
    CUTLASS_DEVICE void operator()(FragmentC& sums, int first_k, int stages) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2 * kHalfSums; ++i) sums[i] = 0;
      k_ = first_k;
      prepare(0, 0);
      auto const places = std::make_integer_sequence<int, kStages>{};
      int left = stages;
      CUTLASS_PRAGMA_NO_UNROLL
      while (left >= kStages) round(sums, left, places);
      if (left > 0) rest(sums, left, places);
    }

   private:
    using Sums = typename HalfWgmma::Sums;
    using Scales = typename Traits::Scales;
    using Operands = typename Scales::Operands;
    using Converter = typename Scales::Converter;
    static constexpr int kGroupSteps = kSteps / kRows;  // whose sums are scaled together
    static_assert(kStages % 2 == 0, "a place has one of the two fragment buffers");

    /// One stage in every place of the ring. The last stage waits for its MMAs: if sums were read while MMAs are in
    /// flight at the end of a loop, ptxas would serialise the MMAs.
    template <int... kPlaces>
    CUTLASS_DEVICE void round(FragmentC& sums, int& left, std::integer_sequence<int, kPlaces...>) {
      Sums halves[2];
      begin_stage<0>(halves);
      (stage<kPlaces, kPlaces == kStages - 1>(sums, halves, left), ...);
    }

    /// The `left` < kStages last stages, one after the other.
    template <int... kPlaces>
    CUTLASS_DEVICE void rest(FragmentC& sums, int left, std::integer_sequence<int, kPlaces...>) {
      (single_stage<kPlaces>(sums, left) && ...);
    }

    template <int kPlace>
    CUTLASS_DEVICE bool single_stage(FragmentC& sums, int& left) {
      Sums halves[2];
      begin_stage<kPlace>(halves);
      stage<kPlace, true>(sums, halves, left);
      return left > 0;
    }

    template <int kPlace>
    CUTLASS_DEVICE void begin_stage(Sums (&halves)[2]) {
      multiply<kPlace>(halves[0], 0, 0);
      multiply<kPlace>(halves[1], 0, 1);
    }

    /// Finishes a stage, whose first group's MMAs are under way, and issues those of the next one's, unless the ring's
    /// round ends with it.
    template <int kPlace, bool kLast>
    CUTLASS_DEVICE void stage(FragmentC& sums, Sums (&halves)[2], int& left) {
      constexpr int kNext = (kPlace + 1) % kStages;
      if (--left > 0) prepare(kNext, kNext % 2);
      CUTLASS_PRAGMA_UNROLL
      for (int row = 0; row < kRows; ++row) {
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < 2; ++half) {
          bool const ends = row == kRows - 1 && half == 1;
          if (kLast && ends)
            cute::warpgroup_wait<0>();
          else
            cute::warpgroup_wait<1>();
          arch::fence_registers(halves[half]);
          if (ends && lane_ == 0) barriers_.empty[kPlace].arrive();
          promote(sums + half * kHalfSums, halves[half], scales_[kPlace % 2][row]);
          if (row + 1 < kRows)
            multiply<kPlace>(halves[half], row + 1, half);
          else if (!kLast)
            multiply<kNext>(halves[half], 0, half);
        }
      }
    }

    /// Issues the MMAs of a group of a stage by half of the tokens.
    template <int kPlace>
    CUTLASS_DEVICE void multiply(Sums& group, int row, int half) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kGroupSteps; ++i) arch::fence_registers(fragments_[kPlace % 2][row * kGroupSteps + i]);
      arch::fence_registers(group);
      cute::warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kGroupSteps; ++i) {
        int const step = row * kGroupSteps + i;
        uint64_t const tokens = arch::swizzled_operand<Base::kChunkBytes>(kPlace * SharedStorage::kTokenBytes +
                                                                          half * kHalfTokens * Base::kChunkBytes +
                                                                          step * kStepK * int(sizeof(Element)));
        HalfWgmma::issue(group, fragments_[kPlace % 2][step], tokens, i == 0);
      }
      cute::warpgroup_commit_batch();
    }

    /// Elements 0 and 1 of four sums belong to row g, 2 and 3 to row g + 8.
    static CUTLASS_DEVICE void promote(float* sums, Sums const& group, float const (&scale)[2]) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kHalfSums; ++i) sums[i] += float(typename Traits::Product(group[i])) * scale[i / 2 % 2];
    }

    /// Waits for a stage and fills a fragment buffer, whose last MMAs are done, and its scales.
    CUTLASS_DEVICE void prepare(int place, int buffer) {
      await(place);
      CUTLASS_PRAGMA_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) {
        uint4 const* const words =
            reinterpret_cast<uint4 const*>(storage_.weights(place, strip_) + tile * LayoutA::kTileBytes + codes_byte_);
        uint4 const codes[2] = {words[0], words[1]};
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < LayoutA::kSteps; ++i) convert(place, buffer, tile * LayoutA::kSteps + i, codes, i);
      }
      k_ += Shape::kK;
    }

    /// A step's operand A.
    CUTLASS_DEVICE void convert(int place, int buffer, int step, uint4 const (&codes)[2], int i) {
      int const row = step / kGroupSteps;
      if (step % kGroupSteps == 0) {
        int const box_row = kRows == 1 ? 0 : args_.group_size.group(k_ + step * kStepK) - args_.group_size.group(k_);
        operands_ = sum_scales_.load(storage_.scales(place) + box_row * args_.scale_row,
                                     storage_.zeros(place) + box_row * args_.zero_row);
        scales_[buffer][row][0] = operands_.scale[0], scales_[buffer][row][1] = operands_.scale[1];
      }
      uint32_t(&fragment)[4] = fragments_[buffer][step];
      arch::fence_registers(fragment);  // keeps the old one alive until here
      uint32_t const* const own = reinterpret_cast<uint32_t const*>(&codes[0]) + i * LayoutA::kWords;
      uint32_t const* const next = reinterpret_cast<uint32_t const*>(&codes[1]) + i * LayoutA::kWords;
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        uint32_t const codes_of_rows = arch::permute_bytes(own[half], next[half], bytes_of_k_);
        Converter::convert(fragment[half * 2], fragment[half * 2 + 1], codes_of_rows, operands_.zero);
      }
    }

    SharedStorage& storage_;
    Arguments const& args_;
    int const strip_, lane_;
    Scales const sum_scales_;
    int const codes_byte_;       // in a tile, of the two lanes whose codes this one has
    uint32_t const bytes_of_k_;  // of their words
    int k_;                      // of the stage whose codes come next
    uint32_t fragments_[2][kSteps][4];
    float scales_[2][kRows][2];  // of rows g and g + 8
    Operands operands_;          // of the group that is converted
  };
};

}  // namespace cutlass::gemm::threadblock
