// Products of experts on the host, and their selection.
#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <vector>

#include "host/multiversion.h"
#include "plan/problem.h"
#include "qcutlass/error.h"
#include "qcutlass/gemm.h"
#include "qcutlass/pack.h"
#include "selection.h"

namespace qcutlass {
namespace {

constexpr int64_t kExperts = 4, kTokens = 5, kN = 20, kK = 70;

/// fp32 activations and weights that are small integers: sums are exact in any order.
class GroupedProduct {
 public:
  GroupedProduct(Packing packing, int64_t group_size, std::vector<int32_t> offsets, int64_t m, unsigned seed)
      : offsets_(std::move(offsets)), codes_(kExperts * kN * kK), a_(kTokens * kK), out_(m * kN, kCanary) {
    std::mt19937 random(seed);
    for (uint8_t& code : codes_) code = static_cast<uint8_t>(random() % 16);
    for (float& x : a_) x = static_cast<float>(random() % 9) - 4;
    int64_t const bytes = layout::packed_bytes(packing, kN, kK);
    packed_.resize(kExperts * bytes);
    for (int64_t e = 0; e < kExperts; ++e)
      host::pack({packing, kN, kK, codes_.data() + e * kN * kK, kK, packed_.data() + e * bytes}, 1);
    WeightArguments& w = arguments_.weights;
    w.packing = packing;
    w.n = kN, w.k = kK, w.group_size = group_size;
    w.packed = packed_.data();
    w.scale_type = DType::kFloat32;
    w.scale_stride = w.zero_stride = kN;
    for (int64_t i = 0; i < kExperts * w.groups() * kN; ++i) {
      scales_.push_back(static_cast<float>(1 << random() % 3));
      zeros_.push_back(static_cast<uint8_t>(random() % 16));
    }
    w.scales = scales_.data();
    w.zero_type = DType::kUInt8;
    w.zeros = zeros_.data();
    for (int64_t i = 0; i < kExperts * kN; ++i) bias_.push_back(static_cast<float>(random() % 64));
    for (int64_t r = 0; r < m; ++r) {
      rows_.push_back(static_cast<int32_t>(random() % kTokens));
      row_scale_.push_back(random() % 2 == 0 ? 1.0f : -0.5f);
    }
    arguments_.m = m;
    arguments_.a_type = DType::kFloat32;
    arguments_.a = a_.data();
    arguments_.a_stride = kK;
    arguments_.out = out_.data();
    arguments_.out_stride = kN;
    arguments_.bias_type = DType::kFloat32;
    arguments_.bias = bias_.data();
    arguments_.activation = Activation::kRelu;
    arguments_.experts = {kExperts, offsets_.data(), rows_.data(), row_scale_.data(), kTokens};
  }
  GroupedProduct(GroupedProduct const&) = delete;

  GemmArguments& arguments() { return arguments_; }
  std::vector<int32_t>& offsets() { return offsets_; }
  std::vector<int32_t>& rows() { return rows_; }

  bool is_untouched() const {
    for (float x : out_)
      if (x != kCanary) return false;
    return true;
  }

  void expect_right() const {
    WeightArguments const& w = arguments_.weights;
    for (int64_t r = 0; r < arguments_.m; ++r) {
      int64_t e = 0;
      while (e < kExperts && r >= offsets_[e + 1]) ++e;
      for (int64_t n = 0; n < kN; ++n) {
        double sum = bias_[(e % kExperts) * kN + n];
        for (int64_t k = 0; k < kK && e < kExperts; ++k) {
          int64_t const parameter = (e * w.groups() + k / w.group_size) * kN + n;
          sum += a_[rows_[r] * kK + k] * (codes_[(e * kN + n) * kK + k] - zeros_[parameter]) * scales_[parameter];
        }
        bool const nobodys = r < offsets_[0] || e == kExperts;
        ASSERT_EQ(out_[r * kN + n], nobodys ? 0.0 : std::max(sum, 0.0) * row_scale_[r]) << r << ", " << n;
      }
    }
  }

 private:
  static constexpr float kCanary = -1984;

  std::vector<int32_t> offsets_, rows_;
  std::vector<uint8_t> codes_, packed_, zeros_;
  std::vector<float> a_, out_, scales_, bias_, row_scale_;
  GemmArguments arguments_;
};

TEST(GroupedGemm, EachRowMeetsItsExpert) {
  host::VectorLevel const best = host::vector_level();
  for (host::VectorLevel level : {host::VectorLevel::kBaseline, host::VectorLevel::kAvx2, host::VectorLevel::kAvx512}) {
    if (level > best) continue;
    host::vector_level() = level;
    for (Packing packing : {Packing::kW4A16, Packing::kW8A16})
      for (int64_t group_size : {16, 24, 64, 70})
        for (int threads : {1, 2}) {
          GroupedProduct product(packing, group_size, {2, 3, 3, 20, 22}, 25, 7);
          host::gemm(product.arguments(), threads);
          product.expect_right();
        }
  }
  host::vector_level() = best;
}

TEST(GroupedGemm, NobodysRowsAreZeros) {
  for (std::vector<int32_t> const& offsets : {std::vector<int32_t>(5, 0), std::vector<int32_t>(5, 6)}) {
    GroupedProduct product(Packing::kW4A16, 64, offsets, 6, 7);
    product.arguments().experts.a_rows = 0;
    host::gemm(product.arguments(), 1);
    product.expect_right();
  }
}

TEST(GroupedGemm, ChecksArgumentsBeforeWriting) {
  std::function<void(GroupedProduct&)> const changes[] = {
      [](GroupedProduct& p) { p.offsets()[2] = 2; },
      [](GroupedProduct& p) { p.offsets()[0] = -1; },
      [](GroupedProduct& p) { p.offsets()[4] = 26; },
      [](GroupedProduct& p) { p.rows()[3] = kTokens; },
      [](GroupedProduct& p) { p.rows()[20] = -1; },
      [](GroupedProduct& p) { p.arguments().experts.offsets = nullptr; },
      [](GroupedProduct& p) { p.arguments().experts.count = -1; },
      [](GroupedProduct& p) { p.arguments().int8_activations = true; },
      [](GroupedProduct& p) { p.arguments().weights.packing = Packing::kW8A8; },
      [](GroupedProduct& p) { p.arguments().out_stride = kN - 1; },
  };
  for (auto const& change : changes) {
    GroupedProduct product(Packing::kW4A16, 64, {2, 3, 3, 20, 22}, 25, 7);
    change(product);
    EXPECT_THROW(host::gemm(product.arguments(), 1), InvalidArgument);
    EXPECT_TRUE(product.is_untouched());
  }
}

GemmArguments grouped_problem(int64_t m, int64_t experts, int64_t n, int64_t k) {
  GemmArguments arguments = selection::weight_only_problem(m, n, k);
  arguments.experts.count = experts;
  arguments.experts.a_rows = m;
  return arguments;
}

TEST(GroupedSelection, FewRowsStreamAndManyDoNot) {
  for (DeviceTraits const& device : selection::kDevices) {
    auto const is_stream = [&](int64_t m) {
      return select(grouped_problem(m, 128, 1536, 2048), device).tactic.find("stream") != std::string::npos;
    };
    EXPECT_TRUE(is_stream(8));
    EXPECT_TRUE(is_stream(512));
    EXPECT_FALSE(is_stream(128 * 1024));
  }
}

TEST(GroupedSelection, OnlyTouchedExpertsCost) {
  double last = 0;
  for (int64_t m : {8, 32, 128, 4096, 65536}) {
    double const total = candidates(grouped_problem(m, 128, 1536, 2048), selection::kH200).front().cost.total;
    EXPECT_GT(total, last);
    last = total;
  }
  // Of a few experts some are expected to have several rows, of many none.
  GemmArguments const few = grouped_problem(8, 8, 1536, 2048), of_many = grouped_problem(8, 512, 1536, 2048);
  std::string const tactic = select(few, selection::kH200).tactic;
  Cost const alone = candidates(few, selection::kH200, tactic).front().cost,
             among = candidates(of_many, selection::kH200, tactic).front().cost,
             among_more = candidates(grouped_problem(8, 4096, 1536, 2048), selection::kH200, tactic).front().cost;
  EXPECT_LT(alone.load, among.load);
  EXPECT_EQ(among.total, among_more.total);
}

TEST(GroupedSelection, TilesThatHoldAnExpertsRowsAreExpectedToDoSo) {
  Problem const problem = make_problem(grouped_problem(8 * 64, 8, 4096, 14336));
  EXPECT_EQ(problem.token_tiles(64), 12) << "every second expert has more";
  EXPECT_EQ(problem.token_tiles(96), 8);
  EXPECT_EQ(problem.token_tiles(32), 20);
  EXPECT_EQ(make_problem(grouped_problem(8 * 4096, 8, 4096, 14336)).token_tiles(256), 8 * 16 + 4);
}

TEST(GroupedSelection, RowsThatAreNotThereAreRefused) {
  GemmArguments arguments = grouped_problem(8, 8, 1536, 2048);
  arguments.experts.a_rows = 7;
  EXPECT_THROW(candidates(arguments, selection::kH200), InvalidArgument);
  int32_t const row = 0;
  arguments.experts.rows = &row;
  EXPECT_FALSE(candidates(arguments, selection::kH200).empty());
}

TEST(GroupedSelection, ManyRowsGoWithWgmma) {
  auto const tactic = [](GemmArguments const& arguments) { return select(arguments, selection::kH200Wgmma).tactic; };
  EXPECT_NE(tactic(grouped_problem(128 * 1024, 128, 1536, 2048)).find("sm90a"), std::string::npos);
  EXPECT_EQ(tactic(grouped_problem(64, 128, 1536, 2048)).find("sm90a"), std::string::npos);
}

/// Kernels that read neighbouring rows alone get them in the order of their experts, from the workspace.
TEST(GroupedSelection, RowsThatAreAnywhereAreBroughtIntoOrderForWgmma) {
  int32_t const row = 0;
  GemmArguments arguments = grouped_problem(4096, 8, 1536, 2048);
  double const in_order = candidates(arguments, selection::kH200Wgmma).front().cost.total;
  arguments.experts.rows = &row;
  for (Candidate const& candidate : candidates(arguments, selection::kH200Wgmma)) {
    bool const is_wgmma = candidate.plan.tactic.find("sm90a") != std::string::npos;
    EXPECT_EQ(candidate.plan.workspace_bytes, is_wgmma ? 4096u * 2048 * 2 : 0u) << candidate.plan.tactic;
  }
  EXPECT_GT(candidates(arguments, selection::kH200Wgmma).front().cost.total, in_order);
}

/// Enabling a kind is a value of Kind::takes_experts.
TEST(GroupedSelection, TakesCodesOfAnyKind) {
  auto const takes = [](std::function<void(WeightArguments&)> const& change) {
    GemmArguments arguments = grouped_problem(8, 8, 1536, 2048);
    arguments.weights.zero_type = DType::kNone;
    change(arguments.weights);
    EXPECT_FALSE(candidates(arguments, selection::kH200).empty());
  };
  takes([](WeightArguments& w) { w.packing = Packing::kE2M1A16; });
  takes([](WeightArguments& w) { w.packing = Packing::kE4M3A16; });
  takes([](WeightArguments& w) { w.minimum_type = w.scale_type; });
}

TEST(GroupedSelection, TakesScalesOfTwoLevels) {
  GemmArguments arguments = grouped_problem(8, 8, 1536, 2048);
  arguments.weights.group_size = 32;
  arguments.weights.scale_type = DType::kInt8;
  for (int64_t super_groups : {4, 8, 64}) {
    arguments.weights.super_groups = super_groups;
    EXPECT_EQ(kind_of(arguments).mode, ScaleMode::kMinimum);
    EXPECT_FALSE(candidates(arguments, selection::kH200).empty());
  }
}

/// Kernels go from expert to expert by the stride of the scales' super-blocks.
TEST(GroupedSelection, CopiesSuperBlocksOfOtherStrides) {
  GemmArguments arguments = grouped_problem(8, 8, 1536, 2048);
  WeightArguments& w = arguments.weights;
  alignas(16) char numbers[16];  // whose address counts alone
  w.group_size = 32;
  w.scale_type = w.minimum_type = DType::kUInt8;
  w.super_groups = 8;
  w.minimums = w.super_scales = w.super_minimums = numbers;
  w.minimum_stride = w.super_scale_stride = w.super_minimum_stride = w.n;
  EXPECT_FALSE(make_problem(arguments).weights.copied_supers);
  w.super_minimum_stride += 8;
  EXPECT_TRUE(make_problem(arguments).weights.copied_supers);
}

TEST(GroupedSelection, RefusesSuperBlocksThatStagesReachOver) {
  GemmArguments arguments = grouped_problem(8, 8, 1536, 2048);
  arguments.weights.group_size = 32;
  arguments.weights.scale_type = DType::kInt8;
  arguments.weights.super_groups = 2;
  try {
    candidates(arguments, selection::kH200);
    FAIL() << "expected Unsupported";
  } catch (Unsupported const& error) {
    EXPECT_NE(std::string(error.what()).find("super_scales: the CUDA kernels take super-blocks of multiples of 128"),
              std::string::npos);
  }
}

TEST(GroupedSelection, SharesNoK) {
  GemmArguments const arguments = grouped_problem(8, 8, 1536, 2048);
  for (Candidate const& candidate : candidates(arguments, selection::kH200Wgmma)) {
    EXPECT_EQ(candidate.plan.split_k, 1);
    EXPECT_EQ(candidate.plan.workspace_bytes, 0u);
  }
  EXPECT_THROW(candidates(arguments, selection::kH200, {}, 2), Unsupported);
  GemmArguments bytes = arguments;
  bytes.weights.packing = Packing::kW8A8;
  bytes.a_type = DType::kInt8;
  bytes.out_type = DType::kFloat16;
  EXPECT_THROW(candidates(bytes, selection::kH200), Unsupported);
}

}  // namespace
}  // namespace qcutlass
