// The build: its parts, versions and GPUs.
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "qcutlass/gemm.h"
#include "qcutlass/layout.h"
#include "register.h"

namespace py = pybind11;
using namespace py::literals;

namespace qcutlass::python {

namespace {

std::string compiler() {
#if defined(__clang__)
  return "Clang " __clang_version__;
#elif defined(__GNUC__)
  return "GCC " __VERSION__;
#else
  return "unknown";
#endif
}

std::map<std::string, std::string> build_info() {
  std::string architectures;
  for (std::string const& name : cuda::built_architectures())
    architectures += (architectures.empty() ? "" : " ") + name;
  return {
      {"version", QCUTLASS_VERSION},        {"compiler", compiler()},
      {"cuda", cuda::toolkit_version()},    {"cuda_architectures", architectures.empty() ? "none" : architectures},
      {"cutlass", cuda::cutlass_version()}, {"layout_version", std::to_string(layout::kVersion)},
  };
}

}  // namespace

void register_build(py::module_& module) {
  module.def("cuda_is_built", &cuda::is_built);
  module.def("cuda_architectures", &cuda::built_architectures);
  module.def("device_traits", &cuda::device_traits, "device"_a);
  module.def("build_info", &build_info);
}

}  // namespace qcutlass::python
