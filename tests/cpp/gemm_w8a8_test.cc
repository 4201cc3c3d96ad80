#include "host/gemm_w8a8.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "qcutlass/error.h"
#include "qcutlass/gemm.h"
#include "qcutlass/pack.h"
#include "reference.h"

namespace qcutlass {
namespace {

struct SumsCase {
  int64_t m, n, k;
  DType a_type = DType::kInt8;
  DType out_type = DType::kFloat32;
  int a_scale_stride = 1, w_scale_stride = 1;
  bool azp = false;
  int azp_stride = 1;
  DType bias_type = DType::kNone;
  Activation activation = Activation::kNone;
};

/// A product with random contents, its rows of activations and outputs apart, with canaries between the latter.
class Product {
 public:
  Product(SumsCase const& c, unsigned seed) : case_(c), codes_(c.n * c.k), a_(c.m * (c.k + 3)) {
    std::mt19937 random(seed);
    bool const is_int8 = c.a_type == DType::kInt8;
    // Bytes of fp8 of ordinary size: no NaN, no infinity.
    auto const byte = [&] { return static_cast<uint8_t>(is_int8 ? random() : (random() % 2 << 7) + random() % 0x60); };
    for (uint8_t& code : codes_) code = byte();
    for (uint8_t& code : a_) code = byte();
    packed_.resize(layout::packed_bytes(Packing::kW8A8, c.n, c.k));
    host::pack({Packing::kW8A8, c.n, c.k, codes_.data(), c.k, packed_.data()}, 1);
    for (int64_t i = 0; i < c.m; ++i) a_scale_.push_back(std::ldexp(1.0f + random() % 1000 / 1000.0f, -8));
    for (int64_t i = 0; i < c.n; ++i) w_scale_.push_back(std::ldexp(1.0f + random() % 1000 / 1000.0f, -8));
    for (int64_t i = 0; i < c.m; ++i) azp_.push_back(static_cast<int32_t>(random() % 2000) - 1000);
    for (int64_t n = 0; n < c.n; ++n) {
      int32_t sum = 0;
      for (int64_t k = 0; k < c.k; ++k) sum += static_cast<int8_t>(codes_[n * c.k + k]);
      channel_sums_.push_back(sum);
    }
    bias_ = test::Array(c.bias_type, c.n);
    for (int64_t i = 0; c.bias_type != DType::kNone && i < c.n; ++i) bias_.set(i, random() % 64 / 8.0 - 4);
    out_ = test::Array(c.out_type, c.m * (c.n + 5) + 1);

    arguments_.m = c.m;
    arguments_.weights.packing = Packing::kW8A8;
    arguments_.weights.n = c.n;
    arguments_.weights.k = arguments_.weights.group_size = c.k;
    arguments_.weights.packed = packed_.data();
    arguments_.a_type = c.a_type;
    arguments_.out_type = c.out_type;
    arguments_.a = a_.data();
    arguments_.a_stride = c.k + 3;
    arguments_.out = out_.data();
    arguments_.out_stride = c.n + 5;
    arguments_.bias_type = c.bias_type;
    arguments_.bias = bias_.data();
    arguments_.activation = c.activation;
    SumScales& sums = arguments_.sums;
    if (c.out_type != DType::kInt32) {
      sums.a_scale = a_scale_.data();
      sums.w_scale = w_scale_.data();
    }
    sums.a_scale_stride = c.a_scale_stride;
    sums.w_scale_stride = c.w_scale_stride;
    if (!c.azp) return;
    sums.azp = azp_.data();
    sums.azp_stride = c.azp_stride;
    sums.channel_sums = channel_sums_.data();
  }
  Product(Product const&) = delete;

  GemmArguments& arguments() { return arguments_; }
  test::Array const& out() const { return out_; }

  void run(int threads) {
    for (int64_t i = 0; i <= case_.m * arguments_.out_stride; ++i) out_.set(i, kCanary);
    host::gemm(arguments_, threads);
  }
  void run(host::ByteKernels kernels) {
    for (int64_t i = 0; i <= case_.m * arguments_.out_stride; ++i) out_.set(i, kCanary);
    host::gemm_w8a8(arguments_, 2, kernels);
  }

  /// Integers of int8 products are exact in double.
  double sum(int64_t m, int64_t n) const {
    DType const w_type = case_.a_type == DType::kInt8 ? DType::kInt8 : DType::kFloat8E4M3;
    double const zero = case_.azp ? azp_[m * case_.azp_stride] : 0;
    double result = 0;
    for (int64_t k = 0; k < case_.k; ++k) {
      double const a = test::get(case_.a_type, a_.data(), m * arguments_.a_stride + k);
      result += (a - zero) * test::get(w_type, codes_.data(), n * case_.k + k);
    }
    return result;
  }

  /// Largest |out - reference| / bound. int8: three roundings of the scaled sum, one of the bias, one of the output;
  /// fp8: also the sum's, 2^-24 for each term.
  double worst_error() const {
    double worst = 0;
    double const unit = std::ldexp(1.0, -test::format_of(case_.out_type).precision), fp32 = std::ldexp(1.0, -24);
    for (int64_t m = 0; m < case_.m; ++m) {
      for (int64_t n = 0; n < case_.n; ++n) {
        double const scale = double{a_scale_[m * case_.a_scale_stride]} * double{w_scale_[n * case_.w_scale_stride]};
        double const scaled = sum(m, n) * scale;
        double const argument = scaled + (case_.bias_type == DType::kNone ? 0.0 : bias_[n]);
        bool const clipped = case_.activation == Activation::kRelu && argument < 0;
        double const reference = clipped ? 0 : argument;
        double magnitude = 0;
        for (int64_t k = 0; case_.a_type != DType::kInt8 && k < case_.k; ++k) {
          magnitude += std::fabs(test::get(case_.a_type, a_.data(), m * arguments_.a_stride + k) *
                                 test::get(DType::kFloat8E4M3, codes_.data(), n * case_.k + k)) *
                       scale;
        }
        double const bound = unit * std::fabs(reference) * (1 + std::ldexp(1.0, -7)) +
                             fp32 * (3 * std::fabs(scaled) + std::fabs(argument) + case_.k * magnitude) +
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
      for (int64_t i = case_.n; i < arguments_.out_stride; ++i) {
        if (out_[m * arguments_.out_stride + i] != kCanary) return false;
      }
    }
    return out_[case_.m * arguments_.out_stride] == kCanary;
  }

 private:
  static constexpr double kCanary = -1984.0;

  SumsCase case_;
  std::vector<uint8_t> codes_, a_, packed_;
  std::vector<float> a_scale_, w_scale_;
  std::vector<int32_t> azp_, channel_sums_;
  test::Array bias_, out_;
  GemmArguments arguments_;
};

class GemmW8A8Test : public testing::TestWithParam<SumsCase> {};

TEST_P(GemmW8A8Test, IsExactOrWithinTheErrorBound) {
  SumsCase const c = GetParam();
  Product product(c, 42);
  for (int threads : {1, 2}) {
    product.run(threads);
    EXPECT_TRUE(product.canaries_are_intact());
    if (c.out_type != DType::kInt32) {
      EXPECT_LE(product.worst_error(), 1.0);
      continue;
    }
    for (int64_t m = 0; m < c.m; ++m) {
      for (int64_t n = 0; n < c.n; ++n)
        ASSERT_EQ(product.out()[m * (c.n + 5) + n], product.sum(m, n)) << m << ", " << n;
    }
  }
}

TEST_P(GemmW8A8Test, DoesNotDependOnTheKernels) {
  SumsCase const c = GetParam();
  Product product(c, 42), other(c, 42);
  product.run(1);
  for (host::ByteKernels kernels : host::byte_kernels()) {
    other.run(kernels);
    for (int64_t i = 0; i < c.m * (c.n + 5); ++i) ASSERT_EQ(other.out()[i], product.out()[i]) << i;
  }
}

std::vector<SumsCase> cases() {
  std::vector<SumsCase> result;
  DType const i8 = DType::kInt8, i32 = DType::kInt32, f16 = DType::kFloat16, f32 = DType::kFloat32;
  for (int64_t m : {1, 2, 3, 4, 5, 7, 8, 9, 33}) result.push_back({m, 33, 130, i8, i32, 1, 1, m % 2 == 0});
  for (int64_t n : {1, 7, 8, 15, 16, 17, 31}) result.push_back({5, n, 66, i8, i32});
  for (int64_t k : {1, 15, 31, 32, 33, 63, 1023, 1024, 1025, 2100}) result.push_back({5, 17, k, i8, i32, 1, 1, true});
  for (DType a_type : {i8, DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    for (DType out_type : {f16, DType::kBFloat16, f32}) {
      for (int stride : {0, 1}) {
        result.push_back({5, 37, 200, a_type, out_type, stride, 1});
        result.push_back({5, 37, 200, a_type, out_type, 1, stride, a_type == i8, stride, f16, Activation::kRelu});
      }
      result.push_back({3, 20, 64, a_type, out_type, 1, 1, false, 1, f32});
    }
    for (int64_t m : {1, 2, 4, 9, 17}) result.push_back({m, 33, 130, a_type, f32});
    for (int64_t k : {1, 31, 33, 1025}) result.push_back({3, 17, k, a_type, f32});
    result.push_back({70, 17, 4500, a_type, f16});  // several blocks of rows
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Cases, GemmW8A8Test, testing::ValuesIn(cases()), [](auto const& info) {
  SumsCase const& c = info.param;
  return std::to_string(info.index) + "_m" + std::to_string(c.m) + "_n" + std::to_string(c.n) + "_k" +
         std::to_string(c.k) + "_" + test::name_of(c.a_type) + "_" + test::name_of(c.out_type);
});

TEST(GemmW8A8, TheLargestSum) {
  Product product({2, 3, kMaxInt8K, DType::kInt8, DType::kInt32}, 1);
  std::vector<uint8_t> const codes(2 * (kMaxInt8K + 3), 0x80);
  std::vector<uint8_t> const packed(layout::packed_bytes(Packing::kW8A8, 3, kMaxInt8K), 0x80);
  product.arguments().a = codes.data();
  product.arguments().weights.packed = packed.data();
  for (host::ByteKernels kernels : host::byte_kernels()) {
    product.run(kernels);
    EXPECT_EQ(product.out()[0], kMaxInt8K * 128.0 * 128.0);
    EXPECT_EQ(product.out()[8 + 2], kMaxInt8K * 128.0 * 128.0);
  }
}

TEST(GemmW8A8, NothingToDo) {
  Product product({2, 20, 70}, 3);
  product.arguments().m = 0;
  product.arguments().a = product.arguments().out = nullptr;
  host::gemm(product.arguments(), 1);
  product.arguments().m = 2;
  product.arguments().weights.n = 0;
  host::gemm(product.arguments(), 1);
}

TEST(GemmW8A8, ChecksArgumentsBeforeWriting) {
  SumsCase const c{2, 20, 70, DType::kInt8, DType::kFloat16, 1, 1, true, 1, DType::kFloat16, Activation::kRelu};
  static int32_t const perm = 0;
  std::function<void(GemmArguments&)> const changes[] = {
      [](GemmArguments& a) { a.m = -1; },
      [](GemmArguments& a) { a.a_type = DType::kUInt8; },
      [](GemmArguments& a) { a.a_type = DType::kFloat8E4M3; },  // with zero points
      [](GemmArguments& a) { a.out_type = DType::kNone; },
      [](GemmArguments& a) { a.out_type = DType::kInt8; },
      [](GemmArguments& a) { a.out_type = DType::kInt32; },  // with bias and activation
      [](GemmArguments& a) { a.a = nullptr; },
      [](GemmArguments& a) { a.out = nullptr; },
      [](GemmArguments& a) { a.out_stride = 19; },
      [](GemmArguments& a) { a.bias_type = DType::kInt32; },
      [](GemmArguments& a) { a.bias = nullptr; },
      [](GemmArguments& a) { a.act_scale_type = DType::kFloat16; },
      [](GemmArguments& a) { a.perm = &perm; },
      [](GemmArguments& a) { a.weights.k = 0; },
      [](GemmArguments& a) { a.weights.k = kMaxInt8K + 1; },
      [](GemmArguments& a) { a.weights.packed = nullptr; },
      [](GemmArguments& a) { a.weights.scale_type = DType::kFloat16; },
      [](GemmArguments& a) { a.sums.a_scale = nullptr; },
      [](GemmArguments& a) { a.sums.w_scale = nullptr; },
      [](GemmArguments& a) { a.sums.a_scale_stride = 2; },
      [](GemmArguments& a) { a.sums.w_scale_stride = -1; },
      [](GemmArguments& a) { a.sums.azp_stride = 2; },
      [](GemmArguments& a) { a.sums.channel_sums = nullptr; },
  };
  for (auto const& change : changes) {
    Product product(c, 3);
    change(product.arguments());
    EXPECT_THROW(host::gemm(product.arguments(), 1), InvalidArgument) << &change - changes;
    for (int64_t i = 0; i < 2 * 25; ++i) ASSERT_EQ(product.out()[i], 0.0);  // as constructed
  }
  Product product(c, 3);
  EXPECT_THROW(host::gemm(product.arguments(), 0), InvalidArgument);
}

}  // namespace
}  // namespace qcutlass
