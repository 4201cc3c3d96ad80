// Shared memory of the kernels: what a stage and a block take, how many stages fit, and which kernels exist because
// they fit. Each kernel asserts that its own shared memory has the size computed here.
#pragma once

#include "plan/schedule.h"
#include "plan/tactics.h"

namespace qcutlass {

/// The most shared memory that a block may have on any GPU so far (sm_90, sm_100).
inline constexpr int kMostSharedMemory = 227 * 1024;

/// Rows of scales that `k` columns of weights may need in the main loop.
constexpr int scale_rows(ScaleMode mode, int k = kNativeGroup) {
  if (mode == ScaleMode::kNone || is_blockwise(mode)) return 0;
  return k / (is_promoted(mode) ? promoted_k(mode) : mode == ScaleMode::kNative ? kNativeGroup : kGroupStep);
}
/// Bytes kept per scale and per zero or minimum in shared memory: 4 where they are of any type.
constexpr int scale_bytes(ScaleMode mode) { return takes_any_type(mode) ? 4 : 2; }
constexpr int zero_bytes(ScaleMode mode) { return takes_any_type(mode) ? 4 : 1; }
/// fp32 words of one row of block scales in shared memory, of tokens and of strips of 16 channels: whole vectors.
constexpr int block_row(int channels, int tokens) { return (tokens + channels / 16 + 3) / 4 * 4; }

/// Whether sums are scaled instead of weights: by the streaming loop, where a group spans many columns, or of any size
/// where streams_scaled_groups or streams_minimum_sums says so.
constexpr bool scales_sums(Tactic const& t, Kind const& kind) {
  return t.mainloop == Mainloop::kStream &&
         (kind.mode == ScaleMode::kNative || streams_scaled_groups(kind) || streams_minimum_sums(kind.mode, t.tokens));
}

/// Whether weights are rounded to the activations' type.
constexpr bool rounds_weights(Tactic const& t, Kind const& kind) {
  return !is_promoted(kind.mode) && scale_rows(kind.mode) > 0 && !scales_sums(t, kind);
}

/// Shared memory of a stage for m rows of activations.
constexpr int stage_bytes(Tactic const& t, Kind const& kind, int64_t m) {
  int const rows =
      t.mainloop == Mainloop::kStream && m < t.tokens ? int(m) : t.tokens;  // the ring of kStream has no others
  int const stage_k = t.stage_k(kind.packing);
  int const weights = t.channels * stage_k * kind.weight_bits() / 8;
  int const activations = rows * stage_k * kind.activation_bytes();
  int const scales = t.channels * scale_rows(kind.mode, stage_k) * (scale_bytes(kind.mode) + zero_bytes(kind.mode));
  bool const in_ring = is_blockwise(kind.mode) && !is_wgmma(t.mainloop);
  int const blocks = in_ring ? stage_k / promoted_k(kind.mode) * block_row(t.channels, t.tokens) * 4 : 0;
  return weights + activations + scales + blocks;
}

/// fp32 words between two token rows of the epilogue's transposing buffer: 4 mod 32, so that the accumulator's lanes
/// (g, t) hit bank 8t + g of the 32, each once.
constexpr int epilogue_row(Tactic const& t) { return (t.channels + 31) / 32 * 32 + 4; }

/// Token columns (in blocks of 8 per warp) that the epilogue transposes between two barriers: as many as fit the memory
/// that the mainloop no longer needs.
constexpr int epilogue_blocks(Tactic const& t, Kind const& kind) {
  int const available = t.stages * stage_bytes(t, kind, t.tokens);
  int const block = t.slices * t.tokens / t.warp_tokens * 8 * epilogue_row(t) * 4;
  int blocks = t.warp_tokens / 8;
  while (blocks > 1 && blocks * block > available) blocks /= 2;
  return blocks;
}

/// What wgmma kernels for experts have beside: the ring of ExpertSchedule, four places of a tile (16 bytes) and two
/// barriers (8 bytes) each.
inline constexpr int kScheduleBytes = 4 * (16 + 2 * 8);

/// Shared memory of a block of a wgmma kernel with so many stages: the ring; two barriers (16 bytes) a stage; and the
/// buffers through which the epilogue stores. WgmmaEpilogue has two buffers a warpgroup (64 channels), of 32 tokens by
/// 64 + 8 channels of 2 bytes; RowEpilogue one for each of 8 warps, of 16 tokens by warp_channels of 2 bytes and 16
/// bytes of padding.
constexpr int wgmma_shared_memory(Tactic const& t, Kind const& kind, int stages, bool grouped) {
  int const buffers =
      t.mainloop == Mainloop::kWgmmaRs ? t.channels / 64 * 2 * 32 * (64 + 8) * 2 : 8 * 16 * (t.warp_channels * 2 + 16);
  int const bytes = stages * (stage_bytes(t, kind, t.tokens) + 16) + buffers + (grouped ? kScheduleBytes : 0);
  return (bytes + 127) / 128 * 128;
}

/// Stages of the ring. A wgmma kernel has as many of the configuration's stages as fit, but at least 3 or 4. Its
/// batches of MMAs use two sets of buffers, or of sums, in turns, so the ring holds an even number of batches.
constexpr int stages_of(Tactic const& t, Kind const& kind) {
  if (!is_wgmma(t.mainloop)) return t.stages;
  int const batches = t.mainloop == Mainloop::kWgmmaRs
                          ? t.stage_k(kind.packing) / step_k(kind.packing) / wgmma_batch(t, kind.packing)
                          : 1;
  int const step = batches % 2 == 0 ? 1 : 2;
  int stages = t.stages / step * step;
  bool const grouped = t.serves_experts(kind);  // kernels with and without experts have equally many
  while (stages > 2 + step && wgmma_shared_memory(t, kind, stages, grouped) > kMostSharedMemory) stages -= step;
  return stages;
}

/// Whether so many blocks of a wgmma kernel may be a cluster that shares k: whether the ring has room for the sums that
/// a block receives. In kWgmmaRs it receives all blocks' sums of the parts that it finishes, of 16 tokens each. In
/// kWgmmaSs, whose tiles are smaller, there is always room.
constexpr bool may_cluster(Tactic const& t, Kind const& kind, int blocks) {
  if (blocks > kMostWgmmaCluster) return false;
  if (blocks == 1 || t.mainloop == Mainloop::kWgmmaSs) return true;
  constexpr int kPartTokens = 16, kSumBytes = 4;
  int const parts = (t.tokens / kPartTokens + blocks - 1) / blocks;
  return blocks * parts * t.channels * kPartTokens * kSumBytes <= stages_of(t, kind) * stage_bytes(t, kind, t.tokens);
}

/// Dynamic shared memory of a block for m rows of activations. `grouped`: those of experts.
constexpr int shared_memory_bytes(Tactic const& t, Kind const& kind, int64_t m, bool grouped = false) {
  if (is_wgmma(t.mainloop)) return wgmma_shared_memory(t, kind, stages_of(t, kind), grouped);
  int const epilogue = epilogue_blocks(t, kind) * t.slices * t.tokens / t.warp_tokens * 8 * epilogue_row(t) * 4;
  int const mainloop = t.stages * stage_bytes(t, kind, m);
  return mainloop > epilogue ? mainloop : epilogue;
}

/// The system's share of the shared memory of an SM, for every block.
inline constexpr int kReservedSharedMemory = 1024;

/// Dynamic shared memory that a block takes at least in a streaming launch that may start early, but for the rows of
/// experts: an SM has room for its share of the launch's blocks, and for two where that is one. With more room, blocks
/// of a launch that starts early pile up on some SMs, which then finish last. On an H200 tiles of 64 channels by four
/// warps, of which an SM has room for three, took 22.2 us of 14336 x 8192 with 4 rows of int4, and 18.0 with room for
/// two; tiles of which it has room for two took as long as before. Unless a tile itself needs more, 4 KB are left for
/// blocks of norms and quantisers between products: each takes the system's share, and a few bytes of its own.
constexpr int spread_shared_memory(int64_t share, int limit) {
  constexpr int kOthers = 4 * 1024;
  int64_t const bytes = (limit + kReservedSharedMemory - kOthers) / (share > 2 ? share : 2) - kReservedSharedMemory;
  return bytes > 0 ? int(bytes / 128 * 128) : 0;
}

/// Whether the configuration is for such products, and some GPU can run it, if only for one row of activations.
constexpr bool is_compiled(Tactic const& t, Kind const& kind) {
  return t.serves(kind) && shared_memory_bytes(t, kind, 1) <= kMostSharedMemory;
}

/// Whether there are kernels of wgmma for products of this kind, of the rows of experts if they are `grouped`.
constexpr bool has_wgmma(Kind const& kind, bool grouped) {
  for (Tactic const& t : kTactics)
    if (is_wgmma(t.mainloop) && (grouped ? t.serves_experts(kind) : t.serves(kind))) return true;
  return false;
}

/// Whether a GPU that runs wgmma does without a configuration: one of kMultistage with more than 16 tokens, for kinds
/// that have wgmma kernels. Machine code for sm_90 does not contain it (arch/superseded.h), which saves a quarter of
/// the time to compile. Selection would hardly choose it: on an H200, of 2 400 products of 16-bit activations, for none
/// with layers of models and for two with random ones, whose best other prediction is 6 % longer. The two of 4 by 8
/// bits stay: see is_named_only.
constexpr bool is_superseded(Tactic const& t, Kind const& kind, bool grouped) {
  return kind.packing != Packing::kW4A8 && t.mainloop == Mainloop::kMultistage && t.tokens > 16 &&
         has_wgmma(kind, grouped);
}

/// Whether a GPU that runs wgmma takes a configuration only if a caller names it: one of mma.sync of 4 by 8 bits. These
/// are what other GPUs run. Their times have not been measured, so their predictions can't be trusted.
constexpr bool is_named_only(Tactic const& t, Kind const& kind) {
  return kind.packing == Packing::kW4A8 && !is_wgmma(t.mainloop);
}

/// Whether there is a kernel for the rows of experts, whose rings hold all rows of a tile.
constexpr bool is_compiled_for_experts(Tactic const& t, Kind const& kind) {
  return t.serves_experts(kind) && shared_memory_bytes(t, kind, t.tokens, true) <= kMostSharedMemory;
}

}  // namespace qcutlass
