#include "host/numeric.h"

#include <gtest/gtest.h>

#include <cmath>

#include "reference.h"

namespace qcutlass {
namespace {

template <class T>
struct Traits;
template <>
struct Traits<host::Half> {
  static constexpr int kExponentBits = 5;
  static constexpr uint16_t kInfinity = 0x7c00;
};
template <>
struct Traits<host::BFloat16> {
  static constexpr int kExponentBits = 8;
  static constexpr uint16_t kInfinity = 0x7f80;
};

template <class T>
uint16_t convert(float value) {
  T result;
  host::from_float(value, &result);
  return result.bits;
}

template <class T>
class NumericTest : public testing::Test {};
using Types = testing::Types<host::Half, host::BFloat16>;
TYPED_TEST_SUITE(NumericTest, Types);

TYPED_TEST(NumericTest, ToFloatIsExactForEveryPattern) {
  for (int i = 0; i < 65536; ++i) {
    auto const bits = static_cast<uint16_t>(i);
    float const value = host::to_float(TypeParam{bits});
    double const expected = test::value_of_bits(bits, Traits<TypeParam>::kExponentBits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << i;
      uint16_t const back = convert<TypeParam>(value);
      ASSERT_GT(back & 0x7fff, Traits<TypeParam>::kInfinity) << i;  // still a NaN, of the same sign
      ASSERT_EQ(back & 0x8000, bits & 0x8000) << i;
    } else {
      ASSERT_EQ(value, expected) << i;
      ASSERT_EQ(std::signbit(value), std::signbit(expected)) << i;
      ASSERT_EQ(convert<TypeParam>(value), bits);
    }
  }
}

TYPED_TEST(NumericTest, RoundsToNearestEvenBetweenEveryPairOfNeighbours) {
  float const infinity = std::numeric_limits<float>::infinity();
  for (uint16_t bits = 0; bits < Traits<TypeParam>::kInfinity; ++bits) {
    auto const next = static_cast<uint16_t>(bits + 1);
    double const low = test::value_of_bits(bits, Traits<TypeParam>::kExponentBits);
    // Above the largest value, rounding goes as if the next one were finite.
    double const high =
        next == Traits<TypeParam>::kInfinity
            ? 2 * low - test::value_of_bits(static_cast<uint16_t>(bits - 1), Traits<TypeParam>::kExponentBits)
            : test::value_of_bits(next, Traits<TypeParam>::kExponentBits);
    auto const tie = static_cast<float>((low + high) / 2);
    ASSERT_EQ(tie, (low + high) / 2) << "the tie is a float";
    uint16_t const even = bits % 2 == 0 ? bits : next;
    ASSERT_EQ(convert<TypeParam>(tie), even) << bits;
    ASSERT_EQ(convert<TypeParam>(-tie), even | 0x8000) << bits;
    ASSERT_EQ(convert<TypeParam>(std::nextafter(tie, 0.0f)), bits) << bits;
    ASSERT_EQ(convert<TypeParam>(std::nextafter(tie, infinity)), next) << bits;
  }
}

TYPED_TEST(NumericTest, ExtremesAndNaN) {
  float const infinity = std::numeric_limits<float>::infinity();
  uint16_t const infinity_bits = Traits<TypeParam>::kInfinity;
  EXPECT_EQ(convert<TypeParam>(infinity), infinity_bits);
  EXPECT_EQ(convert<TypeParam>(-infinity), infinity_bits | 0x8000);
  EXPECT_EQ(convert<TypeParam>(std::numeric_limits<float>::max()), infinity_bits);
  EXPECT_EQ(convert<TypeParam>(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_EQ(convert<TypeParam>(-0.0f), 0x8000);
  // A NaN whose payload lies only in the bits that are dropped must not become an infinity.
  EXPECT_GT(convert<TypeParam>(host::bit_cast<float>(0x7f800001u)), infinity_bits);
}

TEST(LoadFloats, ReadsEveryType) {
  for (DType type : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kUInt8, DType::kInt8, DType::kInt32}) {
    test::Array array(type, 100);
    for (int i = 0; i < 100; ++i) array.set(i, i);
    float values[60];
    host::load_floats(type, array.data(), 40, 60, values);
    for (int i = 0; i < 60; ++i) EXPECT_EQ(values[i], 40 + i);
  }
}

TEST(LoadFloats, ReadsEveryEightBitFloat) {
  uint8_t bytes[256];
  for (int i = 0; i < 256; ++i) bytes[i] = static_cast<uint8_t>(i);
  for (DType type : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    float values[256];
    host::load_floats(type, bytes, 0, 256, values);
    for (int i = 0; i < 256; ++i) {
      double const expected = test::get(type, bytes, i);
      ASSERT_EQ(std::isnan(values[i]), std::isnan(expected)) << i;
      ASSERT_EQ(std::signbit(values[i]), std::signbit(expected)) << i;
      if (!std::isnan(expected)) ASSERT_EQ(values[i], expected) << i;
    }
  }
  EXPECT_EQ(test::value_of_e4m3(0x7e), 448);
  EXPECT_EQ(test::value_of_e4m3(0x01), 0x1p-9);
  EXPECT_EQ(test::value_of_e5m2(0x7b), 57344);
}

}  // namespace
}  // namespace qcutlass
