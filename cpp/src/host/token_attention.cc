#include "host/token_attention.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "host/exponential.h"
#include "host/multiversion.h"
#include "host/numeric.h"
#include "host/parallel.h"

namespace qcutlass::host {

namespace {

/// Multiplications that one range of the parallel loop should at least hold: some 5 microseconds.
constexpr int64_t kGrainOperations = int64_t{1} << 16;

/// Sums that are kept apart, so that they are lanes of registers.
constexpr int kLanes = 16;

QCUTLASS_INLINE float dot(float const* __restrict a, float const* __restrict b, int64_t count) {
  float sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (int lane = 0; i < count; ++i, ++lane) sums[lane] += a[i] * b[i];
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  }
  return sums[0];
}

/// Scores into weights, whose sum is returned. The largest is 1.
QCUTLASS_INLINE float exponentiate(float* scores, int64_t count) {
  float largest = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < count; ++i) largest = scores[i] > largest ? scores[i] : largest;
  for (int64_t i = 0; i < count; ++i) scores[i] = exponential(scores[i] - largest);
  float sums[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) sums[i % kLanes] += scores[i];
  float sum = 0.0f;
  for (float part : sums) sum += part;
  return sum;
}

/// Memory for the queries that share keys and values: `group` of them.
struct Scratch {
  Scratch(int64_t group, int64_t size, int64_t length)
      : queries(group * size), scores(group * length), totals(group), sums(group * size), head(size) {}

  std::vector<float> queries, scores, totals, sums, head;
};

/// The queries of heads that share keys and values: those of kv head `index % kv_heads` of row `index / kv_heads`.
QCUTLASS_MULTIVERSION void attend(DecoderBlock const& block, BlockToken const& token, void const* queries, void* out,
                                  int64_t index, Scratch& scratch) {
  int64_t const size = block.size, group = block.heads / block.kv_heads, length = token.length;
  int64_t const row = index / block.kv_heads, kv_head = index % block.kv_heads;
  int64_t const first = (row * block.heads + kv_head * group) * size;
  int64_t const keys = row * token.keys.row_stride + kv_head * token.keys.head_stride;
  int64_t const values = row * token.values.row_stride + kv_head * token.values.head_stride;
  float *const q = scratch.queries.data(), *const scores = scratch.scores.data(), *const sums = scratch.sums.data();
  load_floats(block.type, queries, first, group * size, q);
  for (int64_t t = 0; t < length; ++t) {
    float const* const key =
        floats_at(block.type, token.keys.data, keys + t * token.keys.token_stride, size, scratch.head.data());
    for (int64_t g = 0; g < group; ++g) scores[g * length + t] = token.scaling * dot(q + g * size, key, size);
  }
  for (int64_t g = 0; g < group; ++g) scratch.totals[g] = exponentiate(scores + g * length, length);
  std::fill(scratch.sums.begin(), scratch.sums.end(), 0.0f);
  for (int64_t t = 0; t < length; ++t) {
    float const* const value =
        floats_at(block.type, token.values.data, values + t * token.values.token_stride, size, scratch.head.data());
    for (int64_t g = 0; g < group; ++g) {
      float const weight = scores[g * length + t];
      float* const sum = sums + g * size;
      for (int64_t i = 0; i < size; ++i) sum[i] += weight * value[i];
    }
  }
  for (int64_t g = 0; g < group; ++g) {
    for (int64_t i = 0; i < size; ++i) sums[g * size + i] /= scratch.totals[g];
  }
  store_floats(block.type, sums, group * size, out, first);
}

}  // namespace

void attend_to_all(DecoderBlock const& block, BlockToken const& token, void const* queries, void* out, int threads) {
  int64_t const group = block.heads / block.kv_heads;
  int64_t const operations = std::max<int64_t>(1, 2 * group * block.size * token.length);
  parallel_for(token.rows * block.kv_heads, kGrainOperations / operations, threads, [&](int64_t begin, int64_t end) {
    Scratch scratch(group, block.size, token.length);
    for (int64_t index = begin; index < end; ++index) attend(block, token, queries, out, index, scratch);
  });
}

}  // namespace qcutlass::host
