// Selection of batch-invariant products: one order of sums for each kind, N, K and GPU, whatever the number of rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "plan/sum_order.h"
#include "qcutlass/error.h"
#include "qcutlass/gemm.h"
#include "selection.h"

namespace qcutlass {
namespace {

using namespace selection;

constexpr int64_t kRows[] = {1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 127, 128, 129, 500, 2048, 5000, 100000};
constexpr Shape kOthers[] = {{4096, 4096}, {28672, 4096}, {4096, 14336}, {1536, 576}, {1, 1}, {97, 1000}, {192, 65536}};

/// A product of every kind that adds in floating point.
std::vector<GemmArguments> kinds(int64_t m, int64_t n, int64_t k) {
  std::vector<GemmArguments> result = products_of_every_kind(m, n, k);
  for (GemmArguments& a : result) a.batch_invariant = true;
  return result;
}

SumOrder order_of(GemmArguments const& a, Plan const& plan) {
  return sum_order(make_problem(a).kind, a.activation, plan.row, plan.split_k);
}

TEST(SelectInvariant, HasOneOrderOfSumsForEveryNumberOfRows) {
  for (DeviceTraits const& device : kDevices)
    for (auto [n, k] : kOthers) {
      std::vector<GemmArguments> const firsts = kinds(1, n, k);
      for (size_t i = 0; i < firsts.size(); ++i) {
        if (!has_instructions(firsts[i], device)) continue;
        Plan const first = select(firsts[i], device, {}, 0, true);
        EXPECT_FALSE(first.dense);
        for (int64_t m : kRows) {
          GemmArguments const a = kinds(m, n, k)[i];
          for (Candidate const& c : candidates(a, device, {}, 0, true)) {
            EXPECT_TRUE(order_of(a, c.plan) == order_of(firsts[i], first))
                << m << " rows, " << n << " x " << k << ": " << c.plan.tactic << " is not " << first.tactic;
            EXPECT_EQ(c.plan.cluster, first.cluster) << "shares of k are added elsewhere";
            EXPECT_EQ(c.plan.shared_channel + c.plan.shared_token, 0) << "some tiles share k, others do not";
          }
        }
      }
    }
}

/// What the test above is for: without the flag orders follow the rows.
TEST(SelectInvariant, OrdersDifferOtherwise) {
  for (DeviceTraits const& device : kDevices) {
    GemmArguments const few = weight_only_problem(1, 4096, 4096), many = weight_only_problem(2048, 4096, 4096);
    EXPECT_FALSE(order_of(few, select(few, device)) == order_of(many, select(many, device)));
  }
}

/// A tile is chosen among those of the order by the number of rows.
TEST(SelectInvariant, TilesFollowTheRowsWhereTheirSumsAgree) {
  GemmArguments few = weight_only_problem(1, 4096, 4096), many = weight_only_problem(2048, 4096, 4096);
  few.batch_invariant = many.batch_invariant = true;
  EXPECT_LT(traits_of(few, select(few, kA100).tactic).tokens, traits_of(many, select(many, kA100).tactic).tokens);
}

TEST(SelectInvariant, Int8SumsAreExactInAnyOrder) {
  for (int64_t m : {1, 64, 4096}) {
    GemmArguments a = eight_bits_problem(m, 4096, 4096, DType::kInt8);
    std::string const free = select(a, kH200Wgmma).tactic;
    a.batch_invariant = true;
    EXPECT_EQ(select(a, kH200Wgmma).tactic, free);
  }
  GemmArguments few = eight_bits_problem(1, 4096, 4096, DType::kInt8),
                many = eight_bits_problem(4096, 4096, 4096, DType::kInt8);
  for (GemmArguments* a : {&few, &many}) a->activation = Activation::kGeluTanh, a->batch_invariant = true;
  EXPECT_EQ(select(few, kH200Wgmma).tactic, select(many, kH200Wgmma).tactic) << "its epilogue is compiled anew";
}

TEST(SelectInvariant, TakesWhatIsForcedIfItIsInvariant) {
  GemmArguments a = weight_only_problem(2000, 4096, 4096);
  a.batch_invariant = true;
  for (TacticTraits const& t : tactics(a)) {
    if (t.shared_memory > kH200Wgmma.shared_memory_per_block) continue;
    DeviceTraits const& gpu = t.superseded ? kH200 : kH200Wgmma;
    std::vector<Candidate> const all = candidates(a, gpu, t.name);
    ASSERT_EQ(all.size(), 1u) << t.name;
    EXPECT_EQ(all[0].plan.tactic, t.name);
    EXPECT_EQ(select(a, gpu, t.name, 2).split_k, 2);
    if (t.wgmma) {
      Tactic const& tactic = kTactics[all[0].plan.row];
      for (int blocks = 2; blocks <= kMostWgmmaCluster; ++blocks) {
        if (!may_cluster(tactic, make_problem(a).kind, blocks)) {
          EXPECT_THROW(select(a, gpu, t.name, blocks), Unsupported) << "no room for what they exchange";
          continue;
        }
        Plan const plan = select(a, gpu, t.name, blocks);
        EXPECT_TRUE(plan.cluster) << "one kernel adds and finishes sums";
        EXPECT_EQ(plan.shared_channel + plan.shared_token, 0) << "all tiles share k, whatever their number";
      }
      EXPECT_THROW(select(a, gpu, t.name, kMostWgmmaCluster + 1), Unsupported) << "more than a cluster's blocks";
    }
  }
  EXPECT_EQ(select(a, kH200Wgmma, {}, 4).split_k, 4);
  EXPECT_THROW(select(a, kH200Wgmma, dense_tactic(a), 0, true), Unsupported) << "the order is that of a library";
}

TEST(SelectInvariant, ClustersHaveRoomForWhatTheyExchange) {
  for (GemmArguments const& a : kinds(1, 4096, 4096)) {
    Kind const kind = make_problem(a).kind;
    for (Tactic const& t : kTactics) {
      if (!is_wgmma(t.mainloop) || !is_compiled(t, kind)) continue;
      for (int blocks : {1, 2, 3, 4}) EXPECT_TRUE(may_cluster(t, kind, blocks)) << t.channels << " x " << t.tokens;
      EXPECT_FALSE(may_cluster(t, kind, kMostWgmmaCluster + 1));
      // Five blocks of 128 x 256 finish 4 of 16 parts of 8 KB at most, each by the sums of five: 160 KB of a ring.
      EXPECT_TRUE(t.channels * t.tokens >= 128 * 256 || (may_cluster(t, kind, 5) && may_cluster(t, kind, 6)))
          << t.channels << " x " << t.tokens;
    }
  }
  Kind const kind = make_problem(weight_only_problem(1, 4096, 4096)).kind;
  for (Tactic const& t : kTactics) {
    if (t.mainloop != Mainloop::kWgmmaRs || !is_compiled(t, kind)) continue;
    EXPECT_EQ(may_cluster(t, kind, 5), t.channels != 128 || t.tokens != 256) << "148 KB";
    EXPECT_EQ(may_cluster(t, kind, 6), t.channels != 256 || t.tokens != 128) << "177 KB for 192";
  }
}

/// Rows of the table whose sums have one order by five and six blocks, of which some have no room for them.
TEST(SelectInvariant, SharesOfForcedNumbersAreAddedInOneKernel) {
  for (int64_t m : {1, 256, 1000})
    for (GemmArguments const& a : kinds(m, 128, 512))
      for (int blocks = 2; blocks <= kMostWgmmaCluster && has_instructions(a, kH200Wgmma); ++blocks)
        for (Candidate const& c : candidates_by(a, kH200Wgmma, blocks))
          EXPECT_TRUE(c.plan.cluster || !is_wgmma(kTactics[c.plan.row].mainloop)) << c.plan.tactic << " by " << blocks;
}

TEST(SumOrder, IsSharedOnlyByTilesWithTheSameSlices) {
  for (GemmArguments const& a : kinds(1, 4096, 4096)) {
    Kind const kind = make_problem(a).kind;
    for (int row = 0; row < kTacticCount; ++row)
      for (int other = 0; other < row; ++other) {
        Tactic const &t = kTactics[row], &u = kTactics[other];
        if (!t.serves(kind) || !u.serves(kind)) continue;
        if (!(sum_order(kind, a.activation, row, 2) == sum_order(kind, a.activation, other, 2))) continue;
        EXPECT_EQ(t.mainloop, u.mainloop);
        EXPECT_NE(t.mainloop, Mainloop::kWgmmaSs);
        EXPECT_FALSE(kind.is_promoted());
        EXPECT_EQ(t.stage_k(kind.packing), u.stage_k(kind.packing)) << "shares of k are cut elsewhere";
        EXPECT_EQ(t.slices, u.slices);
      }
    for (int row = 0; row < kTacticCount; ++row)
      EXPECT_FALSE(sum_order(kind, a.activation, row, 2) == sum_order(kind, a.activation, row, 4));
  }
}

}  // namespace
}  // namespace qcutlass
