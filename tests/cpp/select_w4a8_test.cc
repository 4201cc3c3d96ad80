// Selection of products of 4-bit weights by 8-bit activations.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "plan/footprint.h"
#include "plan/problem.h"
#include "qcutlass/error.h"
#include "qcutlass/gemm.h"
#include "selection.h"

namespace qcutlass {
namespace {

using namespace selection;

constexpr DType kI8 = DType::kInt8, kE4M3 = DType::kFloat8E4M3;

GemmArguments problem(int64_t m, int64_t n, int64_t k, DType type = kI8, int64_t group_size = 128) {
  GemmArguments a = weight_only_problem(m, n, k, group_size, type);
  a.weights.scale_type = DType::kFloat16;
  a.out_type = DType::kBFloat16;
  return a;
}

bool is_wgmma(std::string const& tactic) { return tactic.find("_sm90a_") != std::string::npos; }

TEST(SelectW4A8, GroupsHaveScaleModes) {
  EXPECT_EQ(make_problem(problem(1, 64, 4096)).kind.mode, ScaleMode::kGroup);
  EXPECT_EQ(make_problem(problem(1, 64, 4096, kI8, 4096)).kind.mode, ScaleMode::kGroup);
  EXPECT_EQ(make_problem(problem(1, 64, 4096, kI8, 96)).kind.mode, ScaleMode::kGroup32);
  EXPECT_EQ(select(problem(1, 64, 4096), kA100).tactic.rfind("w4a8_s8_group_sm80_", 0), 0u);
  EXPECT_EQ(select(problem(1, 64, 4096, kE4M3, 32), kRtx4090).tactic.rfind("w4a8_e4m3_group32_sm89_", 0), 0u);
  EXPECT_THROW(select(problem(1, 64, 4096, kI8, 48), kA100), Unsupported);
}

TEST(SelectW4A8, WgmmaIsTheChoiceWhereItIs) {
  for (DType type : {kI8, kE4M3})
    for (int64_t group : {32, 128})
      for (Shape shape : kShapes)
        for (int64_t m : kTokens) {
          GemmArguments a = problem(m, shape.first, shape.second, type, group);
          EXPECT_TRUE(is_wgmma(select(a, kH200Wgmma).tactic)) << m << " x " << shape.first << " x " << shape.second;
          EXPECT_FALSE(is_wgmma(select(a, kH200).tactic));
          a.batch_invariant = true;
          EXPECT_TRUE(is_wgmma(select(a, kH200Wgmma).tactic)) << m << " x " << shape.first << " x " << shape.second;
        }
}

TEST(SelectW4A8, EveryTacticCanBeNamedThere) {
  for (DType type : {kI8, kE4M3})
    for (int64_t group : {32, 128}) {
      GemmArguments const a = problem(300, 4096, 4096, type, group);
      std::set<std::string> names;
      int others = 0;
      for (TacticTraits const& t : tactics(a)) {
        EXPECT_TRUE(names.insert(t.name).second) << t.name;
        EXPECT_FALSE(t.superseded) << t.name;
        EXPECT_EQ(select(a, kH200Wgmma, t.name).tactic, t.name);
        if (t.wgmma) continue;
        ++others;
        EXPECT_LE(t.shared_memory, 99 * 1024) << t.name << " is for GPUs of 8.6 and 8.9, too";
      }
      EXPECT_EQ(others, 3);
    }
}

TEST(SelectW4A8, EveryShapeHasAPlanOnEveryGpuWithInstructions) {
  for (DeviceTraits const& gpu : kDevices)
    for (DType type : {kI8, kE4M3})
      for (int64_t m : {1, 17, 64, 300, 5000})
        for (int64_t n : {1, 100, 4096})
          for (int64_t k : {1, 129, 4096})
            for (int64_t group : {int64_t{32}, int64_t{96}, int64_t{128}, int64_t{4096}}) {
              GemmArguments const a = problem(m, n, k, type, group);
              if (has_instructions(a, gpu))
                EXPECT_NO_THROW(select(a, gpu));
              else
                EXPECT_THROW(select(a, gpu), Unsupported);
            }
}

TEST(SelectW4A8, LargeTilesServePrefill) {
  for (DeviceTraits const& gpu : {kA100, kRtx3090, kRtx4090}) {
    EXPECT_NE(select(problem(1, 8192, 8192), gpu).tactic.find("_n64m16k"), std::string::npos);
    EXPECT_NE(select(problem(4096, 8192, 8192), gpu).tactic.find("_n128m128k"), std::string::npos);
  }
}

}  // namespace
}  // namespace qcutlass
