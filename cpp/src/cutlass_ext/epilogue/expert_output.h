// The element-wise end of a product of experts: bias, activation, the row's scale, one rounding.
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
      : Base(params, channel), tokens_(params.tokens), activation_(params.activation), row_scale_(params.row_scale) {}

  CUTLASS_DEVICE void store(int token, float (&sum)[kVector]) const {
    if (token >= tokens_) return;
    this->add_bias(sum);
    activate(sum, activation_);
    if (row_scale_ != nullptr) {
      float const scale = row_scale_[token];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i) sum[i] *= scale;
    }
    this->write(token, sum);
  }

  /// Zeros in place of a result.
  CUTLASS_DEVICE void clear(int token) const {
    float const zeros[kVector] = {};
    if (token < tokens_) this->write(token, zeros);
  }

 private:
  int const tokens_;
  qcutlass::Activation const activation_;
  float const* const row_scale_;
};

}  // namespace cutlass::epilogue::thread
