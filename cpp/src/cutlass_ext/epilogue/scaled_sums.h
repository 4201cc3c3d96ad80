// The output operator of products of 8-bit activations: zero points, scales of tokens and channels, bias, activation,
// gate, residual. It does what CUTLASS expresses as a visitor tree (row and column broadcasts, computes, a store).
// After wgmma it works value by value on the sums in their registers, after all other main loops on vectors of
// channels.
#pragma once

#include "cutlass_ext/epilogue/bias_activation.h"

namespace cutlass::epilogue::thread {

/// Maps vectors of 8 consecutive channels of one token from int32 (int8 operands) or fp32 (fp8 operands) sums to the
/// output, whose type is the launch's.
template <class Sum_>
class ScaledSums {
 public:
  static constexpr int kVector = kVectorChannels;
  using Sum = Sum_;
  static constexpr bool kInteger = std::is_same_v<Sum, int32_t>;

  struct Params : OutputTensor {
    qcutlass::SumScales scales;

    Params() = default;
    explicit Params(OutputArguments const& args) : OutputTensor(args), scales(args.scales) {}
  };

  /// The values of a token that its sums are finished with.
  struct Token {
    float scale;
    int32_t azp;
  };
  static CUTLASS_DEVICE Token load_token(Params const& params, int token) {
    int64_t const last = fast_min(token, params.tokens - 1);
    qcutlass::SumScales const& scales = params.scales;
    return {scales.a_scale != nullptr ? scales.a_scale[last * scales.a_scale_stride] : 1.f,
            kInteger && scales.azp != nullptr ? scales.azp[last * scales.azp_stride] : 0};
  }

  /// The values of a channel that its sums are finished with.
  struct FloatChannel {
    float scale, bias;
    FloatChannel() = default;
    CUTLASS_DEVICE FloatChannel(float scale, float bias, int32_t) : scale(scale), bias(bias) {}
  };
  struct alignas(16) IntegerChannel {
    float scale, bias;
    int32_t codes;
    IntegerChannel() = default;
    CUTLASS_DEVICE IntegerChannel(float scale, float bias, int32_t codes) : scale(scale), bias(bias), codes(codes) {}
  };
  using Channel = std::conditional_t<kInteger, IntegerChannel, FloatChannel>;
  static CUTLASS_DEVICE Channel load_channel(Params const& params, int channel) {
    if (channel >= params.channels) return {1.f, kNoBias, 0};
    qcutlass::SumScales const& scales = params.scales;
    return {scales.w_scale != nullptr ? scales.w_scale[scales.w_scale_stride != 0 ? channel : 0] : 1.f,
            load_bias(params.bias, params.bias_type, channel), shifts(params) ? scales.channel_sums[channel] : 0};
  }
  static CUTLASS_DEVICE bool uses_channels(Params const&) { return true; }

  /// Whether outputs are int32 sums, to which only zero points are applied.
  static CUTLASS_DEVICE bool stores_sums(Params const& params) {
    return kInteger && params.output_type == qcutlass::DType::kInt32;
  }
  /// Whether activations have zero points.
  static CUTLASS_DEVICE bool shifts(Params const& params) { return kInteger && params.scales.azp != nullptr; }
  /// The sum minus the zero point's part, modulo 2^32.
  static CUTLASS_DEVICE Sum shifted(Sum sum, Token const& token, Channel const& channel) {
    if constexpr (kInteger) sum = Sum(uint32_t(sum) - uint32_t(token.azp) * uint32_t(channel.codes));
    return sum;
  }

  /// The scaled sum plus bias, fp32. `shifts`: what the function says. The zero point's part alone may exceed 32 bits.
  static CUTLASS_DEVICE float value(Sum sum, Token const& token, Channel const& channel, bool shifts) {
    float v = float(sum);
    if constexpr (kInteger)
      if (shifts) v = float(int64_t(sum) - int64_t(token.azp) * channel.codes);
    return fmaf(v * token.scale, channel.scale, channel.bias);
  }

  CUTLASS_DEVICE ScaledSums(Params const& params, int channel) : params_(params), channel_(channel) {
    qcutlass::SumScales const& scales = params.scales;
    if (scales.w_scale_stride != 0) {
      load_channels(w_scale_, scales.w_scale, channel, params.channels);
    } else {
      float const scale = scales.w_scale != nullptr ? *scales.w_scale : 1.f;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i) w_scale_[i] = scale;
    }
    load_channels(bias_, params.bias, params.bias_type, channel, params.channels);
    if (shifts(params)) load_channels(codes_, scales.channel_sums, channel, params.channels);
  }

  /// Finishes the sums of a token's 8 channels and stores them, as BiasActivation::store does.
  CUTLASS_DEVICE void store(int token, Sum (&sum)[kVector]) const {
    if (token >= params_.tokens) return;
    Token const of_token = load_token(params_, token);
    if (stores_sums(params_)) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector && shifts(params_); ++i) sum[i] = shifted(sum[i], of_token, channel(i));
      store_channels(static_cast<Sum*>(params_.output) + token * params_.stride + channel_, sum,
                     params_.channels - channel_, params_.vectors);
      return;
    }
    float values[kVector];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) values[i] = value(sum[i], of_token, channel(i), shifts(params_));
    finish_channels<void>(params_, token, channel_, values);
  }

 private:
  CUTLASS_DEVICE Channel channel(int i) const { return {w_scale_[i], bias_[i], codes_[i]}; }

  Params const& params_;
  int channel_;
  float w_scale_[kVector], bias_[kVector];
  int32_t codes_[kVector];
};

}  // namespace cutlass::epilogue::thread
