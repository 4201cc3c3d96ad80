// Activations of gated MLPs in fp32, for loops that the compiler vectorises.
#pragma once

#include "host/exponential.h"
#include "host/multiversion.h"

namespace qcutlass::host {

/// x * sigmoid(alpha * x). exp() overflows to infinity, and the quotient to 0, where the exact value is smaller than
/// any number.
QCUTLASS_INLINE float silu(float x, float alpha = 1.0f) { return x / (1.0f + exponential(-alpha * x)); }

/// As in epilogue.h: (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)).
QCUTLASS_INLINE float gelu_tanh(float x) {
  float const y = 0.79788456f * (x + 0.044715f * x * x * x);
  return x / (1.0f + exponential(-2.0f * y));
}

}  // namespace qcutlass::host
