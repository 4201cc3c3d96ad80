// Selection among the kernels of asynchronous MMAs.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "plan/footprint.h"
#include "plan/gpu_class.h"
#include "plan/shared_tiles.h"
#include "plan/tactics.h"
#include "qcutlass/gemm.h"
#include "selection.h"

namespace qcutlass {
namespace {

using namespace selection;

bool is_wgmma(GemmArguments const& a, DeviceTraits const& device) {
  return traits_of(a, select(a, device).tactic).wgmma;
}

TEST(Wgmma, SharesTheLastWave) {
  std::string const tactic = "w4a16_f16_native_sm90a_n128m160k128_s4";
  for (int64_t m : {300, 320}) {
    // 448 tiles on 132 SMs are three waves and 52 tiles, the last 26 of 128 channels: a cluster of two for each of
    // them.
    Plan const pairs = select(weight_only_problem(m, 28672, 4096), kH200Wgmma);
    EXPECT_EQ(pairs.tactic, tactic);
    EXPECT_EQ(pairs.split_k, 2);
    EXPECT_TRUE(pairs.cluster);
    EXPECT_EQ(pairs.shared_channel, 28672 - 26 * 128);
    EXPECT_EQ(pairs.shared_token, 0);
    EXPECT_EQ(pairs.workspace_bytes, 0u);
    // Of 172 tiles 40 are left, for three blocks each. Clusters of three leave SMs of an H200 out.
    Plan const threes = select(weight_only_problem(m, 11008, 4096), kH200Wgmma, tactic, 3);
    EXPECT_FALSE(threes.cluster);
    EXPECT_EQ(threes.shared_channel, 11008 - 20 * 128);
    EXPECT_EQ(threes.workspace_bytes, size_t(3) * m * 20 * 128 * 4);
  }
  // Blocks of a pair begin with a tile at once if what comes before are pairs: not after 131 of 11 x 13 tiles.
  Plan const odd =
      select(weight_only_problem(13 * 64, 11 * 128, 4096), kH200Wgmma, "w4a16_f16_native_sm90a_n128m64k128_s8", 2);
  EXPECT_EQ(odd.shared_channel, 7 * 128);
  EXPECT_FALSE(odd.cluster);
  // Nor where an SM would be without a neighbour; threes leave out SMs even where there are few tiles.
  DeviceTraits neighbourless = kH200Wgmma;
  neighbourless.sm_count = 131;
  EXPECT_FALSE(
      select(weight_only_problem(64, 140 * 128, 4096), neighbourless, "w4a16_f16_native_sm90a_n128m64k128_s8", 2)
          .cluster);
  EXPECT_TRUE(
      select(weight_only_problem(64, 140 * 128, 4096), kH200Wgmma, "w4a16_f16_native_sm90a_n128m64k128_s8", 2).cluster);
  EXPECT_FALSE(
      select(weight_only_problem(64, 140 * 128, 4096), kH200Wgmma, "w4a16_f16_native_sm90a_n128m64k128_s8", 3).cluster);
  // Tiles of tokens come in groups, of four here and then three: 224 * 7 = 11 * 132 + 116.
  Plan const grouped =
      select(weight_only_problem(7 * 256, 28672, 4096), kH200Wgmma, "w4a16_f16_native_sm90a_n128m256k64_s4", 2);
  EXPECT_EQ(grouped.shared_token, 4 * 256);
  EXPECT_EQ(grouped.shared_channel, 28672 - 39 * 128);
  EXPECT_FALSE(grouped.cluster) << "117 pairs are more than there are SMs for";
  // Whole waves have no last one.
  Plan const whole =
      select(weight_only_problem(64, 2 * 132 * 128, 4096), kH200Wgmma, "w4a16_f16_native_sm90a_n128m64k128_s8", 2);
  EXPECT_EQ(whole.split_k, 1);
  EXPECT_EQ(whole.workspace_bytes, 0u);
}

TEST(Wgmma, KnowsTheBusiestBlockOfASharedLastWave) {
  Tactic const& t = *std::find_if(std::begin(kTactics), std::end(kTactics), [](Tactic const& t) {
    return t.mainloop == Mainloop::kWgmmaRs && t.channels == 128 && t.tokens == 64;
  });
  auto const busiest = [&t](int64_t m, int64_t channel_tiles, int split_k) {
    return SharedTiles(make_problem(weight_only_problem(m, channel_tiles * 128, 4096)), kH200Wgmma, t, split_k)
        .busiest(132, split_k, 32);
  };
  EXPECT_EQ(busiest(64, 140, 2), 32 + 16);  // a tile and one of 8 x 2 shares
  EXPECT_EQ(busiest(64, 140, 3), 32 + 11);  // the longest share of 32 stages
  // 131 tiles are whole: the block after them begins with the first of 12 x 11 shares and has no second one.
  EXPECT_EQ(busiest(13 * 64, 11, 11), 32 + 3);
  EXPECT_EQ(busiest(13 * 64, 11, 2), 32 + 16);
}

TEST(Wgmma, IsOfferedWhereItsCodeRuns) {
  for (int64_t m : {1, 64, 4096})
    for (DeviceTraits const& device : kDevices) {
      GemmArguments const a = weight_only_problem(m, 8192, 8192);
      bool offered = false;
      for (Candidate const& c : candidates(a, device)) offered |= traits_of(a, c.plan.tactic).wgmma;
      EXPECT_EQ(offered, device.wgmma) << m;
    }
}

TEST(Wgmma, IsChosenFromSomeNumberOfTokensUp) {
  for (auto [n, k] : kShapes)
    for (int64_t m : kTokens)
      for (DType type : {DType::kFloat16, DType::kBFloat16})
        for (Packing packing : {Packing::kW4A16, Packing::kW8A16}) {
          bool const chosen = is_wgmma(weight_only_problem(m, n, k, 128, type, packing), kH200Wgmma);
          EXPECT_FALSE(chosen && m < 16) << m << " tokens, " << n << " x " << k;
          EXPECT_TRUE(chosen || m < 128) << m << " tokens, " << n << " x " << k;
        }
}

TEST(Wgmma, SharesKInClustersThatHaveRoomForTheSums) {
  GemmArguments const a = weight_only_problem(128, 512, 32768);
  for (TacticTraits const& t : tactics(a))
    if (t.wgmma) {
      for (int blocks = 2; blocks <= 7; ++blocks) {
        Plan const plan = select(a, kH200Wgmma, t.name, blocks);
        EXPECT_EQ(plan.cluster, may_cluster(kTactics[plan.row], make_problem(a).kind, blocks)) << t.name;
        if (!plan.cluster) EXPECT_GE(plan.workspace_bytes, size_t(blocks) * 128 * 512 * 4) << t.name;
      }
    }
}

TEST(Wgmma, ClustersThatDoNotRunAtOnceGoThroughMemory) {
  GemmArguments const a = weight_only_problem(64, 4096, 14336);  // 32 tiles of 128 channels; 39 clusters of 3, 30 of 4
  std::string const tactic = "w4a16_f16_native_sm90a_n128m64k128_s8";
  EXPECT_TRUE(select(a, kH200Wgmma, tactic, 3).cluster);
  Plan const plan = select(a, kH200Wgmma, tactic, 4);
  EXPECT_FALSE(plan.cluster);
  EXPECT_EQ(plan.workspace_bytes, size_t{4} * 64 * 4096 * 4);
  EXPECT_TRUE(select(weight_only_problem(64, 8192, 8192), kH200Wgmma, tactic, 4).cluster)
      << "several rounds either way";
  for (int blocks = 2; blocks <= 8; ++blocks) EXPECT_LE(resident_clusters(132, blocks) * blocks, 132);
}

TEST(Wgmma, RingsHoldWholePairsOfBatches) {
  constexpr Kind kKinds[] = {
      {DType::kFloat16, Packing::kW4A16, ScaleMode::kNative}, {DType::kFloat16, Packing::kW4A16, ScaleMode::kFine},
      {DType::kFloat16, Packing::kW4A16, ScaleMode::kFloat},  {DType::kFloat16, Packing::kW8A16, ScaleMode::kNative},
      {DType::kFloat16, Packing::kW8A16, ScaleMode::kFine},   {DType::kFloat16, Packing::kW8A16, ScaleMode::kFloat},
      {DType::kInt8, Packing::kW8A8, ScaleMode::kNone},       {DType::kInt8, Packing::kW8A8, ScaleMode::kBlock}};
  int rings = 0;
  for (Kind const& kind : kKinds)
    for (Tactic const& t : kTactics)
      if (is_wgmma(t.mainloop) && t.serves(kind)) {
        int const stages = stages_of(t, kind), steps = t.stage_k(kind.packing) / step_k(kind.packing);
        EXPECT_GE(stages, 3);
        EXPECT_LE(stages, std::max(t.stages, 4));
        EXPECT_EQ(stages * (steps / wgmma_batch(t, kind.packing)) % 2, 0);
        ++rings;
      }
  EXPECT_GT(rings, 50);
}

/// Times on an H200, microseconds: fp16, 4-bit codes in groups of 128. A row is of one run.
TEST(Wgmma, ChoicesAreAmongTheBestMeasured) {
  std::vector<Measured> const rows = {
      {4096, 4096, 64, {{"n128m64k128", 4, 9.35}, {"n128m96k128", 4, 9.58}, {"n128m64k128", 3, 9.86}}},
      {4096, 4096, 96, {{"n128m96k128", 4, 10.3}, {"n128m128k128", 4, 11.1}, {"n128m96k128", 3, 11.5}}},
      {4096, 4096, 192, {{"n128m96k128", 2, 14.1}, {"n128m192k64", 4, 15.9}, {"n128m128k128", 2, 16.2}}},
      {4096, 4096, 256, {{"n128m128k128", 2, 16.6}, {"n128m64k128", 1, 17.1}, {"n256m64k128", 2, 18.6}}},
      {4096, 4096, 300, {{"n128m160k128", 2, 19.5}, {"n128m96k128", 1, 20.3}, {"n128m192k64", 2, 22.1}}},
      {4096, 4096, 512, {{"n128m128k128", 1, 24.4}, {"n256m128k64", 2, 28.2}, {"n256m64k128", 1, 28.6}}},
      {4096, 4096, 640, {{"n128m160k128", 1, 29.2}, {"n128m192k64", 1, 33.7}, {"n128m128k128", 4, 35.1}}},
      {6144, 4096, 256, {{"n128m128k128", 1, 22.7}, {"n128m96k128", 8, 26.2}, {"n256m128k64", 2, 26.2}}},
      {6144, 4096, 300, {{"n128m160k128", 1, 26.9}, {"n256m64k128", 1, 28.4}, {"n128m192k64", 1, 31.3}}},
      {11008, 4096, 256, {{"n128m128k128", 3, 37}, {"n128m128k128", 2, 39.3}, {"n128m96k128", 1, 39.4}}},
      {11008, 4096, 300, {{"n128m160k128", 3, 43.2}, {"n256m128k64", 1, 46}, {"n128m160k128", 2, 46.2}}},
      {28672, 4096, 24, {{"n256m32k128", 1, 24.1}, {"n128m32k128", 1, 28.1}, {"n256m64k128", 1, 29.0}}},
      {28672, 4096, 32, {{"n256m32k128", 1, 24.2}, {"n128m32k128", 1, 28.3}, {"n256m64k128", 1, 28.9}}},
      {28672, 4096, 64, {{"n256m64k128", 1, 30.8}, {"n128m64k128", 1, 33.6}, {"n128m96k128", 1, 39.3}}},
      {28672, 4096, 96, {{"n128m96k128", 1, 40}, {"n256m128k64", 1, 44.6}, {"n128m128k128", 1, 45.8}}},
      {28672, 4096, 128, {{"n256m128k64", 1, 44.9}, {"n128m128k128", 1, 46.6}, {"n256m64k128", 1, 56.5}}},
      {28672, 4096, 129, {{"n128m160k128", 1, 54.4}, {"n128m192k64", 1, 63.4}, {"n128m96k128", 2, 70}}},
      {28672, 4096, 192, {{"n128m192k64", 1, 65.2}, {"n128m96k128", 1, 76.9}, {"n256m64k128", 1, 83.4}}},
      {28672, 4096, 224, {{"n128m224k64", 1, 75.2}, {"n128m256k64", 1, 83.8}, {"n128m128k128", 2, 86.6}}},
      {28672, 4096, 256, {{"n128m256k64", 1, 84.1}, {"n128m128k128", 2, 87.9}, {"n256m128k64", 1, 88.3}}},
      {28672, 4096, 300, {{"n128m160k128", 2, 103}, {"n128m160k128", 1, 109}, {"n128m192k64", 2, 120}}},
      {28672, 4096, 448, {{"n128m224k64", 2, 142}, {"n128m160k128", 8, 150}, {"n128m224k64", 1, 150}}},
      {28672, 4096, 512, {{"n128m256k64", 2, 160}, {"n128m128k128", 1, 164}, {"n256m128k64", 2, 165}}},
      {4096, 14336, 32, {{"n256m32k128", 8, 16.3}}},
      {4096, 14336, 64, {{"n128m64k128", 4, 18.7}, {"n256m64k128", 8, 20.1}, {"n128m96k128", 4, 20.5}}},
      {4096, 14336, 96, {{"n128m96k128", 4, 21.7}, {"n128m128k128", 4, 24.4}, {"n128m96k128", 3, 26}}},
      {4096, 14336, 128, {{"n128m128k128", 4, 26.2}, {"n256m128k64", 8, 29.2}, {"n128m128k128", 3, 30.1}}},
      {4096, 14336, 160, {{"n128m160k128", 4, 30.5}, {"n128m192k64", 4, 34.1}, {"n128m96k128", 2, 35.9}}},
      {4096, 14336, 192, {{"n128m192k64", 4, 35.1}, {"n128m96k128", 2, 37}, {"n128m192k64", 3, 42}}},
      {4096, 14336, 256, {{"n128m128k128", 2, 43.9}, {"n128m256k64", 4, 45.4}, {"n256m128k64", 4, 47.5}}},
      {4096, 14336, 300, {{"n128m160k128", 2, 52.1}, {"n128m192k64", 2, 60.2}, {"n128m96k128", 1, 65.4}}},
      {8192, 8192, 32, {{"n256m32k128", 4, 17.4}, {"n256m64k128", 4, 19.7}, {"n128m64k128", 2, 19.9}}},
      {8192, 8192, 96, {{"n128m96k128", 2, 23.8}, {"n128m128k128", 2, 27.2}, {"n256m128k64", 4, 30.1}}},
      {8192, 8192, 128, {{"n128m128k128", 2, 27.7}, {"n256m128k64", 4, 31.7}, {"n256m64k128", 2, 32.3}}},
      {8192, 8192, 160, {{"n128m160k128", 2, 33}, {"n128m192k64", 2, 37.7}, {"n128m96k128", 1, 38.8}}},
      {8192, 8192, 300, {{"n128m160k128", 1, 55.4}, {"n128m192k64", 1, 65.2}, {"n128m128k128", 2, 72.4}}},
      {8192, 8192, 448, {{"n128m224k64", 1, 76}, {"n128m256k64", 1, 85.8}, {"n128m160k128", 2, 87}}},
      {8192, 8192, 1024, {{"n128m256k64", 1, 173}, {"n256m128k64", 1, 179}, {"n128m128k128", 1, 184}}},
  };
  expect_choices_among_the_best([](int64_t m, int64_t n, int64_t k) { return weight_only_problem(m, n, k); }, rows);
}

}  // namespace
}  // namespace qcutlass
