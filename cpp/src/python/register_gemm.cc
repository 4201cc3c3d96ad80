// Products and kernel selection.
#include <pybind11/stl.h>

#include "qcutlass/gemm.h"
#include "register.h"

namespace py = pybind11;
using namespace py::literals;

namespace qcutlass::python {

namespace {

void register_plans(py::module_& module) {
  py::class_<Plan>(module, "Plan", "What selection chose for a product on a GPU.")
      .def_readonly("tactic", &Plan::tactic, "Name of the kernel's configuration, as in qcutlass.tactics().")
      .def_readonly("split_k", &Plan::split_k, "Blocks that share the K extent of an output tile, where it is shared.")
      .def_readonly("cluster", &Plan::cluster, "Whether those blocks are a thread block cluster, without a workspace.")
      .def_readonly("shared_channel", &Plan::shared_channel, "First channel of the tiles whose K is shared.")
      .def_readonly("shared_token", &Plan::shared_token, "First token of them.")
      .def_readonly("workspace_bytes", &Plan::workspace_bytes, "Scratch memory of a launch, bytes.")
      .def_readonly("rounds_weights", &Plan::rounds_weights, "Whether weights are rounded to the activations' type.")
      .def_readonly("dense", &Plan::dense, "Whether slices of weights are dequantised and multiplied by torch.mm.")
      .def_readonly("slice", &Plan::slice, "Rows of weights in such a slice; 0 unless dense.");
  py::class_<Cost>(module, "Cost", "Parts of a predicted time, microseconds.")
      .def_readonly("load", &Cost::load, "Bytes on their way: memory, L2, shared memory.")
      .def_readonly("compute", &Cost::compute, "MMAs, conversions and the instructions between them.")
      .def_readonly("fixed", &Cost::fixed, "Launches, first bytes, last stores, the exchange of partial sums.")
      .def_readonly("total", &Cost::total, "Less than the sum of the parts where they overlap.");
  py::class_<Candidate>(module, "Candidate", "A plan, and what it is predicted to take.")
      .def_readonly("plan", &Candidate::plan, "The plan.")
      .def_readonly("cost", &Candidate::cost, "Its predicted time.");
  py::class_<DeviceTraits>(module, "DeviceTraits")
      .def(py::init([](int compute_capability, int sm_count, int shared_memory_per_block, bool wgmma) {
             return DeviceTraits{compute_capability, sm_count, shared_memory_per_block, compute_capability, wgmma};
           }),
           "compute_capability"_a, "sm_count"_a, "shared_memory_per_block"_a, "wgmma"_a = false)
      .def_readonly("compute_capability", &DeviceTraits::compute_capability)
      .def_readonly("code_capability", &DeviceTraits::code_capability)
      .def_readonly("sm_count", &DeviceTraits::sm_count)
      .def_readonly("shared_memory_per_block", &DeviceTraits::shared_memory_per_block)
      .def_readonly("wgmma", &DeviceTraits::wgmma);
  py::class_<TacticTraits>(module, "TacticTraits")
      .def_readonly("name", &TacticTraits::name)
      .def_readonly("channels", &TacticTraits::channels)
      .def_readonly("tokens", &TacticTraits::tokens)
      .def_readonly("k", &TacticTraits::k)
      .def_readonly("warps", &TacticTraits::warps)
      .def_readonly("stages", &TacticTraits::stages)
      .def_readonly("shared_memory", &TacticTraits::shared_memory)
      .def_readonly("max_registers", &TacticTraits::max_registers)
      .def_readonly("wgmma", &TacticTraits::wgmma)
      .def_readonly("superseded", &TacticTraits::superseded);
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
  module.def(
      "prepare_activations",
      [](GemmArguments const& arguments, uintptr_t a_out, int64_t a_out_stride, uintptr_t stream) {
        cuda::prepare_activations(arguments, to_pointer(a_out), a_out_stride, to_pointer(stream));
      },
      "arguments"_a, "a_out"_a, "a_out_stride"_a, "stream"_a);
  module.def(
      "finish",
      [](GemmArguments const& arguments, uintptr_t sums, int64_t sums_stride, int64_t begin, int64_t end,
         uintptr_t stream) {
        cuda::finish(arguments, to_pointer<float const>(sums), sums_stride, begin, end, to_pointer(stream));
      },
      "arguments"_a, "sums"_a, "sums_stride"_a, "begin"_a, "end"_a, "stream"_a);
  module.def("select", &select, "arguments"_a, "device"_a, "tactic"_a = "", "split_k"_a = 0, "dense"_a = false);
  module.def("candidates", &candidates, "arguments"_a, "device"_a, "tactic"_a = "", "split_k"_a = 0, "dense"_a = false);
  module.def("dense_tactic", &dense_tactic, "arguments"_a);
  module.def("kernel_set_hash", [] {
    std::vector<std::string> build = cuda::built_architectures();
    build.insert(build.end(), {QCUTLASS_VERSION, cuda::toolkit_version(), cuda::cutlass_version()});
    return kernel_set_hash(build);
  });
  module.def("tactics", &tactics, "arguments"_a);
}

}  // namespace qcutlass::python
