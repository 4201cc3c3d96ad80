// Selection of blockwise int8 products: the same pure function over the same table.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "plan/cost_model.h"
#include "plan/workspace.h"
#include "qcutlass/error.h"
#include "qcutlass/gemm.h"
#include "selection.h"

namespace qcutlass {
namespace {

using namespace selection;

GemmArguments problem(int64_t m, int64_t n, int64_t k, int64_t size = 128, int64_t out_size = 0) {
  GemmArguments a = unscaled_problem(m, n, k, DType::kInt8, Packing::kW8A8);
  a.out_type = out_size != 0 ? DType::kInt8 : DType::kFloat16;
  a.blocks.size = size;
  a.quantized.size = out_size;
  return a;
}

TEST(SelectBlockwise, SizesHaveScaleModes) {
  EXPECT_EQ(make_problem(problem(1, 64, 4096)).kind.mode, ScaleMode::kBlock);
  EXPECT_EQ(make_problem(problem(1, 64, 4096, 64)).kind.mode, ScaleMode::kBlock64);
  EXPECT_EQ(make_problem(problem(1, 64, 4096, 32)).kind.mode, ScaleMode::kBlock32);
  EXPECT_EQ(select(problem(1, 64, 4096), kH200).tactic.rfind("w8a8_s8_block_sm80_", 0), 0u);
  EXPECT_EQ(select(problem(1, 64, 4096, 32), kH200).tactic.rfind("w8a8_s8_block32_sm80_", 0), 0u);
}

TEST(SelectBlockwise, AsynchronousMmasServeManyTokensInBlocksOf128) {
  auto const is_wgmma = [](GemmArguments const& a, DeviceTraits const& gpu) {
    return select(a, gpu).tactic.find("_sm90a_") != std::string::npos;
  };
  for (int64_t out : {0, 128})
    for (int64_t m : {1, 16, 512, 4096}) {
      EXPECT_EQ(is_wgmma(problem(m, 8192, 8192, 128, out), kH200Wgmma), m >= 512) << m;
      EXPECT_FALSE(is_wgmma(problem(m, 8192, 8192, 128, out), kH200));
      for (int64_t small : {32, 64}) EXPECT_FALSE(is_wgmma(problem(m, 8192, 8192, small, out), kH200Wgmma));
    }
}

TEST(SelectBlockwise, NamesAreUnique) {
  for (int64_t size : {32, 64, 128}) {
    std::set<std::string> names;
    for (TacticTraits const& t : tactics(problem(16, 4096, 4096, size)))
      EXPECT_TRUE(names.insert(t.name).second) << t.name;
    EXPECT_FALSE(names.empty());
  }
}

TEST(SelectBlockwise, EveryShapeHasAPlanOnEveryGpu) {
  for (DeviceTraits const& gpu : {kA100, kRtx3090, kH200})
    for (int64_t m : {1, 17, 64, 300, 5000})
      for (int64_t n : {1, 100, 4096})
        for (int64_t k : {1, 129, 4096})
          for (int64_t size : {32, 64, 128})
            for (int64_t out : {0, 32, 64, 128}) EXPECT_NO_THROW(select(problem(m, n, k, size, out), gpu));
}

TEST(SelectBlockwise, QuantizedBlocksOfChannelsLieWithinATile) {
  for (int64_t out : {32, 64, 128}) {
    size_t count = 0;
    for (Candidate const& c : candidates(problem(8, 4096, 4096, 128, out), kH200))
      for (TacticTraits const& t : tactics(problem(8, 4096, 4096)))
        if (t.name == c.plan.tactic) {
          EXPECT_EQ(t.channels % out, 0) << t.name;
          ++count;
        }
    EXPECT_GT(count, 0u);
  }
  EXPECT_THROW(select(problem(8, 4096, 4096, 128, 128), kH200, "w8a8_s8_block_sm80_stream_n64m32k512w8_s3"),
               Unsupported);
  EXPECT_NO_THROW(select(problem(8, 4096, 4096, 128, 0), kH200, "w8a8_s8_block_sm80_stream_n64m32k512w8_s3"));
}

TEST(SelectBlockwise, PartialSumsHaveRoomForWholeBlocksOfChannels) {
  Plan plan;
  plan.split_k = 2;
  EXPECT_EQ(Workspace(make_problem(problem(8, 100, 4096)), plan).partial_stride, 104);
  EXPECT_EQ(Workspace(make_problem(problem(8, 100, 4096, 128, 64)), plan).partial_stride, 128);
}

TEST(SelectBlockwise, PromotionTakesTime) {
  GemmArguments plain = problem(4096, 8192, 8192);
  plain.blocks = {};
  double const scaled = candidates(plain, kH200).front().cost.compute;
  double const block = candidates(problem(4096, 8192, 8192), kH200).front().cost.compute;
  double const fine = candidates(problem(4096, 8192, 8192, 32), kH200).front().cost.compute;
  EXPECT_GT(block, scaled);
  EXPECT_GT(fine, 1.5 * block);
}

TEST(SelectBlockwise, LongSumsAreFine) {  // no sum of more than 128 products is an integer
  EXPECT_NO_THROW(select(problem(1, 16, kMaxInt8K + 1), kH200));
}

TEST(SelectBlockwise, RefusesWhatKernelsWouldGetWrong) {
  EXPECT_THROW(select(problem(8, 256, 256, 48), kH200), InvalidArgument);
  EXPECT_THROW(select(problem(8, 256, 256, 256), kH200), InvalidArgument);
  EXPECT_THROW(select(problem(8, 256, 256, 128, 16), kH200), InvalidArgument);
  auto const with = [](auto change) {
    GemmArguments a = problem(8, 256, 256);
    change(a);
    return a;
  };
  auto const out_int8 = with([](GemmArguments& a) { a.out_type = DType::kInt8; });
  EXPECT_THROW(select(out_int8, kH200), InvalidArgument);
  auto const out_int32 = with([](GemmArguments& a) { a.out_type = DType::kInt32; });
  EXPECT_THROW(select(out_int32, kH200), InvalidArgument);
  auto const out_none = with([](GemmArguments& a) { a.out_type = DType::kNone; });
  EXPECT_THROW(select(out_none, kH200), InvalidArgument);
  auto const both = with([](GemmArguments& a) { a.quantized.size = 128; });
  EXPECT_THROW(select(both, kH200), InvalidArgument);
  auto const small_float8 = [](GemmArguments& a) { a.a_type = DType::kFloat8E4M3, a.blocks.size = 64; };
  EXPECT_THROW(select(with(small_float8), kH200), Unsupported);
  auto const quantized_float8 = [](GemmArguments& a) { a.a_type = DType::kFloat8E4M3, a.quantized.size = 128; };
  EXPECT_THROW(select(with(quantized_float8), kH200), Unsupported);
  auto const e5m2 = [](GemmArguments& a) { a.a_type = DType::kFloat8E5M2; };
  EXPECT_THROW(select(with(e5m2), kH200), Unsupported);
  auto const weight_only = with([](GemmArguments& a) { a.weights.packing = Packing::kW8A16; });
  EXPECT_THROW(select(weight_only, kH200), Unsupported);
  GemmArguments not_blockwise = problem(8, 256, 256, 0, 128);
  EXPECT_THROW(select(not_blockwise, kH200), Unsupported);
}

}  // namespace
}  // namespace qcutlass
