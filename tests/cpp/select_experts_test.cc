// Selection for products of experts.
#include "selection.h"

namespace qcutlass::selection {
namespace {

/// A product of a mixture's block: `slots` experts for each of `tokens` tokens, gates beside the channels or not.
struct Row {
  int64_t experts, slots, tokens, n, k;
  std::vector<Time> times;
};

/// Times on an H200, microseconds, the mean of uniform ids and of Zipf's: fp16, 4-bit codes in groups of 128. The rows
/// of 128 experts are Qwen3-30B-A3B's, those of 8 are Mixtral-8x7B's, of one run.
TEST(Experts, ChoicesAreAmongTheBestMeasured) {
  std::vector<Row> const rows = {
      {128, 8, 4, 2 * 768, 2048, {{"n128m8k256w4", 1, 17.2}, {"n128m8k512w8", 1, 21.7}, {"n64m8k512w4", 1, 23.4}}},
      {128, 8, 4, 2048, 768, {{"n128m8k256w4", 1, 12.5}, {"n128m8k512w8", 1, 13.3}, {"n64m8k512w4", 1, 18.7}}},
      {128, 8, 16, 2 * 768, 2048, {{"n128m8k256w4", 1, 38.4}, {"n128m8k512w8", 1, 43.7}, {"n64m8k512w4", 1, 53.1}}},
      {128, 8, 16, 2048, 768, {{"n128m8k256w4", 1, 26.0}, {"n256m32k128", 1, 27.1}, {"n128m8k512w8", 1, 33.4}}},
      {128, 8, 64, 2 * 768, 2048, {{"n128m8k256w4", 1, 60.4}, {"n128m8k512w8", 1, 69.6}, {"n64m8k512w4", 1, 85.4}}},
      {128, 8, 64, 2048, 768, {{"n256m32k128", 1, 38.5}, {"n128m8k256w4", 1, 40.2}, {"n128m8k512w8", 1, 52.3}}},
      {8, 2, 4, 2 * 14336, 4096, {{"n128m8k256w4", 1, 93.3}, {"n128m8k512w8", 1, 99.8}, {"n64m8k512w4", 1, 106.8}}},
      {8, 2, 4, 4096, 14336, {{"n32m8k1024w8", 1, 50.3}, {"n128m8k512w8", 1, 53.8}, {"n64m8k512w4", 1, 56.2}}},
      {8, 2, 16, 2 * 14336, 4096, {{"n128m8k256w4", 1, 120.2}, {"n128m8k512w8", 1, 130.3}, {"n64m8k512w4", 1, 153.4}}},
      {8, 2, 16, 4096, 14336, {{"n128m8k512w8", 1, 72.7}, {"n32m8k1024w8", 1, 74.7}, {"n128m8k256w4", 1, 80.6}}},
      {8, 2, 64, 2 * 14336, 4096, {{"n256m32k128", 1, 187.8}, {"n128m8k256w4", 1, 270.2}, {"n64m16k512w4", 1, 276.8}}},
      {8, 2, 64, 4096, 14336, {{"n64m16k512w4", 1, 124.1}, {"n256m32k128", 1, 125.3}, {"n128m8k512w8", 1, 133.0}}},
  };
  for (Row const& row : rows) {
    GemmArguments product = weight_only_problem(row.tokens * row.slots, row.n, row.k);
    product.experts.count = row.experts;
    product.experts.a_rows = product.m;
    expect_among_the_best(product, row.times);
  }
}

}  // namespace
}  // namespace qcutlass::selection
