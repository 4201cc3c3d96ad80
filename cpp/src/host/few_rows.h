// The weight-only product of few rows of activations.
#pragma once

#include <cstdint>
#include <vector>

#include "qcutlass/scheme.h"

namespace qcutlass::host {

/// Rows of activations in the order in which a strip's codes meet them, and what multiplies them.
class FewRows {
 public:
  /// The most rows that a product may have.
  static int most();

  /// Whether products of `m` rows with these weights are to be made so.
  static bool serves(WeightArguments const& weights, int64_t m);

  /// `activations`: [m][k], as the codes' columns meet them. `steady`: a row's sums are the same bits whatever m is,
  /// for which fewer rows pay.
  FewRows(WeightArguments const& weights, float const* activations, int64_t m, bool steady = false);

  /// Rows of sums: m, or some more, which are padding.
  int rows() const { return rows_; }

  /// sums[row][channel] = the products of the 16 channels of a strip.
  void multiply(int64_t strip, float* sums) const { multiply_(weights_, activations_, strip, sums); }

  /// The sums of several, one after the other, each the same bits as alone; less work, as weights are dequantised once.
  /// All are steady, of the same weights and of most() rows.
  static void multiply(std::vector<FewRows const*> const& parts, int64_t strip, float* sums);

 private:
  using Multiply = void (*)(WeightArguments const& weights, float const* activations, int64_t strip, float* sums);

  WeightArguments const& weights_;
  int rows_;
  Multiply multiply_;
  std::vector<float> storage_;
  float* activations_;
};

}  // namespace qcutlass::host
