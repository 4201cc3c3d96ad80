#include "host/token_attention.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "host/channel_vector.h"
#include "host/exponential.h"
#include "host/multiversion.h"
#include "host/numeric.h"
#include "host/parallel.h"

namespace qcutlass::host {

namespace {

/// Multiplications that one range of the parallel loop should at least hold: some 5 microseconds.
constexpr int64_t kGrainOperations = int64_t{1} << 16;

constexpr int kLanes = 8;
using Float = Vectors<kLanes>::Float;

/// Tokens whose scores are summed up together, one in each lane at the end, and that are converted together.
constexpr int kTokens = kLanes, kBlock = 4 * kTokens;

/// Queries that a value is multiplied for, and vectors of it, once it is loaded: their sums stay in registers.
constexpr int kQueries = 3, kParts = 2;

QCUTLASS_INLINE Float load(float const* from) {
  Float x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}
QCUTLASS_INLINE void store(Float const& x, float* to) { std::memcpy(to, &x, sizeof(x)); }

/// Keys or values of some tokens as fp32: where they are, or in memory for kBlock of them.
struct Tokens {
  float const* data;
  int64_t stride;

  static QCUTLASS_INLINE Tokens of(DType type, CachedHeads const& heads, int64_t offset, int64_t count, int64_t size,
                                   float* scratch) {
    if (type == DType::kFloat32) return {static_cast<float const*>(heads.data) + offset, heads.token_stride};
    for (int64_t t = 0; t < count; ++t)
      load_floats(type, heads.data, offset + t * heads.token_stride, size, scratch + t * size);
    return {scratch, size};
  }
};

/// The sum of the lanes of each of eight vectors.
QCUTLASS_INLINE Float add_lanes(Float const (&x)[kTokens]) {
  Float quads[4], pairs[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    quads[i] = __builtin_shufflevector(x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) +
               __builtin_shufflevector(x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    pairs[i] = __builtin_shufflevector(quads[i], quads[i + 2], 0, 1, 8, 9, 4, 5, 12, 13) +
               __builtin_shufflevector(quads[i], quads[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
  return __builtin_shufflevector(pairs[0], pairs[1], 0, 8, 2, 10, 4, 12, 6, 14) +
         __builtin_shufflevector(pairs[0], pairs[1], 1, 9, 3, 11, 5, 13, 7, 15);
}

/// scores[t] = scaling * the product of a query with key t, of kTokens tokens; `keys`: of each.
QCUTLASS_INLINE void score(float const* query, float const* const (&keys)[kTokens], int64_t size, float scaling,
                           float* scores) {
  Float sums[kTokens] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    Float const x = load(query + i);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) sums[t] += x * load(keys[t] + i);
  }
  Float total = add_lanes(sums);
  for (; i < size; ++i) {
    for (int t = 0; t < kTokens; ++t) total[t] += query[i] * keys[t][i];
  }
  store(total * scaling, scores);
}

/// Scores into weights, whose sum is returned. The largest is 1.
QCUTLASS_INLINE float exponentiate(float* scores, int64_t count) {
  float largest = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < count; ++i) largest = scores[i] > largest ? scores[i] : largest;
  for (int64_t i = 0; i < count; ++i) scores[i] = exponential(scores[i] - largest);
  Float sums = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sums += load(scores + i);
  float sum = 0.0f;
  for (; i < count; ++i) sum += scores[i];
  for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  return sum;
}

/// Adds values of `count` tokens, times their weights, to the sums of kTheseQueries queries, in kTheseParts vectors.
template <int kTheseQueries, int kTheseParts>
QCUTLASS_INLINE void add_values(Tokens const& values, int64_t count, float const* weights, int64_t weights_stride,
                                int64_t size, float* sums) {
  Float total[kTheseQueries][kTheseParts];
#pragma GCC unroll 4
  for (int g = 0; g < kTheseQueries; ++g) {
#pragma GCC unroll 2
    for (int part = 0; part < kTheseParts; ++part) total[g][part] = load(sums + g * size + part * kLanes);
  }
  for (int64_t t = 0; t < count; ++t) {
    float const* const value = values.data + t * values.stride;
#pragma GCC unroll 2
    for (int part = 0; part < kTheseParts; ++part) {
      Float const x = load(value + part * kLanes);
#pragma GCC unroll 4
      for (int g = 0; g < kTheseQueries; ++g) total[g][part] += weights[g * weights_stride + t] * x;
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < kTheseQueries; ++g) {
#pragma GCC unroll 2
    for (int part = 0; part < kTheseParts; ++part) store(total[g][part], sums + g * size + part * kLanes);
  }
}

template <int kTheseQueries>
QCUTLASS_INLINE void add_values(Tokens const& values, int64_t count, float const* weights, int64_t weights_stride,
                                int64_t size, float* sums) {
  int64_t i = 0;
  auto const from = [&](int64_t column) { return Tokens{values.data + column, values.stride}; };
  for (; i + kParts * kLanes <= size; i += kParts * kLanes)
    add_values<kTheseQueries, kParts>(from(i), count, weights, weights_stride, size, sums + i);
  for (; i + kLanes <= size; i += kLanes)
    add_values<kTheseQueries, 1>(from(i), count, weights, weights_stride, size, sums + i);
  for (; i < size; ++i) {
    for (int g = 0; g < kTheseQueries; ++g) {
      for (int64_t t = 0; t < count; ++t)
        sums[g * size + i] += weights[g * weights_stride + t] * values.data[t * values.stride + i];
    }
  }
}

/// Queries that share keys and values, so many of a row's heads from `head` on.
struct SharedHeads {
  int64_t row, head, count;
};

/// Memory for at most `count` queries that share keys and values.
struct Scratch {
  Scratch(int64_t count, int64_t size, int64_t length)
      : stride(layout::ceil_div(length, kTokens) * kTokens),
        queries(count * size),
        scores(count * stride),
        sums(count * size),
        tokens(kBlock * size) {}

  int64_t stride;  ///< from a query's first score to the next one's
  std::vector<float> queries, scores, sums, tokens;
};

QCUTLASS_MULTIVERSION void attend(DecoderBlock const& block, BlockToken const& token, void const* queries, void* out,
                                  SharedHeads const& heads, Scratch& scratch) {
  int64_t const size = block.size, length = token.length, stride = scratch.stride;
  int64_t const kv_head = heads.head / (block.heads / block.kv_heads);
  int64_t const first = (heads.row * block.heads + heads.head) * size;
  float *const q = scratch.queries.data(), *const scores = scratch.scores.data(), *const sums = scratch.sums.data();
  auto const tokens_of = [&](CachedHeads const& cached, int64_t begin, int64_t count) {
    int64_t const offset = heads.row * cached.row_stride + kv_head * cached.head_stride + begin * cached.token_stride;
    return Tokens::of(block.type, cached, offset, count, size, scratch.tokens.data());
  };
  load_floats(block.type, queries, first, heads.count * size, q);
  for (int64_t t = 0; t < length; t += kTokens) {
    int64_t const count = std::min<int64_t>(kTokens, length - t);
    Tokens const keys = tokens_of(token.keys, t, count);
    float const* of_each[kTokens];
    for (int i = 0; i < kTokens; ++i) of_each[i] = keys.data + std::min<int64_t>(i, count - 1) * keys.stride;
    for (int64_t g = 0; g < heads.count; ++g)
      score(q + g * size, of_each, size, token.scaling, scores + g * stride + t);
  }
  float totals[kQueries];
  std::fill_n(sums, heads.count * size, 0.0f);
  for (int64_t g = 0; g < heads.count; g += kQueries) {
    int64_t const these = std::min<int64_t>(kQueries, heads.count - g);
    for (int64_t i = 0; i < these; ++i) totals[i] = exponentiate(scores + (g + i) * stride, length);
    for (int64_t t = 0; t < length; t += kBlock) {
      int64_t const count = std::min<int64_t>(kBlock, length - t);
      Tokens const values = tokens_of(token.values, t, count);
      float const* const weights = scores + g * stride + t;
      if (these == kQueries) {
        add_values<kQueries>(values, count, weights, stride, size, sums + g * size);
      } else {
        for (int64_t i = 0; i < these; ++i)
          add_values<1>(values, count, weights + i * stride, stride, size, sums + (g + i) * size);
      }
    }
    for (int64_t i = 0; i < these; ++i) {
      for (int64_t k = 0; k < size; ++k) sums[(g + i) * size + k] /= totals[i];
    }
  }
  store_floats(block.type, sums, heads.count * size, out, first);
}

}  // namespace

void attend_to_all(DecoderBlock const& block, BlockToken const& token, void const* queries, void* out, int threads) {
  int64_t const group = block.heads / block.kv_heads;
  int64_t const operations = std::max<int64_t>(1, 2 * block.size * token.length);
  parallel_for(token.rows * block.heads, kGrainOperations / operations, threads, [&](int64_t begin, int64_t end) {
    Scratch scratch(std::min(group, end - begin), block.size, token.length);
    while (begin < end) {
      int64_t const head = begin % block.heads, count = std::min(end - begin, group - head % group);
      attend(block, token, queries, out, {begin / block.heads, head, count}, scratch);
      begin += count;
    }
  });
}

}  // namespace qcutlass::host
