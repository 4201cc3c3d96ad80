// Rates of the classes of GPUs. Those of sm_90 were fitted to times measured on an H200, the others are what the
// architectures document; selection needs the ratios more than the values.
#pragma once

namespace qcutlass {

struct GpuClass {
  int compute_capability = 0;
  double dram_rate = 0;   ///< TB/s
  double l2_rate = 0;     ///< TB/s
  double clock_rate = 0;  ///< GHz under tensor-core load
  double mma_clocks = 0;  ///< of an m16n8k16 MMA with fp32 accumulation; a quarter of an SM issues nothing else then
  double dense_rate = 0;  ///< TFLOP/s of one SM in full waves of large tiles of the vendor's dense 16-bit product
  double dequantize_rate = 0;  ///< TB/s of 16-bit weights written

  constexpr GpuClass dram(double value) const { return with(&GpuClass::dram_rate, value); }
  constexpr GpuClass l2(double value) const { return with(&GpuClass::l2_rate, value); }
  constexpr GpuClass clock(double value) const { return with(&GpuClass::clock_rate, value); }
  constexpr GpuClass mma(double value) const { return with(&GpuClass::mma_clocks, value); }
  constexpr GpuClass dense(double value) const { return with(&GpuClass::dense_rate, value); }
  constexpr GpuClass dequantize(double value) const { return with(&GpuClass::dequantize_rate, value); }

 private:
  constexpr GpuClass with(double GpuClass::*field, double value) const {
    GpuClass result = *this;
    result.*field = value;
    return result;
  }
};

constexpr GpuClass gpu(int compute_capability) {
  GpuClass result;
  result.compute_capability = compute_capability;
  return result;
}

inline constexpr GpuClass kGpuClasses[] = {
    gpu(80).dram(1.8).l2(4.0).clock(1.3).mma(8).dense(2.5).dequantize(1.2),      // A100
    gpu(86).dram(0.7).l2(2.5).clock(1.6).mma(16).dense(0.8).dequantize(0.5),     // A10, RTX 30
    gpu(89).dram(0.9).l2(4.5).clock(2.2).mma(16).dense(1.3).dequantize(1.2),     // L40S, RTX 40
    gpu(90).dram(4.1).l2(9.67).clock(1.77).mma(6).dense(6.19).dequantize(2.54),  // H100, H200: 817 TFLOP/s on 132 SMs
    gpu(100).dram(7.0).l2(9.0).clock(1.8).mma(6).dense(10.0).dequantize(5.0),    // B200
    gpu(120).dram(1.6).l2(5.0).clock(2.4).mma(16).dense(1.3).dequantize(1.2),    // RTX 50
};

/// The class of a GPU: the newest one that is not newer than it.
constexpr GpuClass const& gpu_class(int compute_capability) {
  GpuClass const* best = &kGpuClasses[0];
  for (GpuClass const& c : kGpuClasses)
    if (c.compute_capability <= compute_capability) best = &c;
  return *best;
}

/// Clusters of so many blocks, one an SM, that run at once: those beyond pairs do not fill every group of SMs that may
/// hold one. Shares of the SMs as cudaOccupancyMaxActiveClusters has them on an H200 (39 of 3 blocks, 30 of 4, 22, 17,
/// 15 of 7 or 8).
constexpr int resident_clusters(int sm_count, int blocks) {
  constexpr double kShares[] = {1, 1, 1, 0.887, 0.91, 0.834, 0.773, 0.796, 0.91};
  return int(sm_count * kShares[blocks]) / blocks;
}

}  // namespace qcutlass
