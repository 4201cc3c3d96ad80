// Products and kernel selection.
#include <pybind11/stl.h>

#include "qcutlass/gemm.h"
#include "register.h"

namespace py = pybind11;
using namespace py::literals;

namespace qcutlass::python {

namespace {

void register_plans(py::module_& module) {
  py::class_<Plan>(module, "Plan")
      .def_readonly("tactic", &Plan::tactic)
      .def_readonly("split_k", &Plan::split_k)
      .def_readonly("cluster", &Plan::cluster)
      .def_readonly("workspace_bytes", &Plan::workspace_bytes);
  py::class_<DeviceTraits>(module, "DeviceTraits")
      .def(py::init([](int compute_capability, int sm_count, int shared_memory_per_block) {
             return DeviceTraits{compute_capability, sm_count, shared_memory_per_block};
           }),
           "compute_capability"_a, "sm_count"_a, "shared_memory_per_block"_a)
      .def_readonly("compute_capability", &DeviceTraits::compute_capability)
      .def_readonly("sm_count", &DeviceTraits::sm_count)
      .def_readonly("shared_memory_per_block", &DeviceTraits::shared_memory_per_block);
  py::class_<TacticTraits>(module, "TacticTraits")
      .def_readonly("name", &TacticTraits::name)
      .def_readonly("channels", &TacticTraits::channels)
      .def_readonly("tokens", &TacticTraits::tokens)
      .def_readonly("k", &TacticTraits::k)
      .def_readonly("warps", &TacticTraits::warps)
      .def_readonly("stages", &TacticTraits::stages)
      .def_readonly("shared_memory", &TacticTraits::shared_memory)
      .def_readonly("max_registers", &TacticTraits::max_registers);
}

}  // namespace

void register_gemm(py::module_& module) {
  register_plans(module);
  module.def("gemm_host", &host::gemm, "arguments"_a, "threads"_a, py::call_guard<py::gil_scoped_release>());
  module.def(
      "gemm_cuda",
      [](GemmArguments const& arguments, Plan const& plan, uintptr_t stream) {
        py::gil_scoped_release release;
        cuda::gemm(arguments, plan, to_pointer(stream));
      },
      "arguments"_a, "plan"_a, "stream"_a);
  module.def("select", &select, "arguments"_a, "device"_a, "tactic"_a = "", "split_k"_a = 0);
  module.def("tactics", &tactics, "arguments"_a);
}

}  // namespace qcutlass::python
