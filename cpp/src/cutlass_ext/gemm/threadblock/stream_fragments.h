// Shared memory -> register fragments of a warp of the streaming mainloop: operand B, codes of operand A, and scales.
#pragma once

#include "cutlass/arch/memory_sm75.h"
#include "cutlass/fast_math.h"

namespace cutlass::gemm::threadblock {

/// Reads the places of a StreamRing. Strips are counted from the warp's first one. Base: the mainloop's PackedMmaBase.
template <class Base, class Ring>
class StreamFragments {
 public:
  using Element = typename Base::Element;
  using Traits = typename Base::Traits;
  using LayoutA = typename Base::LayoutA;
  using Place = typename Ring::Place;
  using Scales = typename Traits::Scales;
  using Operands = typename Scales::Operands;
  static constexpr int kSteps = Base::kSteps, kColumns = Base::kColumns;

  using Tokens = uint32_t[kColumns][kSteps][2];      // operand B of a stage
  static constexpr int kPartSteps = 4;               // of half of a stage
  using Codes = uint32_t[kSteps * LayoutA::kWords];  // of a strip

  CUTLASS_DEVICE StreamFragments(int warp, int lane)
      : lane_(lane),
        first_channel_(warp / Base::kWarpsN % Base::kWarpsM * Base::WarpShape::kM + lane / 4),
        lane_byte_(LayoutA::lane_byte(lane)),
        first_token_(warp % Base::kWarpsN * Base::WarpShape::kN) {}

  /// Finds the lane's rows of the `tokens` tokens of the tile that exist. Those beyond the last read its row; their
  /// sums are not stored.
  CUTLASS_DEVICE void set_tokens(int lane, int tokens) {
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kColumns; ++n) {
      int const row = fast_min(first_token_ + n * 8 + lane % 8, tokens - 1);
      token_offset_[n] = row * Ring::TokenLoader::kRowBytes + Ring::TokenLoader::swizzled(row, lane / 8) * 16;
    }
  }

  /// The lane's row g of the first strip, within the block's tile.
  CUTLASS_DEVICE int first_channel() const { return first_channel_; }

  /// Operand B of so many steps, from step `first` on, a multiple of 4.
  template <int kCount>
  CUTLASS_DEVICE void load_tokens(uint32_t (&b)[kColumns][kCount][2], uint8_t const* place, int first = 0) const {
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kColumns; ++n) {
      CUTLASS_PRAGMA_UNROLL
      for (int s = 0; s < kCount; s += 2) {  // ldmatrix: the 4 chunks of two steps; the swizzle flips their bit 2
        Array<unsigned, 4> fragment;
        int const offset = s % 4 == 0 ? token_offset_[n] : token_offset_[n] ^ 64;
        arch::ldsm<layout::RowMajor, 4>(fragment, place + Place::kTokens + (first + s) / 4 * 128 + offset);
        b[n][s][0] = fragment[0], b[n][s][1] = fragment[1];
        b[n][s + 1][0] = fragment[2], b[n][s + 1][1] = fragment[3];
      }
    }
  }

  /// The lane's codes of packed tile `tile`, and of so many tiles of a stage before it, of kCount strips from strip m
  /// on.
  template <int kCount, int kWords>
  CUTLASS_DEVICE void load_codes(uint32_t (&codes)[kCount][kWords], uint8_t const* place, int m, int tile,
                                 int before = 0) const {
    int const byte = LayoutA::kConverts ? lane_ * 16 : lane_byte_;  // the former needs no register
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i)
      Traits::load_codes(codes[i] + tile * 4, place + Place::kWeights +
                                                  (first_channel_ / 16 + m + i) * Ring::WeightLoader::kStripBytes +
                                                  (before + tile) * LayoutA::kTileBytes + byte);
  }

  /// The scales and zeros of kCount strips from strip m on in row `row` of a stage.
  template <int kCount>
  CUTLASS_DEVICE void load_operands(Operands (&operands)[kCount], uint8_t const* place, int row, int m,
                                    qcutlass::DType scale_type, qcutlass::DType zero_type) const {
    if constexpr (Ring::kRows == 0) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) operands[i] = Scales::symmetric();
    } else {
      uint8_t const* const scales = place + Place::kGroups + row * Ring::GroupLoader::kScaleRowBytes;
      uint8_t const* const zeros =
          place + Place::kGroups + Ring::GroupLoader::kZeros + row * Ring::GroupLoader::kZeroRowBytes;
      if constexpr (qcutlass::takes_any_type(Traits::kMode) || qcutlass::has_float_codes(Traits::kPacking)) {
        auto const row_of = [&](int i) {
          uint8_t const* const first = place + Place::kGroups + super_byte(Base::Shape::kM);
          return warp::GroupRow{scales, zeros, first_channel_ - lane_ / 4 + (m + i) * 16, first,
                                first + Ring::GroupLoader::kZeros};
        };
        Scales::load(operands, row_of(0), row_of, lane_, scale_type, zero_type);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kCount; ++i)
          operands[i] = Scales::load(scales, zeros, first_channel_ + (m + i) * 16, scale_type, zero_type);
      }
    }
  }

  /// The scales alone, of the lane's rows g and g + 8.
  CUTLASS_DEVICE float2 load_scales(uint8_t const* place, int row, int m) const {
    Element const* scales =
        reinterpret_cast<Element const*>(place + Place::kGroups + row * Ring::GroupLoader::kScaleRowBytes) +
        first_channel_ + m * 16;
    return {float(scales[0]), float(scales[8])};
  }

  /// Block scales in a row of them: those of the lane's two tokens of column n, and that of strip m.
  CUTLASS_DEVICE float2 load_token_scales(float const* row, int n) const {
    return *reinterpret_cast<float2 const*>(row + first_token_ + n * 8 + lane_ % 4 * 2);
  }
  CUTLASS_DEVICE float load_strip_scale(float const* row, int m) const {
    return row[Base::Shape::kN + first_channel_ / 16 + m];
  }

 private:
  int const lane_;
  int const first_channel_;  // of this lane, within the block's tile
  int const lane_byte_;      // of what it names to ldmatrix, in a packed tile
  int const first_token_;    // of its warp
  int token_offset_[kColumns];
};

}  // namespace cutlass::gemm::threadblock
