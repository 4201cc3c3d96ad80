// Operands by name, and products of operands elsewhere in memory.
#include <pybind11/stl.h>

#include <string>

#include "operands.h"
#include "qcutlass/error.h"
#include "register.h"

namespace py = pybind11;
using namespace py::literals;

namespace qcutlass::python {

Rebinding::Rebinding(GemmArguments const& product, std::vector<Operand> const& operands) : product_(product) {
  for (Operand operand : operands) operands_.push_back(kOperands.at(static_cast<size_t>(operand)));
}

std::vector<uintptr_t> Rebinding::addresses() const {
  std::vector<uintptr_t> found;
  for (OperandTraits const& operand : operands_) found.push_back(operand.get(product_));
  return found;
}

GemmArguments Rebinding::at(std::vector<uintptr_t> const& addresses, uintptr_t out) const {
  if (addresses.size() != operands_.size()) {
    throw InvalidArgument("addresses: expected " + std::to_string(operands_.size()) + ", one for each operand, got " +
                          std::to_string(addresses.size()));
  }
  GemmArguments product = product_;
  for (size_t i = 0; i < operands_.size(); ++i) operands_[i].set(product, addresses[i]);
  product.out = to_pointer(out);
  return product;
}

void register_operands(py::module_& module) {
  py::enum_<Operand> operand(module, "Operand");
  for (size_t i = 0; i < kOperands.size(); ++i) operand.value(kOperands[i].name, static_cast<Operand>(i));
  py::class_<Rebinding>(module, "Rebinding")
      .def(py::init<GemmArguments const&, std::vector<Operand> const&>(), "product"_a, "operands"_a)
      .def_property_readonly("addresses", &Rebinding::addresses)
      .def("__call__", &Rebinding::at, "addresses"_a, "out"_a);
}

}  // namespace qcutlass::python
