// Codes in blocks: to numbers, and through GELU to other codes.
#include <algorithm>
#include <cmath>
#include <limits>

#include "host/check.h"
#include "host/epilogue.h"
#include "host/int8_codes.h"
#include "host/multiversion.h"
#include "host/numeric.h"
#include "host/parallel.h"
#include "qcutlass/layout.h"
#include "qcutlass/quantize.h"

namespace qcutlass::host {

namespace {

constexpr int64_t kLargestBlock = 128;

/// Elements that one range of a parallel loop should at least hold.
constexpr int64_t kGrainElements = int64_t{1} << 14;

void check_blocks(BlockArguments const& arguments, int threads) {
  check_threads(threads);
  check_at_least("rows", arguments.rows, 0);
  check_at_least("columns", arguments.columns, 1);
  check_block_size("size", arguments.size);
  if (arguments.rows == 0) return;
  check_not_null("codes", arguments.codes);
  check_at_least("codes_stride", arguments.codes_stride, 0);
  check_not_null("scales", arguments.scales);
  check_not_null("out", arguments.out);
}

/// Calls visit(row, first column, columns, scale's index) for each part of a row that lies in one block.
template <class Visit>
QCUTLASS_INLINE void for_each_part(BlockArguments const& arguments, int64_t begin, int64_t end, Visit const& visit) {
  int64_t const height = arguments.square ? arguments.size : 1;
  int64_t const blocks = layout::ceil_div(arguments.columns, arguments.size);
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      int64_t const k = block * arguments.size;
      visit(row, k, std::min(arguments.size, arguments.columns - k), row / height * blocks + block);
    }
  }
}

/// Numbers of a part of a row.
QCUTLASS_INLINE void load(BlockArguments const& arguments, int64_t row, int64_t k, int64_t count, float scale,
                          float* __restrict x) {
  load_floats(arguments.code_type, arguments.codes, row * arguments.codes_stride + k, count, x);
  for (int64_t i = 0; i < count; ++i) x[i] *= scale;
}

QCUTLASS_MULTIVERSION void dequantize_rows(BlockArguments const& arguments, int64_t begin, int64_t end) {
  alignas(64) float x[kLargestBlock];
  for_each_part(arguments, begin, end, [&](int64_t row, int64_t k, int64_t count, int64_t index) {
    load(arguments, row, k, count, arguments.scales[index], x);
    store_floats(arguments.out_type, x, count, arguments.out, row * arguments.columns + k);
  });
}

QCUTLASS_MULTIVERSION void gelu_rows(BlockArguments const& arguments, int64_t begin, int64_t end) {
  alignas(64) float x[kLargestBlock];
  for_each_part(arguments, begin, end, [&](int64_t row, int64_t k, int64_t count, int64_t index) {
    float const scale = arguments.scales[index];
    load(arguments, row, k, count, std::isfinite(scale) ? scale : std::numeric_limits<float>::quiet_NaN(), x);
    activate(Activation::kGelu, count, x);
    arguments.out_scales[index] =
        quantize_block(x, count, static_cast<int8_t*>(arguments.out) + row * arguments.columns + k);
  });
}

}  // namespace

void dequantize_blocks(BlockArguments const& arguments, int threads) {
  check_blocks(arguments, threads);
  check_floating("out_type", arguments.out_type);
  check(arguments.code_type == DType::kInt8 || arguments.code_type == DType::kFloat8E4M3,
        "code_type must be int8 or float8_e4m3fn");
  parallel_for(arguments.rows, kGrainElements / arguments.columns, threads,
               [&](int64_t begin, int64_t end) { dequantize_rows(arguments, begin, end); });
}

void gelu_blocks(BlockArguments const& arguments, int threads) {
  check_blocks(arguments, threads);
  check(arguments.code_type == DType::kInt8, "code_type: GELU is of int8 codes");
  check(!arguments.square, "square: GELU is of activations, whose blocks have one row");
  if (arguments.rows != 0) check_not_null("out_scales", arguments.out_scales);
  parallel_for(arguments.rows, kGrainElements / arguments.columns / 8, threads,
               [&](int64_t begin, int64_t end) { gelu_rows(arguments, begin, end); });
}

}  // namespace qcutlass::host
