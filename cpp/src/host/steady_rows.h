// A few rows of activations by weights, each row's sums being the same bits whatever the others are, and however many.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "host/few_rows.h"
#include "host/strips.h"
#include "qcutlass/layout.h"

namespace qcutlass::host {

class SteadyRows {
 public:
  /// Rows that are multiplied at once.
  static int64_t most(WeightArguments const& weights) {
    return FewRows::serves(weights, 1) ? FewRows::most() : kPadded;
  }

  /// `activations`: [m][k], as the codes' columns meet them, of most() rows or fewer.
  SteadyRows(WeightArguments const& weights, float const* activations, int64_t m);
  SteadyRows(SteadyRows const&) = delete;  // rows point to the weights
  SteadyRows& operator=(SteadyRows const&) = delete;

  /// sums [rows][16] = the products of a strip, some more rows than there are; `multiply`: multiply_strip() of the
  /// weights.
  void multiply(MultiplyStrip multiply, int64_t strip, std::vector<float>& sums) const;

  /// Calls store(part, sums) with those of each of some, all but the last of most() rows: in all the same bits, and
  /// less work, as weights are dequantised once where it can be.
  template <class Store>
  static void multiply(std::vector<SteadyRows const*> const& parts, MultiplyStrip multiply, int64_t strip,
                       std::vector<float>& sums, Store const& store) {
    size_t const together = multiply_together(parts, strip, sums);
    for (size_t part = 0; part < together; ++part) store(part, sums.data() + part * FewRows::most() * layout::kTileN);
    for (size_t part = together; part < parts.size(); ++part) {
      parts[part]->multiply(multiply, strip, sums);
      store(part, sums.data());
    }
  }

 private:
  /// The sums of as many of the first parts as are multiplied together; their number, which may be none.
  static size_t multiply_together(std::vector<SteadyRows const*> const& parts, int64_t strip, std::vector<float>& sums);

  /// Where groups are not whole steps, rows of zeros make up this number: one way of adding then serves them all.
  static constexpr int64_t kPadded = 4;

  WeightArguments weights_;
  std::optional<FewRows> few_;
  std::vector<float> padded_;
};

}  // namespace qcutlass::host
