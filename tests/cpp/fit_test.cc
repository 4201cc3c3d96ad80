// Plans are refused for products that they were not made for.
#include "plan/fit.h"

#include <gtest/gtest.h>

#include "plan/footprint.h"
#include "plan/gpu_class.h"
#include "qcutlass/error.h"
#include "qcutlass/gemm.h"
#include "selection.h"

namespace qcutlass {
namespace {

using namespace selection;

bool fits(GemmArguments const& a, DeviceTraits const& device, Plan const& plan) {
  try {
    check_plan(make_problem(a), device, plan);
  } catch (InvalidArgument const&) {
    return false;
  }
  return true;
}

TEST(CheckPlan, TakesWhatWasSelected) {
  for (DeviceTraits const& device : kDevices)
    for (auto const& [n, k] : {Shape{4096, 4096}, Shape{192, 65536}, Shape{96, 1024}})
      for (int64_t m : {1, 9, 64, 300, 5000})
        for (bool invariant : {false, true})
          for (GemmArguments a : products_of_every_kind(m, n, k)) {
            if (!has_instructions(a, device)) continue;
            a.batch_invariant = invariant;
            for (Candidate const& c : candidates(a, device))
              EXPECT_TRUE(fits(a, device, c.plan)) << c.plan.tactic << " x " << c.plan.split_k;
          }
}

TEST(CheckPlan, RefusesAnotherProductOrGpu) {
  for (DeviceTraits const& device : kDevices) {
    GemmArguments const product = weight_only_problem(64, 256, 16384);
    for (Candidate const& c : candidates(product, device)) {
      Plan plan = c.plan;
      GemmArguments other = product;
      other.weights.k = 64;  // fewer stages than shares of k, an endless wait in a kernel
      EXPECT_EQ(fits(other, device, plan), plan.split_k == 1) << plan.tactic << " x " << plan.split_k;
      other = product;
      other.experts.count = 8, other.experts.a_rows = other.m;
      EXPECT_TRUE(!fits(other, device, plan) || plan.split_k == 1) << plan.tactic;
      DeviceTraits small = device;
      small.shared_memory_per_block = 1024;
      EXPECT_FALSE(fits(product, small, plan)) << plan.tactic;
      plan.split_k = 0;
      EXPECT_FALSE(fits(product, device, plan)) << plan.tactic;
    }
  }
}

TEST(CheckPlan, RefusesKindsWithoutSuchAKernel) {
  int refused = 0;
  for (GemmArguments const& a : products_of_every_kind(300, 4096, 4096))
    for (GemmArguments const& other : products_of_every_kind(300, 4096, 4096))
      for (Candidate const& c : candidates(a, kH200Wgmma)) {
        bool const has = has_kernel(make_problem(other), kTactics[c.plan.row]);
        refused += !has;
        EXPECT_TRUE(has || !fits(other, kH200Wgmma, c.plan)) << c.plan.tactic;
      }
  EXPECT_GT(refused, 0);
}

TEST(CheckPlan, ClustersHaveRoomForWhatTheyExchange) {
  int refused = 0;
  for (GemmArguments const& a : products_of_every_kind(200, 1024, 16384))
    for (GemmArguments const& other : products_of_every_kind(200, 1024, 16384))
      for (int blocks : {5, 6})
        for (Candidate const& c : candidates_by(a, kH200Wgmma, blocks)) {
          Tactic const& t = kTactics[c.plan.row];
          if (!c.plan.cluster || !is_wgmma(t.mainloop) || may_cluster(t, make_problem(other).kind, blocks)) continue;
          refused += has_kernel(make_problem(other), t);
          EXPECT_FALSE(fits(other, kH200Wgmma, c.plan)) << c.plan.tactic << " by " << blocks;
        }
  EXPECT_GT(refused, 0);
}

TEST(CheckPlan, ClustersHaveAtMostEightBlocks) {
  GemmArguments const a = weight_only_problem(1, 64, 65536);
  int through_memory = 0;
  for (Candidate c : candidates_by(a, kH200, 16)) {
    ++through_memory;
    EXPECT_TRUE(fits(a, kH200, c.plan)) << c.plan.tactic;
    c.plan.cluster = true;
    EXPECT_FALSE(fits(a, kH200, c.plan)) << c.plan.tactic;
  }
  EXPECT_GT(through_memory, 0);
}

TEST(CheckPlan, GatesAndBlocksOfChannelsLieWithinTiles) {
  GemmArguments plain = weight_only_problem(1, 4096, 4096), gated = plain;
  gated.activation = Activation::kSilu;
  gated.gate = Gate::kInterleaved;
  int refused = 0;
  for (Candidate const& c : candidates(plain, kH200Wgmma))
    if (kTactics[c.plan.row].channels % 32 != 0) {
      ++refused;
      EXPECT_FALSE(fits(gated, kH200Wgmma, c.plan)) << c.plan.tactic;
    }
  for (Candidate const& c : candidates(gated, kH200Wgmma)) EXPECT_TRUE(fits(gated, kH200Wgmma, c.plan));
  EXPECT_GT(refused, 0);
}

TEST(CheckPlan, BoxesOfExpertsRowsAreWhole) {
  GemmArguments a = weight_only_problem((int64_t(1) << 30) - 256, 16, 64);
  a.experts.count = 2;
  for (bool is_too_tall : {false, true}) {
    a.m += is_too_tall;
    a.experts.a_rows = a.m;
    for (Tactic const& t : kTactics)
      if (is_wgmma(t.mainloop) && t.tokens == 256) EXPECT_EQ(fits_grid(make_problem(a), t), !is_too_tall) << t.channels;
  }
}

}  // namespace
}  // namespace qcutlass
