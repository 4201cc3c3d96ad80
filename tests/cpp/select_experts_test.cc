// Selection for products of experts.
#include "selection.h"

namespace qcutlass::selection {
namespace {

/// The times of a configuration by its tile.
struct Time {
  char const* tile;
  double us;
};

/// A product of a mixture's block: `slots` experts for each of `tokens` tokens, gates beside the channels or not.
struct Row {
  int64_t experts, slots, tokens, n, k;
  std::vector<Time> times;
};

/// Times on an H200, microseconds, the mean of uniform ids and of Zipf's: fp16, 4-bit codes in groups of 128. The rows
/// of 128 experts are Qwen3-30B-A3B's, those of 8 are Mixtral-8x7B's, of one run.
TEST(Experts, ChoicesAreAmongTheBestMeasured) {
  std::vector<Row> const rows = {
      {128, 8, 4, 2 * 768, 2048, {{"n128m8k256w4", 17.2}, {"n128m8k512w8", 21.7}, {"n64m8k512w4", 23.4}}},
      {128, 8, 4, 2048, 768, {{"n128m8k256w4", 12.5}, {"n128m8k512w8", 13.3}, {"n64m8k512w4", 18.7}}},
      {128, 8, 16, 2 * 768, 2048, {{"n128m8k256w4", 38.4}, {"n128m8k512w8", 43.7}, {"n64m8k512w4", 53.1}}},
      {128, 8, 16, 2048, 768, {{"n128m8k256w4", 26.0}, {"n256m32k128", 27.1}, {"n128m8k512w8", 33.4}}},
      {128, 8, 64, 2 * 768, 2048, {{"n128m8k256w4", 60.4}, {"n128m8k512w8", 69.6}, {"n64m8k512w4", 85.4}}},
      {128, 8, 64, 2048, 768, {{"n256m32k128", 38.5}, {"n128m8k256w4", 40.2}, {"n128m8k512w8", 52.3}}},
      {8, 2, 4, 2 * 14336, 4096, {{"n128m8k256w4", 93.3}, {"n128m8k512w8", 99.8}, {"n64m8k512w4", 106.8}}},
      {8, 2, 4, 4096, 14336, {{"n32m8k1024w8", 50.3}, {"n128m8k512w8", 53.8}, {"n64m8k512w4", 56.2}}},
      {8, 2, 16, 2 * 14336, 4096, {{"n128m8k256w4", 120.2}, {"n128m8k512w8", 130.3}, {"n64m8k512w4", 153.4}}},
      {8, 2, 16, 4096, 14336, {{"n128m8k512w8", 72.7}, {"n32m8k1024w8", 74.7}, {"n128m8k256w4", 80.6}}},
      {8, 2, 64, 2 * 14336, 4096, {{"n256m32k128", 187.8}, {"n128m8k256w4", 270.2}, {"n64m16k512w4", 276.8}}},
      {8, 2, 64, 4096, 14336, {{"n64m16k512w4", 124.1}, {"n256m32k128", 125.3}, {"n128m8k512w8", 133.0}}},
  };
  for (Row const& row : rows) {
    GemmArguments product = weight_only_problem(row.tokens * row.slots, row.n, row.k);
    product.experts.count = row.experts;
    product.experts.a_rows = product.m;
    std::string const chosen = select(product, kH200Wgmma).tactic;
    double best = row.times[0].us, us = 0;
    for (Time const& time : row.times) {
      best = std::min(best, time.us);
      if (chosen.find("_" + std::string(time.tile) + "_") != std::string::npos) us = time.us;
    }
    EXPECT_GT(us, 0) << chosen << " for " << row.tokens << " tokens, " << row.n << " x " << row.k;
    EXPECT_LE(us, 1.05 * best) << chosen << " for " << row.tokens << " tokens, " << row.n << " x " << row.k;
  }
}

}  // namespace
}  // namespace qcutlass::selection
