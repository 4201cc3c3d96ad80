// Activations, and which channels of gated MLPs are gates of which others.
#pragma once

#include <utility>

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/activation.h"
#include "cutlass/functional.h"
#include "qcutlass/types.h"

namespace cutlass::epilogue::thread {

/// v * sigmoid(u): u = v is SiLU, u = 2 sqrt(2 / pi) (v + 0.044715 v^3) is GELU in its tanh form. The code is short,
/// since unrolled loops repeat it. Error: exp2f() is off by up to 2^-22 of its result and the reciprocal by 2^-23. With
/// s = sigmoid(u), a relative error of the exponential, or an absolute one of u, changes s by 1 - s <= 1 times it
/// relative to s, that is, s (1 - s) <= 1 / 4 times it in all. With two roundings the result is within about 2^-22 |v|.
CUTLASS_DEVICE float gate_value(float v, qcutlass::Activation activation) {
  constexpr float kLog2E = 1.44269504f;
  constexpr float kLinear = 2.30220820f, kCubic = 0.10294324f;  // 2 sqrt(2 / pi) log2(e), and 0.044715 times it
  float const slope = activation == qcutlass::Activation::kSilu ? kLog2E : fmaf(kCubic, v * v, kLinear);
  return v * reciprocal_approximate<float>{}(1.f + exp2f(-v * slope));
}

/// CUTLASS's ReLU and GELU (erf), right but for the last bits of fp32. Its GELU_taylor and SiLu use an approximate tanh
/// and exp with errors near a rounding step of fp16: gate_value() is as right as the others.
template <int kCount>
CUTLASS_DEVICE void activate(float (&x)[kCount], qcutlass::Activation activation) {
  auto const each = [&](auto function) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) x[i] = function(x[i]);
  };
  switch (activation) {
    case qcutlass::Activation::kNone: break;
    case qcutlass::Activation::kRelu: each(ReLu<float>{}); break;
    case qcutlass::Activation::kGelu: each(GELU<float>{}); break;
    default: each([&](float v) { return gate_value(v, activation); }); break;  // kGeluTanh, kSilu
  }
}

/// activate() for many values, in a loop over groups of eight, because the code of an activation is long. Registers
/// have no run-time index, so the loop copies a group to values of its own and back.
template <int kCount, int... kGroups>
CUTLASS_DEVICE void activate_in_groups(float (&x)[kCount], qcutlass::Activation activation,
                                       std::integer_sequence<int, kGroups...>) {
  constexpr int kGroup = kCount / int(sizeof...(kGroups));
  auto const copy = [](float* to, float const* from) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kGroup; ++i) to[i] = from[i];
  };
  CUTLASS_PRAGMA_NO_UNROLL
  for (int group = 0; group < int(sizeof...(kGroups)); ++group) {
    float values[kGroup];
    ((group == kGroups ? copy(values, x + kGroups * kGroup) : void()), ...);
    activate(values, activation);
    ((group == kGroups ? copy(x + kGroups * kGroup, values) : void()), ...);
  }
}
template <int kCount>
CUTLASS_DEVICE void activate_all(float (&x)[kCount], qcutlass::Activation activation) {
  static_assert(kCount % 8 == 0);
  if (activation != qcutlass::Activation::kNone)
    activate_in_groups(x, activation, std::make_integer_sequence<int, kCount / 8>{});
}

/// Channels of a gate that lie together in a tile, before as many of what they multiply.
inline constexpr int kGateTurn = 16;

/// The column of the output that a channel of a gate gives.
CUTLASS_HOST_DEVICE constexpr int gated_column(int channel) {
  return channel / (2 * kGateTurn) * kGateTurn + channel % kGateTurn;
}
/// And the channel that gives a column.
CUTLASS_HOST_DEVICE constexpr int gate_channel(int column) {
  return column / kGateTurn * (2 * kGateTurn) + column % kGateTurn;
}

}  // namespace cutlass::epilogue::thread
