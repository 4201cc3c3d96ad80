// Routing, gates and sums of a mixture of experts: counting sort; rows in pieces of fp32 that stay in cache.
#include "qcutlass/moe.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "host/check.h"
#include "host/gates.h"
#include "host/multiversion.h"
#include "host/numeric.h"
#include "host/parallel.h"

namespace qcutlass::host {

namespace {

/// Elements that one range of a parallel loop should at least hold: some 5 microseconds.
constexpr int64_t kGrainElements = int64_t{1} << 14;

/// Elements that are computed at once.
constexpr int64_t kPiece = 512;

int64_t grain_of(int64_t elements) { return kGrainElements / std::max<int64_t>(elements, 1); }

template <class Id>
void route_ids(RouteArguments const& arguments) {
  auto const* const ids = static_cast<Id const*>(arguments.ids);
  int64_t const rows = arguments.tokens * arguments.slots;
  auto const is_routed = [&](Id id) { return id >= 0 && id < arguments.experts; };
  std::vector<int32_t> next(arguments.experts + 1);
  for (int64_t r = 0; r < rows; ++r) {
    if (is_routed(ids[r])) ++next[ids[r] + 1];
  }
  for (int64_t expert = 0; expert < arguments.experts; ++expert) next[expert + 1] += next[expert];
  std::copy(next.begin(), next.end(), arguments.offsets);
  for (int64_t r = 0; r < rows; ++r) {
    arguments.order[r] = is_routed(ids[r]) ? next[ids[r]]++ : -1;
    if (arguments.order[r] < 0) continue;
    arguments.rows[arguments.order[r]] = static_cast<int32_t>(r / arguments.slots);
    if (arguments.weights != nullptr) arguments.row_scale[arguments.order[r]] = arguments.weights[r];
  }
  for (int64_t place = arguments.offsets[arguments.experts]; place < rows; ++place) {
    arguments.rows[place] = 0;
    if (arguments.weights != nullptr) arguments.row_scale[place] = 0.0f;
  }
}

/// Numbers of gate and up from column k on.
QCUTLASS_INLINE void load_pair(GateRowsArguments const& arguments, int64_t row, int64_t k, int64_t count, float* gate,
                               float* up) {
  int64_t const begin = row * arguments.x_stride;
  if (!arguments.interleaved) {
    load_floats(arguments.type, arguments.x, begin + k, count, gate);
    load_floats(arguments.type, arguments.x, begin + arguments.columns + k, count, up);
    return;
  }
  alignas(64) float both[2 * kPiece];
  load_floats(arguments.type, arguments.x, begin + 2 * k, 2 * count, both);
  for (int64_t i = 0; i < count; ++i) gate[i] = both[2 * i];
  for (int64_t i = 0; i < count; ++i) up[i] = both[2 * i + 1];
}

QCUTLASS_MULTIVERSION void gate_range(GateRowsArguments const& arguments, int64_t begin, int64_t end) {
  alignas(64) float gate[kPiece], up[kPiece];
  float const limit = arguments.limit;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t k = 0; k < arguments.columns; k += kPiece) {
      int64_t const count = std::min(kPiece, arguments.columns - k);
      load_pair(arguments, row, k, count, gate, up);
      // NaN stays: no comparison with it is true.
      for (int64_t i = 0; i < count; ++i) gate[i] = gate[i] > limit ? limit : gate[i];
      for (int64_t i = 0; i < count; ++i) up[i] = up[i] > limit ? limit : up[i] < -limit ? -limit : up[i];
      for (int64_t i = 0; i < count; ++i) up[i] += arguments.up_offset;
      if (arguments.activation == Activation::kSilu) {
        for (int64_t i = 0; i < count; ++i) gate[i] = silu(gate[i], arguments.alpha) * up[i];
      } else {
        for (int64_t i = 0; i < count; ++i) gate[i] = gelu_tanh(gate[i]) * up[i];
      }
      store_floats(arguments.type, gate, count, arguments.out, row * arguments.columns + k);
    }
  }
}

QCUTLASS_MULTIVERSION void sum_range(SumSlotsArguments const& arguments, int64_t begin, int64_t end) {
  alignas(64) float sum[kPiece], y[kPiece];
  for (int64_t token = begin; token < end; ++token) {
    for (int64_t k = 0; k < arguments.columns; k += kPiece) {
      int64_t const count = std::min(kPiece, arguments.columns - k);
      std::fill(sum, sum + count, 0.0f);
      for (int64_t slot = 0; slot < arguments.slots; ++slot) {
        int32_t const row = arguments.order[token * arguments.slots + slot];
        if (row < 0) continue;
        load_floats(arguments.type, arguments.y, row * arguments.y_stride + k, count, y);
        for (int64_t i = 0; i < count; ++i) sum[i] += y[i];
      }
      store_floats(arguments.type, sum, count, arguments.out, token * arguments.out_stride + k);
    }
  }
}

}  // namespace

void route(RouteArguments const& arguments) {
  check_at_least("tokens", arguments.tokens, 0);
  check_at_least("slots", arguments.slots, 1);
  check_at_least("experts", arguments.experts, 1);
  check(arguments.tokens <= std::numeric_limits<int32_t>::max() / arguments.slots,
        "tokens * slots must be less than 2^31");
  check(arguments.id_bytes == 4 || arguments.id_bytes == 8, "id_bytes must be 4 or 8, got ", arguments.id_bytes);
  check_not_null("offsets", arguments.offsets);
  if (arguments.tokens > 0) {
    check_not_null("ids", arguments.ids);
    check_not_null("rows", arguments.rows);
    check_not_null("order", arguments.order);
    if (arguments.weights != nullptr) check_not_null("row_scale", arguments.row_scale);
  }
  arguments.id_bytes == 4 ? route_ids<int32_t>(arguments) : route_ids<int64_t>(arguments);
}

void gate_rows(GateRowsArguments const& arguments, int threads) {
  check_threads(threads);
  check_at_least("rows", arguments.rows, 0);
  check_at_least("columns", arguments.columns, 1);
  check_floating("type", arguments.type);
  check(arguments.activation == Activation::kSilu || arguments.activation == Activation::kGeluTanh,
        "activation must be silu or gelu_tanh");
  check(arguments.limit > 0.0f, "limit must be positive, got ", arguments.limit);
  if (arguments.rows == 0) return;
  check_not_null("x", arguments.x);
  check_not_null("out", arguments.out);
  int64_t const rows = arguments.live == nullptr ? arguments.rows : std::min<int64_t>(arguments.rows, *arguments.live);
  parallel_for(rows, grain_of(2 * arguments.columns), threads,
               [&](int64_t begin, int64_t end) { gate_range(arguments, begin, end); });
}

void sum_slots(SumSlotsArguments const& arguments, int threads) {
  check_threads(threads);
  check_at_least("tokens", arguments.tokens, 0);
  check_at_least("slots", arguments.slots, 1);
  check_at_least("columns", arguments.columns, 1);
  check_floating("type", arguments.type);
  if (arguments.tokens == 0) return;
  check_not_null("y", arguments.y);
  check_not_null("order", arguments.order);
  check_not_null("out", arguments.out);
  parallel_for(arguments.tokens, grain_of(arguments.slots * arguments.columns), threads,
               [&](int64_t begin, int64_t end) { sum_range(arguments, begin, end); });
}

}  // namespace qcutlass::host
