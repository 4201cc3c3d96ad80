#include "host/gemm_blockwise.h"

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

struct BlockCase {
  int64_t m, n, k, size = 128;
  DType out_type = DType::kFloat32;
  DType bias_type = DType::kNone;
  Activation activation = Activation::kNone;
  int64_t out_size = 0;       ///< of a quantised output
  DType type = DType::kInt8;  ///< of both operands
  bool apart = false;         ///< gate and up, in turns of 16 channels, have scales of their own
};

/// A product with random contents, its rows of activations, scales and outputs apart, with canaries between the latter.
class Product {
 public:
  explicit Product(BlockCase const& c)
      : case_(c),
        blocks_k_(ceil_div(c.k, c.size)),
        rows_(c.apart ? ceil_div(c.n / 2, c.size) : ceil_div(c.n, c.size)),
        codes_(c.n * c.k),
        a_(c.m * (c.k + 3)) {
    std::mt19937 random(42);
    auto const number = [&] { return std::ldexp(1.0f + random() % 1000 / 1000.0f, -4 - int(random() % 4)); };
    // Any byte; of fp8 those without the middle bits of the exponent: subnormals, numbers up to 3.75, no NaN.
    auto const byte = [&] { return static_cast<int8_t>(random() & (c.type == DType::kInt8 ? 0xff : 0xcf)); };
    for (int8_t& code : codes_) code = byte();
    for (int8_t& code : a_) code = byte();
    std::vector<uint8_t> bytes(codes_.begin(), codes_.end());
    packed_.resize(layout::packed_bytes(Packing::kW8A8, c.n, c.k));
    host::pack({Packing::kW8A8, c.n, c.k, bytes.data(), c.k, packed_.data()}, 1);
    for (int64_t i = 0; i < c.m * (blocks_k_ + 2); ++i) a_scale_.push_back(number());
    for (int64_t i = 0; i < (c.apart ? 2 : 1) * rows_ * (blocks_k_ + 1); ++i) w_scale_.push_back(number());
    bias_ = test::Array(c.bias_type, c.n);
    for (int64_t i = 0; c.bias_type != DType::kNone && i < c.n; ++i) bias_.set(i, random() % 64 / 8.0 - 4);
    out_ = test::Array(c.out_type, c.m * (c.n + 5) + 1);
    blocks_n_ = c.out_size == 0 ? 0 : ceil_div(c.n, c.out_size);
    out_scale_.assign(c.m * (blocks_n_ + 1) + 1, kCanary);

    arguments_.m = c.m;
    arguments_.weights.packing = Packing::kW8A8;
    arguments_.weights.n = c.n;
    arguments_.weights.k = arguments_.weights.group_size = c.k;
    arguments_.weights.packed = packed_.data();
    arguments_.a_type = c.type;
    arguments_.out_type = c.out_type;
    arguments_.a = a_.data();
    arguments_.a_stride = c.k + 3;
    arguments_.out = out_.data();
    arguments_.out_stride = c.n + 5;
    arguments_.bias_type = c.bias_type;
    arguments_.bias = bias_.data();
    arguments_.activation = c.activation;
    arguments_.blocks = {c.size, a_scale_.data(), blocks_k_ + 2, w_scale_.data(), blocks_k_ + 1};
    if (c.apart) arguments_.blocks.up_offset = rows_ * (blocks_k_ + 1);
    if (c.out_size != 0) arguments_.quantized = {c.out_size, out_scale_.data(), blocks_n_ + 1};
  }
  Product(Product const&) = delete;

  GemmArguments& arguments() { return arguments_; }
  test::Array const& out() const { return out_; }
  std::vector<float> const& out_scale() const { return out_scale_; }

  void run(int threads) {
    for (int64_t i = 0; i <= case_.m * arguments_.out_stride; ++i) out_.set(i, kCanary);
    host::gemm(arguments_, threads);
  }
  void run(host::ByteKernels kernels) {
    for (int64_t i = 0; i <= case_.m * arguments_.out_stride; ++i) out_.set(i, kCanary);
    host::gemm_blockwise(arguments_, 2, kernels);
  }

  /// The exact answer, and the error that fp32 sums of G rounded terms may have: G + 1 roundings of each, one of the
  /// bias. Sums of int8 are exact; in those of fp8 each product takes part in fewer additions than there are products.
  struct Answer {
    double value, error;
  };
  Answer answer(int64_t m, int64_t n) const {
    double total = 0, magnitude = 0, inner = 0;
    for (int64_t block = 0; block < blocks_k_; ++block) {
      double sum = 0, sizes = 0;
      int64_t const begin = block * case_.size, end = std::min(case_.k, begin + case_.size);
      for (int64_t k = begin; k < end; ++k) {
        double const product = test::get(case_.type, a_.data(), m * (case_.k + 3) + k) *
                               test::get(case_.type, codes_.data(), n * case_.k + k);
        sum += product;
        sizes += std::fabs(product);
      }
      double const scale =
          a_scale_[m * (blocks_k_ + 2) + block] * double{w_scale_[scale_row(n) * (blocks_k_ + 1) + block]};
      total += sum * scale;
      magnitude += std::fabs(sum) * scale;
      if (case_.type != DType::kInt8) inner += std::ldexp((end - begin) * sizes * scale, -24);
    }
    double const argument = total + (case_.bias_type == DType::kNone ? 0.0 : bias_[n]);
    double const error =
        std::ldexp((blocks_k_ + 1) * magnitude + std::fabs(argument), -24) + inner + std::ldexp(1.0, -40);
    return {case_.activation == Activation::kRelu ? std::max(argument, 0.0) : argument, error};
  }

  double worst_error() const {
    double worst = 0;
    for (int64_t m = 0; m < case_.m; ++m) {
      if (case_.out_size != 0) worst = std::max(worst, worst_error_of_codes(m));
      for (int64_t n = 0; case_.out_size == 0 && n < case_.n; ++n) {
        Answer const exact = answer(m, n);
        double const unit = std::ldexp(1.0, -test::format_of(case_.out_type).precision);
        double const bound = exact.error + unit * std::fabs(exact.value) * (1 + std::ldexp(1.0, -7)) +
                             (case_.out_type == DType::kFloat16 ? std::ldexp(1.0, -25) : 0.0);
        worst = std::max(worst, std::fabs(out_[m * arguments_.out_stride + n] - exact.value) / bound);
      }
    }
    return worst;
  }

  bool canaries_are_intact() const {
    for (int64_t m = 0; m < case_.m; ++m) {
      for (int64_t i = case_.n; i < arguments_.out_stride; ++i)
        if (out_[m * arguments_.out_stride + i] != kCanary) return false;
      if (out_scale_[m * (blocks_n_ + 1) + blocks_n_] != kCanary) return false;
    }
    return out_[case_.m * arguments_.out_stride] == kCanary;
  }

  static constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

 private:
  static constexpr double kCanary = -119.0;

  /// Of the scale of each block: that of its largest number, one rounding more; of a code: half a step more.
  double worst_error_of_codes(int64_t m) const {
    double worst = 0;
    for (int64_t block = 0; block < blocks_n_; ++block) {
      int64_t const end = std::min(case_.n, (block + 1) * case_.out_size);
      double largest = 0, error = 0, scale = out_scale_[m * (blocks_n_ + 1) + block];
      for (int64_t n = block * case_.out_size; n < end; ++n) {
        Answer const exact = answer(m, n);
        largest = std::max(largest, std::fabs(exact.value));
        error = std::max(error, exact.error);
        double const off = std::fabs(out_[m * arguments_.out_stride + n] * scale - exact.value);
        worst = std::max(worst, off / (scale / 2 + exact.error + std::ldexp(127 * scale, -24)));
      }
      if (largest > error)
        worst = std::max(worst, std::fabs(scale - largest / 127) / (error / 127 + std::ldexp(scale, -23)));
    }
    return worst;
  }

  /// That of channel n: a gate's are in the first half of the rows, those of what it multiplies in the second.
  int64_t scale_row(int64_t n) const {
    if (!case_.apart) return n / case_.size;
    int64_t const pair = n / 32, own = pair * 16 + n % 16;
    return n / 16 % 2 * rows_ + own / case_.size;
  }

  BlockCase case_;
  int64_t blocks_k_, blocks_n_, rows_;
  std::vector<int8_t> codes_, a_;
  std::vector<uint8_t> packed_;
  std::vector<float> a_scale_, w_scale_, out_scale_;
  test::Array bias_, out_;
  GemmArguments arguments_;
};

class GemmBlockwiseTest : public testing::TestWithParam<BlockCase> {};

TEST_P(GemmBlockwiseTest, IsWithinTheErrorBound) {
  Product product(GetParam());
  for (int threads : {1, 2}) {
    product.run(threads);
    EXPECT_TRUE(product.canaries_are_intact());
    EXPECT_LE(product.worst_error(), 1.0);
  }
  for (host::ByteKernels kernels : host::byte_kernels()) {
    product.run(kernels);
    EXPECT_LE(product.worst_error(), 1.0) << "kernels " << int(kernels);
  }
}

std::vector<BlockCase> cases() {
  std::vector<BlockCase> result;
  DType const f16 = DType::kFloat16, bf16 = DType::kBFloat16, f32 = DType::kFloat32, i8 = DType::kInt8;
  for (int64_t size : {32, 64, 128}) {
    for (int64_t m : {1, 4, 5, 33}) result.push_back({m, 150, 300, size});
    for (int64_t n : {1, 16, 127, 128, 129, 257}) result.push_back({3, n, 200, size, f32, f16});
    for (int64_t k : {1, 31, 32, 33, 127, 128, 129, 1025}) result.push_back({3, 40, k, size});
    for (DType out_type : {f16, bf16, f32}) result.push_back({5, 37, 200, size, out_type, f32, Activation::kRelu});
    for (int64_t out_size : {32, 64, 128}) {
      for (int64_t n : {1, 40, 128, 300}) result.push_back({4, n, 260, size, i8, f16, Activation::kNone, out_size});
      result.push_back({4, 300, 260, size, i8, bf16, Activation::kRelu, out_size});
    }
  }
  DType const e4m3 = DType::kFloat8E4M3;
  for (int64_t size : {32, 64, 128}) {
    for (int64_t m : {1, 2, 4, 7, 33}) result.push_back({m, 150, 300, size, f32, f16, Activation::kNone, 0, e4m3});
    for (int64_t k : {1, 31, 33, 128, 129, 1025})
      result.push_back({3, 40, k, size, bf16, f32, Activation::kRelu, 0, e4m3});
  }
  for (int64_t size : {32, 64, 128}) {
    for (DType type : {i8, e4m3}) {
      for (int64_t n : {32, 96, 128, 256, 320, 576})
        result.push_back({3, n, 300, size, f32, f32, Activation::kNone, 0, type, true});
    }
    result.push_back({4, 320, 260, size, i8, f16, Activation::kRelu, 64, i8, true});
  }
  result.push_back({70, 17, 4500, 128, f16, f32, Activation::kNone, 0, e4m3});
  result.push_back({70, 17, 4500, 128, f16});  // several blocks of rows
  result.push_back({70, 150, 4500, 128, i8, f32, Activation::kNone, 128});
  return result;
}

INSTANTIATE_TEST_SUITE_P(Cases, GemmBlockwiseTest, testing::ValuesIn(cases()), [](auto const& info) {
  BlockCase const& c = info.param;
  return std::to_string(info.index) + "_m" + std::to_string(c.m) + "_n" + std::to_string(c.n) + "_k" +
         std::to_string(c.k) + "_b" + std::to_string(c.size) + "_" + test::name_of(c.type) + "_" +
         test::name_of(c.out_type) + std::to_string(c.out_size) + (c.apart ? "_apart" : "");
});

TEST(GemmBlockwise, NothingToDo) {
  Product product({2, 20, 70});
  product.arguments().m = 0;
  product.arguments().a = product.arguments().out = nullptr;
  host::gemm(product.arguments(), 1);
  product.arguments().m = 2;
  product.arguments().weights.n = 0;
  host::gemm(product.arguments(), 1);
}

TEST(GemmBlockwise, ChecksArgumentsBeforeWriting) {
  BlockCase const floating{2, 150, 300, 128, DType::kFloat16, DType::kFloat16, Activation::kRelu};
  BlockCase const quantized{2, 150, 300, 128, DType::kInt8, DType::kFloat16, Activation::kRelu, 64};
  static float const one = 1;
  static int32_t const zero = 0;
  struct Change {
    BlockCase const& of;
    std::function<void(GemmArguments&)> apply;
  };
  Change const changes[] = {
      {floating, [](GemmArguments& a) { a.m = -1; }},
      {floating, [](GemmArguments& a) { a.a_type = DType::kFloat8E5M2; }},
      {quantized, [](GemmArguments& a) { a.a_type = DType::kFloat8E4M3; }},
      {floating, [](GemmArguments& a) { a.weights.packing = Packing::kW8A16; }},
      {floating, [](GemmArguments& a) { a.out_type = DType::kInt32; }},
      {floating, [](GemmArguments& a) { a.out_type = DType::kInt8; }},  // without quantized
      {floating, [](GemmArguments& a) { a.a = nullptr; }},
      {floating, [](GemmArguments& a) { a.out = nullptr; }},
      {floating, [](GemmArguments& a) { a.out_stride = 149; }},
      {floating, [](GemmArguments& a) { a.bias_type = DType::kInt32; }},
      {floating, [](GemmArguments& a) { a.bias = nullptr; }},
      {floating, [](GemmArguments& a) { a.act_scale_type = DType::kFloat16; }},
      {floating, [](GemmArguments& a) { a.perm = &zero; }},
      {floating, [](GemmArguments& a) { a.sums.a_scale = &one; }},
      {floating, [](GemmArguments& a) { a.sums.azp = &zero; }},
      {floating, [](GemmArguments& a) { a.weights.k = 0; }},
      {floating, [](GemmArguments& a) { a.weights.packed = nullptr; }},
      {floating, [](GemmArguments& a) { a.blocks.size = 48; }},
      {floating, [](GemmArguments& a) { a.blocks.a = nullptr; }},
      {floating, [](GemmArguments& a) { a.blocks.w = nullptr; }},
      {floating, [](GemmArguments& a) { a.blocks.a_stride = -1; }},
      {floating, [](GemmArguments& a) { a.blocks.w_stride = 2; }},
      {floating, [](GemmArguments& a) { a.blocks.up_offset = 3; }},  // 150 channels are no pairs of 16
      {floating, [](GemmArguments& a) { a.quantized.size = 128; }},
      {quantized, [](GemmArguments& a) { a.quantized.size = 100; }},
      {quantized, [](GemmArguments& a) { a.quantized.scales = nullptr; }},
      {quantized, [](GemmArguments& a) { a.quantized.stride = 2; }},
  };
  for (Change const& change : changes) {
    Product product(change.of);
    change.apply(product.arguments());
    EXPECT_THROW(host::gemm(product.arguments(), 1), InvalidArgument) << &change - changes;
    for (int64_t i = 0; i < 2 * 155; ++i) ASSERT_EQ(product.out()[i], 0.0);  // as constructed
    for (float const scale : product.out_scale()) ASSERT_LT(scale, 0);
  }
  Product product(floating);
  EXPECT_THROW(host::gemm(product.arguments(), 0), InvalidArgument);
}

}  // namespace
}  // namespace qcutlass
