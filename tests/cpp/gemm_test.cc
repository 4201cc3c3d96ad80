#include "qcutlass/gemm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "host/multiversion.h"
#include "qcutlass/error.h"
#include "random_weights.h"
#include "reference.h"

namespace qcutlass {
namespace {

struct GemmCase {
  test::WeightCase weights;
  int64_t m;
  DType a_type;
  DType bias_type = DType::kNone;
  DType act_scale_type = DType::kNone;
  bool perm = false;
  Activation activation = Activation::kNone;
};

double activate(Activation activation, double x) {
  switch (activation) {
    case Activation::kNone: return x;
    case Activation::kRelu: return std::max(x, 0.0);
    case Activation::kGelu: return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Activation::kGeluTanh: return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kSilu: return x / (1 + std::exp(-x));
  }
  return x;
}

/// The largest slope of each activation: how much it can magnify the error of its argument.
double slope(Activation activation) {
  return activation == Activation::kNone || activation == Activation::kRelu ? 1.0 : 1.13;
}

/// A product with random contents, run on strided operands with canaries between the rows of `out`.
class Product {
 public:
  Product(GemmCase const& c, unsigned seed) : case_(c), weights_(c.weights, seed) {
    std::mt19937 random(seed + 1);
    std::normal_distribution<double> normal;
    int64_t const k = c.weights.k, n = c.weights.n;
    a_ = test::Array(c.a_type, c.m * (k + 2));
    for (int64_t i = 0; i < c.m * (k + 2); ++i) a_.set(i, normal(random));
    bias_ = test::Array(c.bias_type, n);
    act_scale_ = test::Array(c.act_scale_type, k);
    if (c.bias_type != DType::kNone) {
      for (int64_t i = 0; i < n; ++i) bias_.set(i, normal(random));
    }
    if (c.act_scale_type != DType::kNone) {
      for (int64_t i = 0; i < k; ++i) act_scale_.set(i, std::exp(normal(random)));
    }
    for (int64_t i = 0; i < k; ++i) perm_.push_back(static_cast<int32_t>(i));
    std::shuffle(perm_.begin(), perm_.end(), random);
    out_ = test::Array(c.a_type, c.m * (n + 5) + 1);

    arguments_.m = c.m;
    arguments_.weights = weights_.arguments();
    arguments_.a_type = c.a_type;
    arguments_.a = a_.data();
    arguments_.a_stride = k + 2;
    arguments_.out = out_.data();
    arguments_.out_stride = n + 5;
    arguments_.bias_type = c.bias_type;
    arguments_.bias = bias_.data();
    arguments_.act_scale_type = c.act_scale_type;
    arguments_.act_scale = act_scale_.data();
    arguments_.perm = c.perm ? perm_.data() : nullptr;
    arguments_.activation = c.activation;
  }
  Product(Product const&) = delete;

  GemmArguments& arguments() { return arguments_; }
  test::Array& a() { return a_; }
  test::Array const& out() const { return out_; }
  int64_t a_stride() const { return arguments_.a_stride; }

  void run(int threads) {
    for (int64_t i = 0; i <= case_.m * arguments_.out_stride; ++i) out_.set(i, kCanary);
    host::gemm(arguments_, threads);
  }

  /// The activation that meets code column k.
  double activation_at(int64_t m, int64_t k) const {
    int64_t const column = case_.perm ? perm_[k] : k;
    double const value = a_[m * arguments_.a_stride + column];
    if (case_.act_scale_type == DType::kNone) return value;
    return test::round_to(test::format_of(case_.a_type), static_cast<float>(value * act_scale_[column]));
  }

  /// Largest |out - reference| / bound, where the bound is
  ///   u |ref| (1 + 2^-7) + 2^-23 (K / 8 + 16) (|x| + 4 Q) slope + 2^-25 ,  x = the sum with bias, Q = sqrt(sum (a
  ///   w)^2).
  double worst_error() const {
    double worst = 0;
    double const unit = std::ldexp(1.0, -test::format_of(case_.a_type).precision);
    for (int64_t m = 0; m < case_.m; ++m) {
      for (int64_t n = 0; n < case_.weights.n; ++n) {
        double sum = 0, squares = 0;
        for (int64_t k = 0; k < case_.weights.k; ++k) {
          double const product = activation_at(m, k) * weights_.weight(n, k);
          sum += product;
          squares += product * product;
        }
        if (case_.bias_type != DType::kNone) sum += bias_[n];
        double const reference = activate(case_.activation, sum);
        double const bound = unit * std::fabs(reference) * (1 + std::ldexp(1.0, -7)) +
                             std::ldexp(case_.weights.k / 8.0 + 16, -23) * (std::fabs(sum) + 4 * std::sqrt(squares)) *
                                 slope(case_.activation) +
                             std::ldexp(1.0, -25);
        double const error = std::fabs(out_[m * arguments_.out_stride + n] - reference);
        if (!(error / bound <= worst))
          worst = std::isnan(error) ? std::numeric_limits<double>::infinity() : error / bound;
      }
    }
    return worst;
  }

  bool canaries_are_intact() const {
    for (int64_t m = 0; m < case_.m; ++m) {
      for (int64_t i = case_.weights.n; i < arguments_.out_stride; ++i) {
        if (out_[m * arguments_.out_stride + i] != kCanary) return false;
      }
    }
    return out_[case_.m * arguments_.out_stride] == kCanary;
  }

 private:
  static constexpr double kCanary = -1984.0;

  GemmCase case_;
  test::RandomWeights weights_;
  test::Array a_, bias_, act_scale_, out_;
  std::vector<int32_t> perm_;
  GemmArguments arguments_;
};

class GemmTest : public testing::TestWithParam<GemmCase> {};

/// Makes products use no instructions past a level, for a while.
class LevelGuard {
 public:
  explicit LevelGuard(host::VectorLevel level) : best_(host::vector_level()) { host::vector_level() = level; }
  ~LevelGuard() { host::vector_level() = best_; }
  LevelGuard(LevelGuard const&) = delete;

 private:
  host::VectorLevel best_;
};

/// The levels of this machine.
std::vector<host::VectorLevel> levels() {
  std::vector<host::VectorLevel> result;
  for (host::VectorLevel level : {host::VectorLevel::kBaseline, host::VectorLevel::kAvx2, host::VectorLevel::kAvx512}) {
    if (level <= host::vector_level()) result.push_back(level);
  }
  return result;
}

TEST_P(GemmTest, StaysWithinTheErrorBound) {
  Product product(GetParam(), 42);
  for (host::VectorLevel level : levels()) {
    LevelGuard const guard(level);
    for (int threads : {1, 2}) {
      product.run(threads);
      EXPECT_LE(product.worst_error(), 1.0) << "level " << static_cast<int>(level);
      EXPECT_TRUE(product.canaries_are_intact());
    }
  }
}

std::vector<GemmCase> cases() {
  std::vector<GemmCase> result;
  DType const f16 = DType::kFloat16, bf16 = DType::kBFloat16, f32 = DType::kFloat32, none = DType::kNone;
  for (Packing packing : {Packing::kW4A16, Packing::kW8A16}) {
    for (DType a_type : {f16, bf16, f32}) {
      for (DType zero_type : test::zero_types()) result.push_back({{packing, 37, 200, 64, f16, zero_type}, 3, a_type});
      for (DType scale_type : {f16, bf16, f32})
        result.push_back({{packing, 16, 128, 128, scale_type, bf16}, 2, a_type});
      for (Activation activation : {Activation::kRelu, Activation::kGelu, Activation::kGeluTanh, Activation::kSilu}) {
        result.push_back({{packing, 50, 96, 32, f16, DType::kUInt8}, 5, a_type, f16, none, false, activation});
      }
      for (DType type : {f16, bf16, f32})
        result.push_back({{packing, 21, 77, 16, f16, none}, 2, a_type, type, type, true});
    }
    for (int64_t m : {1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 33}) result.push_back({{packing, 33, 130, 64, f16, f16}, m, f16});
    for (int64_t n : {1, 7, 8, 15, 16, 17, 31}) result.push_back({{packing, n, 66, 16, f16, none}, 2, f32});
    for (int64_t k : {1, 15, 31, 32, 33, 63, 64, 65, 127, 129})
      result.push_back({{packing, 17, k, 16, f16, f16}, 2, f32});
    for (int64_t group_size : {1, 5, 16, 32, 48, 80, 100, 256, 300, 10000}) {
      result.push_back({{packing, 17, 300, group_size, f16, DType::kUInt8}, 3, f16});
    }
    // Few rows: groups of whole tiles, of halves and quarters of a tile and of neither, a short last one, padding of n
    // and k, and more tiles than are met at a time.
    for (int64_t group_size : {8, 16, 24, 32, 64, 96, 128, 10000}) {
      for (DType zero_type : {none, DType::kUInt8, f16, f32}) {
        for (int64_t m = 1; m <= 9; ++m) {
          DType const a_type = m % 3 == 0 ? f32 : m % 3 == 1 ? f16 : bf16;
          DType const scale_type = zero_type == f32 ? f32 : m % 2 == 0 ? bf16 : f16;
          DType const act_scale_type = m % 4 == 3 ? f16 : none;
          result.push_back(
              {{packing, 21, 808, group_size, scale_type, zero_type}, m, a_type, none, act_scale_type, m % 2 == 1});
        }
      }
    }
    for (int64_t group_size : {5, 16, 32, 48, 64, 10000}) {
      for (int64_t m : {1, 2, 4, 6, 8, 9}) {
        DType const type = m % 2 == 0 ? f32 : f16;
        result.push_back({{packing, 21, 808, group_size, type, type, true}, m, m == 4 ? bf16 : f32});
      }
    }
    for (int64_t group_size : {5, 16, 32, 64}) {
      for (int64_t m : {1, 4, 8, 9}) {
        DType const a_type = m == 4 ? bf16 : f32, integer = m == 1 ? DType::kUInt8 : DType::kInt8;
        result.push_back({{packing, 37, 808, group_size, integer, DType::kUInt8, true, 8}, m, a_type});
        result.push_back({{packing, 37, 808, group_size, DType::kInt8, none, false, 5}, m, a_type});
      }
    }
    result.push_back({{packing, 64, 8192, 128, f16, DType::kUInt8}, 1, f32});
    result.push_back({{packing, 4096, 64, 64, f16, DType::kUInt8}, 9, f32, f32, none, true, Activation::kSilu});
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Cases, GemmTest, testing::ValuesIn(cases()), [](auto const& info) {
  return std::to_string(info.index) + "_m" + std::to_string(info.param.m) + "_" + test::name_of(info.param.a_type) +
         "_" + test::name_of(info.param.weights);
});

/// Integer activations, integer zeros and power-of-two scales: every order of summation is exact, and so must the
/// result be.
TEST(GemmExact, IntegersAreRoundedOnceFromTheExactSum) {
  int64_t const n = 48, k = 1024, groups = 16;
  for (Packing packing : {Packing::kW4A16, Packing::kW8A16}) {
    for (DType a_type : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
      std::mt19937 random(7);
      std::vector<uint8_t> codes(n * k), packed(layout::packed_bytes(packing, n, k)), zeros(groups * n);
      test::Array scales(DType::kFloat16, groups * n), a(a_type, 6 * k), out(a_type, 6 * n);
      int const levels = 1 << bits_of(packing);
      for (uint8_t& code : codes) code = static_cast<uint8_t>(random() % levels);
      for (uint8_t& zero : zeros) zero = static_cast<uint8_t>(random() % levels);
      for (int64_t i = 0; i < groups * n; ++i) scales.set(i, std::ldexp(1.0, -static_cast<int>(random() % 3)));
      // One row of large positive products shows a narrow accumulator.
      for (int64_t i = 0; i < 6 * k; ++i) a.set(i, i < k ? 3 : static_cast<int>(random() % 15) - 7);
      host::pack({packing, n, k, codes.data(), k, packed.data()}, 1);

      GemmArguments arguments;
      arguments.m = 6;
      arguments.weights = {
          packing, n, k, k / groups, packed.data(), DType::kFloat16, scales.data(), n, DType::kUInt8, zeros.data(), n};
      arguments.a_type = a_type;
      arguments.a = a.data();
      arguments.a_stride = k;
      arguments.out = out.data();
      arguments.out_stride = n;
      host::gemm(arguments, 2);

      double largest = 0;
      for (int64_t row = 0; row < 6; ++row) {
        for (int64_t column = 0; column < n; ++column) {
          double sum = 0;
          for (int64_t i = 0; i < k; ++i) {
            int64_t const group = i / (k / groups) * n + column;
            sum += a[row * k + i] * (codes[column * k + i] - zeros[group]) * scales[group];
          }
          largest = std::max(largest, std::fabs(sum));
          ASSERT_EQ(out[row * n + column], test::round_to(test::format_of(a_type), sum)) << row << ", " << column;
        }
      }
      EXPECT_GT(largest, 2048);
    }
  }
}

TEST(Gemm, NaNAndInfinityStayInTheirRow) {
  for (double special : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    Product product({{Packing::kW4A16, 20, 70, 64, DType::kFloat16, DType::kFloat16}, 3, DType::kFloat16}, 3);
    product.a().set(product.a_stride() + 69, special);
    product.run(1);
    for (int64_t n = 0; n < 20; ++n) {
      int64_t const stride = product.arguments().out_stride;
      EXPECT_TRUE(std::isfinite(product.out()[n]));
      EXPECT_FALSE(std::isfinite(product.out()[stride + n]));
      EXPECT_TRUE(std::isfinite(product.out()[2 * stride + n]));
    }
  }
}

TEST(Gemm, RepeatsBitwiseForAnyNumberOfThreads) {
  for (int64_t m : {1, 4, 5, 12}) {
    Product product({{Packing::kW4A16, 512, 2048, 32, DType::kFloat16, DType::kFloat16}, m, DType::kFloat32}, 9);
    for (host::VectorLevel level : levels()) {
      LevelGuard const guard(level);
      product.run(1);
      std::vector<double> first;
      for (int64_t i = 0; i < m * product.arguments().out_stride; ++i) first.push_back(product.out()[i]);
      for (int threads : {1, 2, 5}) {
        product.run(threads);
        for (size_t i = 0; i < first.size(); ++i) ASSERT_EQ(product.out()[static_cast<int64_t>(i)], first[i]);
      }
    }
  }
}

/// Codes that are their zero make weights of 0, whatever the activations.
TEST(GemmExact, CodesThatAreTheirZeroAddNothing) {
  int64_t const n = 16, k = 256, m = 8;
  for (Packing packing : {Packing::kW4A16, Packing::kW8A16}) {
    for (int64_t group_size : {16, 32, 64}) {
      std::vector<uint8_t> codes(n * k, 13), packed(layout::packed_bytes(packing, n, k));
      int64_t const groups = k / group_size;
      test::Array scales(DType::kFloat16, groups * n), zeros(DType::kUInt8, groups * n);
      test::Array a(DType::kFloat32, m * k), out(DType::kFloat32, m * n);
      std::mt19937 random(5);
      std::normal_distribution<double> normal;
      for (int64_t i = 0; i < groups * n; ++i) scales.set(i, 0.37);
      for (int64_t i = 0; i < groups * n; ++i) zeros.set(i, 13);
      for (int64_t i = 0; i < m * k; ++i) a.set(i, 1e6 * normal(random));
      host::pack({packing, n, k, codes.data(), k, packed.data()}, 1);
      GemmArguments arguments;
      arguments.weights = {
          packing, n, k, group_size, packed.data(), DType::kFloat16, scales.data(), n, DType::kUInt8, zeros.data(), n};
      arguments.a_type = DType::kFloat32;
      arguments.a = a.data();
      arguments.a_stride = k;
      arguments.out = out.data();
      arguments.out_stride = n;
      for (host::VectorLevel level : levels()) {
        LevelGuard const guard(level);
        for (arguments.m = 1; arguments.m <= m; ++arguments.m) {
          for (int64_t i = 0; i < m * n; ++i) out.set(i, -1);
          host::gemm(arguments, 1);
          for (int64_t i = 0; i < arguments.m * n; ++i) ASSERT_EQ(out[i], 0.0);
        }
      }
    }
  }
}

TEST(Gemm, NothingToDo) {
  GemmCase c{{Packing::kW4A16, 20, 70, 64, DType::kFloat16, DType::kNone}, 2, DType::kFloat16};
  Product product(c, 3);
  product.arguments().m = 0;
  product.arguments().a = product.arguments().out = nullptr;
  host::gemm(product.arguments(), 1);
  product.arguments().m = 2;
  product.arguments().weights.n = 0;
  host::gemm(product.arguments(), 1);
}

TEST(Gemm, ChecksArgumentsBeforeWriting) {
  GemmCase const c{{Packing::kW4A16, 20, 70, 64, DType::kFloat16, DType::kUInt8},
                   2,
                   DType::kFloat16,
                   DType::kFloat16,
                   DType::kFloat16,
                   true};
  std::function<void(GemmArguments&)> const changes[] = {
      [](GemmArguments& a) { a.m = -1; },
      [](GemmArguments& a) { a.a_type = DType::kInt8; },
      [](GemmArguments& a) { a.a = nullptr; },
      [](GemmArguments& a) { a.out_stride = 19; },
      [](GemmArguments& a) { a.bias_type = DType::kInt32; },
      [](GemmArguments& a) { a.bias = nullptr; },
      [](GemmArguments& a) { a.act_scale_type = DType::kUInt8; },
      [](GemmArguments& a) { a.act_scale = nullptr; },
      [](GemmArguments& a) { a.weights.k = 0; },
      [](GemmArguments& a) { a.weights.group_size = 0; },
      [](GemmArguments& a) { a.weights.packed = nullptr; },
      [](GemmArguments& a) { a.weights.packing = Packing::kW8A8; },
      [](GemmArguments& a) { const_cast<int32_t*>(a.perm)[69] = 70; },
      [](GemmArguments& a) { const_cast<int32_t*>(a.perm)[0] = -1; },
  };
  for (auto const& change : changes) {
    Product product(c, 3);
    change(product.arguments());
    EXPECT_THROW(host::gemm(product.arguments(), 1), InvalidArgument);
    for (int64_t i = 0; i < 2 * 25; ++i) ASSERT_EQ(product.out()[i], 0.0);  // as constructed
  }
  Product product(c, 3);
  EXPECT_THROW(host::gemm(product.arguments(), 0), InvalidArgument);
}

}  // namespace
}  // namespace qcutlass
