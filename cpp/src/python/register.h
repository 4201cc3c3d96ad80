// One function per part of the extension's surface; module.cc calls them.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace qcutlass::python {

void register_types(pybind11::module_& module);
void register_operands(pybind11::module_& module);
void register_pack(pybind11::module_& module);
void register_quantize(pybind11::module_& module);
void register_decoder(pybind11::module_& module);
void register_decoder_block(pybind11::module_& module);
void register_held(pybind11::module_& module);
void register_moe(pybind11::module_& module);
void register_gemm(pybind11::module_& module);
void register_launch(pybind11::module_& module);
void register_costs(pybind11::module_& module);
void register_build(pybind11::module_& module);

/// Python passes addresses as integers.
template <class T = void>
T* to_pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace qcutlass::python
