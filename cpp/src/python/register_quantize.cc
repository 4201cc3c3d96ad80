// Quantising to 8 bits.
#include "qcutlass/quantize.h"
#include "register.h"

namespace py = pybind11;
using namespace py::literals;

namespace qcutlass::python {

namespace {

void quantize(int64_t rows, int64_t columns, DType a_type, uintptr_t a, int64_t a_stride, DType code_type,
              uintptr_t codes, uintptr_t scale, uintptr_t azp, uintptr_t smooth, bool per_tensor, bool asymmetric,
              uintptr_t given_scale, uintptr_t given_azp, uintptr_t workspace, int device, uintptr_t stream,
              int threads) {
  QuantizeArguments arguments;
  arguments.rows = rows;
  arguments.columns = columns;
  arguments.a_type = a_type;
  arguments.a = to_pointer(a);
  arguments.a_stride = a_stride;
  arguments.smooth = to_pointer<float>(smooth);
  arguments.per_tensor = per_tensor;
  arguments.asymmetric = asymmetric;
  arguments.given_scale = to_pointer<float>(given_scale);
  arguments.given_azp = to_pointer<int32_t>(given_azp);
  arguments.code_type = code_type;
  arguments.codes = to_pointer(codes);
  arguments.scale = to_pointer<float>(scale);
  arguments.azp = to_pointer<int32_t>(azp);
  arguments.workspace = to_pointer(workspace);
  py::gil_scoped_release release;
  device < 0 ? host::quantize(arguments, threads) : cuda::quantize(arguments, to_pointer(stream));
}

}  // namespace

void register_quantize(py::module_& module) {
  module.attr("QUANTIZE_WORKSPACE_BYTES") = kQuantizeWorkspaceBytes;
  module.def("quantize", &quantize, "rows"_a, "columns"_a, "a_type"_a, "a"_a, "a_stride"_a, "code_type"_a, "codes"_a,
             "scale"_a, "azp"_a, py::kw_only(), "smooth"_a = 0, "per_tensor"_a = false, "asymmetric"_a = false,
             "given_scale"_a = 0, "given_azp"_a = 0, "workspace"_a = 0, "device"_a = -1, "stream"_a = 0,
             "threads"_a = 1);
}

}  // namespace qcutlass::python
