// What a decoder block computes between its products.
#include <pybind11/stl.h>

#include <optional>
#include <tuple>

#include "launch.h"
#include "qcutlass/decoder.h"
#include "register.h"

namespace py = pybind11;

namespace qcutlass::python {

namespace {

constexpr int kHost = -1;

/// Products that follow in the stream may start before this output is written, and before those of earlier kernels are:
/// none may read them early.
void note_output(int device, uintptr_t stream, void const* out, int64_t bytes) {
  LastOutputs::of(device, stream).add(out, bytes);
}

NormArguments norm_arguments(int64_t rows, int64_t columns, DType type, uintptr_t x, int64_t x_stride,
                             uintptr_t residual, int64_t residual_stride, DType weight_type, uintptr_t weight,
                             float eps, uintptr_t sum, uintptr_t out) {
  NormArguments arguments;
  arguments.rows = rows;
  arguments.columns = columns;
  arguments.type = type;
  arguments.x = to_pointer(x);
  arguments.x_stride = x_stride;
  arguments.residual = to_pointer(residual);
  arguments.residual_stride = residual_stride;
  arguments.weight_type = weight_type;
  arguments.weight = to_pointer(weight);
  arguments.eps = eps;
  arguments.sum = to_pointer(sum);
  arguments.out = to_pointer(out);
  return arguments;
}

void run_norm(NormArguments const& arguments, int threads, int device, uintptr_t stream) {
  if (device != kHost) {
    int64_t const elements = arguments.rows * arguments.columns, bytes = elements * size_of(arguments.type);
    if (arguments.residual != nullptr) note_output(device, stream, arguments.sum, bytes);
    note_output(device, stream, arguments.out, bytes);
    if (arguments.code_type != DType::kNone) {
      int64_t const scales = arguments.given_scale != nullptr ? 1 : arguments.rows;
      note_output(device, stream, arguments.codes, elements * size_of(arguments.code_type));
      note_output(device, stream, arguments.scale, scales * int64_t{sizeof(float)});
    }
  }
  py::gil_scoped_release release;
  if (device == kHost)
    host::add_rms_norm(arguments, threads);
  else
    cuda::add_rms_norm(arguments, to_pointer(stream));
}

void add_rms_norm(int64_t rows, int64_t columns, DType type, uintptr_t x, int64_t x_stride, uintptr_t residual,
                  int64_t residual_stride, DType weight_type, uintptr_t weight, float eps, uintptr_t sum, uintptr_t out,
                  int threads, int device, uintptr_t stream) {
  run_norm(
      norm_arguments(rows, columns, type, x, x_stride, residual, residual_stride, weight_type, weight, eps, sum, out),
      threads, device, stream);
}

void add_rms_norm_quantized(int64_t rows, int64_t columns, DType type, uintptr_t x, int64_t x_stride,
                            uintptr_t residual, int64_t residual_stride, DType weight_type, uintptr_t weight, float eps,
                            uintptr_t sum, uintptr_t out, DType code_type, uintptr_t codes, uintptr_t given_scale,
                            uintptr_t scale, int threads, int device, uintptr_t stream) {
  NormArguments arguments =
      norm_arguments(rows, columns, type, x, x_stride, residual, residual_stride, weight_type, weight, eps, sum, out);
  arguments.code_type = code_type;
  arguments.codes = to_pointer(codes);
  arguments.given_scale = to_pointer<float>(given_scale);
  arguments.scale = to_pointer<float>(scale);
  run_norm(arguments, threads, device, stream);
}

void gate(int64_t rows, int64_t columns, DType type, Activation activation, uintptr_t gate, int64_t gate_stride,
          uintptr_t up, int64_t up_stride, uintptr_t out, int threads, int device, uintptr_t stream) {
  GateArguments arguments;
  arguments.rows = rows;
  arguments.columns = columns;
  arguments.type = type;
  arguments.activation = activation;
  arguments.gate = to_pointer(gate);
  arguments.gate_stride = gate_stride;
  arguments.up = to_pointer(up);
  arguments.up_stride = up_stride;
  arguments.out = to_pointer(out);
  if (device != kHost) note_output(device, stream, arguments.out, rows * columns * size_of(type));
  py::gil_scoped_release release;
  if (device == kHost)
    host::gate(arguments, threads);
  else
    cuda::gate(arguments, to_pointer(stream));
}

/// Heads: their number, x, its strides along batch, tokens and heads, the norm's weight, out, its strides.
using Heads =
    std::tuple<int64_t, uintptr_t, int64_t, int64_t, int64_t, uintptr_t, uintptr_t, int64_t, int64_t, int64_t>;

RotaryHeads heads_of(Heads const& given) {
  auto const [heads, x, batch_stride, token_stride, head_stride, norm, out, out_batch_stride, out_token_stride,
              out_head_stride] = given;
  return {heads,           to_pointer(x),    batch_stride,     token_stride,   head_stride, to_pointer(norm),
          to_pointer(out), out_batch_stride, out_token_stride, out_head_stride};
}

void rotate(int64_t batch, int64_t tokens, int64_t size, DType type, Heads const& queries, Heads const& keys,
            std::optional<Heads> const& values, uintptr_t cos, uintptr_t sin, int64_t angle_batch_stride,
            int64_t angle_token_stride, DType norm_type, float eps, uintptr_t place, int64_t room, int threads,
            int device, uintptr_t stream) {
  RotaryArguments arguments;
  arguments.batch = batch;
  arguments.tokens = tokens;
  arguments.size = size;
  arguments.type = type;
  arguments.queries = heads_of(queries);
  arguments.keys = heads_of(keys);
  if (values) arguments.values = heads_of(*values);
  arguments.cos = to_pointer(cos);
  arguments.sin = to_pointer(sin);
  arguments.angle_batch_stride = angle_batch_stride;
  arguments.angle_token_stride = angle_token_stride;
  arguments.norm_type = norm_type;
  arguments.eps = eps;
  arguments.place = static_cast<int64_t const*>(to_pointer(place));
  arguments.room = room;
  if (device != kHost) {
    int64_t const row = tokens * size * size_of(type);
    note_output(device, stream, arguments.queries.out, batch * arguments.queries.heads * row);
    int64_t const kept = arguments.place == nullptr ? tokens : room;
    for (RotaryHeads const& part : {arguments.keys, arguments.values}) {  // in caches of any strides
      int64_t const last = (batch - 1) * part.out_batch_stride + (kept - 1) * part.out_token_stride +
                           (part.heads - 1) * part.out_head_stride + size;
      if (part.heads > 0 && kept > 0) note_output(device, stream, part.out, last * size_of(type));
    }
  }
  py::gil_scoped_release release;
  if (device == kHost)
    host::rotate(arguments, threads);
  else
    cuda::rotate(arguments, to_pointer(stream));
}

}  // namespace

void register_decoder(py::module_& module) {
  // Positional arguments alone: names would take longer than a small call.
  module.def("add_rms_norm", &add_rms_norm);
  module.def("add_rms_norm_quantized", &add_rms_norm_quantized);
  module.def("gate", &gate);
  module.def("rotate", &rotate);
}

}  // namespace qcutlass::python
