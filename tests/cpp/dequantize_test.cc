#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "qcutlass/error.h"
#include "qcutlass/pack.h"
#include "random_weights.h"
#include "reference.h"

namespace qcutlass {
namespace {

/// Every 4-bit code with every integer zero 0..15 and every finite fp16 scale, against the correctly rounded (code -
/// zero) * scale.
TEST(DequantizeExhaustive, FourBitCodesZerosAndHalfScales) {
  constexpr int64_t kZeros = 16, kCodes = 16, kColumns = kZeros * kCodes;
  std::vector<uint16_t> patterns;
  for (int i = 0; i < 65536; ++i) {
    if (std::isfinite(test::value_of_bits(static_cast<uint16_t>(i), 5))) patterns.push_back(static_cast<uint16_t>(i));
  }
  auto const n = static_cast<int64_t>(patterns.size());
  ASSERT_EQ(n, 63488);

  std::vector<uint8_t> codes(n * kColumns), packed(layout::packed_bytes(Packing::kW4A16, n, kColumns));
  for (int64_t i = 0; i < n * kColumns; ++i) codes[i] = static_cast<uint8_t>(i % kCodes);
  host::pack({Packing::kW4A16, n, kColumns, codes.data(), kColumns, packed.data()}, 2);
  std::vector<uint8_t> zeros(kZeros * n);
  for (int64_t i = 0; i < kZeros * n; ++i) zeros[i] = static_cast<uint8_t>(i / n);

  DequantizeArguments arguments;
  arguments.weights.n = n;
  arguments.weights.k = kColumns;
  arguments.weights.group_size = kCodes;
  arguments.weights.packed = packed.data();
  arguments.weights.scale_type = DType::kFloat16;
  arguments.weights.scales = patterns.data();
  arguments.weights.scale_stride = n;
  arguments.weights.zero_type = DType::kUInt8;
  arguments.weights.zeros = zeros.data();
  arguments.weights.zero_stride = n;
  // The same scales for every zero.
  std::vector<uint16_t> scales;
  for (int64_t zero = 0; zero < kZeros; ++zero) scales.insert(scales.end(), patterns.begin(), patterns.end());
  arguments.weights.scales = scales.data();

  constexpr int64_t kRows = 4096;
  for (DType type : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    SCOPED_TRACE(test::name_of(type));
    test::Array out(type, kRows * kColumns);
    arguments.out_type = type;
    arguments.out = out.data();
    arguments.out_stride = kColumns;
    for (int64_t begin = 0; begin < n; begin += kRows) {
      arguments.row_begin = begin;
      arguments.row_end = std::min(n, begin + kRows);
      host::dequantize(arguments, 2);
      for (int64_t row = begin; row < arguments.row_end; ++row) {
        double expected[31];
        double const scale = test::value_of_bits(patterns[row], 5);
        for (int i = 0; i < 31; ++i) expected[i] = test::round_to(test::format_of(type), (i - 15) * scale);
        for (int64_t column = 0; column < kColumns; ++column) {
          double const weight = out[(row - begin) * kColumns + column];
          ASSERT_EQ(weight, expected[column % kCodes - column / kCodes + 15]) << row << ", " << column;
        }
      }
    }
  }
}

class DequantizeTest : public testing::TestWithParam<test::WeightCase> {};

TEST_P(DequantizeTest, MatchesTheSchemeBitForBit) {
  test::WeightCase const c = GetParam();
  test::RandomWeights const weights(c, 1234);
  int64_t const stride = c.k + 7;
  double const canary = -77.0;
  for (DType type : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (auto const& [begin, end] :
         {std::pair<int64_t, int64_t>{0, c.n}, {c.n / 3, c.n - c.n / 4}, {c.n / 2, c.n / 2}}) {
      SCOPED_TRACE(std::string(test::name_of(type)) + " rows " + std::to_string(begin) + " to " + std::to_string(end));
      test::Array out(type, (end - begin) * stride + 1);
      for (int64_t i = 0; i <= (end - begin) * stride; ++i) out.set(i, canary);
      host::dequantize({weights.arguments(), begin, end, type, out.data(), stride}, 3);
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t k = 0; k < stride; ++k) {
          double const expected = k < c.k ? test::round_to(test::format_of(type), weights.weight(row, k)) : canary;
          ASSERT_EQ(out[(row - begin) * stride + k], expected) << row << ", " << k;
        }
      }
      EXPECT_EQ(out[(end - begin) * stride], canary);
    }
  }
}

std::vector<test::WeightCase> cases() {
  std::vector<test::WeightCase> result;
  for (Packing packing : {Packing::kW4A16, Packing::kW8A16}) {
    for (DType zero_type : test::zero_types()) {
      for (DType scale_type : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
        result.push_back({packing, 35, 131, 16, scale_type, zero_type});
      }
    }
    for (DType type : {DType::kFloat16, DType::kBFloat16, DType::kFloat32})
      result.push_back({packing, 35, 131, 16, DType::kFloat32, type, true});
    for (int64_t group_size : {1, 3, 32, 48, 64, 100, 128, 130, 131, 4096}) {
      result.push_back({packing, 18, 131, group_size, DType::kFloat16, DType::kUInt8});
    }
    for (int64_t super_groups : {1, 2, 8, 9}) {
      result.push_back({packing, 35, 131, 16, DType::kInt8, DType::kNone, false, super_groups});
      result.push_back({packing, 35, 131, 16, DType::kUInt8, DType::kUInt8, true, super_groups});
      result.push_back({packing, 35, 131, 16, DType::kInt8, DType::kInt8, true, super_groups});
    }
    result.push_back({packing, 1, 1, 1, DType::kFloat32, DType::kFloat32});
    result.push_back({packing, 3000, 70, 64, DType::kFloat16, DType::kNone});
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Cases, DequantizeTest, testing::ValuesIn(cases()),
                         [](auto const& info) { return test::name_of(info.param); });

TEST(Dequantize, ChecksArguments) {
  test::RandomWeights const weights({Packing::kW4A16, 4, 64, 32, DType::kFloat16, DType::kUInt8}, 5);
  std::vector<float> out(4 * 64);
  DequantizeArguments const good{weights.arguments(), 0, 4, DType::kFloat32, out.data(), 64};
  host::dequantize(good, 1);
  auto const rejects = [&](auto change) {
    DequantizeArguments bad = good;
    change(bad);
    EXPECT_THROW(host::dequantize(bad, 1), InvalidArgument);
  };
  rejects([](DequantizeArguments& a) { a.row_begin = -1; });
  rejects([](DequantizeArguments& a) { a.row_end = 5; });
  rejects([](DequantizeArguments& a) { a.row_begin = 3, a.row_end = 2; });
  rejects([](DequantizeArguments& a) { a.out_type = DType::kInt8; });
  rejects([](DequantizeArguments& a) { a.out = nullptr; });
  rejects([](DequantizeArguments& a) { a.out_stride = 63; });
  rejects([](DequantizeArguments& a) { a.weights.packing = Packing::kW8A8; });
  rejects([](DequantizeArguments& a) { a.weights.group_size = 0; });
  rejects([](DequantizeArguments& a) { a.weights.scale_type = DType::kNone; });
  rejects([](DequantizeArguments& a) { a.weights.scale_stride = 3; });
  rejects([](DequantizeArguments& a) { a.weights.zeros = nullptr; });
  rejects([](DequantizeArguments& a) { a.weights.minimum_type = DType::kFloat32; });
  DequantizeArguments minimums = good;
  minimums.weights.zero_type = DType::kNone, minimums.weights.minimum_type = DType::kFloat32;
  EXPECT_THROW(host::dequantize(minimums, 1), InvalidArgument);
}

TEST(Dequantize, ChecksSuperBlocks) {
  test::RandomWeights const weights({Packing::kW4A16, 4, 64, 32, DType::kInt8, DType::kUInt8, true, 1}, 5);
  std::vector<float> out(4 * 64);
  DequantizeArguments const good{weights.arguments(), 0, 4, DType::kFloat32, out.data(), 64};
  host::dequantize(good, 1);
  auto const rejects = [&](auto change) {
    DequantizeArguments bad = good;
    change(bad.weights);
    EXPECT_THROW(host::dequantize(bad, 1), InvalidArgument);
  };
  rejects([](WeightArguments& w) { w.super_groups = 0; });
  rejects([](WeightArguments& w) { w.super_groups = -1; });
  rejects([](WeightArguments& w) { w.super_scales = nullptr; });
  rejects([](WeightArguments& w) { w.super_minimums = nullptr; });
  rejects([](WeightArguments& w) { w.super_scale_stride = 3; });
  rejects([](WeightArguments& w) { w.super_minimum_stride = 3; });
  rejects([](WeightArguments& w) { w.scale_type = DType::kFloat32; });
  rejects([](WeightArguments& w) { w.minimum_type = DType::kFloat16; });
  rejects([](WeightArguments& w) { w.packing = Packing::kE2M1A16; });
  rejects([](WeightArguments& w) { w.zero_type = DType::kUInt8, w.zeros = w.scales, w.zero_stride = 4; });
  float const whole = 1;
  rejects([&](WeightArguments& w) { w.global_scale = &whole; });
}

}  // namespace
}  // namespace qcutlass
