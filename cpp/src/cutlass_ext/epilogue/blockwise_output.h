// The end of blockwise int8 products: bias, activation, and one rounding or quantisation by blocks of channels.
#pragma once

#include <math_constants.h>

#include "cutlass_ext/epilogue/bias_activation.h"
#include "integer_floats.h"
#include "qcutlass/gemm.h"
#include "qcutlass/quantize.h"

namespace cutlass::epilogue::thread {

/// Maps vectors of 8 consecutive channels of one token from fp32 sums to the output. Where that is quantised, the
/// threads that hold a block of channels of a token are neighbours in a warp, the first of them at a multiple of their
/// number, and call store() together.
class BlockwiseOutput {
 public:
  static constexpr int kVector = kVectorChannels;
  using Sum = float;

  struct Params {
    void* output;  // [tokens, channels]
    qcutlass::DType output_type;
    int64_t stride;
    int tokens, channels;
    bool vectors;  // as in BiasActivation
    void const* bias;
    qcutlass::DType bias_type;
    qcutlass::Activation activation;
    qcutlass::QuantizedOutput quantized;
  };

  CUTLASS_DEVICE BlockwiseOutput(Params const& params, int channel) : params_(params), channel_(channel) {
    if (params.bias_type != qcutlass::DType::kNone)
      load_channels(bias_, params.bias, params.bias_type, channel, params.channels);
  }

  CUTLASS_DEVICE NoToken load(int /*token*/) const { return {}; }

  /// As BiasActivation's.
  template <bool kActivates = true>
  CUTLASS_DEVICE void store(int token, float (&sum)[kVector], NoToken /*of_token*/ = {}) const {
    if (params_.bias_type != qcutlass::DType::kNone) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i) sum[i] += bias_[i];
    }
    if constexpr (kActivates) activate(sum, params_.activation);
    if (params_.quantized.size != 0)
      quantize(token, sum);
    else if (token < params_.tokens)
      store_channels(params_.output, params_.output_type, token * params_.stride + channel_, sum,
                     params_.channels - channel_, params_.vectors);
  }

 private:
  static constexpr unsigned kMostLanes = 128 / kVector;  // of the largest block
  static constexpr float kLargest = qcutlass::largest_code(qcutlass::DType::kInt8);

  /// The quantiser of qcutlass/quantize.h with a reciprocal in place of quotients: next to half a code, the other one
  /// may be chosen. A tile's main loop waits for its epilogue, so instructions count.
  CUTLASS_DEVICE void quantize(int token, float (&value)[kVector]) const {
    int const size = int(params_.quantized.size);
    if (channel_ + kVector > params_.channels) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i)
        if (channel_ + i >= params_.channels) value[i] = 0.f;  // sums of channels that do not exist
    }
    int bits = 0;  // of max |value|: magnitudes are ordered as their bits are, and NaN is the largest
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) bits = fast_max(bits, __float_as_int(fabsf(value[i])));
    unsigned const lanes = unsigned(size) / kVector, lane = threadIdx.x % 32;
    unsigned const mask = ((1u << lanes) - 1) << (lane & ~(lanes - 1));
    CUTLASS_PRAGMA_UNROLL
    for (unsigned distance = 1; distance < kMostLanes; distance *= 2)  // no branch: others are interleaved with it
      bits = fast_max(bits, __shfl_xor_sync(mask, bits, distance < lanes ? distance : 0));
    float const scale = scale_of(__int_as_float(bits)), reciprocal = __fdividef(1.f, scale);
    uint2 codes = {round(value, reciprocal), round(value + kVector / 2, reciprocal)};
    if (!(scale < CUDART_INF_F)) codes = make_uint2(0, 0);  // NaN and infinities, which the scale shows

    if (token >= params_.tokens || channel_ >= params_.channels) return;
    if (channel_ % size == 0) params_.quantized.scales[token * params_.quantized.stride + channel_ / size] = scale;
    int8_t* const out = static_cast<int8_t*>(params_.output) + token * params_.stride + channel_;
    if (params_.vectors) {
      *reinterpret_cast<uint2*>(out) = codes;
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i)
        if (channel_ + i < params_.channels) out[i] = reinterpret_cast<int8_t const*>(&codes)[i];
    }
  }

  /// qcutlass::scale_of, its quotient by a constant by a product and one step of Newton's: correctly rounded.
  static CUTLASS_DEVICE float scale_of(float extent) {
    constexpr float kInverse = 1.f / kLargest;
    float const rough = extent * kInverse, quotient = fmaf(fmaf(-rough, kLargest, extent), kInverse, rough);
    float const scale = quotient < qcutlass::kLeastScale ? qcutlass::kLeastScale : quotient;  // NaN stays
    return extent == 0.f ? 1.f : extent < CUDART_INF_F ? scale : extent;
  }

  /// Four codes.
  static CUTLASS_DEVICE uint32_t round(float const* value, float reciprocal) {
    uint32_t bits[4];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) bits[i] = __float_as_uint(fmaf(value[i], reciprocal, qcutlass::kIntegerFloat));
    return qcutlass::pack_bytes(bits[0], bits[1], bits[2], bits[3]);
  }

  Params const& params_;
  int channel_;
  float bias_[kVector];
};

}  // namespace cutlass::epilogue::thread
