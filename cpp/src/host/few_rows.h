// The weight-only product of few rows of activations.
#pragma once

#include <cstdint>
#include <vector>

#include "qcutlass/scheme.h"

namespace qcutlass::host {

/// Rows of activations, arranged in the order of a strip's packed codes, and the function that multiplies them.
class FewRows {
 public:
  /// The most rows that a product may have.
  static int most();

  /// Whether this is the way to multiply `m` rows by these weights.
  static bool serves(WeightArguments const& weights, int64_t m);

  /// `activations`: [m][k], in the order of the codes' columns. `steady`: a row's sums have the same bits whatever m
  /// is, which costs time with few rows.
  FewRows(WeightArguments const& weights, float const* activations, int64_t m, bool steady = false);

  /// Rows of sums: m, or some more, which are padding.
  int rows() const { return rows_; }

  /// sums[row][channel] = the products of the 16 channels of a strip.
  void multiply(int64_t strip, float* sums) const { multiply_(weights_, activations_, strip, sums); }

  /// The sums of several objects, one after the other, with the same bits as alone, and less work, as weights are
  /// dequantised once. All objects are steady, and have the same weights and most() rows.
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
