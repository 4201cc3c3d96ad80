// Selection of 8-by-8-bit products: the same pure function over the same table.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "plan/cost_model.h"
#include "plan/footprint.h"
#include "plan/workspace.h"
#include "qcutlass/error.h"
#include "qcutlass/gemm.h"
#include "selection.h"

namespace qcutlass {
namespace {

using namespace selection;

constexpr DType kTypes[] = {DType::kInt8, DType::kFloat8E4M3, DType::kFloat8E5M2};

GemmArguments problem(int64_t m, int64_t n, int64_t k, DType type = DType::kInt8) {
  return eight_bits_problem(m, n, k, type);
}

TEST(SelectW8A8, NamesAreUniqueAndTellTheTypes) {
  std::set<std::string> names;
  size_t count = 0;
  for (DType type : kTypes)
    for (TacticTraits const& t : tactics(problem(16, 4096, 4096, type))) {
      ++count;
      names.insert(t.name);
      bool const is_int8 = type == DType::kInt8;
      std::string const of_type = is_int8 ? "s8" : type == DType::kFloat8E4M3 ? "e4m3" : "e5m2";
      std::string const prefix = "w8a8_" + of_type + (t.wgmma ? "_sm90a_" : is_int8 ? "_sm80_" : "_sm89_");
      EXPECT_EQ(t.name.rfind(prefix, 0), 0u) << t.name;
      EXPECT_EQ(t.k % 128, 0) << t.name;
    }
  EXPECT_EQ(names.size(), count);
  EXPECT_EQ(names.count("w8a8_s8_sm80_n128m128k128_s3"), 1u);
  EXPECT_EQ(names.count("w8a8_s8_sm80_stream_n32m8k1024w8_s3"), 1u);
  EXPECT_EQ(names.count("w8a8_e4m3_sm90a_n128m128k128_s6"), 1u);
}

TEST(SelectW8A8, AsynchronousMmasServeManyTokens) {
  for (DType type : kTypes)
    for (auto [n, k] : {std::pair{4096, 4096}, {28672, 4096}, {4096, 14336}, {8192, 8192}})
      for (int64_t m : {1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096}) {
        GemmArguments const a = problem(m, n, k, type);
        bool const chosen = traits_of(a, select(a, kH200Wgmma).tactic).wgmma;
        EXPECT_FALSE(chosen && m < 16) << m << " tokens, " << n << " x " << k;
        EXPECT_TRUE(chosen || m < 128) << m << " tokens, " << n << " x " << k;
        EXPECT_FALSE(traits_of(a, select(a, kH200).tactic).wgmma);
      }
}

/// Of the promoted configurations, the one with more tokens a tile was the fastest one from here on.
TEST(SelectW8A8, PromotedSumsPreferManyTokensATile) {
  for (int64_t m : {1024, 4096})
    EXPECT_EQ(select(problem(m, 8192, 8192, DType::kFloat8E4M3), kH200Wgmma).tactic, "w8a8_e4m3_sm90a_n128m128k128_s6");
  GemmArguments const a = problem(4096, 8192, 8192, DType::kFloat8E4M3), b = problem(4096, 8192, 8192);
  auto const compute = [](GemmArguments const& arguments) {
    return candidates(arguments, kH200Wgmma).front().cost.compute;
  };
  EXPECT_GT(compute(a), 1.05 * compute(b)) << "promotion takes time";
}

TEST(SelectW8A8, NeighboursShareWeights) {
  EXPECT_EQ(wgmma_sharers(Mainloop::kWgmmaSs, 1, 1), 1) << "no neighbour";
  EXPECT_EQ(wgmma_sharers(Mainloop::kWgmmaSs, 2, 1), 2);
  EXPECT_EQ(wgmma_sharers(Mainloop::kWgmmaSs, 3, 1), 1) << "a fourth of the blocks would have nothing to do";
  EXPECT_EQ(wgmma_sharers(Mainloop::kWgmmaSs, 9, 1), 2);
  EXPECT_EQ(wgmma_sharers(Mainloop::kWgmmaSs, 2, 3), 1) << "the cluster shares k";
  EXPECT_EQ(wgmma_sharers(Mainloop::kWgmmaRs, 2, 1), 1);
}

/// Times of one run on an H200, microseconds: the fastest configurations, and those within a few percent.
TEST(SelectW8A8, ChoicesAreAmongTheBestMeasured) {
  std::vector<Measured> const int8 = {
      {4096, 4096, 256, {{"n128m64k128", 1, 10.39}}},    {4096, 4096, 512, {{"n128m128k128", 1, 14.57}}},
      {4096, 4096, 2048, {{"n128m128k128", 1, 52}}},     {4096, 14336, 512, {{"n128m128k128", 1, 39.07}}},
      {4096, 14336, 2048, {{"n128m128k128", 1, 151.3}}}, {8192, 8192, 512, {{"n128m128k128", 1, 46.21}}},
      {8192, 8192, 2048, {{"n128m128k128", 1, 183.2}}},  {28672, 4096, 512, {{"n128m128k128", 1, 83.28}}},
      {28672, 4096, 2048, {{"n128m128k128", 1, 327.7}}},
  };
  std::vector<Measured> const e4m3 = {
      {4096, 4096, 64, {{"n128m64k128", 3, 8.526}, {"n128m64k128", 2, 8.985}}},
      {4096, 4096, 128, {{"n128m64k128", 2, 9.356}, {"n128m64k128", 1, 10.11}}},
      {4096, 4096, 256, {{"n128m64k128", 1, 11.15}, {"n128m128k128", 2, 11.69}}},
      {4096, 4096, 512, {{"n128m128k128", 1, 15.52}, {"n256m64k128", 1, 16.98}}},
      {4096, 4096, 1024, {{"n128m128k128", 1, 31.9}, {"n256m64k128", 1, 34.28}}},
      {4096, 4096, 4096, {{"n128m128k128", 1, 108.4}, {"n256m64k128", 1, 113.5}}},
      {4096, 14336, 64, {{"n128m64k128", 3, 19.61}, {"n128m64k128", 2, 19.68}, {"n256m64k128", 6, 21.43}}},
      {4096, 14336, 128, {{"n128m128k128", 3, 21.9}, {"n128m64k128", 2, 23.58}}},
      {4096, 14336, 256, {{"n128m128k128", 2, 28}}},
      {4096, 14336, 512, {{"n128m128k128", 1, 45.65}}},
      {4096, 14336, 1024, {{"n128m128k128", 1, 89.46}}},
      {4096, 14336, 4096, {{"n128m128k128", 1, 349.2}}},
      {8192, 8192, 64, {{"n128m64k128", 2, 19.22}, {"n128m64k128", 1, 20.61}}},
      {8192, 8192, 128, {{"n128m64k128", 1, 21.12}, {"n128m128k128", 2, 21.66}}},
      {8192, 8192, 256, {{"n128m128k128", 1, 28.13}}},
      {8192, 8192, 512, {{"n128m128k128", 1, 52.72}}},
      {8192, 8192, 1024, {{"n128m128k128", 1, 101.8}}},
      {8192, 8192, 4096, {{"n128m128k128", 1, 404.1}}},
      {28672, 4096, 64, {{"n128m64k128", 1, 32.16}, {"n256m64k128", 1, 33.32}}},
      {28672, 4096, 128, {{"n128m128k128", 1, 34.46}, {"n256m64k128", 1, 36.62}, {"n128m64k128", 1, 37.72}}},
      {28672, 4096, 256, {{"n128m128k128", 1, 54.46}}},
      {28672, 4096, 512, {{"n128m128k128", 1, 97.26}, {"n256m64k128", 1, 105.8}}},
      {28672, 4096, 1024, {{"n128m128k128", 1, 189.1}}},
      {28672, 4096, 4096, {{"n128m128k128", 1, 742.9}, {"n256m64k128", 1, 814.1}}},
  };
  for (auto const& [type, rows] : {std::pair{DType::kInt8, int8}, {DType::kFloat8E4M3, e4m3}})
    expect_choices_among_the_best([type = type](int64_t m, int64_t n, int64_t k) { return problem(m, n, k, type); },
                                  rows, 1.09);
}

TEST(SelectW8A8, ConfigurationsForOtherProductsAreNotOffered) {
  GemmArguments weight_only = problem(256, 4096, 4096, DType::kFloat16);
  weight_only.weights.packing = Packing::kW8A16;
  weight_only.weights.scale_type = DType::kFloat16;
  auto const warp_tiles_of_64 = [](GemmArguments const& a) {
    int count = 0;
    for (TacticTraits const& t : tactics(a)) count += t.channels == 128 && t.tokens == 256 && !t.wgmma;
    return count;
  };
  EXPECT_EQ(warp_tiles_of_64(weight_only), 0);
  EXPECT_EQ(warp_tiles_of_64(problem(256, 4096, 4096)), 1);
  EXPECT_THROW(select(weight_only, kH200, "w8a16_f16_native_sm80_n128m256k64_s4"), InvalidArgument);
}

TEST(SelectW8A8, FitsTheDevice) {
  for (DeviceTraits const& device : {kA100, kRtx3090, kRtx4090, kH200})
    for (DType type : kTypes)
      for (auto [n, k] : {std::pair<int64_t, int64_t>{4096, 4096}, {28672, 4096}, {576, 1536}, {1, 1}, {97, 1000}})
        for (int64_t m : {1, 8, 17, 64, 200, 4096}) {
          if (is_float8(type) && device.compute_capability < 89) continue;
          GemmArguments const a = problem(m, n, k, type);
          Plan const plan = select(a, device);
          TacticTraits const t = traits_of(a, plan.tactic);
          EXPECT_LE(t.shared_memory, device.shared_memory_per_block) << plan.tactic;
          EXPECT_LE(plan.split_k, layout::ceil_div(k, t.k)) << plan.tactic;
          EXPECT_EQ(plan.workspace_bytes, Workspace(make_problem(a), plan).bytes);
          EXPECT_FALSE(plan.rounds_weights);
          EXPECT_FALSE(plan.dense);
        }
}

TEST(SelectW8A8, NothingIsDequantised) {
  for (int64_t m : {512, 4096})
    for (Candidate const& c : candidates(problem(m, 4096, 4096), kH200, "", 0, true)) EXPECT_FALSE(c.plan.dense);
}

TEST(SelectW8A8, Float8NeedsItsInstructions) {
  for (DType type : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    EXPECT_THROW(select(problem(8, 256, 256, type), kA100), Unsupported);
    EXPECT_THROW(select(problem(8, 256, 256, type), kRtx3090), Unsupported);
    EXPECT_NO_THROW(select(problem(8, 256, 256, type), kRtx4090));
    DeviceTraits old_code = kH200;  // code for sm_80 runs there, without the instructions
    old_code.code_capability = 80;
    EXPECT_THROW(select(problem(8, 256, 256, type), old_code), Unsupported);
  }
  try {
    select(problem(8, 256, 256, DType::kFloat8E4M3), kRtx3090);
    FAIL();
  } catch (Unsupported const& error) {
    EXPECT_NE(std::string(error.what()).find("8.6"), std::string::npos) << error.what();
  }
}

TEST(SelectW8A8, SumsCannotOverflow) {
  EXPECT_NO_THROW(select(problem(8, 256, 131071), kH200));
  EXPECT_THROW(select(problem(8, 256, 131072), kH200), InvalidArgument);
  EXPECT_NO_THROW(select(problem(8, 256, 131072, DType::kFloat8E4M3), kH200));
}

TEST(SelectW8A8, ActivationsAndWeightsMustAgree) {
  EXPECT_THROW(select(problem(8, 256, 256, DType::kFloat16), kH200), Unsupported);
  GemmArguments a = problem(8, 256, 256);
  a.weights.packing = Packing::kW8A16;
  EXPECT_THROW(select(a, kH200), Unsupported);
}

TEST(SelectW8A8, TakesNoGroupSize) {
  GemmArguments a = problem(8, 256, 4096);
  Plan const plan = select(a, kH200);
  double const total = candidates(a, kH200).front().cost.total;
  a.weights.group_size = 0;
  EXPECT_EQ(select(a, kH200).tactic, plan.tactic);
  EXPECT_EQ(candidates(a, kH200).front().cost.total, total);
}

TEST(SelectW8A8, RefusesWhatTheKernelsWouldIgnore) {
  int32_t const one = 1;
  GemmArguments a = problem(8, 256, 256, DType::kFloat8E4M3);
  a.sums.azp = &one;
  EXPECT_THROW(select(a, kH200), Unsupported);
  a = problem(8, 256, 256);
  a.sums.azp = &one;
  EXPECT_NO_THROW(select(a, kH200));
  a.perm = &one;
  EXPECT_THROW(select(a, kH200), Unsupported);
  a = problem(8, 256, 256);
  a.out_type = DType::kNone;
  EXPECT_THROW(select(a, kH200), InvalidArgument);
  a.out_type = DType::kInt32;
  EXPECT_NO_THROW(select(a, kH200));
  a.a_type = DType::kFloat8E5M2;
  EXPECT_THROW(select(a, kH200), InvalidArgument);
  EXPECT_THROW(select(problem((int64_t(1) << 25) + 1, 16, 32), kH200), Unsupported);
}

TEST(SelectW8A8, SplitsFitTheGrid) {
  GemmArguments const a = problem(1, 16, int64_t(1) << 24, DType::kFloat8E4M3);
  std::string const name = "w8a8_e4m3_sm89_n64m64k128_s3";
  EXPECT_NO_THROW(select(a, kH200, name, 65535));
  EXPECT_THROW(select(a, kH200, name, 65536), Unsupported);
}

TEST(SelectW8A8, UnalignedActivationsAreCopied) {
  GemmArguments a = problem(8, 256, 100);  // rows of 100 bytes
  EXPECT_EQ(Workspace(make_problem(a), Plan{}).activation_stride, 112);
  EXPECT_EQ(Workspace(make_problem(a), Plan{}).bytes, 1024u);  // 8 rows of 112, rounded up to 256
  EXPECT_EQ(Workspace(make_problem(problem(8, 256, 128)), Plan{}).bytes, 0u);
}

TEST(SelectW8A8, MoreTokensTakeMoreTime) {
  double last = 0;
  for (int64_t m : {1, 16, 64, 256, 1024, 4096}) {
    double const total = candidates(problem(m, 8192, 8192), kH200).front().cost.total;
    EXPECT_GT(total, last * 0.95) << m;
    last = total;
  }
}

}  // namespace
}  // namespace qcutlass
