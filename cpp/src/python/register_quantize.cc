// Quantising to 8 bits.
#include "launch.h"
#include "qcutlass/quantize.h"
#include "register.h"

namespace py = pybind11;
using namespace py::literals;

namespace qcutlass::python {

namespace {

void quantize(QuantizeArguments const& arguments, int device, uintptr_t stream, int threads) {
  if (device >= 0) LastOutputs::of(device, stream).add_of(arguments);
  py::gil_scoped_release release;
  device < 0 ? host::quantize(arguments, threads) : cuda::quantize(arguments, to_pointer(stream));
}

BlockArguments block_arguments(int64_t rows, int64_t columns, int64_t size, uintptr_t codes, int64_t codes_stride,
                               uintptr_t scales, uintptr_t out) {
  BlockArguments arguments;
  arguments.rows = rows;
  arguments.columns = columns;
  arguments.size = size;
  arguments.codes = to_pointer(codes);
  arguments.codes_stride = codes_stride;
  arguments.scales = to_pointer<float>(scales);
  arguments.out = to_pointer(out);
  return arguments;
}

void dequantize_blocks(int64_t rows, int64_t columns, int64_t size, DType code_type, uintptr_t codes,
                       int64_t codes_stride, uintptr_t scales, DType out_type, uintptr_t out, bool square, int device,
                       uintptr_t stream, int threads) {
  BlockArguments arguments = block_arguments(rows, columns, size, codes, codes_stride, scales, out);
  arguments.code_type = code_type;
  arguments.square = square;
  arguments.out_type = out_type;
  py::gil_scoped_release release;
  device < 0 ? host::dequantize_blocks(arguments, threads) : cuda::dequantize_blocks(arguments, to_pointer(stream));
}

void gelu_blocks(int64_t rows, int64_t columns, int64_t size, uintptr_t codes, int64_t codes_stride, uintptr_t scales,
                 uintptr_t out, uintptr_t out_scales, int device, uintptr_t stream, int threads) {
  BlockArguments arguments = block_arguments(rows, columns, size, codes, codes_stride, scales, out);
  arguments.out_scales = to_pointer<float>(out_scales);
  py::gil_scoped_release release;
  device < 0 ? host::gelu_blocks(arguments, threads) : cuda::gelu_blocks(arguments, to_pointer(stream));
}

}  // namespace

void register_quantize(py::module_& module) {
  module.attr("QUANTIZE_WORKSPACE_BYTES") = kQuantizeWorkspaceBytes;
  module.def("quantize", &quantize, "arguments"_a, py::kw_only(), "device"_a = -1, "stream"_a = 0, "threads"_a = 1);
  module.def("dequantize_blocks", &dequantize_blocks, "rows"_a, "columns"_a, "size"_a, "code_type"_a, "codes"_a,
             "codes_stride"_a, "scales"_a, "out_type"_a, "out"_a, py::kw_only(), "square"_a = false, "device"_a = -1,
             "stream"_a = 0, "threads"_a = 1);
  module.def("gelu_blocks", &gelu_blocks, "rows"_a, "columns"_a, "size"_a, "codes"_a, "codes_stride"_a, "scales"_a,
             "out"_a, "out_scales"_a, py::kw_only(), "device"_a = -1, "stream"_a = 0, "threads"_a = 1);
}

}  // namespace qcutlass::python
