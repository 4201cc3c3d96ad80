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

void SteadyRows::multiply(MultiplyStrip multiply, int64_t strip, float* sums) const {
  if (few_)
    few_->multiply(strip, sums);
  else
    multiply(weights_, padded_.data(), kPadded, strip, sums);
}

void SteadyRows::multiply(std::vector<SteadyRows const*> const& parts, MultiplyStrip multiply, int64_t strip,
                          float* sums) {
  std::vector<FewRows const*> whole;  // the first parts
  for (SteadyRows const* part : parts) {
    if (part->few_ && part->few_->rows() == FewRows::most()) whole.push_back(&*part->few_);
  }
  size_t const together = whole.size() < 2 ? 0 : whole.size();
  if (together > 0) FewRows::multiply(whole, strip, sums);
  for (size_t part = together; part < parts.size(); ++part)
    parts[part]->multiply(multiply, strip, sums + part * most(parts[part]->weights_) * layout::kTileN);
}

}  // namespace qcutlass::host
