#include "host/gemm_grouped.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <optional>
#include <vector>

#include "host/channel_parameters.h"
#include "host/check.h"
#include "host/numeric.h"
#include "host/parallel.h"
#include "host/steady_rows.h"
#include "host/strips.h"
#include "plan/problem.h"

namespace qcutlass::host {

namespace {

/// Weights times rows that one range of the parallel loop should at least hold: about 10 microseconds.
constexpr int64_t kGrainOperations = int64_t{1} << 17;

/// fp32 activations that are held at a time: they stay in cache while the weights pass by.
constexpr int64_t kHeldActivations = int64_t{1} << 20;
constexpr int64_t kLeastHeldRows = 16;

/// fp32 activations that a strip of weights meets at a time: half of a second-level cache of 2 MB, or all of 1 MB.
constexpr int64_t kRunActivations = int64_t{1} << 18;

void check_offsets(GemmArguments const& arguments) {
  ExpertRows const& experts = arguments.experts;
  int64_t last = 0;
  for (int64_t e = 0; e <= experts.count; ++e) {
    int64_t const offset = experts.offsets[e];
    check(last <= offset && offset <= arguments.m, "offsets[", e, "] must be in [", last, ", ", arguments.m,
          "], at least the one before it and at most the number of rows, got ", offset);
    last = offset;
  }
}

/// The orders of the experts that have rows.
void check_orders(GemmArguments const& arguments) {
  int32_t const* const offsets = arguments.experts.offsets;
  int64_t const k_extent = arguments.weights.k;
  for (int64_t e = 0; arguments.perm != nullptr && e < arguments.experts.count; ++e) {
    if (offsets[e] == offsets[e + 1]) continue;
    for (int64_t k = 0; k < k_extent; ++k) {
      int64_t const column = arguments.perm[e * k_extent + k];
      check(0 <= column && column < k_extent, "perm[", e, ", ", k, "] must be in [0, ", k_extent, "), got ", column);
    }
  }
}

void check_grouped(GemmArguments const& arguments, int threads) {
  ExpertRows const& experts = arguments.experts;
  WeightArguments const& weights = arguments.weights;
  check_threads(threads);
  check_weights(weights);
  check_at_least("m", arguments.m, 0);
  check_at_least("experts", experts.count, 1);
  check_at_least("a_rows", experts.a_rows, 0);
  check_floating("a_type", arguments.a_type);
  check(arguments.bias_type == DType::kNone || is_floating(arguments.bias_type),
        "bias_type must be float16, bfloat16, float32 or none");
  check(arguments.act_scale_type == DType::kNone && !arguments.int8_activations,
        "act_scale, int8_activations: products of experts take activations as they are");
  check_epilogue(arguments);
  if (arguments.m == 0 || weights.n == 0) return;
  check_not_null("a", arguments.a);
  check_not_null("out", arguments.out);
  check_not_null("offsets", experts.offsets);
  if (arguments.bias_type != DType::kNone) check_not_null("bias", arguments.bias);
  check_offsets(arguments);
  check_orders(arguments);
  for (int64_t r = experts.offsets[0]; r < experts.offsets[experts.count]; ++r) {
    int64_t const row = experts.rows == nullptr ? r : experts.rows[r];
    check(0 <= row && row < experts.a_rows, "rows[", r, "] must be in [0, ", experts.a_rows, "), got ", row);
  }
}

char* at(void const* data, int64_t bytes) { return const_cast<char*>(static_cast<char const*>(data)) + bytes; }

/// The product of rows [begin, end), all those of one expert: weights, order, bias, outputs and row scales are its own.
GemmArguments of_expert(GemmArguments const& arguments, int64_t expert, int64_t begin, int64_t end) {
  GemmArguments own = arguments;
  WeightArguments& w = own.weights;
  int64_t const parameters = expert * w.groups() * w.n;
  w.packed = at(w.packed, expert * layout::packed_bytes(w.packing, w.n, w.k));
  w.scales = at(w.scales, parameters * size_of(w.scale_type));
  if (w.zero_type != DType::kNone) w.zeros = at(w.zeros, parameters * size_of(w.zero_type));
  if (w.has_minimums()) w.minimums = at(w.minimums, parameters * size_of(w.minimum_type));
  int64_t const supers = w.has_super_blocks() ? expert * w.super_blocks() * w.n * size_of(DType::kFloat16) : 0;
  if (w.super_scales != nullptr) w.super_scales = at(w.super_scales, supers);
  if (w.super_minimums != nullptr) w.super_minimums = at(w.super_minimums, supers);
  if (w.global_scale != nullptr) w.global_scale += expert;
  if (own.perm != nullptr) own.perm += expert * w.k;
  if (own.bias_type != DType::kNone) own.bias = at(own.bias, expert * w.n * size_of(own.bias_type));
  own.m = end - begin;
  own.out = at(own.out, begin * own.out_stride * size_of(own.a_type));
  if (own.experts.rows != nullptr)
    own.experts.rows += begin;
  else
    own.a = at(own.a, begin * own.a_stride * size_of(own.a_type));
  if (own.experts.row_scale != nullptr) own.experts.row_scale += begin;
  return own;
}

/// A few rows of one expert: as many as are multiplied at once.
class Rows {
 public:
  explicit Rows(GemmArguments const& product) : product_(product) {}

  /// Loads the activations.
  void load() {
    int64_t const k = product_.weights.k;
    int32_t const* const perm = product_.perm;
    std::vector<float> activations(product_.m * k), stored(perm == nullptr ? 0 : k);
    for (int64_t m = 0; m < product_.m; ++m) {
      int64_t const row = product_.experts.rows == nullptr ? m : product_.experts.rows[m];
      float* const out = activations.data() + m * k;
      load_floats(product_.a_type, product_.a, row * product_.a_stride, k, perm == nullptr ? out : stored.data());
      for (int64_t i = 0; perm != nullptr && i < k; ++i) out[i] = stored[perm[i]];
    }
    rows_.emplace(product_.weights, activations.data(), product_.m);
  }

  /// The loaded activations.
  SteadyRows const& rows() const { return *rows_; }

  /// Writes a part of the output, given sums [strips of the part][rows][16], of which the first are its own.
  void store(int64_t part, int64_t rows, float const* sums) const {
    store_part(product_, Parts(product_), part, rows, sums);
  }

 private:
  GemmArguments product_;
  std::optional<SteadyRows> rows_;
};

/// Rows of one expert among those that are held.
struct Run {
  size_t first, last;  ///< of the held Rows
  std::vector<SteadyRows const*> parts = {};
};

/// Multiplies rows [begin, end), all of which belong to experts.
void multiply_rows(GemmArguments const& arguments, int64_t begin, int64_t end, int threads) {
  WeightArguments const& weights = arguments.weights;
  int32_t const* const offsets = arguments.experts.offsets;
  int64_t const most = SteadyRows::most(weights);
  int64_t const run_rows = std::max<int64_t>(1, kRunActivations / (most * weights.k)) * most;
  std::deque<Rows> held;  // does not move its elements
  std::vector<Run> runs;
  int64_t expert = std::upper_bound(offsets, offsets + arguments.experts.count + 1, begin) - offsets - 1;
  for (int64_t row = begin; row < end; ++expert) {
    int64_t const last = std::min<int64_t>(end, offsets[expert + 1]);
    while (row < last) {
      size_t const first = held.size();
      int64_t const run_end = std::min(row + run_rows, last);
      for (; row < run_end; row += most)
        held.emplace_back(of_expert(arguments, expert, row, std::min(row + most, run_end)));
      row = run_end;
      runs.push_back({first, held.size()});
    }
  }
  Parts const parts(arguments);
  int64_t const count = static_cast<int64_t>(held.size());
  parallel_for(count, kGrainOperations / (most * weights.k), threads, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) held[i].load();
  });
  for (Run& run : runs) {
    for (size_t i = run.first; i < run.last; ++i) run.parts.push_back(&held[i].rows());
  }
  int64_t const operations =
      parts.strips() * layout::kTileN * weights.k * (1 + count / static_cast<int64_t>(runs.size()));
  MultiplyStrip const multiply = multiply_strip(weights);
  parallel_for(static_cast<int64_t>(runs.size()) * parts.count(), kGrainOperations / operations, threads,
               [&](int64_t first, int64_t last) {
                 std::vector<float> sums;
                 for (int64_t i = first; i < last; ++i) {
                   Run const& run = runs[i / parts.count()];
                   int64_t const part = i % parts.count(), rows = static_cast<int64_t>(run.parts.size()) * most;
                   sums.assign(parts.strips() * rows * layout::kTileN, 0.0f);
                   for (int64_t strip = 0; strip < parts.strips(part); ++strip)
                     SteadyRows::multiply(run.parts, multiply, parts.strip(part, strip),
                                          sums.data() + strip * rows * layout::kTileN);
                   for (size_t own = run.first; own < run.last; ++own)
                     held[own].store(part, rows, sums.data() + (own - run.first) * most * layout::kTileN);
                 }
               });
}

void clear_rows(GemmArguments const& arguments, int64_t begin, int64_t end) {
  int64_t const size = size_of(arguments.a_type);
  for (int64_t row = begin; row < end; ++row)
    std::memset(at(arguments.out, row * arguments.out_stride * size), 0, arguments.out_columns() * size);
}

}  // namespace

void gemm_grouped(GemmArguments const& arguments, int threads) {
  check_grouped(arguments, threads);
  if (arguments.m == 0 || arguments.weights.n == 0) return;
  int32_t const* const offsets = arguments.experts.offsets;
  int64_t const begin = offsets[0], end = offsets[arguments.experts.count];
  int64_t const step = std::max(kLeastHeldRows, kHeldActivations / arguments.weights.k);
  for (int64_t row = begin; row < end; row += step) multiply_rows(arguments, row, std::min(row + step, end), threads);
  clear_rows(arguments, 0, begin);
  clear_rows(arguments, end, arguments.m);
}

}  // namespace qcutlass::host
