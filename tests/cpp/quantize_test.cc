#include "qcutlass/quantize.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "host/float8.h"
#include "qcutlass/error.h"

namespace qcutlass {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// A matrix of fp32 and what becomes of it.
struct Case {
  int64_t rows = 1;
  std::vector<float> a;
  std::vector<int8_t> codes;
  std::vector<float> scale;
  std::vector<int32_t> azp;
  QuantizeArguments arguments;

  Case(int64_t rows, std::vector<float> values) : rows(rows), a(std::move(values)) {
    int64_t const columns = int64_t(a.size()) / rows;
    codes.assign(a.size(), 0x55);
    scale.assign(rows, -1.0f);
    azp.assign(rows, 1000);
    arguments.rows = rows;
    arguments.columns = columns;
    arguments.a_type = DType::kFloat32;
    arguments.a = a.data();
    arguments.a_stride = columns;
    arguments.code_type = DType::kInt8;
    arguments.codes = codes.data();
    arguments.scale = scale.data();
    arguments.azp = azp.data();
  }

  void run(int threads = 1) { host::quantize(arguments, threads); }
};

template <class Type>
uint8_t convert(float value) {
  Type result;
  host::from_float(value, &result);
  return result.bits;
}

/// Around the middle between each two neighbours, which the decoder of numeric.h tells.
template <class Type, int kLargest>
void check_float8() {
  for (int code = 0; code <= kLargest; ++code) {
    float const value = host::to_float(Type{uint8_t(code)});
    ASSERT_EQ(convert<Type>(value), code);
    ASSERT_EQ(convert<Type>(-value), code | 0x80);
    if (code == kLargest) break;
    float const middle = (value + host::to_float(Type{uint8_t(code + 1)})) / 2;  // exact
    ASSERT_EQ(convert<Type>(std::nextafter(middle, 0.0f)), code);
    ASSERT_EQ(convert<Type>(middle), code + code % 2);
    ASSERT_EQ(convert<Type>(std::nextafter(middle, kInfinity)), code + 1);
    ASSERT_EQ(convert<Type>(std::nextafter(-middle, -kInfinity)), (code + 1) | 0x80);
  }
  for (float const large : {65536.0f, std::numeric_limits<float>::max(), kInfinity}) {
    EXPECT_EQ(convert<Type>(large), kLargest);
    EXPECT_EQ(convert<Type>(-large), kLargest | 0x80);
  }
  EXPECT_EQ(convert<Type>(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_TRUE(std::isnan(host::to_float(Type{convert<Type>(kNaN)})));
  EXPECT_TRUE(std::isnan(host::to_float(Type{convert<Type>(-kNaN)})));
}

TEST(Float8, E4M3RoundsToNearestEvenAndSaturates) { check_float8<host::Float8E4M3, 0x7e>(); }
TEST(Float8, E5M2RoundsToNearestEvenAndSaturates) { check_float8<host::Float8E5M2, 0x7b>(); }

TEST(ScaleOf, HasALeastValueAndKeepsWhatIsNotFinite) {
  EXPECT_EQ(scale_of(0.0f, 127.0f), 1.0f);
  EXPECT_EQ(scale_of(254.0f, 127.0f), 2.0f);
  EXPECT_EQ(scale_of(std::numeric_limits<float>::denorm_min(), 127.0f), kLeastScale);
  EXPECT_EQ(scale_of(kInfinity, 127.0f), kInfinity);
  EXPECT_TRUE(std::isnan(scale_of(kNaN, 127.0f)));
  EXPECT_EQ(kLeastScale, std::numeric_limits<float>::min());
}

TEST(Quantize, EachRowHasItsScale) {
  Case test(2, {127, -0.5f, 1.5f, 2.5f, 1, -2, 0, 0.25f});
  test.run();
  EXPECT_EQ(test.scale, (std::vector<float>{1, 2.0f / 127}));
  EXPECT_EQ(test.codes, (std::vector<int8_t>{127, 0, 2, 2, 64, -127, 0, 16}));
  EXPECT_EQ(test.azp, (std::vector<int32_t>{1000, 1000}));  // nobody asked for it
}

TEST(Quantize, ZeroPointsSpreadTheRange) {
  Case test(2, {255, 0, 1, 254.5f, -255, -1, -0.5f, -1.5f});
  test.arguments.asymmetric = true;
  test.run();
  EXPECT_EQ(test.scale, (std::vector<float>{1, 1}));
  EXPECT_EQ(test.azp, (std::vector<int32_t>{-128, 127}));
  EXPECT_EQ(test.codes, (std::vector<int8_t>{127, -128, -127, 126, -128, 126, 127, 125}));
}

TEST(Quantize, OneScaleForAllRows) {
  for (int const threads : {1, 3}) {
    std::vector<float> a(64 * 4096, 1.0f);
    a[63 * 4096 + 5] = -254;
    Case test(64, a);
    test.arguments.per_tensor = true;
    test.run(threads);
    EXPECT_EQ(test.scale[0], 2);
    EXPECT_EQ(test.scale[1], -1);  // not written
    EXPECT_EQ(test.codes[0], 0);   // 0.5
    EXPECT_EQ(test.codes[63 * 4096 + 5], -127);
  }
}

TEST(Quantize, DividesBySmoothingFactorsFirst) {
  Case test(1, {254, 8, 6});
  std::vector<float> const smooth{2, 4, 12};
  test.arguments.smooth = smooth.data();
  test.run();
  EXPECT_EQ(test.scale[0], 1);
  EXPECT_EQ(test.codes, (std::vector<int8_t>{127, 2, 0}));
}

TEST(Quantize, AGivenScaleSaturatesAndReportsNaN) {
  Case test(1, {1000, -1000, kInfinity, 3});
  float const scale = 2;
  int32_t const azp = 5;
  test.arguments.per_tensor = true;
  test.arguments.given_scale = &scale;
  test.run();
  EXPECT_EQ(test.codes, (std::vector<int8_t>{127, -127, 127, 2}));
  EXPECT_EQ(test.scale[0], 2);

  test.arguments.asymmetric = true;
  test.arguments.given_azp = &azp;
  test.a = {1000, -1000, kNaN, 3};
  test.run();
  EXPECT_EQ(test.codes, (std::vector<int8_t>{127, -128, 5, 7}));
  EXPECT_TRUE(std::isnan(test.scale[0]));
}

TEST(Quantize, ReadsRowsAtTheirStride) {
  Case test(1, {127, 1, 99, 99, 2, 127, 99, 99});
  test.codes.assign(4, 0);
  test.scale.assign(2, 0);
  test.arguments.rows = 2;
  test.arguments.columns = 2;
  test.arguments.a_stride = 4;
  test.arguments.codes = test.codes.data();
  test.arguments.scale = test.scale.data();
  test.run();
  EXPECT_EQ(test.codes, (std::vector<int8_t>{127, 1, 2, 127}));
}

/// Expects the message of the refusal to have `part`, and nothing to be written.
void expect_refused(Case& test, std::string const& part, int threads = 1) {
  try {
    test.run(threads);
    ADD_FAILURE() << "accepted: " << part;
  } catch (InvalidArgument const& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
  EXPECT_EQ(test.codes, std::vector<int8_t>(test.codes.size(), 0x55));
  EXPECT_EQ(test.scale[0], -1);
}

TEST(Quantize, RefusesWrongArguments) {
  float const scale = 1;
  int32_t const azp = 128;
  auto const refuse = [](std::string const& part, auto change) {
    Case test(1, {1, 2});
    change(test.arguments);
    expect_refused(test, part);
  };
  refuse("rows", [](auto& a) { a.rows = -1; });
  refuse("columns", [](auto& a) { a.columns = 0; });
  refuse("a_type", [](auto& a) { a.a_type = DType::kInt8; });
  refuse("code_type", [](auto& a) { a.code_type = DType::kUInt8; });
  refuse("a is a null", [](auto& a) { a.a = nullptr; });
  refuse("codes is a null", [](auto& a) { a.codes = nullptr; });
  refuse("scale is a null", [](auto& a) { a.scale = nullptr; });
  refuse("a_stride", [](auto& a) { a.a_stride = -1; });
  refuse("azp is a null", [](auto& a) { a.asymmetric = true, a.azp = nullptr; });
  refuse("asymmetric codes must be int8", [](auto& a) { a.asymmetric = true, a.code_type = DType::kFloat8E4M3; });
  refuse("needs per_tensor", [&](auto& a) { a.given_scale = &scale; });
  refuse("given_azp must accompany",
         [&](auto& a) { a.given_scale = &scale, a.per_tensor = true, a.asymmetric = true; });
  refuse("given_azp needs", [&](auto& a) { a.given_azp = &azp; });
  refuse("azp must be in [-128, 127], got 128",
         [&](auto& a) { a.given_scale = &scale, a.given_azp = &azp, a.per_tensor = true, a.asymmetric = true; });
  Case test(1, {1, 2});
  expect_refused(test, "threads", 0);
}

TEST(Quantize, NoRows) {
  Case test(1, {1, 2});
  test.arguments.rows = 0;
  test.run();
  EXPECT_EQ(test.scale[0], -1);
  test.arguments.per_tensor = true;
  test.run();
  EXPECT_EQ(test.scale[0], 1);
}

}  // namespace
}  // namespace qcutlass
