// The operands of a product by name, and arguments bound anew to operands elsewhere in memory.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <vector>

#include "qcutlass/gemm.h"

namespace qcutlass::python {

/// An operand of a product: the place of its row in kOperands.
enum class Operand : int {};

/// A pointer somewhere in GemmArguments.
struct OperandTraits {
  char const* name;
  uintptr_t (*get)(GemmArguments const&);
  void (*set)(GemmArguments&, uintptr_t);
};

/// The member that a path of pointers to members leads to.
template <auto First, auto... Rest, class Struct>
constexpr auto& member(Struct& whole) {
  if constexpr (sizeof...(Rest) == 0) {
    return whole.*First;
  } else {
    return member<Rest...>(whole.*First);
  }
}

template <auto... Path>
constexpr OperandTraits operand(char const* name) {
  return {name, [](GemmArguments const& product) { return reinterpret_cast<uintptr_t>(member<Path...>(product)); },
          [](GemmArguments& product, uintptr_t address) {
            auto& pointer = member<Path...>(product);
            pointer = reinterpret_cast<std::decay_t<decltype(pointer)>>(address);
          }};
}

/// Every operand but `out`.
inline constexpr std::array kOperands{
    operand<&GemmArguments::a>("A"),
    operand<&GemmArguments::weights, &WeightArguments::packed>("WEIGHTS"),
    operand<&GemmArguments::weights, &WeightArguments::scales>("SCALES"),
    operand<&GemmArguments::weights, &WeightArguments::zeros>("ZEROS"),
    operand<&GemmArguments::weights, &WeightArguments::global_scale>("GLOBAL_SCALE"),
    operand<&GemmArguments::weights, &WeightArguments::minimums>("MINIMUMS"),
    operand<&GemmArguments::weights, &WeightArguments::super_scales>("SUPER_SCALES"),
    operand<&GemmArguments::weights, &WeightArguments::super_minimums>("SUPER_MINIMUMS"),
    operand<&GemmArguments::bias>("BIAS"),
    operand<&GemmArguments::act_scale>("ACT_SCALE"),
    operand<&GemmArguments::perm>("PERM"),
    operand<&GemmArguments::sums, &SumScales::a_scale>("A_SCALE"),
    operand<&GemmArguments::sums, &SumScales::w_scale>("W_SCALE"),
    operand<&GemmArguments::sums, &SumScales::azp>("AZP"),
    operand<&GemmArguments::sums, &SumScales::channel_sums>("W_SUMS"),
    operand<&GemmArguments::blocks, &BlockScales::a>("BLOCK_A"),
    operand<&GemmArguments::blocks, &BlockScales::w>("BLOCK_W"),
    operand<&GemmArguments::quantized, &QuantizedOutput::scales>("OUT_SCALES"),
    operand<&GemmArguments::experts, &ExpertRows::offsets>("EXPERT_OFFSETS"),
    operand<&GemmArguments::experts, &ExpertRows::rows>("EXPERT_ROWS"),
    operand<&GemmArguments::experts, &ExpertRows::row_scale>("ROW_SCALE"),
    operand<&GemmArguments::residual>("RESIDUAL"),
};

/// A product whose operands, in an order of the caller's, may be elsewhere at each call.
class Rebinding {
 public:
  Rebinding(GemmArguments const& product, std::vector<Operand> const& operands);

  /// Where the operands are that it was made with; 0: there is none.
  std::vector<uintptr_t> addresses() const;

  /// The product of operands at `addresses`, in the order that it was made with.
  GemmArguments at(std::vector<uintptr_t> const& addresses, uintptr_t out) const;

 private:
  GemmArguments product_;
  std::vector<OperandTraits> operands_;
};

}  // namespace qcutlass::python
