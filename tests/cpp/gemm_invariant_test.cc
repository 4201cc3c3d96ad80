// Batch-invariant products on the host: a row is the same bits whatever the number of rows.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "qcutlass/gemm.h"
#include "random_weights.h"

namespace qcutlass {
namespace {

using test::RandomWeights;
using test::WeightCase;

constexpr int64_t kMost = 70, kN = 33;

std::vector<float> random_floats(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> result(count);
  for (float& x : result) x = normal(random);
  return result;
}

/// Rows [first, first + m) of the product.
std::vector<float> product(GemmArguments arguments, int64_t first, int64_t m) {
  int64_t const element = size_of(arguments.a_type);
  std::vector<float> out(m * kN);
  arguments.m = m;
  arguments.a = static_cast<char const*>(arguments.a) + first * arguments.a_stride * element;
  arguments.out = out.data();
  arguments.out_stride = kN;
  if (arguments.sums.a_scale != nullptr) arguments.sums.a_scale += first;
  host::gemm(arguments, 2);
  return out;
}

/// Numbers of rows with which some row differs from that of the whole product.
int different(GemmArguments const& arguments) {
  std::vector<float> const whole = product(arguments, 0, kMost);
  int count = 0;
  for (int64_t m = 1; m < kMost; ++m) {
    int64_t const first = 17 * m % (kMost - m + 1);
    std::vector<float> const part = product(arguments, first, m);
    count += std::memcmp(part.data(), whole.data() + first * kN, part.size() * sizeof(float)) != 0;
  }
  return count;
}

GemmArguments weight_only(RandomWeights const& weights, std::vector<float> const& a) {
  GemmArguments arguments;
  arguments.weights = weights.arguments();
  arguments.a_type = DType::kFloat32;
  arguments.a = a.data();
  arguments.a_stride = arguments.weights.k;
  return arguments;
}

// The Python tests' seed where one is set, as in CI.
unsigned any_seed() {
  char const* given = std::getenv("QCUTLASS_TEST_SEED");
  return given ? static_cast<unsigned>(std::strtoul(given, nullptr, 10)) : std::random_device{}();
}

TEST(GemmInvariant, RowsOfWeightOnlyProducts) {
  unsigned const seed = any_seed();
  SCOPED_TRACE(seed);
  int without = 0;
  for (Packing packing : {Packing::kW4A16, Packing::kW8A16})
    for (int64_t group : {int64_t{7}, int64_t{16}, int64_t{48}, int64_t{64}, int64_t{128}, int64_t{650}})
      for (DType offsets : {DType::kUInt8, DType::kFloat32})
        for (bool minimums : {false, true}) {
          if (minimums && offsets == DType::kUInt8) continue;
          int64_t const k = 650;
          RandomWeights const weights(WeightCase{packing, kN, k, group, DType::kFloat32, offsets, minimums}, seed);
          std::vector<float> const a = random_floats(kMost * k, seed + 1);
          GemmArguments arguments = weight_only(weights, a);
          without += different(arguments);
          arguments.batch_invariant = true;
          EXPECT_EQ(different(arguments), 0) << "groups of " << group << ", " << bits_of(packing) << " bits";
          arguments.activation = Activation::kGeluTanh;
          EXPECT_EQ(different(arguments), 0) << "groups of " << group << ", " << bits_of(packing) << " bits";
        }
  EXPECT_GT(without, 0) << "the comparison finds nothing";
}

TEST(GemmInvariant, ActivationsThatTheProductQuantises) {
  unsigned const seed = any_seed();
  SCOPED_TRACE(seed);
  for (Packing packing : {Packing::kW4A16, Packing::kW8A16})
    for (int64_t group : {int64_t{16}, int64_t{48}, int64_t{128}, int64_t{640}}) {
      int64_t const k = 640;
      RandomWeights const weights(WeightCase{packing, kN, k, group, DType::kFloat32, DType::kUInt8}, seed);
      std::vector<float> const a = random_floats(kMost * k, seed + 1);
      GemmArguments arguments = weight_only(weights, a);
      arguments.int8_activations = arguments.batch_invariant = true;
      EXPECT_EQ(different(arguments), 0) << "groups of " << group << ", " << bits_of(packing) << " bits";
    }
}

TEST(GemmInvariant, RowsOfEightBitProducts) {
  unsigned const seed = any_seed();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  int64_t const k = 1000;
  std::vector<uint8_t> a(kMost * k), w(layout::packed_bytes(Packing::kW8A8, kN, k));
  std::vector<float> const a_scale = random_floats(kMost, seed), w_scale = random_floats(kN, seed + 1);
  int without = 0;
  for (DType type : {DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kInt8}) {
    // Exponents of e4m3 from 2^-6 to 2^1, either sign: finite in e5m2, too.
    for (uint8_t& x : a) x = static_cast<uint8_t>(random() % 128 / 2 | (random() % 2 << 7));
    for (uint8_t& x : w) x = static_cast<uint8_t>(random() % 128 / 2 | (random() % 2 << 7));
    GemmArguments arguments;
    arguments.a_type = type;
    arguments.out_type = DType::kFloat32;
    arguments.a = a.data();
    arguments.a_stride = k;
    WeightArguments& weights = arguments.weights;
    weights.packing = Packing::kW8A8, weights.n = kN, weights.k = k, weights.group_size = k;
    weights.packed = w.data();
    arguments.sums.a_scale = a_scale.data(), arguments.sums.a_scale_stride = 1;
    arguments.sums.w_scale = w_scale.data(), arguments.sums.w_scale_stride = 1;
    without += different(arguments);
    arguments.batch_invariant = true;
    EXPECT_EQ(different(arguments), 0) << int(type);
  }
  EXPECT_GT(without, 0) << "the comparison finds nothing";
}

}  // namespace
}  // namespace qcutlass
