// Quantising to 8 bits: the ranges of rows, then their codes.
#include "qcutlass/quantize.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <mutex>

#include "host/check.h"
#include "host/epilogue.h"
#include "host/float8.h"
#include "host/int8_codes.h"
#include "host/multiversion.h"
#include "host/numeric.h"
#include "host/parallel.h"

namespace qcutlass::host {

namespace {

/// Elements that one range of a parallel loop should at least hold.
constexpr int64_t kGrainElements = int64_t{1} << 15;

/// Elements that are in the first-level cache as fp32 at a time.
constexpr int64_t kBlock = 1024;

void check_quantize(QuantizeArguments const& arguments, int threads) {
  check_threads(threads);
  check_at_least("rows", arguments.rows, 0);
  check_at_least("columns", arguments.columns, 1);
  check_floating("a_type", arguments.a_type);
  check(arguments.code_type == DType::kInt8 || is_float8(arguments.code_type),
        "code_type must be int8, float8_e4m3fn or float8_e5m2");
  check(!arguments.asymmetric || arguments.code_type == DType::kInt8, "asymmetric codes must be int8");
  check_not_null("scale", arguments.scale);
  if (arguments.given_scale != nullptr) {
    check(arguments.per_tensor, "given_scale is one scale for all rows: it needs per_tensor");
    check(arguments.asymmetric == (arguments.given_azp != nullptr),
          "given_azp must accompany given_scale where codes are asymmetric, and only there");
    if (arguments.given_azp != nullptr) {
      int32_t const azp = *arguments.given_azp;
      check(-128 <= azp && azp <= 127, "azp must be in [-128, 127], got ", azp);
    }
  } else {
    check(arguments.given_azp == nullptr, "given_azp needs given_scale");
    if (arguments.asymmetric) check_not_null("azp", arguments.azp);
  }
  if (arguments.block != 0) {
    check_block_size("block", arguments.block);
    check(!arguments.per_tensor && !arguments.asymmetric && arguments.smooth == nullptr,
          "block: blocks have symmetric codes with scales of their own, and no smoothing factors");
  }
  check(!arguments.gated || (arguments.block != 0 && !arguments.square), "gated needs block, and blocks of one row");
  check(!arguments.powers_of_two || arguments.block != 0, "powers_of_two needs block");
  check(!arguments.square || arguments.block != 0, "square needs block");
  if (arguments.rows == 0) return;
  check_not_null("a", arguments.a);
  check_at_least("a_stride", arguments.a_stride, 0);
  check_not_null("codes", arguments.codes);
}

/// The extremes of some values as bits of fp32 magnitudes, whose order is that of their integers: NaN is the largest.
struct Range {
  int32_t high = 0;  ///< max(x, 0), or max|x|
  int32_t low = 0;   ///< max(-x, 0)

  void include(Range const& other) {
    high = std::max(high, other.high);
    low = std::max(low, other.low);
  }
};

struct Quantizer {
  float scale = 1.0f;
  int32_t azp = 0;
};

Quantizer quantizer_of(Range const& range, bool asymmetric, DType type) {
  float const high = bit_cast<float>(range.high), low = bit_cast<float>(range.low);
  if (!asymmetric) return {scale_of(high, largest_code(type)), 0};
  float const scale = scale_of(high + low, kAsymmetricSteps);
  return {scale, std::isfinite(scale) ? static_cast<int32_t>(std::nearbyint(low / scale)) - 128 : 0};
}

/// x of columns [k, k + count) of a row.
QCUTLASS_INLINE void load(QuantizeArguments const& arguments, int64_t row, int64_t k, int64_t count,
                          float* __restrict x) {
  load_floats(arguments.a_type, arguments.a, row * arguments.a_stride + k, count, x);
  if (arguments.smooth == nullptr) return;
  float const* __restrict smooth = arguments.smooth + k;
  for (int64_t i = 0; i < count; ++i) x[i] /= smooth[i];
}

QCUTLASS_MULTIVERSION Range range_of_row(QuantizeArguments const& arguments, int64_t row) {
  alignas(64) float x[kBlock];
  int32_t high = 0, low = 0;
  for (int64_t k = 0; k < arguments.columns; k += kBlock) {
    int64_t const count = std::min(kBlock, arguments.columns - k);
    load(arguments, row, k, count, x);
    if (arguments.asymmetric) {
      for (int64_t i = 0; i < count; ++i) {
        int32_t const bits = bit_cast<int32_t>(x[i]), negated = bits ^ std::numeric_limits<int32_t>::min();
        high = std::max(high, bits);
        low = std::max(low, negated);
      }
    } else {
      high = largest_magnitude(x, count, high);
    }
  }
  return {high, low};
}

/// Returns whether a NaN was made an int8.
QCUTLASS_MULTIVERSION bool quantize_row(QuantizeArguments const& arguments, int64_t row, Quantizer const& quantizer) {
  alignas(64) float x[kBlock];
  bool found = false;
  for (int64_t k = 0; k < arguments.columns; k += kBlock) {
    int64_t const count = std::min(kBlock, arguments.columns - k);
    load(arguments, row, k, count, x);
    for (int64_t i = 0; i < count; ++i) x[i] /= quantizer.scale;
    int64_t const offset = row * arguments.columns + k;
    if (arguments.code_type == DType::kInt8) {
      int32_t const least = arguments.asymmetric ? -128 : -127;
      found |= round_to_int8(x, count, quantizer.azp, least, static_cast<int8_t*>(arguments.codes) + offset);
    } else if (arguments.code_type == DType::kFloat8E4M3) {
      store_floats<Float8E4M3>(x, count, arguments.codes, offset);
    } else {
      store_floats<Float8E5M2>(x, count, arguments.codes, offset);
    }
  }
  return found;
}

/// x of columns [k, k + count) of a row, or of a pair of rows that SwiGLU makes one.
QCUTLASS_INLINE void load_gated(QuantizeArguments const& arguments, int64_t row, int64_t k, int64_t count,
                                float* __restrict x) {
  load(arguments, row, k, count, x);
  if (!arguments.gated) return;
  alignas(64) float up[kBlock];
  load(arguments, row, arguments.columns + k, count, up);
  activate(Activation::kSilu, count, x);
  for (int64_t i = 0; i < count; ++i) x[i] *= up[i];
}

/// The least power of two that is not below a scale.
QCUTLASS_INLINE float power_of_two_above(float scale) {
  constexpr uint32_t kFraction = 0x7fffff;
  return std::isfinite(scale) ? bit_cast<float>((bit_cast<uint32_t>(scale) + kFraction) & ~kFraction) : scale;
}

/// Divides by the scale of a block and stores codes.
QCUTLASS_INLINE void store_codes(QuantizeArguments const& arguments, float* x, int64_t count, float scale,
                                 int64_t offset) {
  if (arguments.code_type == DType::kInt8)
    return divide_and_round(x, count, scale, static_cast<int8_t*>(arguments.codes) + offset);
  for (int64_t i = 0; i < count; ++i) x[i] /= scale;
  if (arguments.code_type == DType::kFloat8E4M3) return store_floats<Float8E4M3>(x, count, arguments.codes, offset);
  store_floats<Float8E5M2>(x, count, arguments.codes, offset);
}

/// Blocks of one row, or a row of blocks that have several rows.
QCUTLASS_MULTIVERSION void quantize_blocks(QuantizeArguments const& arguments, int64_t row_of_blocks, int64_t height) {
  alignas(64) float x[kBlock];
  int64_t const first = row_of_blocks * height, end = std::min(first + height, arguments.rows);
  float* scale = arguments.scale + row_of_blocks * ((arguments.columns + arguments.block - 1) / arguments.block);
  for (int64_t k = 0; k < arguments.columns; k += arguments.block, ++scale) {
    int64_t const count = std::min(arguments.block, arguments.columns - k);
    int32_t high = 0;
    for (int64_t row = first; row < end; ++row) {
      load_gated(arguments, row, k, count, x);
      high = largest_magnitude(x, count, high);
    }
    *scale = scale_of(bit_cast<float>(high), largest_code(arguments.code_type));
    if (arguments.powers_of_two) *scale = power_of_two_above(*scale);
    for (int64_t row = first; row < end; ++row) {
      if (height > 1) load_gated(arguments, row, k, count, x);
      store_codes(arguments, x, count, *scale, row * arguments.columns + k);
    }
  }
}

void quantize_all_blocks(QuantizeArguments const& arguments, int64_t grain, int threads) {
  int64_t const height = arguments.square ? arguments.block : 1;
  parallel_for((arguments.rows + height - 1) / height, grain / height, threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) quantize_blocks(arguments, row, height);
  });
}

void quantize_rows(QuantizeArguments const& arguments, int64_t grain, int threads) {
  parallel_for(arguments.rows, grain, threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      Quantizer const quantizer = quantizer_of(range_of_row(arguments, row), arguments.asymmetric, arguments.code_type);
      quantize_row(arguments, row, quantizer);
      arguments.scale[row] = quantizer.scale;
      if (arguments.asymmetric) arguments.azp[row] = quantizer.azp;
    }
  });
}

Quantizer quantizer_of_tensor(QuantizeArguments const& arguments, int64_t grain, int threads) {
  if (arguments.given_scale != nullptr)
    return {*arguments.given_scale, arguments.given_azp != nullptr ? *arguments.given_azp : 0};
  std::mutex mutex;
  Range range;
  parallel_for(arguments.rows, grain, threads, [&](int64_t begin, int64_t end) {
    Range mine;
    for (int64_t row = begin; row < end; ++row) mine.include(range_of_row(arguments, row));
    std::lock_guard<std::mutex> const lock(mutex);
    range.include(mine);
  });
  return quantizer_of(range, arguments.asymmetric, arguments.code_type);
}

void quantize_tensor(QuantizeArguments const& arguments, int64_t grain, int threads) {
  Quantizer const quantizer = quantizer_of_tensor(arguments, grain, threads);
  std::atomic<bool> found{false};
  parallel_for(arguments.rows, grain, threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      if (quantize_row(arguments, row, quantizer)) found = true;
  });
  bool const unseen = found && arguments.given_scale != nullptr;  // a range's own scale shows its NaN
  *arguments.scale = unseen ? std::numeric_limits<float>::quiet_NaN() : quantizer.scale;
  if (arguments.azp != nullptr) *arguments.azp = quantizer.azp;
}

}  // namespace

void quantize(QuantizeArguments const& arguments, int threads) {
  check_quantize(arguments, threads);
  int64_t const grain = kGrainElements / arguments.columns;
  if (arguments.block != 0) return quantize_all_blocks(arguments, grain, threads);
  arguments.per_tensor ? quantize_tensor(arguments, grain, threads) : quantize_rows(arguments, grain, threads);
}

}  // namespace qcutlass::host
