#include "host/gemm_int8_activations.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "qcutlass/error.h"
#include "random_weights.h"
#include "reference.h"

namespace qcutlass {
namespace {

constexpr int64_t kBlock = 32;

/// Keeps sums as they are.
void store_sums(GemmArguments const& arguments, host::Parts const&, int64_t strip, int64_t, float const* sums) {
  int64_t const n = arguments.weights.n;
  for (int64_t m = 0; m < arguments.m; ++m) {
    for (int64_t i = 0; i < 16 && strip * 16 + i < n; ++i)
      static_cast<float*>(arguments.out)[m * n + strip * 16 + i] = sums[m * 16 + i];
  }
}

std::vector<float> run(WeightArguments const& weights, std::vector<float> const& a, int threads,
                       host::ByteKernels kernels) {
  GemmArguments arguments;
  arguments.m = static_cast<int64_t>(a.size()) / weights.k;
  arguments.weights = weights;
  std::vector<float> out(arguments.m * weights.n, std::numeric_limits<float>::quiet_NaN());
  arguments.out = out.data();
  host::gemm_int8_activations(arguments, a.data(), threads, store_sums, kernels);
  return out;
}

std::vector<float> random_activations(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> a(count);
  for (float& value : a) value = normal(random);
  return a;
}

/// The value that stands for element k of a row.
double quantized(float const* row, int64_t k, int64_t k_extent) {
  float largest = 0;
  int64_t const begin = k / kBlock * kBlock;
  for (int64_t i = begin; i < std::min(begin + kBlock, k_extent); ++i) largest = std::max(largest, std::fabs(row[i]));
  float const scale = largest == 0 ? 1.0f : largest / 127.0f;
  return static_cast<double>(scale) * std::nearbyint(row[k] / scale);
}

struct Case {
  test::WeightCase weights;
  int64_t m;
};

class Int8ActivationsTest : public testing::TestWithParam<Case> {};

TEST_P(Int8ActivationsTest, EveryKindOfKernelMultipliesQuantizedActivations) {
  Case const& c = GetParam();
  test::RandomWeights const weights(c.weights, 5);
  int64_t const n = c.weights.n, k = c.weights.k;
  std::vector<float> const a = random_activations(c.m * k, 6);
  // Codes reach 2^bits - 1, whatever is left of them when zeros are taken off; scales and minimums as RandomWeights has
  // them.
  bool const two_levels = c.weights.super_groups != 0;
  double const codes = 1 << weights.arguments().bits();
  double const minimum = !c.weights.minimums ? 0 : two_levels ? 255 * 1e-3 : 0.01 * codes;
  double const largest = codes * (two_levels ? 255 * 5e-5 : 0.011) + minimum;
  for (host::ByteKernels kernels : host::byte_kernels()) {
    for (int threads : {1, 2}) {
      std::vector<float> const out = run(weights.arguments(), a, threads, kernels);
      for (int64_t row = 0; row < c.m; ++row) {
        for (int64_t channel = 0; channel < n; ++channel) {
          double sum = 0, magnitude = 0;
          for (int64_t i = 0; i < k; ++i) {
            double const x = quantized(a.data() + row * k, i, k);
            sum += x * weights.weight(channel, i);
            magnitude += std::fabs(x) * largest;
          }
          // Roundings: of each run's difference, its two scales and the additions that follow, and of the weights here.
          double const bound = std::ldexp(magnitude, -24) * static_cast<double>(k / 16 + 6);
          ASSERT_LE(std::fabs(out[row * n + channel] - sum), bound)
              << "kernels " << int(kernels) << ", " << threads << " threads, [" << row << ", " << channel << "]";
        }
      }
    }
  }
}

std::vector<Case> cases() {
  std::vector<Case> result;
  DType const f16 = DType::kFloat16;
  for (Packing packing : {Packing::kW4A16, Packing::kW8A16}) {
    for (DType zero : test::zero_types()) result.push_back({{packing, 37, 200, 64, f16, zero}, 3});
    for (int64_t group : {16, 32, 48, 80, 96, 128, 256, 10000}) {
      result.push_back({{packing, 17, 300, group, f16, DType::kUInt8}, 2});
    }
    for (int64_t m : {1, 2, 4, 7, 8, 9, 15, 16, 31}) result.push_back({{packing, 16, 96, 32, f16, DType::kUInt8}, m});
    for (int64_t m : {1, 2, 9}) {
      for (int64_t group : {16, 32, 80, 10000}) {
        result.push_back({{packing, 37, 480, group, f16, f16, true}, m});
        if (group > 32) continue;
        result.push_back({{packing, 37, 480, group, DType::kInt8, DType::kUInt8, true, 5}, m});
        result.push_back({{packing, 37, 480, group, DType::kUInt8, DType::kNone, false, 5}, m});
      }
    }
    for (int64_t k : {1, 15, 31, 33, 63, 65, 511, 512, 513, 1100}) {
      result.push_back({{packing, 5, k, 10000, f16, f16}, 1});
    }
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Cases, Int8ActivationsTest, testing::ValuesIn(cases()), [](auto const& info) {
  return std::to_string(info.index) + "_m" + std::to_string(info.param.m) + "_" + test::name_of(info.param.weights);
});

/// The sums of products with codes that are all the same, in groups of every length of a run.
void expect_equal_codes_are_exact(Packing packing, int code, int value) {
  int64_t const n = 16, k = 256;
  std::vector<uint8_t> codes(n * k, static_cast<uint8_t>(code)), packed(layout::packed_bytes(packing, n, k));
  host::pack({packing, n, k, codes.data(), k, packed.data()}, 1);
  for (int64_t const group_size : {int64_t{16}, kBlock, k}) {
    std::vector<float> const scales(k / group_size * n, 1.0f);
    std::vector<uint8_t> const zeros(k / group_size * n, 0);
    WeightArguments const weights{
        packing, n, k, group_size, packed.data(), DType::kFloat32, scales.data(), n, DType::kUInt8, zeros.data(), n};
    for (int64_t const m : {int64_t{1}, int64_t{2}, int64_t{9}}) {
      for (host::ByteKernels kernels : host::byte_kernels()) {
        std::vector<float> out;
        if (value == -128) {  // which only rows of the callers have
          std::vector<int8_t> const a(m * k, static_cast<int8_t>(value));
          out.resize(m * n);
          GemmArguments arguments;
          arguments.m = m;
          arguments.weights = weights;
          arguments.a_type = DType::kInt8;
          arguments.a = a.data();
          arguments.a_stride = k;
          arguments.out = out.data();
          host::gemm_int8_rows(arguments, 1, store_sums, kernels);
        } else {
          out = run(weights, std::vector<float>(m * k, static_cast<float>(value)), 1, kernels);
        }
        for (float sum : out)
          ASSERT_EQ(sum, static_cast<float>(value * code * k)) << "kernels " << int(kernels) << ", m " << m;
      }
    }
  }
}

TEST(Int8Activations, LargestProductsDoNotSaturate) {
  for (int value : {-127, 127}) {
    for (int code : {0, 1, 15}) expect_equal_codes_are_exact(Packing::kW4A16, code, value);
    for (int code : {0, 1, 127, 128, 255}) expect_equal_codes_are_exact(Packing::kW8A16, code, value);
  }
  for (int code : {0, 15}) expect_equal_codes_are_exact(Packing::kW4A16, code, -128);
}

/// What is exact: integers by powers of two, of every length of run, at every end of K.
TEST(Int8Activations, RowsOfTheCallersAreMultipliedExactly) {
  struct Sizes {
    int64_t k, group_size;
  };
  int64_t const n = 21, most = 13;
  std::mt19937 random(7);
  for (Sizes const size : {Sizes{1, 1},
                           {15, 15},
                           {64, 16},
                           {130, 32},
                           {200, 48},
                           {300, 80},
                           {513, 64},
                           {640, 128},
                           {1100, 256},
                           {2048, 1024},
                           {2048, 2048},
                           {4097, 4097}}) {
    int64_t const k = size.k, groups = layout::ceil_div(k, size.group_size), stride = k + 5;
    std::vector<uint8_t> codes(n * k), zeros(groups * n), packed(layout::packed_bytes(Packing::kW4A16, n, k));
    for (uint8_t& code : codes) code = static_cast<uint8_t>(random() % 16);
    for (uint8_t& zero : zeros) zero = static_cast<uint8_t>(random() % 17);
    host::pack({Packing::kW4A16, n, k, codes.data(), k, packed.data()}, 1);
    std::vector<float> scales(groups * n), out(most * n);
    for (float& scale : scales) scale = std::ldexp(1.0f, -static_cast<int>(random() % 2));
    std::vector<int8_t> a(most * stride);
    for (int8_t& value : a) value = static_cast<int8_t>(static_cast<int>(random() % 256) - 128);
    GemmArguments arguments;
    arguments.weights = {
        Packing::kW4A16, n, k, size.group_size, packed.data(), DType::kFloat32, scales.data(), n, DType::kUInt8,
        zeros.data(),    n};
    arguments.a_type = DType::kInt8;
    arguments.a = a.data();
    arguments.a_stride = stride;
    arguments.out = out.data();
    for (host::ByteKernels kernels : host::byte_kernels()) {
      for (int64_t m : {int64_t{1}, int64_t{2}, int64_t{3}, most}) {
        arguments.m = m;
        host::gemm_int8_rows(arguments, 2, store_sums, kernels);
        for (int64_t row = 0; row < m; ++row) {
          for (int64_t channel = 0; channel < n; ++channel) {
            double sum = 0;
            for (int64_t i = 0; i < k; ++i) {
              int64_t const at = i / size.group_size * n + channel;
              sum += double(scales[at]) * a[row * stride + i] * (codes[channel * k + i] - zeros[at]);
            }
            ASSERT_EQ(out[row * n + channel], sum) << "kernels " << int(kernels) << ", k " << k << ", m " << m;
          }
        }
      }
    }
  }
}

/// Few rows are multiplied otherwise than many, to the same bits.
TEST(Int8Activations, RowsDoNotDependOnTheOnesBesideThem) {
  for (Case const& c : cases()) {
    test::RandomWeights const weights(c.weights, 1);
    int64_t const n = c.weights.n, k = c.weights.k;
    std::vector<float> const a = random_activations(13 * k, 2);
    for (host::ByteKernels kernels : host::byte_kernels()) {
      std::vector<float> const all = run(weights.arguments(), a, 1, kernels);
      for (int64_t first = 0; first < 13; ++first) {
        for (int64_t count = 1; count <= std::min<int64_t>(13 - first, 4); ++count) {
          std::vector<float> const some(a.begin() + first * k, a.begin() + (first + count) * k);
          std::vector<float> const out = run(weights.arguments(), some, 1, kernels);
          for (int64_t i = 0; i < count * n; ++i)
            ASSERT_EQ(out[i], all[first * n + i])
                << "kernels " << int(kernels) << ", " << count << " rows of " << test::name_of(c.weights);
        }
      }
    }
  }
}

TEST(Int8Activations, NaNAndInfinityStayInTheirRow) {
  test::RandomWeights const weights({Packing::kW8A16, 20, 70, 64, DType::kFloat16, DType::kFloat16}, 1);
  for (float special : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> a = random_activations(3 * 70, 2);
    a[70 + 69] = special;
    std::vector<float> const out = run(weights.arguments(), a, 1, host::byte_kernels().back());
    for (int64_t i = 0; i < 60; ++i) EXPECT_EQ(std::isfinite(out[i]), i / 20 != 1);
  }
}

TEST(Int8Activations, RefusesGroupsThatCutSteps) {
  test::RandomWeights const weights({Packing::kW4A16, 20, 70, 24, DType::kFloat16, DType::kNone}, 1);
  std::vector<float> a(70), out(20, -1.0f);
  GemmArguments arguments;
  arguments.m = 1;
  arguments.weights = weights.arguments();
  arguments.a_type = DType::kFloat32;
  arguments.a = a.data();
  arguments.a_stride = 70;
  arguments.out = out.data();
  arguments.out_stride = 20;
  arguments.int8_activations = true;
  EXPECT_THROW(host::gemm(arguments, 1), Unsupported);
  EXPECT_EQ(out, std::vector<float>(20, -1.0f));
  arguments.int8_activations = false;
  host::gemm(arguments, 1);
  EXPECT_EQ(out, std::vector<float>(20, 0.0f));
}

}  // namespace
}  // namespace qcutlass
