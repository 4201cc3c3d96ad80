#include "host/steady_rows.h"

#include "qcutlass/layout.h"

namespace qcutlass::host {

SteadyRows::SteadyRows(WeightArguments const& weights, float const* activations, int64_t m) : weights_(weights) {
  if (FewRows::serves(weights, 1)) {
    few_.emplace(weights_, activations, m, true);
    return;
  }
  padded_.resize(arranged_size(weights.packing, weights.k, kPadded));
  for (int64_t row = 0; row < m; ++row)
    arrange_row(weights.packing, activations + row * weights.k, weights.k, kPadded, row, padded_.data());
}

void SteadyRows::multiply(MultiplyStrip multiply, int64_t strip, float* sums) const {
  if (few_)
    few_->multiply(strip, sums);
  else
    multiply(weights_, padded_.data(), kPadded, strip, sums);
}

}  // namespace qcutlass::host
