// Quantises a warp's rows where the sums are: a row's channels lie in the four lanes of a quad.
#pragma once

#include "cute/arch/copy_sm90.hpp"
#include "cutlass_ext/arch/named_barrier.h"
#include "cutlass_ext/epilogue/blockwise_output.h"

namespace cutlass::epilogue::threadblock {

/// Quantises the outputs of a warp in blocks of channels: 16 tokens (rows g and g + 8 of lane 4g + t) by kChannels
/// channels (2t and 2t + 1 of every eight). With 64 channels, two warps share a block of 128 and call together.
template <int kChannels>
class RowQuantizer {
 public:
  using Params = thread::BlockwiseOutput::Params;
  using Quantizer = thread::BlockQuantizer;
  static constexpr int kValues = kChannels / 2;  // [n8 block][half][odd]
  static constexpr int kRowBytes = kChannels + 16;
  static constexpr int kExchange = 16 * kRowBytes, kBytes = kExchange + 16 * int(sizeof(int));  // of a warp's buffer

  /// `other`: the buffer of the warp that has the other half of these channels, which meets this one at `barrier`.
  CUTLASS_DEVICE RowQuantizer(Params const& params, uint8_t* buffer, uint8_t const* other, int barrier, int lane)
      : params_(params), buffer_(buffer), other_(other), barrier_(barrier), lane_(lane) {}

  /// Writes codes and scales of the halves, eight tokens each, that are `mine`. Token and channel: the warp's first.
  CUTLASS_DEVICE void run(float const (&values)[kValues], int token, int channel, bool const (&mine)[2]) const {
    switch (params_.quantized.size) {
      case 32: quantize<32>(values, token, channel, mine); break;
      case 64: quantize<64>(values, token, channel, mine); break;
      default: quantize<128>(values, token, channel, mine); break;
    }
    __syncwarp();
    store(token, channel, mine);
    __syncwarp();
  }

 private:
  template <int kSize>
  CUTLASS_DEVICE void quantize(float const (&values)[kValues], int token, int channel, bool const (&mine)[2]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half)
      if (mine[half]) quantize_half<kSize>(values, half, token + half * 8 + lane_ / 4, channel);
  }

  template <int kSize>
  CUTLASS_DEVICE void quantize_half(float const (&values)[kValues], int half, int token, int channel) const {
    constexpr int kOwn = kSize < kChannels ? kSize : kChannels;  // channels of a block that this warp has
    constexpr int kLane = kOwn / 4;                              // values of it that a lane has
    uint32_t codes[kChannels / 16];                              // of two n8 blocks
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < kChannels; first += kOwn) {
      float block[kLane];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kLane; ++i) block[i] = values[(first / 8 + i / 2) * 4 + half * 2 + i % 2];
      if (channel + kChannels > params_.channels) {  // values of channels that do not exist
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kLane; ++i)
          if (channel + first + i / 2 * 8 + lane_ % 4 * 2 + i % 2 >= params_.channels) block[i] = 0.f;
      }
      Quantizer::Extent extent;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kLane; ++i) extent.include(block[i]);
      extent.bits = fast_max(extent.bits, __shfl_xor_sync(~0u, extent.bits, 1));
      extent.bits = fast_max(extent.bits, __shfl_xor_sync(~0u, extent.bits, 2));
      if constexpr (kOwn < kSize) extent.bits = fast_max(extent.bits, exchange(extent.bits, half));
      Quantizer const quantizer(extent);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kLane; i += 4)
        codes[first / 16 + i / 4] = quantizer.codes(block[i], block[i + 1], block[i + 2], block[i + 3]);
      int const at = channel + first;
      if (lane_ % 4 == 0 && at % kSize == 0 && token < params_.tokens && at < params_.channels)
        params_.quantized.scales[token * params_.quantized.stride + at / kSize] = quantizer.scale();
    }
    // Pairs of codes as 16-bit elements of 8 x 8 matrices: lane t's words of a row are 2t, 2t + 1 of two n8 blocks.
    uint8_t* const row = buffer_ + (half * 8 + lane_ % 8) * kRowBytes + lane_ / 8 * 16;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kChannels / 16; i += 4)
      cute::SM90_U32x4_STSM_N::copy(codes[i], codes[i + 1], codes[i + 2], codes[i + 3],
                                    *reinterpret_cast<cute::uint128_t*>(row + i * 16));
  }

  /// The other warp's extent of the same row. Each half has a place of its own, which is written again only after both
  /// warps have met: for the other half or, of a tile whose halves other blocks finish, at the cluster's barriers
  /// before.
  CUTLASS_DEVICE int exchange(int bits, int half) const {
    int const at = kExchange + (half * 8 + lane_ / 4) * int(sizeof(int));
    if (lane_ % 4 == 0) *reinterpret_cast<int*>(buffer_ + at) = bits;
    arch::named_barrier_sync<64>(barrier_);
    return *reinterpret_cast<int const*>(other_ + at);
  }

  /// Whole rows, 16 codes a lane.
  CUTLASS_DEVICE void store(int token, int channel, bool const (&mine)[2]) const {
    constexpr int kLanes = kChannels / 16, kRows = 32 / kLanes;  // of a row; at once
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < 16; first += kRows) {
      if (!mine[first / 8]) continue;
      int const row = first + lane_ / kLanes, out_token = token + row, out_channel = channel + lane_ % kLanes * 16;
      uint4 const w = *reinterpret_cast<uint4 const*>(buffer_ + row * kRowBytes + lane_ % kLanes * 16);
      uint4 const codes = {__byte_perm(w.x, w.y, 0x5410), __byte_perm(w.z, w.w, 0x5410), __byte_perm(w.x, w.y, 0x7632),
                           __byte_perm(w.z, w.w, 0x7632)};
      if (out_token >= params_.tokens) continue;
      int8_t* const out = static_cast<int8_t*>(params_.output) + out_token * params_.stride + out_channel;
      int const count = params_.channels - out_channel;
      if (params_.vectors && count == 8)
        *reinterpret_cast<uint2*>(out) = make_uint2(codes.x, codes.y);
      else
        thread::store_words(out, codes, count, params_.vectors);
    }
  }

  Params const& params_;
  uint8_t* const buffer_;
  uint8_t const* const other_;
  int const barrier_, lane_;
};

}  // namespace cutlass::epilogue::threadblock
