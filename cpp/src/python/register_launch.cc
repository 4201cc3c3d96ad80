// Products that were run before.
#include <pybind11/stl.h>

#include <utility>

#include "launch.h"
#include "layer_calls.h"
#include "register.h"

namespace py = pybind11;
using namespace py::literals;

namespace qcutlass::python {

void register_launch(py::module_& module) {
  py::enum_<Access>(module, "Access")
      .value("READ", Access::kRead)
      .value("READ_EARLY", Access::kReadEarly)
      .value("READ_AGAIN", Access::kReadAgain)
      .value("WRITTEN", Access::kWritten);
  py::class_<LastOutputs>(module, "LastOutputs")
      .def(py::init<>())
      .def(
          "add",
          [](LastOutputs& self, uintptr_t begin, uintptr_t end, bool waits) {
            if (waits) self.wait();
            self.add({begin, end});
          },
          "begin"_a, "end"_a, "waits"_a)
      .def(
          "begin_experts",
          [](LastOutputs& self, std::pair<uintptr_t, uintptr_t> offsets, std::pair<uintptr_t, uintptr_t> rows) {
            self.begin_experts({offsets.first, offsets.second}, {rows.first, rows.second});
          },
          "offsets"_a, "rows"_a)
      .def("end_experts", &LastOutputs::end_experts)
      .def(
          "read", [](LastOutputs& self, uintptr_t begin, uintptr_t end) { self.read({begin, end}); }, "begin"_a,
          "end"_a);
  py::class_<Launch, std::shared_ptr<Launch>>(module, "Launch")
      .def(py::init<GemmArguments const&, std::vector<Operand> const&, std::vector<Access>, std::vector<size_t>, int,
                    std::optional<Plan>, int, int64_t, py::object, py::object, py::object, py::object>(),
           "product"_a, "operands"_a, "accesses"_a, "extents"_a, "element_size"_a, "plan"_a, "device"_a, "host_rows"_a,
           "new_out"_a, "new_workspace"_a, "run_dense"_a, "dense_is_ready"_a)
      .def_property_readonly("addresses", &Launch::addresses)
      .def("is_settled", &Launch::is_settled, "addresses"_a, "last"_a)
      .def(
          "run",
          [](Launch const& self, std::vector<uintptr_t> const& addresses, py::handle a, py::object out) {
            return self.run(addresses, a, std::move(out));
          },
          "addresses"_a, "a"_a, "out"_a);
  py::class_<Launches>(module, "Launches")
      .def(py::init<std::vector<int>, std::vector<int>, size_t>(), "operands"_a, "options"_a, "most"_a)
      .def("repeat", &Launches::repeat, "call"_a, "out"_a)
      .def("remember", &Launches::remember, "call"_a, "out"_a, "launch"_a, "generation"_a, "written"_a)
      .def("signature", &Launches::signature, "call"_a, "out"_a)
      .def("__len__", &Launches::size);
  py::class_<LayerState, std::shared_ptr<LayerState>>(module, "LayerState");
  py::class_<LayerCalls>(module, "LayerCalls")
      .def(py::init<std::vector<std::string> const&, size_t>(), "settings"_a, "most"_a)
      .def("repeat", &LayerCalls::repeat, "a"_a, "layer"_a, "activation"_a)
      .def("begin", &LayerCalls::begin, "a"_a, "layer"_a, "activation"_a)
      .def("remember", &LayerCalls::remember, "begin"_a, "launches"_a, "call"_a, "quantizer"_a, "new_scratch"_a)
      .def("__len__", &LayerCalls::size);
  module.def("forget_launches", &Launches::forget_all);
  module.def("launch_generation", &Launches::generation);
}

}  // namespace qcutlass::python
