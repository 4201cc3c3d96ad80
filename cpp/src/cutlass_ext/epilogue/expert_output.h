// The element-wise end of a product of experts: bias, and activation, the row's scale and one rounding, or a gate.
#pragma once

#include "cutlass_ext/epilogue/bias_activation.h"

namespace cutlass::epilogue::thread {

template <class Element>
class ExpertOutput : public BiasActivation<Element> {
 public:
  using Base = BiasActivation<Element>;
  using Base::kVector;

  struct Params : Base::Params {
    float const* row_scale;  // nullptr: none

    Params() = default;
    Params(OutputArguments const& args, float const* row_scale) : Base::Params(args), row_scale(row_scale) {}
  };

  CUTLASS_DEVICE ExpertOutput(Params const& params, int channel)
      : Base(params, channel, params.halves().channel(channel)), row_scale_(params.row_scale) {}

  CUTLASS_DEVICE void store(int token, float (&sum)[kVector]) const {
    if (token >= params_.tokens) return;
    this->add_bias(sum);
    int column = channel_, columns = params_.channels;
    if (params_.gate != qcutlass::Gate::kNone) {
      if (!apply_gate<Element>(params_, channel_, sum)) return;
      column = gated_column(channel_), columns /= 2;
    } else {
      activate(sum, params_.activation);
      if (row_scale_ != nullptr) {
        float const scale = row_scale_[token];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kVector; ++i) sum[i] *= scale;
      }
    }
    this->write(token, column, columns, sum);
  }

  /// Zeros in place of a result.
  CUTLASS_DEVICE void clear(int token) const {
    float const zeros[kVector] = {};
    if (token >= params_.tokens) return;
    if (params_.gate == qcutlass::Gate::kNone)
      this->write(token, channel_, params_.channels, zeros);
    else if (channel_ % (2 * kGateTurn) < kGateTurn)
      this->write(token, gated_column(channel_), params_.channels / 2, zeros);
  }

 private:
  using Base::channel_, Base::params_;
  float const* const row_scale_;
};

}  // namespace cutlass::epilogue::thread
