// The constants of the cost model, for each class of products: what it takes beside the rates of the GPU. They were
// fitted to times of an H200 (`python -m bench fit` prints the lines below from such times), or set by hand, or taken
// from a fitted class, where a comment says so. Other GPUs have the same.
#pragma once

#include "plan/problem.h"

namespace qcutlass {

/// Costs of a main loop of mma.sync beside bytes, MMAs and conversions.
struct MmaSyncCosts {
  double latency = 0;  ///< microseconds from a request to its bytes in shared memory, loaded memory system
  double slice = 0;    ///< clocks of a warp's slice of k: copies, addresses, barriers
  double column = 0;   ///< clocks of loading an n8 block of the activations' fragments for a step
  double wait = 0;     ///< clocks that a warp alone waits for its own results in a slice; other warps' work hides them
  double kernel = 0;   ///< microseconds: launch, first bytes, last stores
  double output = 0;   ///< microseconds of the epilogue, per output of a block and slice of k
  double strip = 0;    ///< clocks of loading a strip's fragment for a step, beside what conversions take
  double reread = 0;   ///< share of the bytes that blocks read again which comes from DRAM again
};

/// Costs of a main loop of wgmma; its times have a form of their own: see cost_model.cc.
struct WgmmaCosts {
  double clock = 0;        ///< GHz
  double exposed = 0.155;  ///< share of the shorter of loads and arithmetic that the longer does not hide
  double slice = 0;        ///< issue clocks of a warp's 128 bytes of k, beside conversions
  double convert = 0;      ///< clocks of an instruction that converts weights
  double operands = 1200;  ///< clocks in which a warp makes the operands of a row of scales of 256 channels
  double promotion = 0;    ///< clocks in which a thread adds a sum of the MMAs to an fp32 sum
  double scaling = 0;      ///< additional clocks if it scales that sum
  double latency = 0;      ///< microseconds from a request to its bytes in shared memory
  double kernel = 0;       ///< microseconds: launch, first bytes, last stores
  double output = 0;       ///< microseconds of the epilogue, per output of a block
  double cluster = 0;      ///< microseconds of meeting another block to exchange sums
  double exchange = 0;     ///< microseconds per sum of a block that goes to other blocks
  double split = 0;        ///< microseconds of the kernel that adds partial sums, beside its traffic
  double last = 0;         ///< additional microseconds if only the last wave's tiles are shared
  double last_passes = 0;  ///< passes through L2 whose time the partial sums of these tiles take, if not in clusters
};

struct ProductCosts {
  double dram = 1, l2 = 1, mma = 1;  ///< factors on the rates of the GPU's class
  double float8_mma = 1;  ///< factor on mma for 8-bit floats: two fp16 MMAs and conversions (arch/mma_float8.h)
  double alu = 0;         ///< clocks of an instruction that converts weights
  double exposed = 0;     ///< share of the shorter of loads and arithmetic that the longer does not hide, in mma.sync
  double promotion = 0;   ///< clocks of scaling the sums of an MMA's accumulator
  double split = 0;       ///< microseconds of the kernel that adds partial sums of mma.sync, beside its traffic
  double cluster = 0;     ///< microseconds of exchanging sums of mma.sync with one more block of a cluster
  double block = 0;       ///< microseconds of starting one more block on an SM
  MmaSyncCosts stream, multistage;
  WgmmaCosts wgmma;
};

/// Calls visit(name, field) for each of them, by the names that `python -m bench fit` has.
template <class Visit>
void for_each_cost(ProductCosts& c, Visit const& visit) {
  visit("dram", c.dram), visit("l2", c.l2), visit("mma", c.mma), visit("float8_mma", c.float8_mma);
  visit("alu", c.alu), visit("exposed", c.exposed), visit("promotion", c.promotion);
  visit("split", c.split), visit("cluster", c.cluster), visit("block", c.block);
  auto const mma_sync = [&](std::string const& name, MmaSyncCosts& loop) {
    visit(name + ".latency", loop.latency), visit(name + ".slice", loop.slice), visit(name + ".column", loop.column);
    visit(name + ".wait", loop.wait), visit(name + ".kernel", loop.kernel), visit(name + ".output", loop.output);
    visit(name + ".strip", loop.strip), visit(name + ".reread", loop.reread);
  };
  mma_sync("stream", c.stream), mma_sync("multistage", c.multistage);
  WgmmaCosts& w = c.wgmma;
  visit("wgmma.clock", w.clock), visit("wgmma.exposed", w.exposed), visit("wgmma.slice", w.slice);
  visit("wgmma.convert", w.convert), visit("wgmma.operands", w.operands), visit("wgmma.promotion", w.promotion);
  visit("wgmma.scaling", w.scaling), visit("wgmma.latency", w.latency);
  visit("wgmma.kernel", w.kernel), visit("wgmma.output", w.output), visit("wgmma.cluster", w.cluster);
  visit("wgmma.exchange", w.exchange), visit("wgmma.split", w.split), visit("wgmma.last", w.last);
  visit("wgmma.last_passes", w.last_passes);
}

constexpr ProductCosts weight_only_costs() {
  ProductCosts c;
  c.alu = 1.19;
  c.exposed = 0.155;
  c.split = 5.4;
  c.cluster = 1.22;
  c.block = 0.05;
  c.stream.latency = 0.732;
  c.stream.slice = 126;
  c.stream.column = 6.51;
  c.stream.wait = 350;
  c.stream.kernel = 1.31;
  c.stream.output = 1.48e-4;
  c.multistage.latency = 0.687;
  c.multistage.slice = 5;
  c.multistage.column = 0.3;
  c.multistage.wait = 65.5;
  c.multistage.kernel = 2.29;
  c.multistage.output = 9.91e-5;
  c.wgmma.clock = 1.85;
  c.wgmma.slice = 30.5;
  c.wgmma.convert = 1.91;
  c.wgmma.latency = 0.498;
  c.wgmma.kernel = 2.34;
  c.wgmma.output = 5.11e-5;
  c.wgmma.cluster = 0.601;
  c.wgmma.exchange = 2.36e-4;
  c.wgmma.split = 1.7;
  c.wgmma.last = 1.5;
  c.wgmma.last_passes = 3;
  return c;
}

/// Weight-only products of int4 weights in native groups, but for those of experts. Streams were fitted to rows of the
/// random layers that are not held out (bench/results/choices.md) and of other layers of the sweep, but for `wait`,
/// which is set: with 350, which it had, or 420 choices at 4096 x 14336 lose 4 %, with 580 one lost 20 % at a held-out
/// layer. The chosen tactic takes 1.4 % longer than the best in the mean of the held-out layers, 9 % in the worst case.
constexpr ProductCosts native_int4_costs() {
  ProductCosts c = weight_only_costs();
  c.stream.latency = 0.72;
  c.stream.slice = 96.9;
  c.stream.column = 0.592;
  c.stream.wait = 540;
  c.stream.kernel = 0.936;
  c.stream.output = 1.84e-4;
  return c;
}

/// The main loop of wgmma where nothing is dequantised. With a shared last wave no pairs of blocks share weights.
constexpr WgmmaCosts eight_bit_wgmma_costs() {
  WgmmaCosts c;
  c.clock = 1.95;
  c.slice = 144;
  c.promotion = 0.5;
  c.scaling = 1.65;
  c.latency = 0.992;
  c.kernel = 2.4;
  c.output = 2.45e-5;
  c.cluster = 0.00647;
  c.exchange = 2.53e-4;
  c.split = 2.83;
  c.last = 3.5;
  c.last_passes = 3;
  return c;
}

constexpr ProductCosts eight_by_eight_costs() {
  ProductCosts c = weight_only_costs();
  c.dram = 1.13;
  c.l2 = 1.42;
  c.mma = 0.658;
  c.float8_mma = 3.26;
  c.exposed = 0.313;
  c.cluster = 0.778;
  c.stream.latency = 0.67;
  c.stream.slice = 15.7;
  c.stream.column = 0.299;
  c.stream.wait = 520;
  c.stream.kernel = 1.26;
  c.stream.output = 1.18e-4;
  c.stream.strip = 1.89;
  c.stream.reread = 0.193;
  c.multistage.latency = 0.335;
  c.multistage.slice = 16.8;
  c.multistage.column = 2.38;
  c.multistage.wait = 407;
  c.multistage.kernel = 2.1;
  c.multistage.output = 1.51e-4;
  c.multistage.strip = 4.42;
  c.multistage.reread = 0.129;
  c.wgmma = eight_bit_wgmma_costs();
  c.wgmma.exposed = 0.313;
  return c;
}

constexpr ProductCosts blockwise_costs() {
  ProductCosts c = weight_only_costs();
  c.dram = 1.16;
  c.l2 = 2.04;
  c.mma = 0.576;
  c.float8_mma = 3.26;
  c.exposed = 0.325;
  c.cluster = 1;
  c.promotion = 8.45;
  c.stream.latency = 0.507;
  c.stream.slice = 312;
  c.stream.column = 0.514;
  c.stream.wait = 360;
  c.stream.kernel = 0.731;
  c.stream.output = 1.23e-4;
  c.stream.strip = 0.407;
  c.stream.reread = 0.327;
  c.multistage.latency = 0.751;
  c.multistage.slice = 151;
  c.multistage.column = 3.04;
  c.multistage.wait = 81.2;
  c.multistage.kernel = 3.1;
  c.multistage.output = 1.11e-4;
  c.multistage.strip = 0.218;
  c.multistage.reread = 0.146;
  c.wgmma = eight_bit_wgmma_costs();
  c.wgmma.exposed = 0.325;
  return c;
}

/// 4 by 8 bits, whose sums leave the MMAs. Of its own only the clock of wgmma is set by measured times: mma.sync is
/// taken to cost what products in blocks do, and conversions as in weight-only products.
constexpr ProductCosts four_by_eight_costs() {
  ProductCosts c = weight_only_costs();
  c.mma = blockwise_costs().mma;
  c.float8_mma = blockwise_costs().float8_mma;
  c.promotion = blockwise_costs().promotion;
  c.multistage = blockwise_costs().multistage;
  c.multistage.reread = weight_only_costs().multistage.reread;  // which wgmma's loads have, too
  c.wgmma.clock = 1.34;
  c.wgmma.promotion = eight_bit_wgmma_costs().promotion;
  c.wgmma.scaling = eight_bit_wgmma_costs().scaling;
  return c;
}

/// Weight-only products of floating codes for which the streaming loop scales the sums of groups: see scales_sums. Set
/// by times of all tactics of MXFP4 and NVFP4 at four shapes with 1 to 4096 rows; the chosen tactic takes 0.4 % longer
/// than the best in the mean. e4m3 codes with scales of another type have the same costs, not fitted to times of
/// theirs.
constexpr ProductCosts scaled_groups_costs() {
  ProductCosts c = weight_only_costs();
  c.exposed = 0.303;
  c.promotion = 3.67;
  c.stream.latency = 1.13;
  c.stream.slice = 7.57;
  c.stream.column = 1.49;
  c.stream.wait = 486;
  c.stream.kernel = 1.07;
  c.stream.output = 4.35e-4;
  c.stream.strip = 0.341;
  c.wgmma.exposed = 0.303;
  c.wgmma.convert = 2.5;
  return c;
}

/// Weight-only products of integers that are scaled in fp32. Set by times of int4 with real zeros in groups of 32 at
/// six shapes with 1 to 4096 rows; the chosen tactic takes 0.5 % longer than the best in the mean, 12 % in the worst
/// case.
constexpr ProductCosts float_scales_costs() {
  ProductCosts c = weight_only_costs();
  c.alu = 1.6;
  c.exposed = 0.5;
  c.block = 0.04;
  c.stream.slice = 60;
  c.stream.column = 2.9;
  c.wgmma.clock = 1.7;
  c.wgmma.slice = 10;
  c.wgmma.convert = 2;
  c.wgmma.kernel = 2.8;
  return c;
}

/// Weight-only products of integers with minimums, or with scales of two levels. Set by measured times; the chosen
/// tactic takes 4 % longer than the best in the mean of three schemes at three shapes with 1 to 32 rows (streaming
/// tactics), and 1.5 % in the mean of Q4_K and Q6_K at six and four shapes with 1 to 4096 rows.
constexpr ProductCosts minimums_costs() {
  ProductCosts c = weight_only_costs();
  c.alu = 0.644;
  c.exposed = 1;
  c.promotion = 2.03;
  c.block = 0.216;
  c.stream.slice = 83.1;
  c.stream.column = 5.91;
  c.stream.wait = 239;
  c.stream.kernel = 1.34;
  c.wgmma.clock = 1.7;
  c.wgmma.slice = 20;
  c.wgmma.convert = 2.2;
  c.wgmma.kernel = 3.4;
  return c;
}

/// The classes of products that have constants of their own, by name.
enum class CostClass : uint8_t {
  kWeightOnly,
  kNativeInt4,
  kEightByEight,
  kBlockwise,
  kFourByEight,
  kScaledGroups,
  kFloatScales,
  kMinimums
};
inline constexpr char const* kCostClassNames[] = {"weight_only",   "native_int4",   "eight_by_eight", "blockwise",
                                                  "four_by_eight", "scaled_groups", "float_scales",   "minimums"};
inline constexpr ProductCosts kProductCosts[] = {weight_only_costs(),  native_int4_costs(),   eight_by_eight_costs(),
                                                 blockwise_costs(),    four_by_eight_costs(), scaled_groups_costs(),
                                                 float_scales_costs(), minimums_costs()};

/// Int4 weights in native groups, but for those of experts.
constexpr bool is_native_int4(Problem const& problem) {
  return problem.kind.packing == Packing::kW4A16 && problem.kind.mode == ScaleMode::kNative && !problem.grouped;
}

constexpr CostClass cost_class(Problem const& problem) {
  Kind const& kind = problem.kind;
  if (streams_scaled_groups(kind)) return CostClass::kScaledGroups;
  if (kind.mode == ScaleMode::kMinimum) return CostClass::kMinimums;
  if (makes_operands(kind.packing, kind.mode)) return CostClass::kFloatScales;
  if (is_native_int4(problem)) return CostClass::kNativeInt4;
  if (kind.dequantises()) return CostClass::kWeightOnly;
  if (kind.packing == Packing::kW4A8) return CostClass::kFourByEight;
  return kind.is_promoted() ? CostClass::kBlockwise : CostClass::kEightByEight;
}

}  // namespace qcutlass
