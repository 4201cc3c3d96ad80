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

/// Maps vectors of 8 consecutive channels of one token from fp32 sums to the output.
template <class Element>
class BiasActivation {
 public:
  static constexpr int kVector = 8;

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
    if (params.bias_type != qcutlass::DType::kNone) load_bias();
  }

  CUTLASS_DEVICE void store(int token, float (&sum)[kVector]) const {
    if (token >= params_.tokens) return;
    if (params_.bias_type != qcutlass::DType::kNone) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i) sum[i] += bias_[i];
    }
    activate(sum, params_.activation);
    Array<Element, kVector> const result =
        NumericArrayConverter<Element, float, kVector>::convert(reinterpret_cast<Array<float, kVector> const&>(sum));
    Element* out = params_.output + token * params_.stride + channel_;
    if (params_.vectors) {
      if (channel_ < params_.channels) *reinterpret_cast<uint4*>(out) = reinterpret_cast<uint4 const&>(result);
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i)
        if (channel_ + i < params_.channels) out[i] = result[i];
    }
  }

 private:
  CUTLASS_DEVICE void load_bias() {
    switch (params_.bias_type) {
      case qcutlass::DType::kFloat16: load_bias<half_t>(); break;
      case qcutlass::DType::kBFloat16: load_bias<bfloat16_t>(); break;
      default: load_bias<float>(); break;
    }
  }

  template <class Bias>
  CUTLASS_DEVICE void load_bias() {
    Bias const* bias = static_cast<Bias const*>(params_.bias) + channel_;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) bias_[i] = channel_ + i < params_.channels ? float(bias[i]) : 0.f;
  }

  Params const& params_;
  int channel_;
  float bias_[kVector];
};

}  // namespace cutlass::epilogue::thread
