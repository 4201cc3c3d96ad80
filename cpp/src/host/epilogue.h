// Activation functions and stores of finished sums, in fp32.
#pragma once

#include <cmath>
#include <cstdint>

#include "host/multiversion.h"
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

}  // namespace qcutlass::host
