// The element-wise end of a product: bias, activation, gate, residual, and a store.
#pragma once

#include <type_traits>

#include "cutlass_ext/epilogue/activation.h"
#include "cutlass_ext/epilogue/columns.h"
#include "cutlass_ext/epilogue/output_arguments.h"

namespace cutlass::epilogue::thread {

/// Channels that a thread has of a token, in every operator below.
inline constexpr int kVectorChannels = 8;

/// `values` of 8 channels from `channel` on; 0 from `channels` on.
template <class Value, class Element>
CUTLASS_DEVICE void load_channels(Value (&values)[kVectorChannels], Element const* data, int channel, int channels) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kVectorChannels; ++i) values[i] = channel + i < channels ? Value(data[channel + i]) : Value(0);
}

/// A bias that leaves every value as it is, -0 too.
inline constexpr float kNoBias = -0.f;

CUTLASS_DEVICE float load_bias(void const* bias, qcutlass::DType type, int channel) {
  switch (type) {
    case qcutlass::DType::kNone: return kNoBias;
    case qcutlass::DType::kFloat16: return float(static_cast<half_t const*>(bias)[channel]);
    case qcutlass::DType::kBFloat16: return float(static_cast<bfloat16_t const*>(bias)[channel]);
    default: return static_cast<float const*>(bias)[channel];
  }
}

CUTLASS_DEVICE void load_channels(float (&values)[kVectorChannels], void const* data, qcutlass::DType type, int channel,
                                  int channels) {
  switch (type) {
    case qcutlass::DType::kNone:
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVectorChannels; ++i) values[i] = kNoBias;
      break;
    case qcutlass::DType::kFloat16: load_channels(values, static_cast<half_t const*>(data), channel, channels); break;
    case qcutlass::DType::kBFloat16:
      load_channels(values, static_cast<bfloat16_t const*>(data), channel, channels);
      break;
    default: load_channels(values, static_cast<float const*>(data), channel, channels); break;
  }
}

/// Calls function(a value of the output's type): Element, or with void the one that the launch has.
template <class Element, class Function>
CUTLASS_DEVICE void with_output_type(qcutlass::DType type, Function const& function) {
  if constexpr (!std::is_void_v<Element>) {
    function(Element{});
  } else {
    switch (type) {
      case qcutlass::DType::kFloat16: function(half_t{}); break;
      case qcutlass::DType::kBFloat16: function(bfloat16_t{}); break;
      default: function(float{}); break;
    }
  }
}

/// Rounds a token's 8 channels to Element, or with void to the launch's type.
template <class Element>
CUTLASS_DEVICE void round_channels(OutputTensor const& out, float (&values)[kVectorChannels]) {
  with_output_type<Element>(out.output_type, [&](auto element) { round_values<decltype(element)>(values); });
}

/// What 8 channels of a token with their bias give with a gate, in the thread that has the gates: returns whether this
/// one has them. Threads that hold neighbouring vectors of a token are neighbours in a warp, the first of four at a
/// multiple of four, and call together.
template <class Element>
CUTLASS_DEVICE bool apply_gate(OutputTensor const& out, int channel, float (&values)[kVectorChannels]) {
  constexpr unsigned kTurnLanes = kGateTurn / kVectorChannels, kPairLanes = 2 * kTurnLanes;
  round_channels<Element>(out, values);
  unsigned const lanes = ((1u << kPairLanes) - 1) << (threadIdx.x % 32 & ~(kPairLanes - 1));
  float multiplied[kVectorChannels];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kVectorChannels; ++i) multiplied[i] = __shfl_xor_sync(lanes, values[i], kTurnLanes);
  if (channel % (2 * kGateTurn) >= kGateTurn) return false;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kVectorChannels; ++i) values[i] = gate_value(values[i], out.activation) * multiplied[i];
  return true;
}

/// A launch's parameters of which the compiler computes nothing in advance: what it computes in front of a main loop,
/// or keeps for the next tile, costs that loop registers.
template <class Params>
CUTLASS_DEVICE Params opaque(Params params) {
  int gate = int(params.gate), activation = int(params.activation),
      types[2] = {int(params.output_type), int(params.bias_type)};
  asm volatile("" : "+l"(params.output), "+l"(params.stride), "+l"(params.residual), "+l"(params.residual_stride));
  asm volatile("" : "+r"(params.tokens), "+r"(params.channels));
  asm volatile("" : "+r"(gate), "+r"(activation), "+r"(types[0]), "+r"(types[1]));
  params.gate = qcutlass::Gate(gate);
  params.activation = qcutlass::Activation(activation);
  params.output_type = qcutlass::DType(types[0]);
  params.bias_type = qcutlass::DType(types[1]);
  return params;
}

/// Activation, gate and residual of a token's 8 channels with their bias, and their store as Element, or with void as
/// the launch's type. With a gate threads call as for apply_gate().
template <class Element>
CUTLASS_DEVICE void finish_channels(OutputTensor const& out, int token, int channel, float (&values)[kVectorChannels]) {
  int column = channel, columns = out.channels;
  if (out.gate != qcutlass::Gate::kNone) {
    if (!apply_gate<Element>(out, channel, values)) return;
    column = gated_column(channel);
    columns /= 2;
  } else {
    activate(values, out.activation);
  }
  bool const adds = out.residual != nullptr;
  if (adds) round_channels<Element>(out, values);
  with_output_type<Element>(out.output_type, [&](auto element) {
    using Type = decltype(element);
    if (adds) {
      auto const* const row = static_cast<Type const*>(out.residual) + token * out.residual_stride;
      auto const residual = load_columns<Type, kVectorChannels>(row + column, columns - column, out.vectors);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVectorChannels; ++i) values[i] = add_separately(values[i], float(residual[i]));
    }
    store_channels(static_cast<Type*>(out.output) + token * out.stride + column, values, columns - column, out.vectors);
  });
}

/// Maps vectors of 8 consecutive channels of one token from fp32 sums to the output.
template <class Element>
class BiasActivation {
 public:
  static constexpr int kVector = kVectorChannels;
  using Sum = float;

  struct Params : OutputTensor {
    Params() = default;
    explicit Params(OutputArguments const& args) : OutputTensor(args) {}
  };

  CUTLASS_DEVICE BiasActivation(Params const& params, int channel) : BiasActivation(params, channel, channel) {}

  CUTLASS_DEVICE void store(int token, float (&sum)[kVector]) const {
    if (token >= params_.tokens) return;
    add_bias(sum);
    finish_channels<Element>(params_, token, channel_, sum);
  }

 protected:
  /// `source`: where the bias has the channels.
  CUTLASS_DEVICE BiasActivation(Params const& params, int channel, int source) : params_(params), channel_(channel) {
    if (params.bias_type != qcutlass::DType::kNone)
      load_channels(bias_, params.bias, params.bias_type, source, params.channels);
  }

  CUTLASS_DEVICE void add_bias(float (&sum)[kVector]) const {
    if (params_.bias_type == qcutlass::DType::kNone) return;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) sum[i] += bias_[i];
  }

  CUTLASS_DEVICE void write(int token, int column, int columns, float const (&values)[kVector]) const {
    store_channels(static_cast<Element*>(params_.output) + token * params_.stride + column, values, columns - column,
                   params_.vectors);
  }

  Params const& params_;
  int channel_;

 private:
  float bias_[kVector];
};

}  // namespace cutlass::epilogue::thread
