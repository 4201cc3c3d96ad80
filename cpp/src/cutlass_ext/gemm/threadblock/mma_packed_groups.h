// The multistage main loop of 4-by-8-bit products: operand A is codes less their zeros, in 8 bits, exactly, and the
// sums of each group of k leave the MMAs' registers to be scaled and added in fp32, as mma_packed_wgmma_groups.h has
// it. As in blockwise products (mma_packed_blockwise.h) they are made output by output, with operand B of a whole slice
// in registers. While the MMAs of a strip run, evenly between them, the codes of the next one are converted.
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
  static_assert(kStrips % 2 == 0, "strips alternate between two buffers, across stages too");

  CUTLASS_DEVICE
  MmaPackedGroups(SharedStorage& storage, Arguments const& args, int channel, int token, int first_k, int end_k,
                  int warp, int lane)
      : Ring(storage, args, channel, token, first_k, end_k, warp, lane),
        sum_scales_(lane / 4, args.scales.type, args.zeros.type),
        codes_byte_(LayoutA::codes_byte(lane)),
        bytes_of_k_(LayoutA::bytes_of_k(lane)) {}

  /// Accumulates the block's share of k, after prefetch_weights(). Shared memory is free for other uses when it
  /// returns.
  CUTLASS_DEVICE void operator()(FragmentC& accumulators) {
    this->fill();
    CUTLASS_PRAGMA_UNROLL
    for (int row = 0; row < kSliceRows; ++row) {
      CUTLASS_PRAGMA_UNROLL
      for (int n = 0; n < kColumns; n += 2) load_tokens(0, row, n);
    }
    load_strip(0, 0);
    CUTLASS_PRAGMA_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) convert(piece, 0, 0);
    accumulators.clear();
    this->for_each_stage([&](int place) { stage(accumulators, place); });
    this->drain();
  }

 private:
  /// Outputs (n8 blocks) of a strip that are made together: their MMAs take turns, one alone would wait for itself.
  static constexpr int kTogether = kColumns == 4 ? 4 : 2;
  static constexpr int kTurns = kColumns / kTogether;
  static constexpr int kRowSteps = kSteps / kSliceRows;  // whose sums are scaled together, by one row of scales
  /// One strip's sums of one row of scales, of kTogether columns.
  static constexpr int kStripUnits = kSliceRows * kTurns, kUnits = kStrips * kStripUnits;
  static constexpr int kUnitMmas = kRowSteps * kTogether, kStripMmas = kStripUnits * kUnitMmas;
  /// Conversions of a strip: of 16 k of both of a lane's rows each.
  static constexpr int kPieces = kSteps * 2, kRowPieces = kRowSteps * 2;
  static_assert(kRowSteps * Ring::Traits::kStepK == qcutlass::promoted_k(kMode));

  using Product = typename Ring::Traits::Product;
  using Blocks = typename ArchMma::FragmentC[kTogether];
  using Sums = Array<float, 4>;
  using Promotion = warp::BlockPromotion<Product>;

  /// The tokens that the steps of a row of scales multiply.
  CUTLASS_DEVICE void load_tokens(int place, int row, int n) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRowSteps; ++i) {
      int const step = row * kRowSteps + i;
      Ring::load_tokens(frag_b_[step], place, step, n);
    }
  }

  /// What the first conversions of strip m need: all codes, and the first row of scales.
  CUTLASS_DEVICE void load_strip(int place, int m) {
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kSliceTiles; ++tile) {
      uint8_t const* const bytes = this->storage_.weights(place) + strip(m) * Ring::WeightLoader::kStripBytes +
                                   (this->slice_ * kSliceTiles + tile) * LayoutA::kTileBytes + codes_byte_;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i)
        reinterpret_cast<uint4&>(codes_[tile][i]) =
            *reinterpret_cast<uint4 const*>(bytes + i * qcutlass::layout::kLaneBytes);
    }
    load_scales(place, m, 0);
  }

  CUTLASS_DEVICE void load_scales(int place, int m, int row) {
    uint8_t const* const bytes =
        this->storage_.groups(place) + (this->slice_ * kSliceRows + row) * Ring::GroupLoader::kRowBytes;
    auto const operands =
        sum_scales_.load(bytes + strip(m) * 16 * this->args_.scales.element_bytes,
                         bytes + Ring::GroupLoader::kZeros + strip(m) * 16 * this->args_.zeros.element_bytes);
    scales_[m % 2][row] = {operands.scale[0], operands.scale[1]};
    zero_[0] = operands.zero[0], zero_[1] = operands.zero[1];
  }

  CUTLASS_DEVICE int strip(int m) const { return this->warp_m_ * kStrips + m; }

  /// A piece of operand A of strip m, and after the last one of a row of scales the next row.
  CUTLASS_DEVICE void convert(int piece, int place, int m) {
    int const step = piece / 2, half = piece % 2, word = step % LayoutA::kSteps * LayoutA::kWords + half;
    auto const& codes = codes_[step / LayoutA::kSteps];
    uint32_t(&fragment)[4] = frag_a_[m % 2][step];
    Converter::convert(fragment[half * 2], fragment[half * 2 + 1],
                       arch::permute_bytes(codes[0][word], codes[1][word], bytes_of_k_), zero_);
    int const next = piece + 1;
    if (next % kRowPieces == 0 && next < kPieces) load_scales(place, m, next / kRowPieces);
  }

  /// Each unit's sums are promoted while the next unit's are made.
  CUTLASS_DEVICE void stage(FragmentC& accumulators, int place) {
    Blocks blocks[2];
    float2 scales[2];
    CUTLASS_PRAGMA_UNROLL
    for (int unit = 0; unit <= kUnits; ++unit) {
      int const m = unit / kStripUnits, row = unit % kStripUnits / kTurns, n = unit % kTurns * kTogether;
      if (unit < kUnits) {
        bool const last_strip = m == kStrips - 1;
        int const next_place = (place + last_strip) % kStages;  // where the strip lies that is converted
        if (unit % kStripUnits == 0) {
          if (last_strip) this->wait_for_next();  // all of this stage is in registers
          load_strip(next_place, (m + 1) % kStrips);
        }
        scales[unit % 2] = scales_[m % 2][row];
        multiply(blocks[unit % 2], unit, next_place);
        if (unit == 0) this->refill(place);
        if (last_strip) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kTogether; i += 2) load_tokens(next_place, row, n + i);
        }
      }
      if (unit > 0) promote(accumulators, blocks[(unit - 1) % 2], scales[(unit - 1) % 2], unit - 1);
    }
  }

  /// The MMAs of a unit, and between them its share of the next strip's conversions.
  CUTLASS_DEVICE void multiply(Blocks& blocks, int unit, int next_place) {
    using A = typename ArchMma::FragmentA;
    using B = typename ArchMma::FragmentB;
    int const m = unit / kStripUnits, row = unit % kStripUnits / kTurns, n = unit % kTurns * kTogether;
    auto const start = Promotion::start();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kUnitMmas; ++i) {
      int const step = row * kRowSteps + i / kTogether, column = i % kTogether;
      mma_(blocks[column], reinterpret_cast<A const&>(frag_a_[m % 2][step]),
           reinterpret_cast<B const&>(frag_b_[step][n + column]), i < kTogether ? start : blocks[column]);
      int const done = unit % kStripUnits * kUnitMmas + i + 1;
      CUTLASS_PRAGMA_UNROLL
      for (int piece = 0; piece < kPieces; ++piece)
        if ((piece + 1) * kStripMmas / kPieces == done) convert(piece, next_place, (m + 1) % kStrips);
    }
  }

  static CUTLASS_DEVICE void promote(FragmentC& accumulators, Blocks const& blocks, float2 scale, int unit) {
    int const m = unit / kStripUnits, n = unit % kTurns * kTogether;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      Sums values;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 4; ++j) values[j] = Promotion::value(blocks[i][j]);
      warp::GroupPromotion::add(reinterpret_cast<Sums*>(&accumulators)[m + (n + i) * kStrips], values, scale);
    }
  }

  ArchMma mma_;
  Scales const sum_scales_;
  int const codes_byte_;               // in a tile, of the two lanes whose codes this one has
  uint32_t const bytes_of_k_;          // of their words
  uint32_t codes_[kSliceTiles][2][4];  // of the strip that is converted
  uint32_t zero_[2];                   // of its row of scales, in every byte
  float2 scales_[2][kSliceRows];       // of rows g and g + 8, of even and odd strips
  uint32_t frag_a_[2][kSteps][4];      // likewise
  uint32_t frag_b_[kSteps][kColumns][2];
};

}  // namespace cutlass::gemm::threadblock
