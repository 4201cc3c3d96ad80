// The tables of kernel configurations, one for each main loop: plain data, shared by the kernels (which are
// instantiated from it), by selection, tests and benches. Adding a configuration is adding a row.
#pragma once

#include <cstdint>

#include "plan/problem.h"

namespace qcutlass {

/// How the kernels' main loop is organised: see cutlass_ext/gemm/threadblock/mma_packed_<mainloop>.h. The last two are
/// for sm_90a alone.
enum class Mainloop : uint8_t {
  kStream,      ///< few tokens: every slice of warps streams weights through a ring of its own
  kMultistage,  ///< more: one ring, operands shared by all warps of a block
  kWgmmaRs,     ///< TMA and wgmma; weights, converted in registers, are operand A
  kWgmmaSs,     ///< TMA and wgmma; both operands in shared memory, tokens are the rows of A
};

constexpr bool is_wgmma(Mainloop mainloop) { return mainloop == Mainloop::kWgmmaRs || mainloop == Mainloop::kWgmmaSs; }

/// k extent of one tensor-core step (m16n8k16, m16n8k32); a group boundary may fall between any two of them.
constexpr int step_k(Packing packing) { return 32 / activation_bytes(packing); }
/// k extent a warp of the multistage loop works on between two barriers: rows of activations of 128 bytes.
constexpr int slice_k(Packing packing) { return 128 / activation_bytes(packing); }
/// k extent of a stage of the streaming loop.
inline constexpr int kStreamK = 128;
/// Groups of scales whose size is a multiple of this are those of ScaleMode::kNative, of kGroupStep those of kFine.
inline constexpr int kNativeGroup = slice_k(Packing::kW4A16), kGroupStep = step_k(Packing::kW4A16);

/// The base of every main loop's configurations. The setters, which return a changed copy, make rows of the tables.
template <class Tactic>
struct TacticOf {
  int channels = 0, tokens = 0;  ///< the output tile of a block
  int slice_count = 1;           ///< slices of k in a stage
  int stage_count = 0;
  Products products = kCommon | kBlockwise;
  Products experts = kNoProducts;  ///< the products of experts that it is built for

  constexpr Tactic slices(int count) const { return with(&TacticOf::slice_count, count); }
  constexpr Tactic stages(int count) const { return with(&TacticOf::stage_count, count); }
  constexpr Tactic for_(Products set) const { return with(&TacticOf::products, set); }
  constexpr Tactic and_experts() const { return with(&TacticOf::experts, products); }
  constexpr Tactic for_experts(Products set) const { return for_(kNoProducts).with(&TacticOf::experts, set); }

 protected:
  template <class Owner, class Value>
  constexpr Tactic with(Value Owner::*field, Value value) const {
    Tactic result = static_cast<Tactic const&>(*this);
    result.*field = value;
    return result;
  }
};

/// A warp computes `warp_channels` channels by all tokens. `slice_count` warps compute the same tile, each for some
/// stages of k.
struct StreamTactic : TacticOf<StreamTactic> {
  int warp_channels = 0;
  int blocks = 1;  ///< blocks an SM for which the launch bounds reserve registers

  constexpr StreamTactic warp(int channels) const { return with(&StreamTactic::warp_channels, channels); }
  constexpr StreamTactic blocks_an_sm(int count) const { return with(&StreamTactic::blocks, count); }
  constexpr int warps() const { return channels / warp_channels * slice_count; }
};

/// A warp computes `warp_channels` by `warp_tokens`. `slice_count` warps compute the same tile, each for a part of
/// every stage's k.
struct MultistageTactic : TacticOf<MultistageTactic> {
  int warp_channels = 0, warp_tokens = 0;
  int blocks = 1;  ///< as above

  constexpr MultistageTactic warp(int channels, int tokens) const {
    return with(&MultistageTactic::warp_channels, channels).with(&MultistageTactic::warp_tokens, tokens);
  }
  constexpr MultistageTactic blocks_an_sm(int count) const { return with(&MultistageTactic::blocks, count); }
  constexpr int warps() const { return channels / warp_channels * (tokens / warp_tokens) * slice_count; }
};

/// Four warps produce; the others are warpgroups of 64 channels and all tokens.
struct WgmmaRsTactic : TacticOf<WgmmaRsTactic> {
  constexpr int warps() const { return channels / 16 + 4; }
};

/// Four warps produce; the others are warpgroups of 64 tokens and `warp_channels` channels.
struct WgmmaSsTactic : TacticOf<WgmmaSsTactic> {
  int warp_channels = 0;

  constexpr WgmmaSsTactic warp(int channels) const { return with(&WgmmaSsTactic::warp_channels, channels); }
  constexpr int warps() const { return channels / warp_channels * (tokens / 16) + 4; }
};

template <class Tactic>
constexpr Tactic tile(int channels, int tokens) {
  Tactic result;
  result.channels = channels, result.tokens = tokens;
  return result;
}
/// A warp has the block's tile, unless it is told otherwise.
constexpr StreamTactic stream(int channels, int tokens) { return tile<StreamTactic>(channels, tokens).warp(channels); }
constexpr MultistageTactic multistage(int channels, int tokens) {
  return tile<MultistageTactic>(channels, tokens).warp(channels, tokens);
}
constexpr WgmmaRsTactic wgmma_rs(int channels, int tokens) { return tile<WgmmaRsTactic>(channels, tokens); }
constexpr WgmmaSsTactic wgmma_ss(int channels, int tokens) {
  return tile<WgmmaSsTactic>(channels, tokens).warp(channels);
}

// tactics: begin
/// Decode: weights stream past few tokens; all warps along k, unless a block has many channels.
inline constexpr StreamTactic kStreamTactics[] = {
    stream(32, 8).slices(8).stages(3).blocks_an_sm(2).for_(kCommon | kSmallBlocks | kRareWeights).and_experts(),
    stream(32, 8).slices(16).stages(2).for_(kCommon | kFloatScales),
    stream(48, 8).slices(8).stages(3).blocks_an_sm(2).for_(kCommon),
    stream(64, 8).slices(4).stages(3).blocks_an_sm(4).for_(kCommon | kRareWeights).and_experts(),
    stream(64, 8).slices(4).stages(2).blocks_an_sm(4).for_(kCommon | kFloatScales),
    stream(64, 8).slices(8).stages(3).blocks_an_sm(2).for_(kInt4Weights),  // room for the next grid's first block
    stream(64, 8).warp(32).slices(8).stages(3).for_(kInt8Weights | kFloatScales),
    stream(128, 8).warp(64).slices(4).stages(2).blocks_an_sm(2).for_(kWeightOnly | kFp32Scaled).and_experts(),
    // Experts have many short tiles: with fewer warps each, less goes into what every warp computes for a tile.
    stream(128, 8).warp(64).slices(2).stages(3).blocks_an_sm(3).for_experts(kInt4Weights | kE2M1Weights),
    stream(80, 8).slices(8).stages(2).blocks_an_sm(2).for_(kInt4Weights),
    stream(224, 8).warp(112).slices(4).stages(2).for_(kInt4Weights),
    stream(32, 16).slices(8).stages(3).blocks_an_sm(2).for_(kCommon | kRareWeights),
    stream(48, 16).slices(8).stages(3).for_(kCommon),
    stream(64, 16).slices(4).stages(3).blocks_an_sm(2).for_(kCommon | kSmallBlocks | kRareWeights).and_experts(),
    stream(64, 16).slices(8).stages(2).for_(kInt4Weights),
    stream(64, 16).slices(8).stages(3).for_(kEightByEight),
    stream(80, 16).slices(8).stages(2).for_(kWeightOnly),
    stream(224, 16).warp(112).slices(4).stages(2).for_(kInt4Weights),
    stream(64, 32).warp(32).slices(4).stages(3).for_(kCommon | kBlockwise | kFp32Scaled).and_experts(),
    stream(48, 32).slices(8).stages(2).for_(kWeightOnly),
    stream(80, 32).slices(8).stages(2).for_(kInt4Weights),
    stream(128, 32).warp(64).slices(4).stages(2).for_(kWeightOnly),
    stream(224, 32).warp(112).slices(4).stages(2).for_(kInt4Weights),
    // blockwise: whole blocks of channels, which have one scale, and outputs are quantised in
    stream(128, 8).warp(64).slices(4).stages(3).for_(kAnyBlocks),
    stream(128, 16).warp(64).slices(4).stages(3).for_(kAnyBlocks),
    stream(128, 32).warp(64).slices(4).stages(3).for_(kAnyBlocks),
    // weights of 8 bits for 8-bit activations fill the rings sooner
    stream(224, 8).warp(112).slices(2).stages(3).for_(kEightBits),
    stream(224, 16).warp(112).slices(2).stages(3).for_(kEightBits),
    stream(224, 32).warp(112).slices(2).stages(3).for_(kEightBits),
};

inline constexpr MultistageTactic kMultistageTactics[] = {
    // up to 64 tokens: all warps along k still
    multistage(64, 16)
        .warp(32, 16)
        .slices(2)
        .stages(3)
        .blocks_an_sm(2)
        .for_(kCommon | kAnyBlocks | kFloatScales | kFourByEight)
        .and_experts(),
    multistage(48, 64).slices(4).stages(3).for_(kCommon),  // 6144 channels in one wave of 128 blocks
    multistage(64, 64).warp(32, 64).slices(4).stages(3).for_(kCommon),
    multistage(128, 64).warp(32, 64).slices(2).stages(3).for_(kCommon),
    // prefill: arithmetic-bound, every dequantised fragment meets as many tokens as registers allow
    // this one fits 99 KB in every scheme
    multistage(64, 64).warp(32, 32).stages(3).blocks_an_sm(2).for_(kAllProducts).and_experts(),
    multistage(128, 128).warp(32, 128).stages(4).blocks_an_sm(2).for_(kWeightOnly | kRareWeights).and_experts(),
    multistage(256, 64).warp(32, 64).stages(4).for_(kWeightOnly),
    multistage(256, 128).warp(32, 128).stages(4).for_(kWeightOnly),
    // the same without conversions to share: square warp tiles read the least from shared memory
    multistage(224, 64).warp(112, 32).slices(2).stages(3).for_(kEightByEight),
    multistage(224, 128).warp(112, 32).stages(4).for_(kEightByEight),
    multistage(128, 128).warp(64, 64).slices(2).stages(3).for_(kEightByEight),
    multistage(128, 128).warp(64, 64).stages(3).blocks_an_sm(2).for_(kEightByEight),
    multistage(256, 128).warp(64, 64).stages(4).for_(kEightByEight),
    multistage(128, 256).warp(64, 64).stages(4).for_(kEightByEight),
    // blockwise: few token columns a warp, whose operand B of 128 k stays in registers beside sums in fp32
    multistage(64, 64).warp(64, 32).slices(4).stages(3).for_(kBlockwise),
    multistage(128, 64).warp(64, 32).stages(3).blocks_an_sm(2).for_(kAnyBlocks),  // 99 KB, outputs in blocks of 128
    multistage(128, 64).warp(64, 32).slices(2).stages(3).for_(kBlockwise),
    // 4 by 8 bits: many tokens a warp, which all multiply what it converts
    multistage(128, 128).warp(64, 32).stages(3).for_(kFourByEight),
};

/// From some 20 to 30 tokens up. Of equal predictions the first is taken: one wave, not two.
inline constexpr WgmmaRsTactic kWgmmaRsTactics[] = {
    wgmma_rs(256, 32).slices(2).stages(6).for_(kWeightOnly | kFloatWeights).and_experts(),
    wgmma_rs(256, 64).slices(2).stages(5).for_(kInt4Weights | kE2M1Weights).and_experts(),
    wgmma_rs(256, 64).stages(7).for_(kInt8Weights | kE4M3Weights | kFp32Scaled).and_experts(),
    wgmma_rs(128, 64).slices(2).stages(8).for_(kWeightOnly | kE4M3Weights | kFloatScales).and_experts(),
    wgmma_rs(128, 96).slices(2).stages(7).for_(kWeightOnly),
    wgmma_rs(128, 128).slices(2).stages(5).for_(kWeightOnly | kRareWeights).and_experts(),
    wgmma_rs(256, 128).stages(7).for_(kWeightOnly),
    wgmma_rs(128, 160).slices(2).stages(4).for_(kInt4Weights),
    wgmma_rs(128, 160).stages(7).for_(kInt8Weights),
    wgmma_rs(128, 192).stages(6).for_(kWeightOnly),
    wgmma_rs(128, 224).stages(6).for_(kWeightOnly),
    wgmma_rs(128, 256).stages(4).for_(kWeightOnly | kE2M1Weights | kFp32Scaled).and_experts(),
    wgmma_rs(128, 256).stages(4).for_(kE4M3Weights),  // whose rows of experts no GPU has run with it
    // 4 by 8 bits: the sums of a group beside those of all
    wgmma_rs(256, 32).stages(8).for_(kFourByEight),
    wgmma_rs(128, 64).stages(8).for_(kFourByEight),
    wgmma_rs(128, 128).stages(8).for_(kFourByEight),
    wgmma_rs(128, 160).stages(6).for_(kFourByEight),
    // Experts often have 60 to 90 rows: a tile of 96 holds them, where one of 64 would ask for a second.
    wgmma_rs(256, 96).slices(2).stages(4).for_experts(kInt4Weights | kE2M1Weights),
    wgmma_rs(256, 96).stages(6).for_experts(kInt8Weights | kE4M3Weights),
};

inline constexpr WgmmaSsTactic kWgmmaSsTactics[] = {
    wgmma_ss(128, 64).warp(64).stages(8).for_(kEightBits),
    wgmma_ss(256, 64).warp(128).stages(4).for_(kEightByEight),
    wgmma_ss(128, 128).stages(6).for_(kEightBits),
};
// tactics: end

/// A row of any of the tables, as selection, the cost model and names see it.
struct Tactic {
  Mainloop mainloop = Mainloop::kStream;
  int row = 0;  ///< of its main loop's table
  int channels = 0, tokens = 0;
  int slices = 1, stages = 0;
  int warps = 0;
  int warp_channels = 0, warp_tokens = 0;
  int min_blocks = 1;  ///< blocks an SM that the register budget must allow
  Products products = kCommon | kBlockwise, experts = kNoProducts;

  constexpr bool serves(Kind const& kind) const { return (products & kind.product()) != 0; }
  constexpr bool serves_experts(Kind const& kind) const {
    return (experts & kind.product()) != 0 &&
           (is_wgmma(mainloop) ? kind.takes_experts_on_wgmma() : kind.takes_experts());
  }
  constexpr bool serves(Problem const& problem) const {
    return problem.grouped ? serves_experts(problem.kind) : serves(problem.kind);
  }
  constexpr int threads() const { return 32 * warps; }
  constexpr int slice_k(Packing packing) const {
    return mainloop == Mainloop::kStream ? kStreamK : qcutlass::slice_k(packing);
  }
  constexpr int stage_k(Packing packing) const { return slices * slice_k(packing); }
  /// The registers that the launch bounds leave a thread, of an SM's 65536; 255 is the instruction set's limit.
  constexpr int max_registers() const {
    int const share = 65536 / (threads() * min_blocks) / 8 * 8;
    return share < 255 ? share : 255;
  }
};

namespace detail {

template <class Row>
constexpr Tactic common(Mainloop mainloop, int row, Row const& t) {
  Tactic result;
  result.mainloop = mainloop, result.row = row;
  result.channels = t.channels, result.tokens = t.tokens;
  result.slices = t.slice_count, result.stages = t.stage_count;
  result.warps = t.warps();
  result.products = t.products, result.experts = t.experts;
  return result;
}
constexpr Tactic view(int row, StreamTactic const& t) {
  Tactic result = common(Mainloop::kStream, row, t);
  result.warp_channels = t.warp_channels, result.warp_tokens = t.tokens, result.min_blocks = t.blocks;
  return result;
}
constexpr Tactic view(int row, MultistageTactic const& t) {
  Tactic result = common(Mainloop::kMultistage, row, t);
  result.warp_channels = t.warp_channels, result.warp_tokens = t.warp_tokens, result.min_blocks = t.blocks;
  return result;
}
constexpr Tactic view(int row, WgmmaRsTactic const& t) {
  Tactic result = common(Mainloop::kWgmmaRs, row, t);
  result.warp_channels = 16, result.warp_tokens = t.tokens;
  return result;
}
constexpr Tactic view(int row, WgmmaSsTactic const& t) {
  Tactic result = common(Mainloop::kWgmmaSs, row, t);
  result.warp_channels = t.warp_channels, result.warp_tokens = 16;
  return result;
}

template <class Row, int kRows>
constexpr int count(Row const (&)[kRows]) {
  return kRows;
}

inline constexpr int kTacticCount =
    count(kStreamTactics) + count(kMultistageTactics) + count(kWgmmaRsTactics) + count(kWgmmaSsTactics);

struct Tactics {
  Tactic rows[kTacticCount];
};

template <class Row, int kRows>
constexpr int append(Tactics& all, int begin, Row const (&rows)[kRows]) {
  for (int i = 0; i < kRows; ++i) all.rows[begin + i] = view(i, rows[i]);
  return begin + kRows;
}

constexpr Tactics all_tactics() {
  Tactics all{};
  append(all, append(all, append(all, append(all, 0, kStreamTactics), kMultistageTactics), kWgmmaRsTactics),
         kWgmmaSsTactics);
  return all;
}
inline constexpr Tactics kAllTactics = all_tactics();

}  // namespace detail

inline constexpr int kTacticCount = detail::kTacticCount;
/// All rows: Plan::row counts in this order.
inline constexpr Tactic const (&kTactics)[kTacticCount] = detail::kAllTactics.rows;

/// Output tiles of a product, which are blocks if k is not shared; of a grouped one as many as are expected.
inline int64_t tiles(Problem const& problem, Tactic const& t) {
  return layout::ceil_div(problem.n, t.channels) * problem.token_tiles(t.tokens);
}

/// Tiles of tokens of a grouped product of `rows` at most, whatever the experts' rows: each has one that is not full.
/// The rows before and after theirs, which are set to zero, are those of two more.
constexpr int64_t most_token_tiles(int64_t rows, int64_t experts, Tactic const& t) {
  int64_t const parts = std::min(rows, experts + 2);
  return parts + (rows - parts) / t.tokens;
}

/// Rows of activations that a tile has at most.
constexpr int64_t tile_rows(Problem const& problem, Tactic const& t) {
  return problem.grouped ? t.tokens : std::max<int64_t>(problem.m, 1);
}

}  // namespace qcutlass
