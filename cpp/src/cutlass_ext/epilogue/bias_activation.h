// The element-wise end of a product: bias, activation, one rounding, and a store of any alignment.
#pragma once

#include <utility>

#include "cutlass/bfloat16.h"
#include "cutlass/constants.h"
#include "cutlass/epilogue/thread/activation.h"
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

/// Rounds the values to Element and stores those that exist. `vectors`: all 8 do, and `out` is 16-byte aligned.
template <class Element, class Value>
CUTLASS_DEVICE void store_channels(Element* out, Value const (&values)[kVectorChannels], int count, bool vectors) {
  Array<Element, kVectorChannels> const result = NumericArrayConverter<Element, Value, kVectorChannels>::convert(
      reinterpret_cast<Array<Value, kVectorChannels> const&>(values));
  if (vectors) {
    constexpr int kWords = sizeof(result) / sizeof(uint4);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kWords; ++i)
      if (count > 0) reinterpret_cast<uint4*>(out)[i] = reinterpret_cast<uint4 const*>(&result)[i];
  } else {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVectorChannels; ++i)
      if (i < count) out[i] = result[i];
  }
}

/// The same where the floating type of `out` is the launch's; `offset` is in elements.
CUTLASS_DEVICE void store_channels(void* out, qcutlass::DType type, int64_t offset,
                                   float const (&values)[kVectorChannels], int count, bool vectors) {
  switch (type) {
    case qcutlass::DType::kFloat16: store_channels(static_cast<half_t*>(out) + offset, values, count, vectors); break;
    case qcutlass::DType::kBFloat16:
      store_channels(static_cast<bfloat16_t*>(out) + offset, values, count, vectors);
      break;
    default: store_channels(static_cast<float*>(out) + offset, values, count, vectors); break;
  }
}

/// Two values rounded to 16 bits.
template <class Element>
CUTLASS_DEVICE uint32_t pack_pair(float first, float second) {
  Array<float, 2> const pair = {first, second};
  Array<Element, 2> const result = NumericArrayConverter<Element, float, 2>::convert(pair);
  return reinterpret_cast<uint32_t const&>(result);
}

/// Stores those of 8 channels of 16 bits, or 16 of 8, that exist.
template <class Element>
CUTLASS_DEVICE void store_words(Element* out, uint4 const& words, int count, bool vectors) {
  constexpr int kCount = int(sizeof(words) / sizeof(Element));
  if (vectors) {
    if (count > 0) *reinterpret_cast<uint4*>(out) = words;
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

  /// OutputTensor's members, but of one type.
  struct Params {
    Element* output;
    int64_t stride;
    int tokens, channels;
    bool vectors;
    void const* bias;
    qcutlass::DType bias_type;
    qcutlass::Activation activation;

    Params() = default;
    explicit Params(OutputArguments const& args)
        : output(static_cast<Element*>(args.output)),
          stride(args.stride),
          tokens(args.tokens),
          channels(args.channels),
          vectors(args.vectors),
          bias(args.bias),
          bias_type(args.bias_type),
          activation(args.activation) {}
  };

  CUTLASS_DEVICE BiasActivation(Params const& params, int channel) : params_(params), channel_(channel) {
    if (params.bias_type != qcutlass::DType::kNone)
      load_channels(bias_, params.bias, params.bias_type, channel, params.channels);
  }

  CUTLASS_DEVICE void store(int token, float (&sum)[kVector]) const {
    if (token >= params_.tokens) return;
    finish(sum);
    write(token, sum);
  }

 protected:
  CUTLASS_DEVICE void finish(float (&sum)[kVector]) const {
    if (params_.bias_type != qcutlass::DType::kNone) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i) sum[i] += bias_[i];
    }
    activate(sum, params_.activation);
  }

  CUTLASS_DEVICE void write(int token, float const (&values)[kVector]) const {
    store_channels(params_.output + token * params_.stride + channel_, values, params_.channels - channel_,
                   params_.vectors);
  }

 private:
  Params const& params_;
  int channel_;
  float bias_[kVector];
};

}  // namespace cutlass::epilogue::thread
