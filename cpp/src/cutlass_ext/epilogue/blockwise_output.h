// The end of blockwise products: bias, activation, and gate, residual and rounding or quantisation by blocks of
// channels.
#pragma once

#include "cutlass_ext/epilogue/bias_activation.h"
#include "cutlass_ext/epilogue/block_quantizer.h"

namespace cutlass::epilogue::thread {

/// Maps vectors of 8 consecutive channels of one token from fp32 sums to the output. Where that is quantised, the
/// threads that hold a block of channels of a token are neighbours in a warp, the first of them at a multiple of their
/// number, and call store() together.
class BlockwiseOutput {
 public:
  static constexpr int kVector = kVectorChannels;
  using Sum = float;

  struct Params : OutputTensor {
    qcutlass::QuantizedOutput quantized;

    Params() = default;
    explicit Params(OutputArguments const& args) : OutputTensor(args), quantized(args.quantized) {}
  };

  /// The values of a token, and of a channel, that its sums are finished with.
  struct Token {};
  static CUTLASS_DEVICE Token load_token(Params const&, int /*token*/) { return {}; }
  struct Channel {
    float bias;
  };
  static CUTLASS_DEVICE Channel load_channel(Params const& params, int channel) {
    return {channel < params.channels ? load_bias(params.bias, params.bias_type, channel) : kNoBias};
  }
  static CUTLASS_DEVICE bool uses_channels(Params const& params) { return params.bias_type != qcutlass::DType::kNone; }
  static CUTLASS_DEVICE float value(float sum, Token, Channel const& channel, bool /*shifts*/) {
    return sum + channel.bias;
  }
  static CUTLASS_DEVICE bool stores_sums(Params const&) { return false; }
  static CUTLASS_DEVICE bool shifts(Params const&) { return false; }
  static CUTLASS_DEVICE float shifted(float sum, Token, Channel const&) { return sum; }

  CUTLASS_DEVICE BlockwiseOutput(Params const& params, int channel) : params_(params), channel_(channel) {
    if (params.bias_type != qcutlass::DType::kNone)
      load_channels(bias_, params.bias, params.bias_type, channel, params.channels);
  }

  /// Finishes the sums of a token's 8 channels and stores them, as BiasActivation::store does. Quantised outputs have
  /// neither gates nor residuals.
  CUTLASS_DEVICE void store(int token, float (&sum)[kVector]) const {
    if (params_.bias_type != qcutlass::DType::kNone) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i) sum[i] += bias_[i];
    }
    if (params_.quantized.size != 0) {
      activate(sum, params_.activation);
      quantize(token, sum);
    } else if (token < params_.tokens) {
      finish_channels<void>(params_, token, channel_, sum);
    }
  }

 private:
  static constexpr unsigned kMostLanes = 128 / kVector;  // of the largest block

  CUTLASS_DEVICE void quantize(int token, float (&value)[kVector]) const {
    int const size = int(params_.quantized.size);
    if (channel_ + kVector > params_.channels) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i)
        if (channel_ + i >= params_.channels) value[i] = 0.f;  // sums of channels that do not exist
    }
    BlockQuantizer::Extent extent;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) extent.include(value[i]);
    unsigned const lanes = unsigned(size) / kVector, lane = threadIdx.x % 32;
    unsigned const mask = ((1u << lanes) - 1) << (lane & ~(lanes - 1));
    CUTLASS_PRAGMA_UNROLL
    for (unsigned distance = 1; distance < kMostLanes; distance *= 2)  // no branch: others are interleaved with it
      extent.bits = fast_max(extent.bits, __shfl_xor_sync(mask, extent.bits, distance < lanes ? distance : 0));
    BlockQuantizer const quantizer(extent);
    uint2 const codes = {quantizer.codes(value[0], value[1], value[2], value[3]),
                         quantizer.codes(value[4], value[5], value[6], value[7])};

    if (token >= params_.tokens || channel_ >= params_.channels) return;
    if (channel_ % size == 0)
      params_.quantized.scales[token * params_.quantized.stride + channel_ / size] = quantizer.scale();
    int8_t* const out = static_cast<int8_t*>(params_.output) + token * params_.stride + channel_;
    if (params_.vectors) {
      *reinterpret_cast<uint2*>(out) = codes;
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i)
        if (channel_ + i < params_.channels) out[i] = reinterpret_cast<int8_t const*>(&codes)[i];
    }
  }

  Params const& params_;
  int channel_;
  float bias_[kVector];
};

}  // namespace cutlass::epilogue::thread
