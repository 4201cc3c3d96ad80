// The products of packed codes on the CPU, by 16-bit activations and by those of 8 bits: each tile of packed weights is
// dequantised once into the first-level cache and multiplied with every row of activations. The 16 channels of a tile
// lie across vector lanes, so scales and zeros are vectors as they come.
#include "qcutlass/gemm.h"

#include <algorithm>
#include <deque>
#include <vector>

#include "host/channel_parameters.h"
#include "host/check.h"
#include "host/few_rows.h"
#include "host/gemm_blockwise.h"
#include "host/gemm_grouped.h"
#include "host/gemm_int8_activations.h"
#include "host/gemm_w8a8.h"
#include "host/multiversion.h"
#include "host/numeric.h"
#include "host/parallel.h"
#include "host/steady_rows.h"
#include "host/strips.h"
#include "plan/problem.h"

namespace qcutlass::host {

namespace {

/// Weights times groups of four rows that one range of the parallel loop should at least hold: about 10 microseconds.
constexpr int64_t kGrainOperations = int64_t{1} << 17;

void check_eight_bits(GemmArguments const& arguments) {
  check(arguments.weights.packing == Packing::kW4A16, "packing: activations of 8 bits meet 4-bit integer codes only");
  check(!arguments.weights.has_minimums(), "minimums: products of 8-bit activations take zeros");
  check(arguments.act_scale_type == DType::kNone && arguments.perm == nullptr,
        "act_scale and perm are not taken with 8-bit activations");
  check_floating("out_type", arguments.out_type);
  int const stride = arguments.sums.a_scale_stride;
  check(stride == 0 || stride == 1, "a_scale_stride must be 0 or 1, got ", stride);
  if (arguments.m > 0) check_not_null("a_scale", arguments.sums.a_scale);
}

void check_gemm(GemmArguments const& arguments, int threads) {
  check_threads(threads);
  check_weights(arguments.weights);
  check_at_least("m", arguments.m, 0);
  if (arguments.has_eight_bit_activations())
    check_eight_bits(arguments);
  else
    check_floating("a_type", arguments.a_type);
  check(arguments.bias_type == DType::kNone || is_floating(arguments.bias_type),
        "bias_type must be float16, bfloat16, float32 or none");
  check(arguments.act_scale_type == DType::kNone || is_floating(arguments.act_scale_type),
        "act_scale_type must be float16, bfloat16, float32 or none");
  if (arguments.int8_activations) check_int8_activations(arguments.weights);
  check_epilogue(arguments);
  if (arguments.m == 0 || arguments.weights.n == 0) return;
  check_not_null("a", arguments.a);
  check_not_null("out", arguments.out);
  if (arguments.bias_type != DType::kNone) check_not_null("bias", arguments.bias);
  if (arguments.act_scale_type != DType::kNone) check_not_null("act_scale", arguments.act_scale);
  if (arguments.perm == nullptr) return;
  for (int64_t k = 0; k < arguments.weights.k; ++k) {
    check(0 <= arguments.perm[k] && arguments.perm[k] < arguments.weights.k, "perm[", k, "] must be in [0, ",
          arguments.weights.k, "), got ", arguments.perm[k]);
  }
}

/// One row of activations as the codes' columns meet them: scaled, rounded to the activations' type, permuted; in fp32.
QCUTLASS_MULTIVERSION void load_activations(GemmArguments const& arguments, int64_t m, float const* act_scale,
                                            float* scratch, float* out) {
  int64_t const k_extent = arguments.weights.k;
  float* const row = arguments.perm == nullptr ? out : scratch;
  load_floats(arguments.a_type, arguments.a, m * arguments.a_stride, k_extent, row);
  if (act_scale != nullptr) {
    for (int64_t k = 0; k < k_extent; ++k) row[k] *= act_scale[k];
    round_floats(arguments.a_type, k_extent, row);
  }
  if (arguments.perm == nullptr) return;
  for (int64_t k = 0; k < k_extent; ++k) out[k] = row[arguments.perm[k]];
}

/// All rows, one behind the other, or arranged for a product of strips.
std::vector<float> load_activations(GemmArguments const& arguments, bool arranged, int threads) {
  int64_t const k = arguments.weights.k;
  Packing const packing = arguments.weights.packing;
  std::vector<float> act_scale;
  if (arguments.act_scale_type != DType::kNone) {
    act_scale.resize(k);
    load_floats(arguments.act_scale_type, arguments.act_scale, 0, k, act_scale.data());
  }
  std::vector<float> result(arranged ? arranged_size(packing, k, arguments.m) : arguments.m * k);
  parallel_for(arguments.m, kGrainOperations / k, threads, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(arguments.perm == nullptr ? 0 : k), row(arranged ? k : 0);
    for (int64_t m = begin; m < end; ++m) {
      float* const out = arranged ? row.data() : result.data() + m * k;
      load_activations(arguments, m, act_scale.empty() ? nullptr : act_scale.data(), scratch.data(), out);
      if (arranged) arrange_row(packing, out, k, arguments.m, m, result.data());
    }
  });
  return result;
}

/// The product of rows [begin, begin + count).
GemmArguments of_rows(GemmArguments const& arguments, int64_t begin, int64_t count) {
  GemmArguments own = arguments;
  own.m = count;
  own.a = static_cast<char const*>(own.a) + begin * own.a_stride * size_of(own.a_type);
  own.out = static_cast<char*>(own.out) + begin * own.out_stride * size_of(own.type_of_out());
  if (own.residual != nullptr)
    own.residual = static_cast<char const*>(own.residual) + begin * own.residual_stride * size_of(own.type_of_out());
  if (own.sums.a_scale != nullptr) own.sums.a_scale += begin * own.sums.a_scale_stride;
  return own;
}

/// Multiplies a few rows at a time, so that a row's sums are the same bits whatever m is.
void multiply_steadily(GemmArguments const& arguments, float const* activations, int threads) {
  WeightArguments const& weights = arguments.weights;
  int64_t const m = arguments.m, k = weights.k, most = SteadyRows::most(weights);
  std::deque<SteadyRows> held;  // does not move its elements
  std::vector<SteadyRows const*> parts;
  for (int64_t begin = 0; begin < m; begin += most) {
    held.emplace_back(weights, activations + begin * k, std::min(most, m - begin));
    parts.push_back(&held.back());
  }
  MultiplyStrip const multiply = multiply_strip(weights);
  auto const count = static_cast<int64_t>(parts.size());
  int64_t const grain = kGrainOperations / (layout::kTileN * k) / count;
  multiply_strips(arguments, count * most, grain, threads,
                  [&](int64_t strip, float* sums) { SteadyRows::multiply(parts, multiply, strip, sums); });
}

/// The product of checked arguments that are not empty, with sums in fp32 unless activations are quantised.
void multiply(GemmArguments const& arguments, int threads) {
  WeightArguments const& weights = arguments.weights;
  bool const few = FewRows::serves(weights, arguments.m);
  bool const arranged = !few && !arguments.int8_activations && !arguments.batch_invariant;
  std::vector<float> const activations = load_activations(arguments, arranged, threads);
  if (arguments.int8_activations) return gemm_int8_activations(arguments, activations.data(), threads);
  if (arguments.batch_invariant) return multiply_steadily(arguments, activations.data(), threads);
  int64_t const grain = kGrainOperations / (layout::kTileN * weights.k) / (arguments.m / 4 + 1);
  if (few) {
    FewRows const rows(weights, activations.data(), arguments.m);
    return multiply_strips(arguments, rows.rows(), grain, threads, [&](int64_t strip, float* sums) {
      if (strip + 1 < layout::tiles_n(weights.n))
        ChannelParameters::prefetch(weights, {strip + 1, 1}, 0, weights.groups());
      rows.multiply(strip, sums);
    });
  }
  MultiplyStrip const multiply = multiply_strip(weights);
  multiply_strips(arguments, arguments.m, grain, threads,
                  [&](int64_t strip, float* sums) { multiply(weights, activations.data(), arguments.m, strip, sums); });
}

/// Rows of 8-bit activations: int8 by dot products of bytes where groups of weights are whole steps of the packed
/// layout, otherwise as fp32, which holds them exactly. So many rows at a time that either form stays in cache.
void multiply_eight_bits(GemmArguments const& arguments, int threads) {
  constexpr int64_t kElements = int64_t{1} << 20, kLeastRows = 16;
  int64_t const block = std::max(kLeastRows, kElements / arguments.weights.k);
  bool const bytes = arguments.a_type == DType::kInt8 && has_whole_steps(arguments.weights);
  for (int64_t begin = 0; begin < arguments.m; begin += block) {
    GemmArguments const rows = of_rows(arguments, begin, std::min(block, arguments.m - begin));
    if (bytes)
      gemm_int8_rows(rows, threads);
    else
      multiply(rows, threads);
  }
}

}  // namespace

void gemm(GemmArguments const& arguments, int threads) {
  if (arguments.experts.count != 0) return gemm_grouped(arguments, threads);
  Kind const kind = kind_of(arguments);
  if (is_blockwise(kind.mode)) return gemm_blockwise(arguments, threads);
  if (!kind.converts()) return gemm_w8a8(arguments, threads);
  check_gemm(arguments, threads);
  if (arguments.m == 0 || arguments.weights.n == 0) return;
  if (arguments.has_eight_bit_activations()) return multiply_eight_bits(arguments, threads);
  multiply(arguments, threads);
}

}  // namespace qcutlass::host
