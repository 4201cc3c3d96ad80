// Norms, gates and rotations: rows of fp32 in cache, loops that the compiler vectorises.
#include "qcutlass/decoder.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "host/check.h"
#include "host/epilogue.h"
#include "host/multiversion.h"
#include "host/numeric.h"
#include "host/parallel.h"
#include "qcutlass/quantize.h"

namespace qcutlass::host {

namespace {

/// Elements that one range of a parallel loop should at least hold: some 5 microseconds.
constexpr int64_t kGrainElements = int64_t{1} << 14;

/// Elements that are computed at once where no row has to be whole.
constexpr int64_t kPiece = 512;

/// Sums that are kept apart, so that they are lanes of registers.
constexpr int kLanes = 32;

int64_t grain_of(int64_t columns) { return kGrainElements / std::max<int64_t>(columns, 1); }

QCUTLASS_INLINE float mean_of_squares(float const* x, int64_t count) {
  float sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) sums[lane] += x[i + lane] * x[i + lane];
  }
  for (int lane = 0; i < count; ++i, ++lane) sums[lane] += x[i] * x[i];
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  }
  return sums[0] / static_cast<float>(count);
}

QCUTLASS_INLINE void normalize(float const* weight, float eps, int64_t count, float* x) {
  float const factor = 1.0f / std::sqrt(mean_of_squares(x, count) + eps);
  for (int64_t i = 0; i < count; ++i) x[i] = x[i] * factor * weight[i];
}

/// Quantises a row of `out`, which x holds before it is rounded; returns whether a given scale becomes NaN.
bool quantize_normed(NormArguments const& arguments, int64_t row, float* x) {
  round_floats(arguments.type, arguments.columns, x);
  bool const is_static = arguments.given_scale != nullptr;
  float scale = 0.0f;
  QuantizeArguments quantize;
  quantize.rows = 1;
  quantize.columns = arguments.columns;
  quantize.a_type = DType::kFloat32;
  quantize.a = x;
  quantize.a_stride = arguments.columns;
  quantize.per_tensor = is_static;
  quantize.given_scale = arguments.given_scale;
  quantize.code_type = arguments.code_type;
  quantize.codes = static_cast<char*>(arguments.codes) + row * arguments.columns;
  quantize.scale = is_static ? &scale : arguments.scale + row;
  host::quantize(quantize, 1);
  return is_static && std::isnan(scale);
}

/// Returns whether a given scale becomes NaN.
QCUTLASS_MULTIVERSION bool add_rms_norm_rows(NormArguments const& arguments, int64_t begin, int64_t end,
                                             float* scratch) {
  bool found = false;
  int64_t const columns = arguments.columns;
  float* const weight = scratch;
  float* const x = scratch + columns;
  float* const residual = scratch + 2 * columns;
  load_floats(arguments.weight_type, arguments.weight, 0, columns, weight);
  for (int64_t row = begin; row < end; ++row) {
    load_floats(arguments.type, arguments.x, row * arguments.x_stride, columns, x);
    if (arguments.residual != nullptr) {
      load_floats(arguments.type, arguments.residual, row * arguments.residual_stride, columns, residual);
      for (int64_t i = 0; i < columns; ++i) x[i] += residual[i];
      round_floats(arguments.type, columns, x);
      store_floats(arguments.type, x, columns, arguments.sum, row * columns);
    }
    normalize(weight, arguments.eps, columns, x);
    store_floats(arguments.type, x, columns, arguments.out, row * columns);
    if (arguments.code_type != DType::kNone) found |= quantize_normed(arguments, row, x);
  }
  return found;
}

QCUTLASS_MULTIVERSION void gate_rows(GateArguments const& arguments, int64_t begin, int64_t end) {
  alignas(64) float gate[kPiece], up[kPiece], out[kPiece];
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t k = 0; k < arguments.columns; k += kPiece) {
      int64_t const count = std::min(kPiece, arguments.columns - k);
      apply_gate(arguments.activation, count,
                 floats_at(arguments.type, arguments.gate, row * arguments.gate_stride + k, count, gate),
                 floats_at(arguments.type, arguments.up, row * arguments.up_stride + k, count, up), out);
      store_floats(arguments.type, out, count, arguments.out, row * arguments.columns + k);
    }
  }
}

/// Where the numbers of one head lie while it is rotated, [size] each.
struct RotaryScratch {
  float* cos;
  float* sin;
  float* norm;
  float* x;
  float* rotated;
};

/// Where heads of a token go; nullptr: nowhere. `place`: of the first token among the outputs, of which there are
/// `room`.
QCUTLASS_INLINE char* output_of(RotaryArguments const& arguments, RotaryHeads const& part, int64_t index, int64_t place,
                                int64_t room) {
  int64_t const batch = index / arguments.tokens, token = index % arguments.tokens;
  if (place < -token || place >= room - token) return nullptr;  // their sum may be too large for 64 bits
  return static_cast<char*>(part.out) +
         (batch * part.out_batch_stride + (token + place) * part.out_token_stride) * size_of(arguments.type);
}

int64_t input_offset(RotaryArguments const& arguments, RotaryHeads const& part, int64_t index) {
  return index / arguments.tokens * part.batch_stride + index % arguments.tokens * part.token_stride;
}

QCUTLASS_INLINE void rotate_heads(RotaryArguments const& arguments, RotaryHeads const& part, int64_t index, char* out,
                                  RotaryScratch const& scratch) {
  int64_t const size = arguments.size, half = size / 2, first = input_offset(arguments, part, index);
  float const *const cos = scratch.cos, *const sin = scratch.sin;
  float *const x = scratch.x, *const rotated = scratch.rotated;
  if (part.norm != nullptr) load_floats(arguments.norm_type, part.norm, 0, size, scratch.norm);
  for (int64_t head = 0; head < part.heads; ++head) {
    load_floats(arguments.type, part.x, first + head * part.head_stride, size, x);
    if (part.norm != nullptr) normalize(scratch.norm, arguments.eps, size, x);
    for (int64_t i = 0; i < half; ++i) rotated[i] = x[i] * cos[i] - x[half + i] * sin[i];
    for (int64_t i = 0; i < half; ++i) rotated[half + i] = x[half + i] * cos[half + i] + x[i] * sin[half + i];
    store_floats(arguments.type, rotated, size, out, head * part.out_head_stride);
  }
}

void copy_heads(RotaryArguments const& arguments, RotaryHeads const& part, int64_t index, char* out) {
  int64_t const element = size_of(arguments.type);
  char const* const from = static_cast<char const*>(part.x) + input_offset(arguments, part, index) * element;
  for (int64_t head = 0; head < part.heads; ++head)
    std::memcpy(out + head * part.out_head_stride * element, from + head * part.head_stride * element,
                size_t(arguments.size * element));
}

/// Of tokens [begin, end) of all sequences.
QCUTLASS_MULTIVERSION void rotate_tokens(RotaryArguments const& arguments, int64_t begin, int64_t end, float* memory) {
  int64_t const size = arguments.size;
  RotaryScratch const scratch{memory, memory + size, memory + 2 * size, memory + 3 * size, memory + 4 * size};
  int64_t const place = arguments.place == nullptr ? 0 : *arguments.place;
  int64_t const room = arguments.place == nullptr ? arguments.tokens : arguments.room;
  for (int64_t index = begin; index < end; ++index) {
    int64_t const angles = index / arguments.tokens * arguments.angle_batch_stride +
                           index % arguments.tokens * arguments.angle_token_stride;
    load_floats(arguments.type, arguments.cos, angles, size, scratch.cos);
    load_floats(arguments.type, arguments.sin, angles, size, scratch.sin);
    rotate_heads(arguments, arguments.queries, index,
                 output_of(arguments, arguments.queries, index, 0, arguments.tokens), scratch);
    char* const keys = output_of(arguments, arguments.keys, index, place, room);
    if (keys == nullptr) continue;
    rotate_heads(arguments, arguments.keys, index, keys, scratch);
    copy_heads(arguments, arguments.values, index, output_of(arguments, arguments.values, index, place, room));
  }
}

void check_matrix(int64_t rows, int64_t columns, DType type, int threads) {
  check_threads(threads);
  check_at_least("rows", rows, 0);
  check_at_least("columns", columns, 1);
  check_floating("type", type);
}

}  // namespace

void add_rms_norm(NormArguments const& arguments, int threads) {
  check_matrix(arguments.rows, arguments.columns, arguments.type, threads);
  check_floating("weight_type", arguments.weight_type);
  check(arguments.eps >= 0.0f, "eps must be at least 0, got ", arguments.eps);
  bool const is_quantized = arguments.code_type != DType::kNone;
  if (is_quantized) {
    check(arguments.code_type == DType::kInt8 || arguments.code_type == DType::kFloat8E4M3,
          "code_type must be int8 or float8_e4m3fn");
    check_not_null("scale", arguments.scale);
  }
  bool const is_static = is_quantized && arguments.given_scale != nullptr;
  if (arguments.rows == 0) {
    if (is_static) *arguments.scale = *arguments.given_scale;
    return;
  }
  check_not_null("x", arguments.x);
  check_not_null("weight", arguments.weight);
  check_not_null("out", arguments.out);
  if (arguments.residual != nullptr) check_not_null("sum", arguments.sum);
  if (is_quantized) check_not_null("codes", arguments.codes);
  std::atomic<bool> found{false};
  parallel_for(arguments.rows, grain_of(arguments.columns), threads, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(3 * arguments.columns);
    if (add_rms_norm_rows(arguments, begin, end, scratch.data())) found = true;
  });
  if (is_static) *arguments.scale = found ? std::numeric_limits<float>::quiet_NaN() : *arguments.given_scale;
}

void gate(GateArguments const& arguments, int threads) {
  check_matrix(arguments.rows, arguments.columns, arguments.type, threads);
  check(arguments.activation == Activation::kSilu || arguments.activation == Activation::kGeluTanh,
        "activation must be silu or gelu_tanh");
  if (arguments.rows == 0) return;
  check_not_null("gate", arguments.gate);
  check_not_null("up", arguments.up);
  check_not_null("out", arguments.out);
  parallel_for(arguments.rows, grain_of(arguments.columns), threads,
               [&](int64_t begin, int64_t end) { gate_rows(arguments, begin, end); });
}

void rotate(RotaryArguments const& arguments, int threads) {
  check_threads(threads);
  check_at_least("batch", arguments.batch, 0);
  check_at_least("tokens", arguments.tokens, 0);
  check_at_least("size", arguments.size, 2);
  check(arguments.size % 2 == 0, "size must be even, got ", arguments.size);
  check_floating("type", arguments.type);
  int64_t const tokens = arguments.batch * arguments.tokens;
  if (tokens == 0) return;
  check_not_null("cos", arguments.cos);
  check_not_null("sin", arguments.sin);
  bool const has_room = arguments.place == nullptr || arguments.room > 0;
  for (RotaryHeads const* each : {&arguments.queries, &arguments.keys}) {
    RotaryHeads const& part = *each;
    check_at_least("heads", part.heads, 1);
    check_not_null("x", part.x);
    if (&part == &arguments.queries || has_room) check_not_null("out", part.out);
    if (part.norm != nullptr) check_floating("norm_type", arguments.norm_type);
  }
  if (arguments.values.heads > 0) {
    check_not_null("values", arguments.values.x);
    if (has_room) check_not_null("values of the output", arguments.values.out);
  }
  int64_t const heads = arguments.queries.heads + arguments.keys.heads + arguments.values.heads;
  parallel_for(tokens, grain_of(heads * arguments.size), threads, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(5 * arguments.size);
    rotate_tokens(arguments, begin, end, scratch.data());
  });
}

}  // namespace qcutlass::host
