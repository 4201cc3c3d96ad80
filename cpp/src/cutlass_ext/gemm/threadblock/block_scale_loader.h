// Global -> shared copies of the block scales of a stage of blockwise int8.
#pragma once

#include "cutlass/arch/memory_sm80.h"
#include "cutlass/fast_math.h"
#include "plan/footprint.h"

namespace cutlass::gemm::threadblock {

/// Scales of blocks of 1 token and of 2^log_channels channels, by 2^log_size columns. Where gate and up lie in turns of
/// 16 channels, those of up lie behind the gate's: a block has a scale for each.
struct BlockScaleMatrices {
  float const *tokens, *channels;  // [tokens, blocks], [blocks of channels, blocks]
  int64_t token_stride, channel_stride;
  int64_t up_offset;  // from a gate's scales to those of up; 0: a block has one scale
  int log_size, log_channels;
  int blocks;  // of k

  /// Those of the 16 channels from `channel` on.
  CUTLASS_DEVICE float const* of_strip(int channel) const {
    return channels + (channel >> log_channels) * channel_stride + channel / 16 % 2 * up_offset;
  }
};

/// Copies the scales of a stage: row r serves k = r * kRowK .. + kRowK. A row is one word for each token of the tile
/// and then one for each strip of 16 channels, which lies within one block.
template <int kChannels, int kTokens, int kRows, int kRowK, int kThreads>
class BlockScaleLoader {
 public:
  static constexpr int kStrips = kTokens * 4;  // where a row's scales of strips begin
  static constexpr int kRowBytes = 4 * qcutlass::block_row(kChannels, kTokens);
  static constexpr int kStageBytes = kRows * kRowBytes;

  BlockScaleLoader() = default;
  /// The tile starts at (channel, token). Tokens beyond the last get the scales of the first ones, channels
  /// that of the last.
  CUTLASS_DEVICE
  BlockScaleLoader(BlockScaleMatrices const& scales, int channel, int channels, int token, int tokens, int thread)
      : last_(scales.blocks - 1), log_size_(scales.log_size) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      int const word = thread + i * kThreads, place = word % kWords;
      row_[i] = word / kWords;
      to_[i] = row_[i] * kRowBytes + place * 4;
      if (place < kTokens)
        from_[i] = scales.tokens + unsigned(token + place) % unsigned(tokens) * scales.token_stride;
      else
        from_[i] = scales.of_strip(fast_min(channel + (place - kTokens) * 16, channels - 1));
    }
  }

  /// The rows of the stage at k. Beyond the end of k, where sums are 0, they are 0 too: infinity would make NaN of
  /// them.
  CUTLASS_DEVICE void copy(uint8_t* stage, int k) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      int const block = (k + row_[i] * kRowK) >> log_size_;
      if (row_[i] < kRows) arch::cp_async_zfill<4>(stage + to_[i], from_[i] + fast_min(block, last_), block <= last_);
    }
  }

 private:
  static constexpr int kWords = kTokens + kChannels / 16;  // a row
  static constexpr int kCopies = (kRows * kWords + kThreads - 1) / kThreads;

  int last_, log_size_;
  int row_[kCopies], to_[kCopies];
  float const* from_[kCopies];
};

/// The loader of products without block scales: loads nothing.
struct NoBlockScales {
  static constexpr int kRowBytes = 0, kStageBytes = 0;
  NoBlockScales() = default;
  CUTLASS_DEVICE NoBlockScales(BlockScaleMatrices const&, int, int, int, int, int) {}
  CUTLASS_DEVICE void copy(uint8_t*, int) const {}
};

/// The loader of a scale mode, for stages of kStageK columns.
template <int kChannels, int kTokens, int kStageK, qcutlass::ScaleMode kMode, int kThreads>
using BlockScaleLoaderOf = std::conditional_t<
    qcutlass::is_blockwise(kMode),
    BlockScaleLoader<kChannels, kTokens, kStageK / qcutlass::promoted_k(kMode), qcutlass::promoted_k(kMode), kThreads>,
    NoBlockScales>;

}  // namespace cutlass::gemm::threadblock
