// Speeds of the classes of GPUs, as the cost model needs them: the only constants it has.
//
// Those of sm_90 were fitted to times measured on an H200. The other classes keep its overheads, and its factors for
// 8-by-8-bit products, and take their rates from what the architectures document; selection needs the ratios more than
// the values.
#pragma once

namespace qcutlass {

struct MemorySpeed {
  double dram;  ///< TB/s
  double l2;    ///< TB/s
};

/// Issue clocks of one quarter of an SM. While it issues an MMA, nothing else issues.
struct IssueSpeed {
  double clock;       ///< GHz under tensor-core load
  double mma;         ///< clocks of an m16n8k16 MMA with fp32 accumulation
  double alu = 1.19;  ///< clocks of an instruction that converts weights
};

/// What a kind of main loop costs beside bytes, MMAs and conversions.
struct MainloopCosts {
  double latency;     ///< microseconds from a request to its bytes in shared memory, loaded memory system
  double slice;       ///< clocks of a warp's slice of k: copies, addresses, barriers
  double column;      ///< clocks of loading an n8 block of the activations' fragments for a step
  double wait;        ///< clocks that a warp alone waits for its own results in a slice; other warps' work hides them
  double kernel;      ///< microseconds: launch, first bytes, last stores
  double output;      ///< microseconds of the epilogue, per output of a block and slice of k
  double strip = 0;   ///< clocks of loading a strip's fragment for a step, beside what conversions take
  double reread = 0;  ///< share of what blocks read again that comes through DRAM again
};
inline constexpr MainloopCosts kStreamCosts = {0.732, 126, 6.51, 350, 1.31, 1.48e-4};
inline constexpr MainloopCosts kMultistageCosts = {0.687, 5, 0.3, 65.5, 2.29, 9.91e-5};

/// The main loops of asynchronous MMAs, whose times have a form of their own: see cost_model.cc.
struct WgmmaCosts {
  double clock = 1.85;        ///< GHz
  double slice = 30.5;        ///< issue clocks of a warp's 128 bytes of k, beside conversions
  double convert = 1.91;      ///< clocks of an instruction that converts weights
  double promotion = 0;       ///< clocks of a thread's sum that leaves the MMAs' registers
  double scaling = 0;         ///< more of them where it is scaled
  double latency = 0.498;     ///< microseconds from a request to its bytes in shared memory
  double kernel = 2.34;       ///< microseconds: launch, first bytes, last stores
  double output = 5.11e-5;    ///< microseconds of the epilogue, per output of a block
  double cluster = 0.601;     ///< microseconds of meeting another block to exchange sums
  double exchange = 2.36e-4;  ///< microseconds per sum of a block that goes to other blocks
  double split = 1.7;         ///< microseconds of the kernel that adds partial sums, beside its traffic
  double last = 1.5;          ///< microseconds more where only tiles of a last wave are shared
  double last_passes = 3;     ///< passes of their sums through L2, as the time goes, where they are not in clusters
};

/// Those of 8-by-8-bit products. With a shared last wave no pairs of blocks share weights.
inline constexpr WgmmaCosts kWgmmaSsCosts = {1.95,    144,     0,       0.5,  1.65, 0.992, 2.4,
                                             2.45e-5, 0.00647, 2.53e-4, 2.83, 3.5,  3};

/// What is different for 8-by-8-bit products, fitted to times of their own: factors on the speeds of the class, and
/// main loops without conversions, whose blocks are fewer and longer.
struct EightBitCosts {
  double dram, l2, mma;
  double exposed;
  double cluster;    ///< see LaunchTimes
  double promotion;  ///< clocks of scaling the sums of an MMA's accumulator
  MainloopCosts stream, multistage;
};
inline constexpr EightBitCosts kEightByEightCosts = {1.13,
                                                     1.42,
                                                     0.658,
                                                     0.313,
                                                     0.778,
                                                     0,
                                                     {0.67, 15.7, 0.299, 520, 1.26, 1.18e-4, 1.89, 0.193},
                                                     {0.335, 16.8, 2.38, 407, 2.1, 1.51e-4, 4.42, 0.129}};
inline constexpr EightBitCosts kBlockwiseCosts = {1.16,
                                                  2.04,
                                                  0.576,
                                                  0.325,
                                                  1,
                                                  8.45,
                                                  {0.507, 312, 0.514, 360, 0.731, 1.23e-4, 0.407, 0.327},
                                                  {0.751, 151, 3.04, 81.2, 3.1, 1.11e-4, 0.218, 0.146}};
/// How much longer MMAs of 8-bit floats take than those of integers: they are two of fp16 and conversions.
inline constexpr double kFloat8Mma = 3.26;

/// Microseconds of combining the blocks that share k, and of small kernels.
struct LaunchTimes {
  double split = 5.4;     ///< the kernel that adds partial sums, beside its traffic; kWgmma has its own
  double cluster = 1.22;  ///< clusters: exchanging sums with one more block
  double block = 0.05;    ///< starting one more block on an SM
  double copy = 2.0;      ///< a kernel that copies activations or finishes outputs, beside its traffic
};

/// Clusters of so many blocks, one an SM, that run at once: those beyond pairs do not fill every group of SMs that may
/// hold one. Shares of the SMs as cudaOccupancyMaxActiveClusters has them on an H200 (39 of 3 blocks, 30 of 4, 22, 17,
/// 15 of 7 or 8).
constexpr int resident_clusters(int sm_count, int blocks) {
  constexpr double kShares[] = {1, 1, 1, 0.887, 0.91, 0.834, 0.773, 0.796, 0.91};
  return int(sm_count * kShares[blocks]) / blocks;
}

/// Dequantising slices of the weights and multiplying them with the vendor's dense 16-bit product.
struct DenseSpeed {
  double product;         ///< TFLOP/s of one SM in full waves of large tiles
  double dequantize;      ///< TB/s of 16-bit weights written
  double launches = 2.5;  ///< microseconds of launching both for a slice
};

struct GpuClass {
  int compute_capability;
  MemorySpeed memory;
  IssueSpeed issue;
  DenseSpeed dense;
  MainloopCosts stream = kStreamCosts, multistage = kMultistageCosts;
  LaunchTimes launch = {};
  double exposed = 0.155;  ///< how much of the shorter of two that overlap is not hidden behind the longer
  double promotion = 0;    ///< see EightBitCosts
  WgmmaCosts wgmma = {};
};

inline constexpr GpuClass kGpuClasses[] = {
    {80, {1.8, 4.0}, {1.3, 8}, {2.5, 1.2}},      // A100
    {86, {0.7, 2.5}, {1.6, 16}, {0.8, 0.5}},     // A10, RTX 30
    {89, {0.9, 4.5}, {2.2, 16}, {1.3, 1.2}},     // L40S, RTX 40
    {90, {4.1, 9.67}, {1.77, 6}, {6.19, 2.54}},  // H100, H200: 817 TFLOP/s on 132 SMs
    {100, {7.0, 9.0}, {1.8, 6}, {10.0, 5.0}},    // B200
    {120, {1.6, 5.0}, {2.4, 16}, {1.3, 1.2}},    // RTX 50
};

/// The class as a kind of 8-by-8-bit products sees it.
constexpr GpuClass for_eight_bits(GpuClass gpu, EightBitCosts const& costs, bool float8) {
  gpu.memory = {gpu.memory.dram * costs.dram, gpu.memory.l2 * costs.l2};
  gpu.issue.mma *= costs.mma * (float8 ? kFloat8Mma : 1);
  gpu.exposed = costs.exposed;
  gpu.launch.cluster = costs.cluster;
  gpu.promotion = costs.promotion;
  gpu.stream = costs.stream;
  gpu.multistage = costs.multistage;
  gpu.wgmma = kWgmmaSsCosts;
  return gpu;
}

/// The class of a GPU: the newest one that is not newer than it.
constexpr GpuClass const& gpu_class(int compute_capability) {
  GpuClass const* best = &kGpuClasses[0];
  for (GpuClass const& c : kGpuClasses)
    if (c.compute_capability <= compute_capability) best = &c;
  return *best;
}

}  // namespace qcutlass
