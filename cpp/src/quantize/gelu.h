// GELU in its erf form, from one exponential and one reciprocal.
#pragma once

namespace qcutlass {

// With z the base-2 logarithm of the odds of the normal distribution, Phi(x) = 1 / (1 + 2^-z), and z = x R(x^2) with a
// polynomial R. These coefficients bring Phi to within 2^-19.38 for every x, the least that four powers can do (a
// linear program over a grid of x; weights as the error of Phi demands); where Phi is 0 or 1 to within that, z only has
// to stay beyond +-23, which holds up to |x| = 1030.
inline constexpr int kGeluTerms = 5;
constexpr float gelu_odds(int power) {
  constexpr float kOdds[kGeluTerms] = {2.3021649f, 0.10500745f, -0.00025455f, -0.000105605f, 4.09300e-6f};
  return kOdds[power];
}

/// Past this |x| of the smallest code, GELU is 0 or the identity; 128 times it is in the polynomial's range.
inline constexpr float kGeluFar = 8.0f;

}  // namespace qcutlass
