// The element-wise end of a product: bias, activation, one rounding, and a store of any alignment.
#pragma once

#include "cutlass/bfloat16.h"
#include "cutlass/constants.h"
#include "cutlass/epilogue/thread/activation.h"
#include "cutlass/half.h"
#include "qcutlass/types.h"

namespace cutlass::epilogue::thread {

/// Exact forms in fp32. CUTLASS's ReLU and GELU (erf) fit; its GELU_taylor and SiLu use approximate tanh and exp
/// instructions with errors near an fp16 rounding step, so these two are written out with the accurate functions.
CUTLASS_DEVICE float activate(float x, qcutlass::Activation activation) {
  switch (activation) {
    case qcutlass::Activation::kRelu: return ReLu<float>{}(x);
    case qcutlass::Activation::kGelu: return GELU<float>{}(x);
    case qcutlass::Activation::kGeluTanh: {
      constexpr float kRoot2OverPi = 0.7978845608f, kCubic = 0.044715f;
      return 0.5f * x * (1.f + tanhf(kRoot2OverPi * (x + kCubic * x * x * x)));
    }
    case qcutlass::Activation::kSilu: return x / (1.f + expf(-x));
    default: return x;
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
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) bias_[i] = load_bias(channel + i);
  }

  CUTLASS_DEVICE void store(int token, float const (&sum)[kVector]) const {
    if (token >= params_.tokens) return;
    Array<Element, kVector> result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) result[i] = Element(activate(sum[i] + bias_[i], params_.activation));
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
  CUTLASS_DEVICE float load_bias(int channel) const {
    if (params_.bias_type == qcutlass::DType::kNone || channel >= params_.channels) return 0.f;
    switch (params_.bias_type) {
      case qcutlass::DType::kFloat16: return float(static_cast<half_t const*>(params_.bias)[channel]);
      case qcutlass::DType::kBFloat16: return float(static_cast<bfloat16_t const*>(params_.bias)[channel]);
      default: return static_cast<float const*>(params_.bias)[channel];
    }
  }

  Params const& params_;
  int channel_;
  float bias_[kVector];
};

}  // namespace cutlass::epilogue::thread
