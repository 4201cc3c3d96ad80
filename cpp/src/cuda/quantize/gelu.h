// GELU in its erf form, from one exponential.
#pragma once

namespace qcutlass {

// GELU(x) = x/2 + |x|/2 (1 - 2 Phi(-|x|)), and 2^P(t) is 2 Phi(-t) for t >= 0 with a polynomial P that is 0 at 0. These
// coefficients, of t to t^5, bring Phi to within 2^-21.4 for every t (a linear program over a grid of t; weights as the
// error of Phi demands; at 4 powers it would be 2^-13.5). Where Phi is 0 to within that, P only has to stay below -21,
// which the last coefficient sees to.
inline constexpr int kGeluTerms = 5;
constexpr float gelu_log2(int term) {
  constexpr float kTerms[kGeluTerms] = {-1.15108911f, -0.459266656f, -0.0525445447f, 0.00738894206f, -0.000519008812f};
  return kTerms[term];
}

/// Past this |x| of the smallest code, GELU is 0 or the identity; 128 times it is in the polynomial's range.
inline constexpr float kGeluFar = 8.0f;

}  // namespace qcutlass
