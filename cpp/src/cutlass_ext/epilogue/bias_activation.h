// The element-wise end of a product: bias, activation, one rounding, and a store of any alignment.
#pragma once

#include "cutlass/bfloat16.h"
#include "cutlass/constants.h"
#include "cutlass/epilogue/thread/activation.h"
#include "cutlass/half.h"
#include "cutlass/numeric_conversion.h"
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

/// Channels that a thread has of a token, in every operator below.
inline constexpr int kVectorChannels = 8;

/// `values` of 8 channels from `channel` on; 0 from `channels` on.
template <class Value, class Element>
CUTLASS_DEVICE void load_channels(Value (&values)[kVectorChannels], Element const* data, int channel, int channels) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kVectorChannels; ++i) values[i] = channel + i < channels ? Value(data[channel + i]) : Value(0);
}

CUTLASS_DEVICE void load_channels(float (&values)[kVectorChannels], void const* data, qcutlass::DType type, int channel,
                                  int channels) {
  switch (type) {
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

/// What an output operator loads for a token, if that is nothing.
struct NoToken {};

/// Maps vectors of 8 consecutive channels of one token from fp32 sums to the output.
template <class Element>
class BiasActivation {
 public:
  static constexpr int kVector = kVectorChannels;
  using Sum = float;

  struct Params {
    Element* output;  // [tokens, channels]
    int64_t stride;
    int tokens, channels;
    bool vectors;  // every 8 channels of a row that start at a multiple of 8 are complete and 16-byte aligned
    void const* bias;
    qcutlass::DType bias_type;
    qcutlass::Activation activation;
  };

  CUTLASS_DEVICE BiasActivation(Params const& params, int channel) : params_(params), channel_(channel) {
    if (params.bias_type != qcutlass::DType::kNone)
      load_channels(bias_, params.bias, params.bias_type, channel, params.channels);
  }

  CUTLASS_DEVICE NoToken load(int /*token*/) const { return {}; }

  /// kActivates: false where the caller knows that there is no activation. `of_token`: what load(token) has returned,
  /// for callers with time to pass between the two.
  template <bool kActivates = true>
  CUTLASS_DEVICE void store(int token, float (&sum)[kVector], NoToken /*of_token*/ = {}) const {
    if (token >= params_.tokens) return;
    if (params_.bias_type != qcutlass::DType::kNone) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i) sum[i] += bias_[i];
    }
    if constexpr (kActivates) activate(sum, params_.activation);
    store_channels(params_.output + token * params_.stride + channel_, sum, params_.channels - channel_,
                   params_.vectors);
  }

 private:
  Params const& params_;
  int channel_;
  float bias_[kVector];
};

}  // namespace cutlass::epilogue::thread
