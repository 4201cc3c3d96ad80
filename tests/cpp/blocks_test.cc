// Codes in blocks: quantised, back, and through GELU.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "cuda/quantize/gelu.h"
#include "qcutlass/error.h"
#include "qcutlass/quantize.h"

namespace qcutlass {
namespace {

constexpr int64_t kRows = 70, kColumns = 200;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

int64_t blocks(int64_t extent, int64_t size) { return (extent + size - 1) / size; }

/// A matrix of fp32 whose rows are apart, its codes and scales.
struct Matrix {
  std::vector<float> a;
  std::vector<int8_t> codes = std::vector<int8_t>(kRows * kColumns, 0x55);
  std::vector<float> scales;
  QuantizeArguments arguments;

  Matrix(int64_t size, bool square) : a(kRows * (kColumns + 3)) {
    std::mt19937 random(7);
    for (float& value : a) value = std::ldexp(float(int(random() % 2001) - 1000), -int(random() % 12));
    scales.assign((square ? blocks(kRows, size) : kRows) * blocks(kColumns, size), -1.0f);
    arguments.rows = kRows;
    arguments.columns = kColumns;
    arguments.a_type = DType::kFloat32;
    arguments.a = a.data();
    arguments.a_stride = kColumns + 3;
    arguments.block = size;
    arguments.square = square;
    arguments.code_type = DType::kInt8;
    arguments.codes = codes.data();
    arguments.scale = scales.data();
  }

  int64_t index_of_scale(int64_t row, int64_t column) const {
    int64_t const size = arguments.block;
    return (arguments.square ? row / size : row) * blocks(kColumns, size) + column / size;
  }
};

TEST(Blocks, EachHasTheScaleOfItsLargestMagnitude) {
  for (int64_t size : {32, 64, 128}) {
    for (bool square : {false, true}) {
      Matrix matrix(size, square);
      for (int threads : {1, 3}) {
        host::quantize(matrix.arguments, threads);
        std::vector<float> largest(matrix.scales.size());
        for (int64_t row = 0; row < kRows; ++row) {
          for (int64_t column = 0; column < kColumns; ++column) {
            float& of_block = largest[matrix.index_of_scale(row, column)];
            of_block = std::max(of_block, std::fabs(matrix.a[row * (kColumns + 3) + column]));
          }
        }
        for (size_t i = 0; i < largest.size(); ++i) ASSERT_EQ(matrix.scales[i], largest[i] / 127.0f);
        for (int64_t row = 0; row < kRows; ++row) {
          for (int64_t column = 0; column < kColumns; ++column) {
            float const quotient =
                matrix.a[row * (kColumns + 3) + column] / matrix.scales[matrix.index_of_scale(row, column)];
            ASSERT_EQ(matrix.codes[row * kColumns + column], std::nearbyint(quotient)) << row << ", " << column;
          }
        }
      }
    }
  }
}

TEST(Blocks, NumbersAreCodesTimesScales) {
  for (bool square : {false, true}) {
    Matrix matrix(64, square);
    host::quantize(matrix.arguments, 1);
    std::vector<float> out(kRows * kColumns + 1, kNaN);
    BlockArguments arguments{
        kRows,           kColumns,   64,     square, matrix.codes.data(), kColumns, matrix.scales.data(),
        DType::kFloat32, out.data(), nullptr};
    for (int threads : {1, 3}) {
      host::dequantize_blocks(arguments, threads);
      for (int64_t i = 0; i < kRows * kColumns; ++i) {
        float const scale = matrix.scales[matrix.index_of_scale(i / kColumns, i % kColumns)];
        ASSERT_EQ(out[i], matrix.codes[i] * scale) << i;
      }
      ASSERT_TRUE(std::isnan(out.back()));
    }
  }
}

TEST(Blocks, GeluIsQuantisedAgain) {
  Matrix matrix(128, false);
  host::quantize(matrix.arguments, 1);
  for (size_t i = 0; i < matrix.scales.size(); ++i) matrix.scales[i] = 0.001f * float(i);  // from 0 to 0.14
  matrix.scales[5] = kNaN;
  matrix.scales[9] = std::numeric_limits<float>::infinity();
  std::vector<int8_t> out(kRows * kColumns + 1, 0x55);
  std::vector<float> scales(matrix.scales.size(), -1.0f);
  BlockArguments arguments{
      kRows,        kColumns,   128,          false, matrix.codes.data(), kColumns, matrix.scales.data(),
      DType::kNone, out.data(), scales.data()};
  for (int threads : {1, 3}) {
    host::gelu_blocks(arguments, threads);
    EXPECT_EQ(scales[0], 1.0f);  // a block of zeros
    for (int64_t i = 0; i < kRows * kColumns; ++i) {
      int64_t const block = matrix.index_of_scale(i / kColumns, i % kColumns);
      if (block == 5 || block == 9) {
        ASSERT_TRUE(std::isnan(scales[block]));
        ASSERT_EQ(out[i], 0);
        continue;
      }
      double const x = double{matrix.scales[block]} * matrix.codes[i];
      double const gelu = 0.5 * x * std::erfc(-x / std::sqrt(2.0));
      ASSERT_LE(std::fabs(out[i] * double{scales[block]} - gelu),
                scales[block] * (0.5 + std::ldexp(1.0, -15)) + std::ldexp(std::fabs(x), -20))
          << i;
    }
    EXPECT_EQ(out.back(), 0x55);
  }
}

/// The GPU's formula in fp32, with 2^P: P may be as large as 128 where Phi is 0 or 1.
TEST(Blocks, ThePolynomialOfGeluIsThatOfTheNormalDistribution) {
  double worst = 0;
  auto const check = [&](float x) {
    float const size = std::fabs(x), half = 0.5f * x;
    float log2 = gelu_log2(kGeluTerms - 1);
    for (int i = kGeluTerms - 2; i >= 0; --i) log2 = std::fmaf(log2, size, gelu_log2(i));
    float const y = std::fmaf(0.5f * size, 1.0f - std::exp2(log2 * size), half);
    double const gelu = 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    worst = std::max(worst, std::fabs(y - gelu) / std::fabs(double{x}));
  };
  for (int i = 1; i <= 100000; ++i) {
    check(float(i) * 1e-4f);
    check(float(i) * -1e-4f);
  }
  for (float x = kGeluFar; x <= 128 * kGeluFar; x *= 1.001f) {
    check(x);
    check(-x);
  }
  EXPECT_LE(worst, std::ldexp(1.0, -21));
  EXPECT_GE(worst, std::ldexp(1.0, -22));  // the bound is not loose
}

TEST(Blocks, RefuseWrongArguments) {
  Matrix matrix(128, false);
  float const factor = 1;
  std::function<void(QuantizeArguments&)> const quantizer_changes[] = {
      [](auto& a) { a.block = 100; },
      [](auto& a) { a.block = 0, a.square = true; },
      [](auto& a) { a.per_tensor = true; },
      [](auto& a) { a.code_type = DType::kFloat16; },
      [&](auto& a) { a.smooth = &factor; },
      [](auto& a) { a.gated = a.square = true; },
      [](auto& a) { a.block = 0, a.powers_of_two = true; },
  };
  for (auto const& change : quantizer_changes) {
    QuantizeArguments arguments = matrix.arguments;
    change(arguments);
    EXPECT_THROW(host::quantize(arguments, 1), InvalidArgument) << &change - quantizer_changes;
  }
  std::vector<float> out(kRows * kColumns, -1.0f);
  BlockArguments const valid{
      kRows,           kColumns,   128,       false, matrix.codes.data(), kColumns, matrix.scales.data(),
      DType::kFloat32, out.data(), out.data()};
  std::function<void(BlockArguments&)> const changes[] = {
      [](auto& a) { a.rows = -1; },        [](auto& a) { a.columns = 0; },      [](auto& a) { a.size = 16; },
      [](auto& a) { a.codes = nullptr; },  [](auto& a) { a.scales = nullptr; }, [](auto& a) { a.out = nullptr; },
      [](auto& a) { a.codes_stride = -1; }};
  for (auto const& change : changes) {
    BlockArguments arguments = valid;
    change(arguments);
    EXPECT_THROW(host::dequantize_blocks(arguments, 1), InvalidArgument) << &change - changes;
    EXPECT_THROW(host::gelu_blocks(arguments, 1), InvalidArgument) << &change - changes;
  }
  BlockArguments arguments = valid;
  arguments.code_type = DType::kFloat8E4M3;
  EXPECT_THROW(host::gelu_blocks(arguments, 1), InvalidArgument);
  arguments.code_type = DType::kFloat8E5M2;
  EXPECT_THROW(host::dequantize_blocks(arguments, 1), InvalidArgument);
  arguments = valid;
  arguments.out_type = DType::kInt8;
  EXPECT_THROW(host::dequantize_blocks(arguments, 1), InvalidArgument);
  arguments = valid;
  arguments.square = true;
  EXPECT_THROW(host::gelu_blocks(arguments, 1), InvalidArgument);
  arguments = valid;
  arguments.out_scales = nullptr;
  EXPECT_THROW(host::gelu_blocks(arguments, 1), InvalidArgument);
  EXPECT_THROW(host::gelu_blocks(valid, 0), InvalidArgument);
  EXPECT_EQ(out, std::vector<float>(out.size(), -1.0f));
  EXPECT_EQ(matrix.codes[0], 0x55);
}

}  // namespace
}  // namespace qcutlass
