// Multiplies a few rows of activations by weights, so that a row's sums have the same bits whatever the other rows are,
// and however many they are.
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

  /// Adds the products of a strip to sums [most()][16] of zeros, some more rows than there are; `multiply`:
  /// multiply_strip() of the weights.
  void multiply(MultiplyStrip multiply, int64_t strip, float* sums) const;

  /// The same for several objects, all of most() rows but the last, to sums [parts][most()][16] of zeros. The bits are
  /// the same. If FewRows serves the weights, all objects of most() rows share one dequantisation.
  static void multiply(std::vector<SteadyRows const*> const& parts, MultiplyStrip multiply, int64_t strip, float* sums);

 private:
  /// If groups are not whole steps, rows of zeros are added up to this number, so that one order of additions serves
  /// all.
  static constexpr int64_t kPadded = 4;

  WeightArguments weights_;
  std::optional<FewRows> few_;
  std::vector<float> padded_;
};

}  // namespace qcutlass::host
