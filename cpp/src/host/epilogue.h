// What follows the sums of a product, in fp32: activation functions, gates, residuals, stores.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "host/check.h"
#include "host/gates.h"
#include "host/multiversion.h"
#include "host/numeric.h"
#include "qcutlass/gemm.h"
#include "qcutlass/layout.h"
#include "qcutlass/types.h"

namespace qcutlass::host {

inline float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::kNone: return x;
    case Activation::kRelu: return x < 0.0f ? 0.0f : x;  // NaN stays
    case Activation::kGelu: return 0.5f * x * std::erfc(x * -0.70710678f);
    case Activation::kGeluTanh: {
      // (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)), without the cancellation of the left side.
      float const y = 0.79788456f * (x + 0.044715f * x * x * x);
      return x / (1.0f + std::exp(-2.0f * y));
    }
    case Activation::kSilu: return x / (1.0f + std::exp(-x));
  }
  return x;
}

QCUTLASS_INLINE void activate(Activation activation, int64_t count, float* values) {
  if (activation == Activation::kNone) return;
  for (int64_t i = 0; i < count; ++i) values[i] = activate(activation, values[i]);
}

/// out[i] = activation(gate[i]) * up[i], of the activations that gates have.
QCUTLASS_INLINE void apply_gate(Activation activation, int64_t count, float const* __restrict gate,
                                float const* __restrict up, float* __restrict out) {
  if (activation == Activation::kSilu) {
    for (int64_t i = 0; i < count; ++i) out[i] = silu(gate[i]) * up[i];
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = gelu_tanh(gate[i]) * up[i];
  }
}

/// Parts: strips whose sums are finished together. Without a gate a part is some neighbouring strips. With a gate it is
/// two strips, of 16 gate channels and of the 16 that they multiply; with Gate::kHalves these lie n / 2 channels apart.
class Parts {
 public:
  /// `width`: channels of a part without a gate.
  explicit Parts(GemmArguments const& arguments, int64_t width = layout::kTileN)
      : strips_(arguments.gate == Gate::kNone ? width / layout::kTileN : 2),
        tiles_(layout::tiles_n(arguments.weights.n)),
        halves_(arguments.gate == Gate::kHalves) {}

  int64_t count() const { return layout::ceil_div(tiles_, strips_); }

  /// Strips of a part; the last one may have fewer.
  int64_t strips() const { return strips_; }
  int64_t strips(int64_t part) const { return std::min(strips_, tiles_ - part * strips_); }

  /// The strip that is number `i` of a part.
  int64_t strip(int64_t part, int64_t i) const { return halves_ ? part + i * (tiles_ / 2) : part * strips_ + i; }

 private:
  int64_t strips_, tiles_;
  bool halves_;
};

/// Finishes the sums of a part, row by row. All products of the host finish their outputs here.
class Epilogue {
 public:
  static constexpr int64_t kMostChannels = 128;  ///< of a part

  QCUTLASS_INLINE Epilogue(GemmArguments const& arguments, Parts const& parts, int64_t part) : arguments_(arguments) {
    int64_t const n = arguments.weights.n, strips = parts.strips(part);
    width_ = strips * layout::kTileN;
    for (int64_t i = 0; has_bias() && i < strips; ++i) {
      float* const bias = bias_ + i * layout::kTileN;
      std::fill_n(bias, layout::kTileN, 0.0f);
      int64_t const first = parts.strip(part, i) * layout::kTileN;
      load_floats(arguments.bias_type, arguments.bias, first, std::min<int64_t>(layout::kTileN, n - first), bias);
    }
    bool const is_gated = arguments.gate != Gate::kNone;
    first_ = is_gated ? part * layout::kTileN : parts.strip(part, 0) * layout::kTileN;
    count_ = is_gated ? layout::kTileN : std::min(width_, n - first_);
  }

  /// The part's first column of the output, and how many it has.
  int64_t first() const { return first_; }
  int64_t count() const { return count_; }

  /// The outputs of row m, not yet rounded, from its sums [strips][16], in their place.
  QCUTLASS_INLINE void finish(int64_t m, float* values) const {
    if (has_bias()) for_strips(width_, [&](int64_t i) { values[i] += bias_[i]; });
    if (arguments_.gate != Gate::kNone) {
      float gated[layout::kTileN];
      apply_gate(arguments_.activation, layout::kTileN, values, values + layout::kTileN, gated);
      std::copy_n(gated, layout::kTileN, values);
    } else {
      activate(arguments_.activation, count_, values);
    }
    if (arguments_.experts.row_scale != nullptr) {
      float const row_scale = arguments_.experts.row_scale[m];
      for_strips(count_, [&](int64_t i) { values[i] *= row_scale; });
    }
    if (arguments_.residual == nullptr) return;
    float residual[kMostChannels] = {};
    load_floats(arguments_.type_of_out(), arguments_.residual, m * arguments_.residual_stride + first_, count_,
                residual);
    for_strips(count_, [&](int64_t i) { values[i] += residual[i]; });
  }

  /// Finishes and writes them.
  QCUTLASS_INLINE void store(int64_t m, float* values) const {
    finish(m, values);
    store_floats(arguments_.type_of_out(), values, count_, arguments_.out, m * arguments_.out_stride + first_);
  }

 private:
  QCUTLASS_INLINE bool has_bias() const { return arguments_.bias_type != DType::kNone; }

  /// Calls of_channel(i) for all channels of as many strips as hold `count`: loops over a strip are vectors.
  template <class OfChannel>
  static QCUTLASS_INLINE void for_strips(int64_t count, OfChannel const& of_channel) {
    for (int64_t begin = 0; begin < count; begin += layout::kTileN) {
      for (int i = 0; i < layout::kTileN; ++i) of_channel(begin + i);
    }
  }

  GemmArguments const& arguments_;
  float bias_[kMostChannels];  ///< of [0, width_), if there is one
  int64_t width_, first_, count_;
};

}  // namespace qcutlass::host
