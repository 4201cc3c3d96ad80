// Quantising to 8 bits.
#include "launch.h"
#include "qcutlass/quantize.h"
#include "register.h"

namespace py = pybind11;
using namespace py::literals;

namespace qcutlass::python {

namespace {

/// Quantises; products that follow in the stream may start before its outputs are written. `scales`: how many.
void run(QuantizeArguments const& arguments, int64_t scales, int device, uintptr_t stream, int threads) {
  if (device >= 0) {
    LastOutputs& last = LastOutputs::of(device, stream);
    last.add(arguments.codes, arguments.rows * arguments.columns);
    last.add(arguments.scale, scales * int64_t{sizeof(float)});
    if (arguments.azp != nullptr) last.add(arguments.azp, scales * int64_t{sizeof(int32_t)});
  }
  py::gil_scoped_release release;
  device < 0 ? host::quantize(arguments, threads) : cuda::quantize(arguments, to_pointer(stream));
}

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
  run(arguments, per_tensor ? 1 : rows, device, stream, threads);
}

void quantize_blocks(int64_t rows, int64_t columns, int64_t size, DType a_type, uintptr_t a, int64_t a_stride,
                     DType code_type, uintptr_t codes, uintptr_t scales, bool square, bool powers_of_two, bool gated,
                     int device, uintptr_t stream, int threads) {
  QuantizeArguments arguments;
  arguments.rows = rows;
  arguments.columns = columns;
  arguments.block = size;
  arguments.square = square;
  arguments.powers_of_two = powers_of_two;
  arguments.gated = gated;
  arguments.a_type = a_type;
  arguments.a = to_pointer(a);
  arguments.a_stride = a_stride;
  arguments.code_type = code_type;
  arguments.codes = to_pointer(codes);
  arguments.scale = to_pointer<float>(scales);
  auto const blocks = [size](int64_t extent) { return (extent + size - 1) / size; };
  run(arguments, (square ? blocks(rows) : rows) * blocks(columns), device, stream, threads);
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
  module.def("quantize", &quantize, "rows"_a, "columns"_a, "a_type"_a, "a"_a, "a_stride"_a, "code_type"_a, "codes"_a,
             "scale"_a, "azp"_a, py::kw_only(), "smooth"_a = 0, "per_tensor"_a = false, "asymmetric"_a = false,
             "given_scale"_a = 0, "given_azp"_a = 0, "workspace"_a = 0, "device"_a = -1, "stream"_a = 0,
             "threads"_a = 1);
  module.def("quantize_blocks", &quantize_blocks, "rows"_a, "columns"_a, "size"_a, "a_type"_a, "a"_a, "a_stride"_a,
             "code_type"_a, "codes"_a, "scales"_a, py::kw_only(), "square"_a = false, "powers_of_two"_a = false,
             "gated"_a = false, "device"_a = -1, "stream"_a = 0, "threads"_a = 1);
  module.def("dequantize_blocks", &dequantize_blocks, "rows"_a, "columns"_a, "size"_a, "code_type"_a, "codes"_a,
             "codes_stride"_a, "scales"_a, "out_type"_a, "out"_a, py::kw_only(), "square"_a = false, "device"_a = -1,
             "stream"_a = 0, "threads"_a = 1);
  module.def("gelu_blocks", &gelu_blocks, "rows"_a, "columns"_a, "size"_a, "codes"_a, "codes_stride"_a, "scales"_a,
             "out"_a, "out_scales"_a, py::kw_only(), "device"_a = -1, "stream"_a = 0, "threads"_a = 1);
}

}  // namespace qcutlass::python
