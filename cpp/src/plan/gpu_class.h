// Rates of GPUs. Those of the H200 were fitted to times measured on one. Nobody has fitted the others: they follow from
// data sheets (tests/cpp/gpu_class_test.cc has these, and the rules), but for those of L2 and of dequantising, which no
// data sheet has: these are estimates. Selection needs the ratios more than the values.
#pragma once

#include "qcutlass/gemm.h"

namespace qcutlass {

struct GpuClass {
  int compute_capability = 0;
  int sm_count = 0;
  double dram_rate = 0;   ///< TB/s
  double l2_rate = 0;     ///< TB/s
  double clock_rate = 0;  ///< GHz under tensor-core load
  double mma_clocks = 0;  ///< of an m16n8k16 MMA with fp32 accumulation; a quarter of an SM issues nothing else then
  double dense_rate = 0;  ///< TFLOP/s of one SM in full waves of large tiles of the vendor's dense 16-bit product
  double dequantize_rate = 0;  ///< TB/s of 16-bit weights written
  bool is_fitted = false;      ///< to measured times

  constexpr GpuClass dram(double value) const { return with(&GpuClass::dram_rate, value); }
  constexpr GpuClass l2(double value) const { return with(&GpuClass::l2_rate, value); }
  constexpr GpuClass clock(double value) const { return with(&GpuClass::clock_rate, value); }
  constexpr GpuClass mma(double value) const { return with(&GpuClass::mma_clocks, value); }
  constexpr GpuClass dense(double value) const { return with(&GpuClass::dense_rate, value); }
  constexpr GpuClass dequantize(double value) const { return with(&GpuClass::dequantize_rate, value); }
  constexpr GpuClass fitted() const {
    GpuClass result = *this;
    result.is_fitted = true;
    return result;
  }

  /// Those of a GPU with so many SMs: what they share is taken to grow with their number.
  constexpr GpuClass of_sms(int count) const {
    double const more = count / static_cast<double>(sm_count);
    GpuClass result = dram(dram_rate * more).l2(l2_rate * more).dequantize(dequantize_rate * more);
    result.sm_count = count;
    return result;
  }

 private:
  constexpr GpuClass with(double GpuClass::*field, double value) const {
    GpuClass result = *this;
    result.*field = value;
    return result;
  }
};

constexpr GpuClass gpu(int compute_capability, int sm_count) {
  GpuClass result;
  result.compute_capability = compute_capability;
  result.sm_count = sm_count;
  return result;
}

inline constexpr GpuClass kGpuClasses[] = {
    gpu(80, 108).dram(1.84).l2(4.0).clock(1.27).mma(8).dense(2.41).dequantize(1.2),            // A100 of 80 GB
    gpu(86, 72).dram(0.54).l2(2.5).clock(1.53).mma(16).dense(1.45).dequantize(0.5),            // A10
    gpu(86, 82).dram(0.842).l2(2.8).clock(1.53).mma(32).dense(0.722).dequantize(0.6),          // RTX 3090
    gpu(89, 142).dram(0.778).l2(4.5).clock(2.27).mma(16).dense(2.12).dequantize(1.2),          // L40S
    gpu(89, 128).dram(0.907).l2(4.5).clock(2.27).mma(32).dense(1.08).dequantize(1.2),          // RTX 4090
    gpu(90, 132).dram(4.1).l2(9.67).clock(1.77).mma(6).dense(6.19).dequantize(2.54).fitted(),  // H200, and H100
    gpu(100, 148).dram(7.2).l2(9.0).clock(1.77).mma(6).dense(12.7).dequantize(5.0),            // B200
    gpu(120, 170).dram(1.61).l2(5.0).clock(2.17).mma(32).dense(1.03).dequantize(1.2),          // RTX 5090
};

/// The row that a GPU's rates come from: of the newest compute capability that is not newer than its own, the one with
/// as many SMs, which tell GPUs of one capability apart; or else the first.
constexpr GpuClass const& gpu_class(DeviceTraits const& device) {
  GpuClass const* best = &kGpuClasses[0];
  for (GpuClass const& c : kGpuClasses)
    if (c.compute_capability <= device.compute_capability && c.compute_capability > best->compute_capability) best = &c;
  for (GpuClass const& c : kGpuClasses)
    if (c.compute_capability == best->compute_capability && c.sm_count == device.sm_count) return c;
  return *best;
}

/// Calls visit(name, field) for each rate, by the names that `python -m bench fit` has.
template <class Visit>
void for_each_rate(GpuClass& gpu, Visit const& visit) {
  visit("gpu.dram", gpu.dram_rate), visit("gpu.l2", gpu.l2_rate), visit("gpu.clock", gpu.clock_rate);
  visit("gpu.mma", gpu.mma_clocks), visit("gpu.dense", gpu.dense_rate), visit("gpu.dequantize", gpu.dequantize_rate);
}

/// Blocks that a cluster may have on every GPU with clusters.
inline constexpr int kMaxCluster = 8;

/// Clusters of so many blocks, one an SM, that run at once: those beyond pairs do not fill every group of SMs that may
/// hold one. Shares of the SMs as cudaOccupancyMaxActiveClusters has them on an H200 (39 of 3 blocks, 30 of 4, 22, 17,
/// 15 of 7 or 8).
constexpr int resident_clusters(int sm_count, int blocks) {
  constexpr double kShares[kMaxCluster + 1] = {1, 1, 1, 0.887, 0.91, 0.834, 0.773, 0.796, 0.91};
  return int(sm_count * kShares[blocks]) / blocks;
}

/// Blocks that the busiest SM gets of a launch, together or one after the other, if so many blocks share each tile.
constexpr int64_t busiest_blocks(int64_t tiles, int blocks, bool cluster, int sm_count) {
  if (!cluster) return (tiles * blocks + sm_count - 1) / sm_count;
  int const resident = resident_clusters(sm_count, blocks);
  return resident > 0 ? (tiles + resident - 1) / resident : tiles;
}

}  // namespace qcutlass
