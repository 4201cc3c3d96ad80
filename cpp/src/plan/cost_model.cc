#include "plan/cost_model.h"

#include <algorithm>
#include <cmath>

#include "plan/shared_tiles.h"

namespace qcutlass {
namespace {

/// The rates of a GPU as a class of products sees them, and what else it costs.
struct Model {
  double dram, l2;    ///< TB/s
  double clock, mma;  ///< GHz; clocks of an MMA of mma.sync
  ProductCosts const& costs;

  Model(GpuClass const& gpu, ProductCosts const& costs, Kind const& kind)
      : dram(gpu.dram_rate * costs.dram),
        l2(gpu.l2_rate * costs.l2),
        clock(gpu.clock_rate),
        mma(gpu.mma_clocks * (costs.mma * (kind.is_float8() ? costs.float8_mma : 1))),
        costs(costs) {}

  MmaSyncCosts const& mainloop(Tactic const& t) const {
    return t.mainloop == Mainloop::kStream ? costs.stream : costs.multistage;
  }

  /// Time of two things that overlap, though not perfectly.
  double overlapped(Tactic const& t, double a, double b) const {
    return std::max(a, b) + (is_wgmma(t.mainloop) ? costs.wgmma.exposed : costs.exposed) * std::min(a, b);
  }
};

/// The spread of a launch's blocks over the GPU.
struct Waves {
  double blocks;
  int sharers;             ///< of weights
  double busiest;          ///< blocks that the busiest SM runs, one after the other or together
  double resident;         ///< blocks that an SM holds at once
  double stages;           ///< of a block
  double shared;           ///< outputs of tiles whose k is shared
  bool only_last = false;  ///< only those of the last wave are

  Waves(Problem const& p, DeviceTraits const& device, Tactic const& t, int split_k, bool cluster)
      : blocks(static_cast<double>(tiles(p, t)) * split_k),
        sharers(wgmma_sharers(t.mainloop, p.token_tiles(t.tokens), split_k)),
        busiest(static_cast<double>(busiest_blocks(
            pairs(p, t), split_k, cluster, cluster ? device.sm_count : std::max(1, device.sm_count / sharers)))),
        resident(resident_blocks(p, device, t)),
        stages(static_cast<double>(layout::ceil_div(p.k, t.stage_k(p.kind.packing)))),
        shared(static_cast<double>(p.m) * static_cast<double>(p.n)) {
    SharedTiles const last(p, device, t, split_k);
    if (!last.only_last()) {
      stages = std::ceil(stages / split_k);
      return;
    }
    only_last = true;
    blocks = static_cast<double>(last.tiles);
    busiest = last.busiest(device.sm_count, split_k, static_cast<int64_t>(stages)) / stages;
    shared = static_cast<double>(p.m - last.first_token) * static_cast<double>(p.n - last.first_channel);
  }

 private:
  /// Groups of blocks that share weights, of a share of k.
  int64_t pairs(Problem const& p, Tactic const& t) const {
    return layout::ceil_div(p.n, t.channels) * layout::ceil_div(p.token_tiles(t.tokens), sharers);
  }
};

/// Instructions per A register (two weights, or four of 8 bits) of the converters, broadcasting folded: see
/// cutlass_ext/arch/dequantize.h, dequantize_float.h and byte_difference.h.
double convert_instructions(Kind const& kind, bool scales) {
  if (kind.packing == Packing::kW4A8) return kind.is_float8() ? 5 : 4;
  if (!kind.dequantises()) return 0;
  if (makes_operands(kind.packing, kind.mode) && scales) {
    // Two codes become fp16, each fp32, is scaled, by a fused multiply and add where there are minimums; both are
    // rounded.
    double const codes = kind.weight_bits() == 4 ? 2.25 : 2, scaling = kind.mode == ScaleMode::kMinimum ? 1 : 2;
    return codes + 2 * (1 + scaling) + 1;
  }
  // Floating codes by scales in fp32, integers being above: two become fp16 (2 to 4), each fp32 (2) and scaled (2), and
  // one instruction rounds both; 6 is what MMAs do not hide, however long they are. With it the model comes within 8 %
  // of the chosen tiles of e4m3 in groups of 128, with 64 to 1024 rows of 28672 x 4096 and 8192 x 8192.
  if (kind.mode == ScaleMode::kFloat && scales) return 6;
  double const multiply = scales ? 1 : 0;
  if (kind.packing == Packing::kE2M1A16)  // small numbers, which scales make whole, and sums of fp16
    return kind.activations == DType::kFloat16 ? multiply + 2.75 : 4.25;
  if (kind.packing == Packing::kE4M3A16) return multiply + (kind.activations == DType::kFloat16 ? 1 : 4);
  bool const four_bits = kind.weight_bits() == 4;
  if (kind.activations == DType::kFloat16) return multiply + (four_bits ? 2.25 : 2.0);
  return multiply + (four_bits ? 2.75 : 5.0);
}

/// All but four warps of a wgmma kernel's blocks multiply.
double warpgroups(Tactic const& t) { return t.warps / 4.0 - 1; }
/// Outputs of a tile that a warpgroup has.
double warpgroup_outputs(Tactic const& t) { return t.channels * t.tokens / warpgroups(t); }

/// Whether no scale changes within a pair of steps.
bool has_pairs(Operand const& weights) { return weights.granularity != Granularity::kGroup || weights.group % 32 == 0; }

/// A slice of k, 128 bytes of a token's row, takes the tensor cores a clock for every 128 outputs of each of 4 steps,
/// and each warpgroup's warps their issue slots. Both overlap the better the more they differ: measured times go with
/// the root of the sum of their squares.
double wgmma_compute(Problem const& p, WgmmaCosts const& costs, Tactic const& t, Waves const& waves) {
  Kind const& kind = p.kind;
  constexpr int kSteps = 4, kRegisters = 4;
  double const mmas = kSteps * t.channels * t.tokens / 128.0;
  double const conversions = kSteps * kRegisters * convert_instructions(kind, true);
  double const promotion = kind.is_promoted() ? costs.promotion + costs.scaling
                           : kind.is_float8() ? costs.promotion
                                              : 0;  // the sums stay in the MMAs
  double const promotions =
      warpgroup_outputs(t) / 128 * promotion * (kind.is_promoted() ? kStreamK / promoted_k(kind.mode) : 1);
  double slice = costs.slice + conversions * costs.convert;
  // The longer MMAs are, the better they hide conversions: by the square root of tokens, the form that the constants
  // were fitted with. Of conversions in fp32 they hide no more.
  if (t.mainloop == Mainloop::kWgmmaRs && !makes_operands(kind.packing, kind.mode) && kind.mode != ScaleMode::kFloat)
    slice *= std::sqrt(64.0 / std::max(64, t.tokens));
  double const issued = warpgroups(t) * (slice + promotions);
  double stage = t.slices * std::hypot(mmas, issued);
  if (makes_operands(kind.packing, kind.mode)) {
    // Three warps make operands, each those of a row in turn, which it stores when a place of the ring is free. The
    // time that a stage waits for them was fitted when a warp made all of its rows. A row of 128 channels takes two
    // thirds of one of 256: of Q2_K with 64 rows tiles of 128 took 1.34 times as long as those of 256.
    constexpr int kOperandWarps = 3;
    int const row_k = has_pairs(p.weights) && p.k % 32 == 0 ? 32 : 16;
    double const row = costs.operands * (t.channels + 128) / (256 + 128);
    double const filling = row * t.stage_k(kind.packing) / row_k;
    stage = std::max({stage, filling / kOperandWarps, (filling + stage) / stages_of(t, kind)});
  }
  return waves.busiest * waves.stages * stage / (costs.clock * 1e3);
}

double wgmma_fixed(WgmmaCosts const& costs, Tactic const& t, Waves const& waves, int split_k, bool cluster) {
  double const tile = t.channels * t.tokens, outputs = tile * waves.busiest;
  if (!cluster) return costs.kernel + outputs * costs.output;
  double const shared = waves.only_last ? tile : outputs, own = waves.only_last ? outputs : outputs / split_k;
  return costs.kernel + own * costs.output + (split_k - 1) * costs.cluster +
         (shared - shared / split_k) * costs.exchange;
}

/// Whether a tile streams int4 weights in native groups, by whose times of random layers two terms of `fixed` were
/// found. The constants of other weights and groups, and of experts, were fitted without them.
bool streams_native_int4(Problem const& p, Tactic const& t) {
  return t.mainloop == Mainloop::kStream && is_native_int4(p);
}

/// The streaming loop scales the sums of groups of any size by powers of two every other step, and those of codes with
/// minimums in groups of 32. By other scales of floating codes it does so every step, with branches by their type: 6 is
/// set so that NVFP4 streams where that was measured to be fastest, with 1 row and not with 8 at 8192 x 8192; with 1
/// for e4m3 codes every choice of 1 to 64 rows in groups of 128 at two shapes is the fastest that was measured. In
/// groups of 16, of which each step is one, minimums take more than as long again: Q2_K, which has them, took 79.2 us
/// where Q3_K took 60.7, with 16 rows of 28672 x 4096.
double scalings_a_step(Problem const& p) {
  if (p.kind.mode == ScaleMode::kMinimum && has_pairs(p.weights)) return 0.5;
  if (p.kind.mode == ScaleMode::kMinimum) return p.weights.zero_type == DType::kNone ? 1 : 2.75;
  if (p.weights.scale_type == DType::kFloat8E8M0 && has_pairs(p.weights)) return 0.5;
  return p.kind.packing == Packing::kE4M3A16 ? 1 : 6;
}

/// Clocks of a warp's slice of k in the loops of mma.sync.
double slice_clocks(Problem const& p, Model const& model, Tactic const& t) {
  Kind const& kind = p.kind;
  MmaSyncCosts const& costs = model.mainloop(t);
  double const strips = t.warp_channels / 16.0, columns = t.warp_tokens / 8.0;
  // Codes with minimums in groups of 16, in tiles whose sums are not scaled. With 3 the model comes to the 93.6 us that
  // Q2_K took at 28672 x 4096 with 16 rows.
  bool const short_groups = t.mainloop == Mainloop::kStream && kind.mode == ScaleMode::kMinimum &&
                            rounds_weights(t, kind) && !has_pairs(p.weights);
  double const converting =
      4 * convert_instructions(kind, rounds_weights(t, kind)) * model.costs.alu * (short_groups ? 3 : 1);
  double const step = strips * (columns * model.mma + converting + costs.strip) + columns * costs.column;
  int const slice_k = t.slice_k(kind.packing);
  double const accumulators = strips * columns;
  double promotions = kind.is_promoted() ? slice_k / promoted_k(kind.mode) * accumulators : 0;
  if (kind.mode != ScaleMode::kNative && scales_sums(t, kind))
    promotions = slice_k / step_k(kind.packing) * scalings_a_step(p) * accumulators;
  return static_cast<double>(slice_k) / step_k(kind.packing) * step + promotions * model.costs.promotion + costs.slice;
}

/// The slowest of: distinct bytes through DRAM, all bytes through L2, the copy rings' bytes in flight.
double load(Problem const& p, Model const& model, Tactic const& t, Waves const& waves) {
  Operand const& w = p.weights;
  int const bits = p.kind.weight_bits();
  int64_t const tile_rows = p.grouped ? layout::ceil_div(p.m, p.token_tiles(t.tokens)) : p.m;
  double const rows = static_cast<double>(std::min<int64_t>(tile_rows, t.tokens));  // no more are read
  int const stage_k = t.stage_k(p.kind.packing), activation_size = p.kind.activation_bytes();
  double const weight_bytes = t.channels * stage_k * bits / 8.0;
  int const scale_size = p.kind.converts() ? size_of(w.scale_type) + size_of(w.zero_type) : 0;
  int64_t const group = w.granularity == Granularity::kGroup ? w.group : p.k;
  double const scale_bytes = t.channels * std::ceil(stage_k / static_cast<double>(group)) * scale_size;
  constexpr int kSector = 32;  // what L2 sends for the scale of a token's block
  double const block_bytes = is_blockwise(p.kind.mode) ? rows * kSector * (stage_k / kStreamK) : 0;
  double const stage = weight_bytes + scale_bytes + block_bytes + rows * stage_k * activation_size;
  double const distinct =
      static_cast<double>(p.matrices()) * static_cast<double>(p.n) * static_cast<double>(p.k) * bits / 8 +
      static_cast<double>(p.m) * static_cast<double>(p.k * activation_size + p.n * size_of(p.output.type));
  double const in_flight = std::min(waves.resident, waves.busiest) * (stages_of(t, p.kind) - 1) * stage;
  double latency = is_wgmma(t.mainloop) ? model.costs.wgmma.latency : model.mainloop(t).latency;
  // A place of the ring is refilled when its warps are done with it, for which rings of two stages have to wait where
  // warps share one. Only native groups need this term: the fitted constants of other modes contain it.
  if (t.mainloop == Mainloop::kStream && t.stages == 2 && t.channels > t.warp_channels &&
      p.kind.mode == ScaleMode::kNative)
    latency += slice_clocks(p, model, t) / (model.clock * 1e3);
  // Where an SM has room for another block, the next launch's first stages come while this one ends. A ring of two
  // stages that is refilled is not counted so: at 13952 x 2048 one of 128 x 8 took 7.7 us of int4 with one row, where
  // 6.5 are predicted so, and 5.7 with one wait less. Tiles of 80 x 8 gain by it all the same.
  bool const ahead = streams_native_int4(p, t) && waves.resident > 1 && (t.stages > 2 || waves.stages <= t.stages);
  double const from_l2 = stage - weight_bytes * (1 - 1.0 / waves.sharers);
  double const again = std::max(0.0, waves.blocks * waves.stages * from_l2 - distinct);
  return std::max({(distinct + model.mainloop(t).reread * again) / (model.dram * 1e6),
                   waves.blocks * waves.stages * from_l2 / (model.l2 * 1e6),
                   (waves.busiest * waves.stages * stage / in_flight - (ahead ? 1 : 0)) * latency});
}

/// Issue slots of the busiest SM's quarters; and, where warps are too few to take turns, each warp's own way. The waits
/// of experts' tiles were fitted to those with few warps and much k.
double compute(Problem const& p, Model const& model, Tactic const& t, Waves const& waves) {
  if (is_wgmma(t.mainloop)) return wgmma_compute(p, model.costs.wgmma, t, waves);
  double const slice = slice_clocks(p, model, t);
  double const issued = waves.busiest * waves.stages * slice * std::max(1.0, t.warps / 4.0);
  constexpr double kExpertWaits = 3;
  double const wait = model.mainloop(t).wait * (p.grouped ? kExpertWaits : 1);
  double const alone = std::ceil(waves.busiest / waves.resident) * waves.stages * (slice + wait);
  return model.overlapped(t, issued, alone) / (model.clock * 1e3);
}

/// Launch, prologue, epilogue, and the exchange of partial sums. Blocks that start when others of their launch have
/// ended on the SM pay what a launch does, as nothing hides their start: at 11200 x 2048 with 16 rows the tile of 48 x
/// 16, two of whose 234 blocks follow each other on most SMs, took 9.5 us of int4 for 7.5 that were predicted without.
/// And all blocks of a cluster exchange their sums at once, so that four take as long for it as two.
double fixed(Problem const& p, Model const& model, Tactic const& t, Waves const& waves, int split_k, bool cluster) {
  MmaSyncCosts const& loop = model.mainloop(t);
  ProductCosts const& costs = model.costs;
  bool const wgmma = is_wgmma(t.mainloop), int4 = streams_native_int4(p, t);
  double const rounds = int4 ? std::ceil(waves.busiest / waves.resident) : 1;
  double const block = wgmma ? wgmma_fixed(costs.wgmma, t, waves, split_k, cluster)
                             : loop.kernel * rounds + (waves.busiest - 1) * costs.block +
                                   t.tokens * t.channels * t.slices * waves.busiest * loop.output;
  if (split_k == 1) return block;
  double const last = waves.only_last ? costs.wgmma.last : 0;
  if (cluster) return block + (wgmma ? last : (int4 ? 1 : split_k - 1) * costs.cluster);
  double const passes = waves.only_last ? costs.wgmma.last_passes : 2;  // written and read
  return block + (wgmma ? costs.wgmma.split : costs.split) + last +
         waves.shared * 4 * split_k * passes / (model.l2 * 1e6);
}

/// Additional time of products of experts: each block finds its tiles from the offsets (ExpertTiles), which the blocks
/// that an SM streams at once hide from each other, and for wgmma another kernel may copy the rows into the experts'
/// order before, which reads and writes them once. The constants, in us, were fitted to times of an H200 with 8 and 128
/// experts.
double experts(Problem const& p, Model const& model, Tactic const& t, Waves const& waves) {
  constexpr double kFirst = 2, kTile = 0.8, kStreamedTile = 2.05, kLaunch = 2;
  if (!p.grouped) return 0;
  bool const wgmma = is_wgmma(t.mainloop);
  double const tile = t.mainloop == Mainloop::kStream ? kStreamedTile / waves.resident : kTile;
  double const finding = kFirst + tile * waves.busiest;
  if (!p.gathers_rows || !wgmma) return finding;
  return finding + kLaunch + 2.0 * static_cast<double>(p.m * p.k * p.kind.activation_bytes()) / (model.dram * 1e6);
}

}  // namespace

int resident_blocks(Problem const& problem, DeviceTraits const& device, Tactic const& tactic) {
  if (!tactic.serves(problem)) return 0;
  if (device.wgmma ? is_superseded(tactic, problem.kind, problem.grouped) : is_wgmma(tactic.mainloop)) return 0;
  int const shared = shared_memory_bytes(tactic, problem.kind, tile_rows(problem, tactic), problem.grouped);
  if (shared > std::min(device.shared_memory_per_block, kMostSharedMemory)) return 0;
  int const by_memory = (device.shared_memory_per_block + kReservedSharedMemory) / (shared + kReservedSharedMemory);
  int const capability = device.compute_capability;
  bool const few_warps = (capability > 80 && capability < 90) || capability >= 120;  // 48 an SM, not 64
  int const by_warps = (few_warps ? 48 : 64) / tactic.warps;
  // Registers are the compiler's, and not known here: launch bounds leave room for min_blocks, and no kernel is taken
  // to need less than half of what they allow.
  int const by_registers = 2 * tactic.min_blocks;
  return std::max(1, std::min({by_memory, by_warps, by_registers}));
}

Cost predict(Problem const& problem, DeviceTraits const& device, Tactic const& tactic, int split_k, bool cluster,
             ProductCosts const& costs, GpuClass const& gpu) {
  Model const model(gpu, costs, problem.kind);
  Waves const waves(problem, device, tactic, split_k, cluster);
  Cost cost;
  cost.load = load(problem, model, tactic, waves);
  cost.compute = compute(problem, model, tactic, waves);
  cost.fixed = fixed(problem, model, tactic, waves, split_k, cluster) + experts(problem, model, tactic, waves);
  cost.total = model.overlapped(tactic, cost.load, cost.compute) + cost.fixed;
  return cost;
}

Cost predict(Problem const& problem, DeviceTraits const& device, Tactic const& tactic, int split_k, bool cluster) {
  return predict(problem, device, tactic, split_k, cluster, kProductCosts[static_cast<int>(cost_class(problem))],
                 gpu_class(device).of_sms(device.sm_count));
}

}  // namespace qcutlass
