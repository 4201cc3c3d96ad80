// A decoder block for one token of each sequence, on the host.
#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "qcutlass/decoder_block.h"
#include "register.h"

namespace py = pybind11;
using namespace py::literals;

namespace qcutlass::python {

namespace {

using NormTuple = std::tuple<uintptr_t, DType, float>;                // weight, its type, eps
using HeadsTuple = std::tuple<uintptr_t, int64_t, int64_t, int64_t>;  // address, strides of rows, heads, tokens
/// What differs from block to block: keys, values, length, scaling, sum, out.
using PlaceTuple = std::tuple<HeadsTuple, HeadsTuple, int64_t, float, uintptr_t, uintptr_t>;

Norm norm_of(NormTuple const& given) {
  auto const [weight, type, eps] = given;
  return {to_pointer(weight), type, eps};
}

CachedHeads heads_of(HeadsTuple const& given) {
  auto const [data, row_stride, head_stride, token_stride] = given;
  return {to_pointer(data), row_stride, head_stride, token_stride};
}

DecoderBlock block_of(DType type, int64_t heads, int64_t kv_heads, int64_t size, Activation activation,
                      JoinedProducts const& qkv, GemmArguments const& output, JoinedProducts const& gate_up,
                      GemmArguments const& down, NormTuple const& query_norm, NormTuple const& key_norm,
                      NormTuple const& mlp_norm, NormTuple const& next_norm) {
  DecoderBlock block{type,
                     heads,
                     kv_heads,
                     size,
                     activation,
                     qkv,
                     gate_up,
                     output,
                     down,
                     norm_of(query_norm),
                     norm_of(key_norm),
                     norm_of(mlp_norm),
                     norm_of(next_norm)};
  host::check_block(block);
  return block;
}

/// Blocks of a stack: each reads what the one before it wrote.
void run(std::vector<DecoderBlock const*> const& blocks, std::vector<PlaceTuple> const& places, int64_t rows,
         uintptr_t x, uintptr_t residual, uintptr_t cos, uintptr_t sin, bool shared_angles, int threads) {
  BlockToken token;
  token.rows = rows;
  token.out = to_pointer(x);
  token.sum = to_pointer(residual);
  token.cos = to_pointer(cos);
  token.sin = to_pointer(sin);
  token.shared_angles = shared_angles;
  py::gil_scoped_release release;
  for (size_t i = 0; i < blocks.size(); ++i) {
    auto const& [keys, values, length, scaling, sum, out] = places.at(i);
    token.x = token.out;
    token.residual = token.sum;
    token.keys = heads_of(keys);
    token.values = heads_of(values);
    token.length = length;
    token.scaling = scaling;
    token.sum = to_pointer(sum);
    token.out = to_pointer(out);
    host::run_block(*blocks[i], token, threads);
  }
}

/// Whether each dictionary has this very value under this name, or lacks the name where the value is None. A step asks
/// for some hundred of them, in a fifth of the time that Python's own loops take.
bool hold(py::tuple const& places, py::tuple const& names, py::tuple const& values) {
  for (size_t i = 0; i < places.size(); ++i) {
    PyObject* const found = PyDict_GetItemWithError(places[i].ptr(), names[i].ptr());
    if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    if ((found == nullptr ? Py_None : found) != values[i].ptr()) return false;
  }
  return true;
}

}  // namespace

void register_decoder_block(py::module_& module) {
  py::class_<DecoderBlock>(module, "DecoderBlock")
      .def(py::init(&block_of), py::kw_only(), "type"_a, "heads"_a, "kv_heads"_a, "size"_a, "activation"_a, "qkv"_a,
           "output"_a, "gate_up"_a, "down"_a, "query_norm"_a, "key_norm"_a, "mlp_norm"_a, "next_norm"_a);
  // Positional arguments alone: names would take longer than a small call.
  module.def("run_decoder_blocks", &run);
  module.def("hold", &hold);
}

}  // namespace qcutlass::python
