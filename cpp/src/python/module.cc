// The extension qcutlass._C: a table of contents.
#include "register.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "The C++ library's functions over raw pointers. Use the package's functions instead.";
  qcutlass::python::register_types(module);
  qcutlass::python::register_operands(module);
  qcutlass::python::register_pack(module);
  qcutlass::python::register_quantize(module);
  qcutlass::python::register_decoder(module);
  qcutlass::python::register_moe(module);
  qcutlass::python::register_gemm(module);
  qcutlass::python::register_decoder_block(module);
  qcutlass::python::register_held(module);
  qcutlass::python::register_launch(module);
  qcutlass::python::register_costs(module);
  qcutlass::python::register_build(module);
}
