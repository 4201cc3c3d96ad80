// The table of kernel configurations: plain data, shared by the kernels (which are instantiated from it), by selection,
// tests and benches. Adding a configuration is adding a row.
#pragma once

#include <cstdint>

#include "qcutlass/gemm.h"
#include "qcutlass/layout.h"

namespace qcutlass {

/// How scales and zeros reach the weights; picked by the scheme, not by the user.
enum class ScaleMode : uint8_t {
  kNative,   ///< scales in the activation type, zeros uint8 or none, one group per 64 k: 16-bit arithmetic
  kFine,     ///< the same with groups of any multiple of 16
  kFloat,    ///< any scale and zero type, real-valued zeros: fp32 arithmetic, one rounding to the activation type
  kNone,     ///< 8-by-8-bit products: nothing before the sums, which the epilogue scales
  kBlock,    ///< blockwise int8: the int32 sums of every 128 k are scaled into fp32 ones
  kBlock64,  ///< the same with those of every 64 k, of smaller blocks
  kBlock32,  ///< likewise
};

inline constexpr char const* kScaleModeNames[] = {"native", "fine", "float", "none", "block", "block64", "block32"};
inline constexpr int kScaleModes = 7;

constexpr bool is_blockwise(ScaleMode mode) { return mode >= ScaleMode::kBlock; }

/// How the kernels' main loop is organised: see cutlass_ext/gemm/threadblock/mma_packed_<mainloop>.h.
enum class Mainloop : uint8_t {
  kStream,      ///< few tokens: every slice of warps streams weights through a ring of its own
  kMultistage,  ///< more: one ring, operands shared by all warps of a block
  kWgmma,       ///< likewise, by asynchronous warpgroup MMAs and TMA: sm_90a alone
};

constexpr int activation_bytes(Packing packing) { return packing == Packing::kW8A8 ? 1 : 2; }
/// k extent of one tensor-core step (m16n8k16, m16n8k32); a group boundary may fall between any two of them.
constexpr int step_k(Packing packing) { return 32 / activation_bytes(packing); }
/// k extent a warp of the multistage loop works on between two barriers: rows of activations of 128 bytes.
constexpr int slice_k(Packing packing) { return 128 / activation_bytes(packing); }
/// k extent of a stage of the streaming loop.
inline constexpr int kStreamK = 128;
/// Groups of scales whose size is a multiple of this are those of ScaleMode::kNative, of kGroupStep those of kFine.
inline constexpr int kNativeGroup = slice_k(Packing::kW4A16), kGroupStep = step_k(Packing::kW4A16);

/// The products that a configuration is built for, as a set.
enum Products : uint8_t {
  kInt4Weights = 1,   ///< 16-bit activations by int4 weights
  kInt8Weights = 2,   ///< by int8 weights
  kInt8 = 4,          ///< int8 by int8, one scale a sum
  kFloat8 = 8,        ///< fp8 by fp8, likewise
  kBlockwise = 16,    ///< blockwise int8 with blocks of 128
  kSmallBlocks = 32,  ///< with smaller ones
};
constexpr Products operator|(Products a, Products b) { return Products(uint8_t(a) | uint8_t(b)); }
inline constexpr Products kWeightOnly = kInt4Weights | kInt8Weights, kEightByEight = kInt8 | kFloat8,
                          kEightBits = kEightByEight | kBlockwise, kNotBlockwise = kWeightOnly | kEightByEight,
                          kAnyBlocks = kBlockwise | kSmallBlocks, kMost = kNotBlockwise | kBlockwise,
                          kAll = kMost | kSmallBlocks;

constexpr Products product_of(Packing packing, ScaleMode mode, DType activations) {
  if (is_blockwise(mode)) return mode == ScaleMode::kBlock ? kBlockwise : kSmallBlocks;
  if (packing == Packing::kW4A16) return kInt4Weights;
  if (packing == Packing::kW8A16) return kInt8Weights;
  return is_float8(activations) ? kFloat8 : kInt8;
}

/// One configuration. The block's tile is `channels` x `tokens`, its warps' tiles are `warp_channels` x `warp_tokens`;
/// `slices` warps share one such tile and split the k extent of each stage. (The warps of kWgmma, which four producing
/// ones feed, have all slices of a stage for themselves. They have 16 channels or, of 8-bit weights for 8-bit
/// activations, 16 tokens.)
struct Tactic {
  Mainloop mainloop;
  int channels, tokens;
  int warp_channels, warp_tokens;
  int slices;
  int stages;
  int min_blocks;  ///< blocks per SM that the register budget must allow (launch bounds)
  Products products = kMost;

  constexpr bool serves(Packing packing, ScaleMode mode, DType activations) const {
    return (products & product_of(packing, mode, activations)) != 0;
  }
  constexpr int warps() const {
    int const tiles = channels / warp_channels * (tokens / warp_tokens);
    return mainloop == Mainloop::kWgmma ? tiles + 4 : tiles * slices;
  }
  constexpr int threads() const { return 32 * warps(); }
  constexpr int slice_k(Packing packing) const {
    return mainloop == Mainloop::kStream ? kStreamK : qcutlass::slice_k(packing);
  }
  constexpr int stage_k(Packing packing) const { return slices * slice_k(packing); }
  /// What the launch bounds leave a thread of the 65536 registers of an SM; 255 is the instruction set's limit.
  constexpr int max_registers() const {
    int const share = 65536 / (threads() * min_blocks) / 8 * 8;
    return share < 255 ? share : 255;
  }
};

/// Largest cluster of kWgmma: blocks have room for each other's sums in all up to this one, not in every one of 7.
inline constexpr int kMostWgmmaCluster = 6;

/// k steps from one wait of kWgmma's weight-only loop for its MMAs to the next: no more than two sets of their
/// operands A leave registers for beside the sums; and two batches of a stage where MMAs are too short to hide looking
/// up fine groups' scales.
constexpr int wgmma_batch(Tactic const& t) {
  if (t.channels == 256 && t.tokens > 64) return 1;
  return t.slices == 1 && t.tokens <= 192 ? 2 : 4;
}
/// Whether its warpgroups take turns.
constexpr bool wgmma_turns(Tactic const& t) { return t.channels == 128 && t.tokens == 128; }

inline constexpr Tactic kTactics[] = {
    // decode: weights stream past few tokens; all warps along k, unless a block has many channels
    {Mainloop::kStream, 32, 8, 32, 8, 8, 3, 2, kNotBlockwise | kSmallBlocks},
    {Mainloop::kStream, 32, 8, 32, 8, 16, 2, 1, kNotBlockwise},
    {Mainloop::kStream, 48, 8, 48, 8, 8, 3, 2, kNotBlockwise},
    {Mainloop::kStream, 64, 8, 64, 8, 4, 3, 4, kNotBlockwise},
    {Mainloop::kStream, 64, 8, 64, 8, 4, 2, 4, kNotBlockwise},
    {Mainloop::kStream, 64, 8, 32, 8, 8, 3, 1, kWeightOnly},
    {Mainloop::kStream, 128, 8, 64, 8, 4, 2, 2, kWeightOnly},
    {Mainloop::kStream, 80, 8, 80, 8, 8, 3, 2, kWeightOnly},
    {Mainloop::kStream, 224, 8, 112, 8, 4, 2, 1, kWeightOnly},
    {Mainloop::kStream, 32, 16, 32, 16, 8, 3, 2, kNotBlockwise},
    {Mainloop::kStream, 48, 16, 48, 16, 8, 3, 1, kNotBlockwise},
    {Mainloop::kStream, 64, 16, 64, 16, 4, 3, 2, kNotBlockwise | kSmallBlocks},
    {Mainloop::kStream, 64, 16, 64, 16, 8, 3, 1, kNotBlockwise},
    {Mainloop::kStream, 80, 16, 80, 16, 8, 2, 1, kWeightOnly},
    {Mainloop::kStream, 224, 16, 112, 16, 4, 2, 1, kWeightOnly},
    {Mainloop::kStream, 64, 32, 32, 32, 4, 3, 1},
    {Mainloop::kStream, 48, 32, 48, 32, 8, 2, 1, kWeightOnly},
    {Mainloop::kStream, 80, 32, 80, 32, 8, 2, 1, kWeightOnly},
    {Mainloop::kStream, 128, 32, 64, 32, 4, 2, 1, kWeightOnly},
    {Mainloop::kStream, 224, 32, 112, 32, 4, 2, 1, kWeightOnly},
    // blockwise: whole blocks of channels, which have one scale, and outputs are quantised in
    {Mainloop::kStream, 128, 8, 64, 8, 4, 3, 1, kAnyBlocks},
    {Mainloop::kStream, 128, 16, 64, 16, 4, 3, 1, kAnyBlocks},
    {Mainloop::kStream, 128, 32, 64, 32, 4, 3, 1, kAnyBlocks},
    // weights of 8 bits for 8-bit activations fill the rings sooner
    {Mainloop::kStream, 224, 8, 112, 8, 2, 3, 1, kEightBits},
    {Mainloop::kStream, 224, 16, 112, 16, 2, 3, 1, kEightBits},
    {Mainloop::kStream, 224, 32, 112, 32, 2, 3, 1, kEightBits},
    // up to 64 tokens: all warps along k still
    {Mainloop::kMultistage, 64, 16, 32, 16, 2, 3, 2, kAll},           // fits 99 KB of shared memory in every scheme
    {Mainloop::kMultistage, 48, 64, 48, 64, 4, 3, 1, kNotBlockwise},  // 6144 channels in one wave of 128 blocks
    {Mainloop::kMultistage, 64, 64, 32, 64, 4, 3, 1, kNotBlockwise},
    {Mainloop::kMultistage, 128, 64, 32, 64, 2, 3, 1, kNotBlockwise},
    // prefill: arithmetic-bound, every dequantised fragment meets as many tokens as registers allow
    {Mainloop::kMultistage, 64, 64, 32, 32, 1, 3, 2, kAll},  // as above
    {Mainloop::kMultistage, 128, 128, 32, 128, 1, 4, 2, kWeightOnly},
    {Mainloop::kMultistage, 256, 64, 32, 64, 1, 4, 1, kWeightOnly},
    {Mainloop::kMultistage, 256, 128, 32, 128, 1, 4, 1, kWeightOnly},
    // the same without conversions to share: square warp tiles read the least from shared memory
    {Mainloop::kMultistage, 224, 64, 112, 32, 2, 3, 1, kEightByEight},
    {Mainloop::kMultistage, 224, 128, 112, 32, 1, 4, 1, kEightByEight},
    {Mainloop::kMultistage, 128, 128, 64, 64, 2, 3, 1, kEightByEight},
    {Mainloop::kMultistage, 128, 128, 64, 64, 1, 3, 2, kEightByEight},
    {Mainloop::kMultistage, 256, 128, 64, 64, 1, 4, 1, kEightByEight},
    {Mainloop::kMultistage, 128, 256, 64, 64, 1, 4, 1, kEightByEight},
    // blockwise: few token columns a warp, whose operand B of 128 k stays in registers beside sums in fp32
    {Mainloop::kMultistage, 64, 64, 64, 32, 4, 3, 1, kBlockwise},
    {Mainloop::kMultistage, 128, 64, 64, 32, 1, 3, 2, kAnyBlocks},  // fits 99 KB, and outputs in blocks of 128
    {Mainloop::kMultistage, 128, 64, 64, 32, 2, 3, 1, kBlockwise},
    // asynchronous MMAs: from some 20 to 30 tokens up. Of equal predictions the first is taken: one wave, not two
    {Mainloop::kWgmma, 256, 64, 16, 64, 2, 5, 1, kInt4Weights},
    {Mainloop::kWgmma, 256, 64, 16, 64, 1, 7, 1, kInt8Weights},
    {Mainloop::kWgmma, 128, 64, 16, 64, 2, 8, 1, kWeightOnly},
    {Mainloop::kWgmma, 128, 96, 16, 96, 2, 7, 1, kWeightOnly},
    {Mainloop::kWgmma, 128, 128, 16, 128, 2, 5, 1, kWeightOnly},
    {Mainloop::kWgmma, 256, 128, 16, 128, 1, 7, 1, kWeightOnly},
    {Mainloop::kWgmma, 128, 160, 16, 160, 2, 4, 1, kInt4Weights},
    {Mainloop::kWgmma, 128, 160, 16, 160, 1, 7, 1, kInt8Weights},
    {Mainloop::kWgmma, 128, 192, 16, 192, 1, 6, 1, kWeightOnly},
    {Mainloop::kWgmma, 128, 224, 16, 224, 1, 6, 1, kWeightOnly},
    {Mainloop::kWgmma, 128, 256, 16, 256, 1, 4, 1, kWeightOnly},
    {Mainloop::kWgmma, 128, 64, 64, 16, 1, 8, 1, kEightBits},
    {Mainloop::kWgmma, 256, 64, 128, 16, 1, 4, 1, kEightByEight},
    {Mainloop::kWgmma, 128, 128, 128, 16, 1, 6, 1, kEightBits},
};
inline constexpr int kTacticCount = static_cast<int>(sizeof(kTactics) / sizeof(kTactics[0]));

/// Rows of scales that `k` columns of weights may need.
constexpr int scale_rows(ScaleMode mode, int k = kNativeGroup) {
  if (mode == ScaleMode::kNone || is_blockwise(mode)) return 0;
  return k / (mode == ScaleMode::kNative ? kNativeGroup : kGroupStep);
}
/// k whose int32 sums a blockwise product scales at once.
constexpr int promoted_k(ScaleMode mode) {
  return mode == ScaleMode::kBlock ? 128 : mode == ScaleMode::kBlock64 ? 64 : 32;
}
/// fp32 words of one row of block scales in shared memory, of tokens and of strips of 16 channels: whole vectors.
constexpr int block_row(int channels, int tokens) { return (tokens + channels / 16 + 3) / 4 * 4; }
/// The streaming loop scales sums instead of weights where a group spans many columns: nothing is rounded then.
constexpr bool rounds_weights(Tactic const& t, ScaleMode mode) {
  return scale_rows(mode) > 0 && (t.mainloop != Mainloop::kStream || mode != ScaleMode::kNative);
}
/// Bytes kept per scale and per zero in shared memory: kFloat takes any type up to 4 bytes.
constexpr int scale_bytes(ScaleMode mode) { return mode == ScaleMode::kFloat ? 4 : 2; }
constexpr int zero_bytes(ScaleMode mode) { return mode == ScaleMode::kFloat ? 4 : 1; }

/// Shared memory of a stage for m rows of activations.
constexpr int stage_bytes(Tactic const& t, Packing packing, ScaleMode mode, int64_t m) {
  int const rows =
      t.mainloop == Mainloop::kStream && m < t.tokens ? int(m) : t.tokens;  // the ring of kStream has no others
  int const stage_k = t.stage_k(packing);
  int const weights = t.channels * stage_k * bits_of(packing) / 8;
  int const activations = rows * stage_k * activation_bytes(packing);
  int const scales = t.channels * scale_rows(mode, stage_k) * (scale_bytes(mode) + zero_bytes(mode));
  bool const in_ring = is_blockwise(mode) && t.mainloop != Mainloop::kWgmma;
  int const blocks = in_ring ? stage_k / promoted_k(mode) * block_row(t.channels, t.tokens) * 4 : 0;
  return weights + activations + scales + blocks;
}

/// fp32 words between two token rows of the epilogue's transposing buffer: 4 mod 32, so that the accumulator's lanes
/// (g, t) hit bank 8t + g of the 32, each once.
constexpr int epilogue_row(Tactic const& t) { return (t.channels + 31) / 32 * 32 + 4; }

/// Token columns (in blocks of 8 per warp) that the epilogue transposes between two barriers: as many as fit the memory
/// that the mainloop no longer needs.
constexpr int epilogue_blocks(Tactic const& t, Packing packing, ScaleMode mode) {
  int const available = t.stages * stage_bytes(t, packing, mode, t.tokens);
  int const block = t.slices * t.tokens / t.warp_tokens * 8 * epilogue_row(t) * 4;
  int blocks = t.warp_tokens / 8;
  while (blocks > 1 && blocks * block > available) blocks /= 2;
  return blocks;
}

/// The most shared memory that a block may have on any GPU so far (sm_90, sm_100).
inline constexpr int kMostSharedMemory = 227 * 1024;

/// Blocks of kWgmma that share weights, neighbours along the tokens: pairs, where few of them are without a neighbour.
constexpr int wgmma_sharers(Packing packing, int64_t token_tiles, int split_k) {
  constexpr int64_t kMany = 8;
  return packing == Packing::kW8A8 && split_k == 1 && (token_tiles % 2 == 0 || token_tiles > kMany) ? 2 : 1;
}

/// Tiles of tokens of kWgmma side by side, or pairs of them, before the next tile of channels: four, with which a wave
/// of tiles reads the least; or some more, if a last group of one or two would read all weights again for little.
constexpr int wgmma_side(int64_t token_tiles) {
  int side = 4;
  while (side < token_tiles && (token_tiles - 1) % side < 2) ++side;
  return side < token_tiles ? side : int(token_tiles);
}

/// Shared memory of a block of kWgmma with so many stages: the ring, buffers that sums leave through, two barriers a
/// stage.
constexpr int wgmma_shared_memory(Tactic const& t, Packing packing, ScaleMode mode, int stages) {
  int const transpose = t.channels / 64 * 2 * 32 * (64 + 8) * 2;
  int const rows = 8 * 16 * (t.warp_channels * 2 + 16);
  int const bytes =
      stages * (stage_bytes(t, packing, mode, t.tokens) + 16) + (packing == Packing::kW8A8 ? rows : transpose);
  return (bytes + 127) / 128 * 128;
}

/// Stages of the ring. kWgmma has as many of a configuration's as fit, but at least 3 or 4, an even number of batches
/// of MMAs, which have buffers or sums in turns.
constexpr int stages_of(Tactic const& t, Packing packing, ScaleMode mode) {
  if (t.mainloop != Mainloop::kWgmma) return t.stages;
  int const batches = packing == Packing::kW8A8 ? 1 : t.stage_k(packing) / step_k(packing) / wgmma_batch(t);
  int const step = batches % 2 == 0 ? 1 : 2;
  int stages = t.stages / step * step;
  while (stages > 2 + step && wgmma_shared_memory(t, packing, mode, stages) > kMostSharedMemory) stages -= step;
  return stages;
}

/// Dynamic shared memory of a block for m rows of activations; the kernels assert that it is their own for a full tile.
constexpr int shared_memory_bytes(Tactic const& t, Packing packing, ScaleMode mode, int64_t m) {
  if (t.mainloop == Mainloop::kWgmma) return wgmma_shared_memory(t, packing, mode, stages_of(t, packing, mode));
  int const epilogue =
      epilogue_blocks(t, packing, mode) * t.slices * t.tokens / t.warp_tokens * 8 * epilogue_row(t) * 4;
  int const mainloop = t.stages * stage_bytes(t, packing, mode, m);
  return mainloop > epilogue ? mainloop : epilogue;
}

/// Whether the configuration is for such products, and some GPU can run it, if only for one row of activations.
constexpr bool is_compiled(Tactic const& t, Packing packing, ScaleMode mode, DType activations) {
  return t.serves(packing, mode, activations) && shared_memory_bytes(t, packing, mode, 1) <= kMostSharedMemory;
}

/// Output tiles of a product, which are blocks if k is not shared.
constexpr int64_t tiles(GemmArguments const& arguments, Tactic const& t) {
  return layout::ceil_div(arguments.weights.n, t.channels) * layout::ceil_div(arguments.m, t.tokens);
}

/// The scale mode that serves a problem.
ScaleMode scale_mode(GemmArguments const& arguments);

}  // namespace qcutlass
