// The end of 8-by-8-bit products: zero points, scales of tokens and channels, bias, activation, one rounding. The
// elements of CUTLASS's visitor trees for the same (row and column broadcasts, computes, a store) as one operator on
// vectors of channels, which sums of all main loops become; its visitors take row-major ones.
#pragma once

#include "cutlass_ext/epilogue/bias_activation.h"
#include "qcutlass/gemm.h"

namespace cutlass::epilogue::thread {

/// Maps vectors of 8 consecutive channels of one token from int32 (int8 operands) or fp32 (fp8 operands) sums to the
/// output, whose type is the launch's.
template <class Sum_>
class ScaledSums {
 public:
  static constexpr int kVector = kVectorChannels;
  using Sum = Sum_;
  static constexpr bool kInteger = std::is_same_v<Sum, int32_t>;

  struct Params {
    void* output;  // [tokens, channels]
    qcutlass::DType output_type;
    int64_t stride;
    int tokens, channels;
    bool vectors;  // as in BiasActivation
    void const* bias;
    qcutlass::DType bias_type;
    qcutlass::Activation activation;
    qcutlass::SumScales scales;
  };

  CUTLASS_DEVICE ScaledSums(Params const& params, int channel) : params_(params), channel_(channel) {
    qcutlass::SumScales const& scales = params.scales;
    if (scales.w_scale_stride != 0) {
      load_channels(w_scale_, scales.w_scale, channel, params.channels);
    } else if (scales.w_scale != nullptr) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i) w_scale_[i] = *scales.w_scale;
    }
    if (params.bias_type != qcutlass::DType::kNone)
      load_channels(bias_, params.bias, params.bias_type, channel, params.channels);
    if (kInteger && scales.azp != nullptr) load_channels(channel_sums_, scales.channel_sums, channel, params.channels);
  }

  struct Token {
    float scale;
    int32_t azp;
  };
  CUTLASS_DEVICE Token load(int token) const {
    int64_t const last = fast_min(token, params_.tokens - 1);
    qcutlass::SumScales const& scales = params_.scales;
    return {scales.a_scale != nullptr ? scales.a_scale[last * scales.a_scale_stride] : 1.f,
            kInteger && scales.azp != nullptr ? scales.azp[last * scales.azp_stride] : 0};
  }

  /// As BiasActivation's.
  template <bool kActivates = true>
  CUTLASS_DEVICE void store(int token, Sum (&sum)[kVector]) const {
    store<kActivates>(token, sum, load(token));
  }
  template <bool kActivates = true>
  CUTLASS_DEVICE void store(int token, Sum (&sum)[kVector], Token const& of_token) const {
    if (token >= params_.tokens) return;
    int64_t const offset = token * params_.stride + channel_;
    qcutlass::SumScales const& scales = params_.scales;
    int32_t const azp = of_token.azp;
    if (kInteger && params_.output_type == qcutlass::DType::kInt32) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector && scales.azp != nullptr; ++i)  // exact modulo 2^32
        sum[i] = Sum(uint32_t(sum[i]) - uint32_t(azp) * uint32_t(channel_sums_[i]));
      store_channels(static_cast<Sum*>(params_.output) + offset, sum, params_.channels - channel_, params_.vectors);
      return;
    }
    float value[kVector];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) {
      if (kInteger && scales.azp != nullptr)  // the zero point's part alone may exceed 32 bits
        value[i] = float(int64_t(sum[i]) - int64_t(azp) * channel_sums_[i]);
      else
        value[i] = float(sum[i]);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) value[i] = value[i] * of_token.scale * w_scale_[i];
    if (params_.bias_type != qcutlass::DType::kNone) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i) value[i] += bias_[i];
    }
    if constexpr (kActivates) activate(value, params_.activation);
    store_channels(params_.output, params_.output_type, offset, value, params_.channels - channel_, params_.vectors);
  }

 private:
  Params const& params_;
  int channel_;
  float w_scale_[kVector], bias_[kVector];
  int32_t channel_sums_[kVector];
};

}  // namespace cutlass::epilogue::thread
