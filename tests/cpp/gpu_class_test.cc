// Rates of GPUs are those of their data sheets, but for what was fitted.
#include "plan/gpu_class.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "selection.h"

namespace qcutlass {
namespace {

using namespace selection;

/// What NVIDIA documents of a GPU: in data sheets of A100 80 GB SXM, A10, L40S, H200 SXM and HGX B200 (boost clocks,
/// which some leave out, from their product briefs), and for GeForce cards in the white papers of GA102, Ada and RTX
/// Blackwell.
struct DataSheet {
  GpuClass row;
  double dram;    ///< TB/s
  double boost;   ///< GHz
  double tensor;  ///< TFLOP/s of dense 16-bit products with sums in fp32, not of sparse ones
};

constexpr DataSheet kDataSheets[] = {
    {gpu(80, 108), 2.039, 1.41, 312},     // A100
    {gpu(86, 72), 0.6, 1.695, 125},       // A10
    {gpu(86, 82), 0.936, 1.695, 71},      // RTX 3090
    {gpu(89, 142), 0.864, 2.52, 362},     // L40S
    {gpu(89, 128), 1.008, 2.52, 165.2},   // RTX 4090
    {gpu(90, 132), 4.8, 1.98, 989},       // H200
    {gpu(100, 148), 8, 1.965, 2250},      // B200
    {gpu(120, 170), 1.792, 2.407, 209.5}  // RTX 5090
};

DataSheet const* data_sheet(GpuClass const& row) {
  for (DataSheet const& sheet : kDataSheets)
    if (sheet.row.compute_capability == row.compute_capability && sheet.row.sm_count == row.sm_count) return &sheet;
  return nullptr;
}

DeviceTraits device(int compute_capability, int sm_count) { return {compute_capability, sm_count, 99 * 1024}; }

/// Copies reach nine tenths of DRAM's rate; clocks under load are nine tenths of the highest; and the vendor's products
/// five sixths of the tensor cores' rate.
double dram(DataSheet const& sheet) { return 0.9 * sheet.dram; }
double clock(DataSheet const& sheet) { return 0.9 * sheet.boost; }
double dense(DataSheet const& sheet) { return sheet.tensor / sheet.row.sm_count * 5 / 6; }

double three_digits(double value) {
  char digits[16];
  std::snprintf(digits, sizeof(digits), "%.3g", value);
  return std::strtod(digits, nullptr);
}

TEST(GpuClass, RowsFollowFromDataSheets) {
  for (GpuClass const& row : kGpuClasses) {
    SCOPED_TRACE(testing::Message() << row.compute_capability << ", " << row.sm_count << " SMs");
    DataSheet const* sheet = data_sheet(row);
    ASSERT_NE(sheet, nullptr);
    if (row.is_fitted) continue;
    EXPECT_EQ(row.dram_rate, three_digits(dram(*sheet)));
    EXPECT_EQ(row.clock_rate, three_digits(clock(*sheet)));
    EXPECT_EQ(row.dense_rate, three_digits(dense(*sheet)));
  }
}

TEST(GpuClass, WhatWasFittedToAnH200IsNearTheRules) {
  GpuClass const& row = gpu_class(kH200);
  DataSheet const& sheet = *data_sheet(row);
  EXPECT_TRUE(row.is_fitted);
  for (double ratio : {row.dram_rate / dram(sheet), row.clock_rate / clock(sheet), row.dense_rate / dense(sheet)}) {
    EXPECT_GT(ratio, 0.94);
    EXPECT_LT(ratio, 1.06);
  }
}

/// The clocks of an MMA are those of the tensor cores at the boost clock, from Hopper on longer: its rate, and that of
/// B200, is one of other instructions.
TEST(GpuClass, ClocksOfMmasFollowFromDataSheets) {
  constexpr double kFlops = 2.0 * 16 * 8 * 16, kQuarters = 4;
  for (GpuClass const& row : kGpuClasses) {
    SCOPED_TRACE(testing::Message() << row.compute_capability << ", " << row.sm_count << " SMs");
    DataSheet const* sheet = data_sheet(row);
    ASSERT_NE(sheet, nullptr);
    double const clocks = kFlops * kQuarters * row.sm_count * sheet->boost * 1e-3 / sheet->tensor;
    if (row.compute_capability == 90 || row.compute_capability == 100)
      EXPECT_GT(row.mma_clocks, clocks);
    else
      EXPECT_EQ(row.mma_clocks, std::exp2(std::round(std::log2(clocks)))) << clocks;
  }
}

TEST(GpuClass, GpusOfOneCapabilityAreToldApartBySms) {
  for (GpuClass const& row : kGpuClasses) EXPECT_EQ(&gpu_class(device(row.compute_capability, row.sm_count)), &row);
  EXPECT_EQ(gpu_class(kRtx4090).mma_clocks, 2 * gpu_class(device(89, 142)).mma_clocks);
  EXPECT_EQ(gpu_class(kRtx3090).mma_clocks, 2 * gpu_class(device(86, 72)).mma_clocks);
}

TEST(GpuClass, OthersHaveTheFirstRowOfTheNewestCapabilityBeforeTheirs) {
  EXPECT_EQ(gpu_class(device(89, 58)).sm_count, 142);   // L4
  EXPECT_EQ(gpu_class(device(87, 16)).sm_count, 72);    // Orin
  EXPECT_EQ(gpu_class(device(90, 114)).sm_count, 132);  // H100 of PCIe
  EXPECT_EQ(gpu_class(device(103, 148)).compute_capability, 100);
  EXPECT_EQ(gpu_class(device(121, 48)).compute_capability, 120);
  EXPECT_EQ(gpu_class(device(75, 40)).compute_capability, 80);
}

TEST(GpuClass, WhatSmsShareGoesWithTheirNumber) {
  for (GpuClass const& row : kGpuClasses) {
    GpuClass const same = row.of_sms(row.sm_count), half = row.of_sms(row.sm_count / 2);
    EXPECT_EQ(same.dram_rate, row.dram_rate);
    EXPECT_EQ(same.l2_rate, row.l2_rate);
    EXPECT_EQ(same.dequantize_rate, row.dequantize_rate);
    EXPECT_EQ(half.dram_rate, row.dram_rate / 2);
    EXPECT_EQ(half.l2_rate, row.l2_rate / 2);
    EXPECT_EQ(half.dequantize_rate, row.dequantize_rate / 2);
    EXPECT_EQ(half.clock_rate, row.clock_rate);
    EXPECT_EQ(half.mma_clocks, row.mma_clocks);
    EXPECT_EQ(half.dense_rate, row.dense_rate);
  }
}

TEST(GpuClass, BusiestSmGetsItsShareOfBlocksOrClusters) {
  EXPECT_EQ(busiest_blocks(132, 1, false, 132), 1);
  EXPECT_EQ(busiest_blocks(133, 1, false, 132), 2);
  EXPECT_EQ(busiest_blocks(33, 8, false, 132), 2);
  EXPECT_EQ(busiest_blocks(32, 8, true, 132), 3) << "15 clusters of 8 run at once";
  EXPECT_EQ(busiest_blocks(66, 2, true, 132), 1);
  EXPECT_EQ(busiest_blocks(5, 8, true, 4), 5) << "no cluster fits";
}

}  // namespace
}  // namespace qcutlass
