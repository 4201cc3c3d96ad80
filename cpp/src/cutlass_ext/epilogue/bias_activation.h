// The element-wise end of a product: bias, activation, gate, residual, and a store of any alignment.
#pragma once

#include <type_traits>
#include <utility>

#include "cutlass/bfloat16.h"
#include "cutlass/constants.h"
#include "cutlass/epilogue/thread/activation.h"
#include "cutlass/functional.h"
#include "cutlass/half.h"
#include "cutlass/numeric_conversion.h"
#include "cutlass_ext/epilogue/output_arguments.h"
#include "qcutlass/types.h"

namespace cutlass::epilogue::thread {

/// Exact forms in fp32. CUTLASS's ReLU and GELU (erf) fit; its GELU_taylor and SiLu use approximate tanh and exp
/// instructions with errors near an fp16 rounding step, so these two are written out with the accurate functions.
template <int kCount>
CUTLASS_DEVICE void activate(float (&x)[kCount], qcutlass::Activation activation) {
  auto const each = [&](auto function) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) x[i] = function(x[i]);
  };
  switch (activation) {
    case qcutlass::Activation::kRelu: each(ReLu<float>{}); break;
    case qcutlass::Activation::kGelu: each(GELU<float>{}); break;
    case qcutlass::Activation::kGeluTanh:
      each([](float v) {
        constexpr float kRoot2OverPi = 0.7978845608f, kCubic = 0.044715f;
        return 0.5f * v * (1.f + tanhf(kRoot2OverPi * (v + kCubic * v * v * v)));
      });
      break;
    case qcutlass::Activation::kSilu: each([](float v) { return v / (1.f + expf(-v)); }); break;
    default: break;
  }
}

/// What a gate makes of its channel, v * sigmoid(u): SiLU has u = v, GELU in its tanh form u = 2 sqrt(2 / pi) (v +
/// 0.044715 v^3). Short, since it stands in every turn of unrolled loops, where the switch of activate() made products
/// slower. exp2f() errs by 2^-22 and the reciprocal by 2^-23 of their
/// results; with s = sigmoid(u) an error of the exponential, and of its argument, counts s (1 - s) <= 1 / 4, so that
/// the result, two roundings included, is within about 2^-22 |v|.
CUTLASS_DEVICE float gate_value(float v, qcutlass::Activation activation) {
  constexpr float kLog2E = 1.44269504f;
  constexpr float kLinear = 2.30220820f, kCubic = 0.10294324f;  // 2 sqrt(2 / pi) log2(e), and 0.044715 times it
  float const slope = activation == qcutlass::Activation::kSilu ? kLog2E : fmaf(kCubic, v * v, kLinear);
  return v * reciprocal_approximate<float>{}(1.f + exp2f(-v * slope));
}

/// The same of many values, eight at a time: the code of an activation is long, and registers have no run-time index.
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

/// So many elements as are accessed at once, 16 bytes at most.
template <class Element, int kCount>
using Access = AlignedArray<Element, kCount * sizeof(Element) < 16 ? kCount : 16 / int(sizeof(Element))>;

/// Rounds the values to Element and stores those that exist. `vectors`: all do, and `out` is aligned to an Access.
template <class Element, class Value, int kCount>
CUTLASS_DEVICE void store_channels(Element* out, Value const (&values)[kCount], int count, bool vectors) {
  using Vector = Access<Element, kCount>;
  Array<Element, kCount> const result =
      NumericArrayConverter<Element, Value, kCount>::convert(reinterpret_cast<Array<Value, kCount> const&>(values));
  if (vectors) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount / int(Vector::kElements); ++i)
      if (count > 0) reinterpret_cast<Vector*>(out)[i] = reinterpret_cast<Vector const*>(&result)[i];
  } else {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i)
      if (i < count) out[i] = result[i];
  }
}

/// Two values rounded to 16 bits.
template <class Element>
CUTLASS_DEVICE uint32_t pack_pair(float first, float second) {
  Array<float, 2> const pair = {first, second};
  Array<Element, 2> const result = NumericArrayConverter<Element, float, 2>::convert(pair);
  return reinterpret_cast<uint32_t const&>(result);
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

/// Values as they are in memory between two operators. What is fused rounds where separate operators do: its bits are
/// theirs.
template <class Element, int kCount>
CUTLASS_DEVICE void round_values(float (&values)[kCount]) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kCount; ++i) values[i] = float(Element(values[i]));
}

/// kCount elements that follow `from`, of which `count` exist. `vectors`: all do, or none, and they are aligned to an
/// Access.
template <class Element, int kCount>
CUTLASS_DEVICE AlignedArray<Element, kCount> load_columns(Element const* from, int count, bool vectors) {
  using Vector = Access<Element, kCount>;
  AlignedArray<Element, kCount> result;
  if (vectors) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount / int(Vector::kElements); ++i)
      if (count > 0) reinterpret_cast<Vector*>(&result)[i] = reinterpret_cast<Vector const*>(from)[i];
  } else {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i)
      if (i < count) result[i] = from[i];
  }
  return result;
}

/// A sum that is never fused with the product before it: rounded as the sum of a separate operator.
CUTLASS_DEVICE float add_separately(float a, float b) { return __fadd_rn(a, b); }

/// Channels of a gate that lie together, before as many of what they multiply (qcutlass::Gate::kInterleaved).
inline constexpr int kGateTurn = 16;

/// The column of the output that a channel of a gate gives.
CUTLASS_HOST_DEVICE constexpr int gated_column(int channel) {
  return channel / (2 * kGateTurn) * kGateTurn + channel % kGateTurn;
}
/// And the channel that gives a column.
CUTLASS_HOST_DEVICE constexpr int gate_channel(int column) {
  return column / kGateTurn * (2 * kGateTurn) + column % kGateTurn;
}

/// Activation, gate and residual of a token's 8 channels with their bias, and their store as Element, or with void as
/// the launch's type. With a gate, threads that hold neighbouring vectors of a token are neighbours in a warp, the
/// first of four at a multiple of four, and call together.
template <class Element>
CUTLASS_DEVICE void finish_channels(OutputTensor const& out, int token, int channel, float (&values)[kVectorChannels]) {
  constexpr unsigned kTurnLanes = kGateTurn / kVectorChannels, kPairLanes = 2 * kTurnLanes;
  auto const round = [&] {
    with_output_type<Element>(out.output_type, [&](auto element) { round_values<decltype(element)>(values); });
  };
  int column = channel, columns = out.channels;
  if (out.gate != qcutlass::Gate::kNone) {
    round();
    unsigned const lanes = ((1u << kPairLanes) - 1) << (threadIdx.x % 32 & ~(kPairLanes - 1));
    float multiplied[kVectorChannels];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVectorChannels; ++i) multiplied[i] = __shfl_xor_sync(lanes, values[i], kTurnLanes);
    if (channel % (2 * kGateTurn) >= kGateTurn) return;  // the other thread has the gate
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVectorChannels; ++i) values[i] = gate_value(values[i], out.activation) * multiplied[i];
    column = gated_column(channel);
    columns /= 2;
  } else {
    activate(values, out.activation);
  }
  bool const adds = out.residual != nullptr;
  if (adds) round();
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

/// Stores those elements of some words that exist, `vectors`: all, or none.
template <class Element, class Words>
CUTLASS_DEVICE void store_words(Element* out, Words const& words, int count, bool vectors) {
  constexpr int kCount = int(sizeof(words) / sizeof(Element));
  if (vectors) {
    if (count > 0) *reinterpret_cast<Words*>(out) = words;
  } else {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i)
      if (i < count) out[i] = reinterpret_cast<Element const*>(&words)[i];
  }
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

  CUTLASS_DEVICE BiasActivation(Params const& params, int channel) : params_(params), channel_(channel) {
    if (params.bias_type != qcutlass::DType::kNone)
      load_channels(bias_, params.bias, params.bias_type, channel, params.channels);
  }

  CUTLASS_DEVICE void store(int token, float (&sum)[kVector]) const {
    if (token >= params_.tokens) return;
    add_bias(sum);
    finish_channels<Element>(params_, token, channel_, sum);
  }

 protected:
  CUTLASS_DEVICE void add_bias(float (&sum)[kVector]) const {
    if (params_.bias_type == qcutlass::DType::kNone) return;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) sum[i] += bias_[i];
  }

  CUTLASS_DEVICE void write(int token, float const (&values)[kVector]) const {
    store_channels(static_cast<Element*>(params_.output) + token * params_.stride + channel_, values,
                   params_.channels - channel_, params_.vectors);
  }

 private:
  Params const& params_;
  int channel_;
  float bias_[kVector];
};

}  // namespace cutlass::epilogue::thread
