#include "host/steady_rows.h"

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

void SteadyRows::multiply(MultiplyStrip multiply, int64_t strip, std::vector<float>& sums) const {
  sums.assign((few_ ? few_->rows() : kPadded) * layout::kTileN, 0.0f);
  if (few_)
    few_->multiply(strip, sums.data());
  else
    multiply(weights_, padded_.data(), kPadded, strip, sums.data());
}

size_t SteadyRows::multiply_together(std::vector<SteadyRows const*> const& parts, int64_t strip,
                                     std::vector<float>& sums) {
  std::vector<FewRows const*> whole;
  for (SteadyRows const* part : parts) {
    if (part->few_ && part->few_->rows() == FewRows::most()) whole.push_back(&*part->few_);
  }
  if (whole.size() < 2) return 0;
  sums.resize(whole.size() * FewRows::most() * layout::kTileN);
  FewRows::multiply(whole, strip, sums.data());
  return whole.size();
}

}  // namespace qcutlass::host
