// Mixtures of experts: the steps around their products.
#include "launch.h"
#include "qcutlass/moe.h"
#include "register.h"

namespace py = pybind11;

namespace qcutlass::python {

namespace {

/// Where a step runs: on the host with `threads`, or in a stream of a GPU where `device` is at least 0.
struct Backend {
  int device;
  uintptr_t stream;
  int threads;

  bool is_host() const { return device < 0; }

  /// A step lets its successor start early, which may then not read this, all that it writes, as weights.
  void writes(void const* data, size_t bytes) const {
    if (is_host()) return;
    auto const begin = reinterpret_cast<uintptr_t>(data);
    LastOutputs& last = LastOutputs::of(device, stream);
    last.wait();
    last.add({begin, begin + bytes});
  }

  void begin_experts(uintptr_t offsets, size_t boundaries, uintptr_t rows, size_t count) const {
    if (is_host()) return;
    LastOutputs::of(device, stream)
        .begin_experts({offsets, offsets + boundaries * sizeof(int32_t)}, {rows, rows + count * sizeof(int32_t)});
  }
  void end_experts() const {
    if (!is_host()) LastOutputs::of(device, stream).end_experts();
  }
};

void route(int64_t tokens, int64_t slots, int64_t experts, int id_bytes, uintptr_t ids, uintptr_t weights,
           uintptr_t rows, uintptr_t offsets, uintptr_t order, uintptr_t row_scale, int device, uintptr_t stream,
           int threads) {
  RouteArguments arguments;
  arguments.tokens = tokens;
  arguments.slots = slots;
  arguments.experts = experts;
  arguments.id_bytes = id_bytes;
  arguments.ids = to_pointer(ids);
  arguments.weights = to_pointer<float>(weights);
  arguments.rows = to_pointer<int32_t>(rows);
  arguments.offsets = to_pointer<int32_t>(offsets);
  arguments.order = to_pointer<int32_t>(order);
  arguments.row_scale = to_pointer<float>(row_scale);
  Backend const backend{device, stream, threads};
  backend.writes(arguments.row_scale, sizeof(float) * size_t(tokens * slots));  // of floats alone scales can be made
  backend.begin_experts(offsets, size_t(experts + 1), rows, size_t(tokens * slots));
  py::gil_scoped_release release;
  backend.is_host() ? host::route(arguments) : cuda::route(arguments, to_pointer(stream));
}

void gate_rows(int64_t rows, int64_t columns, uintptr_t live, DType type, uintptr_t x, int64_t x_stride,
               bool interleaved, Activation activation, float alpha, float limit, float up_offset, uintptr_t out,
               int device, uintptr_t stream, int threads) {
  GateRowsArguments arguments;
  arguments.rows = rows;
  arguments.columns = columns;
  arguments.live = to_pointer<int32_t>(live);
  arguments.type = type;
  arguments.x = to_pointer(x);
  arguments.x_stride = x_stride;
  arguments.interleaved = interleaved;
  arguments.activation = activation;
  arguments.alpha = alpha;
  arguments.limit = limit;
  arguments.up_offset = up_offset;
  arguments.out = to_pointer(out);
  Backend const backend{device, stream, threads};
  backend.writes(arguments.out, size_t(size_of(type) * rows * columns));
  py::gil_scoped_release release;
  backend.is_host() ? host::gate_rows(arguments, threads) : cuda::gate_rows(arguments, to_pointer(stream));
}

void sum_slots(int64_t tokens, int64_t slots, int64_t columns, DType type, uintptr_t y, int64_t y_stride,
               uintptr_t order, uintptr_t out, int64_t out_stride, int device, uintptr_t stream, int threads) {
  SumSlotsArguments arguments;
  arguments.tokens = tokens;
  arguments.slots = slots;
  arguments.columns = columns;
  arguments.type = type;
  arguments.y = to_pointer(y);
  arguments.y_stride = y_stride;
  arguments.order = to_pointer<int32_t>(order);
  arguments.out = to_pointer(out);
  arguments.out_stride = out_stride;
  Backend const backend{device, stream, threads};
  backend.writes(arguments.out, size_t(size_of(type) * (tokens * out_stride)));
  backend.end_experts();
  py::gil_scoped_release release;
  backend.is_host() ? host::sum_slots(arguments, threads) : cuda::sum_slots(arguments, to_pointer(stream));
}

}  // namespace

void register_moe(py::module_& module) {
  using namespace py::literals;
  module.attr("MOST_EXPERTS") = kMostExperts;
  // Positional arguments alone, but for the backend's: names would take longer than a small call.
  module.def("moe_route", &route, py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
             py::arg(), py::arg(), py::arg(), "device"_a = -1, "stream"_a = 0, "threads"_a = 1);
  module.def("moe_gate", &gate_rows, py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
             py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), "device"_a = -1, "stream"_a = 0, "threads"_a = 1);
  module.def("moe_sum", &sum_slots, py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
             py::arg(), py::arg(), "device"_a = -1, "stream"_a = 0, "threads"_a = 1);
}

}  // namespace qcutlass::python
