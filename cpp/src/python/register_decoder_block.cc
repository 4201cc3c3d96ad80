// A decoder block for one token of each sequence, on the host.
#include <pybind11/stl.h>

#include <tuple>
#include <utility>
#include <vector>

#include "qcutlass/decoder_block.h"
#include "register.h"

namespace py = pybind11;
using namespace py::literals;

namespace qcutlass::python {

namespace {

using NormTuple = std::tuple<uintptr_t, DType, float>;                // weight, its type, eps
using HeadsTuple = std::tuple<uintptr_t, int64_t, int64_t, int64_t>;  // address, strides of rows, heads, tokens
using PlaceTuple = std::tuple<HeadsTuple, HeadsTuple, float>;         // keys, values, scaling

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

/// Blocks of a stack, each of which reads what the one before it wrote, and where they have keys and values.
class PlacedBlocks {
 public:
  PlacedBlocks(std::vector<DecoderBlock const*> blocks, std::vector<PlaceTuple> const& places)
      : blocks_(std::move(blocks)) {
    for (size_t i = 0; i < blocks_.size(); ++i) {
      auto const& [keys, values, scaling] = places.at(i);
      places_.push_back({heads_of(keys), heads_of(values), scaling});
    }
  }

  void run(int64_t length, int64_t rows, uintptr_t x, uintptr_t residual, uintptr_t cos, uintptr_t sin,
           bool shared_angles, uintptr_t sum, uintptr_t out, int threads) const {
    py::gil_scoped_release release;
    BlockToken token;
    token.rows = rows;
    token.length = length;
    token.cos = to_pointer(cos);
    token.sin = to_pointer(sin);
    token.shared_angles = shared_angles;
    token.x = to_pointer(x);
    token.residual = to_pointer(residual);
    // Blocks write in turns to the result and to memory of the same size, so that the last one writes to the result.
    int64_t const bytes = rows * blocks_.front()->output.weights.n * size_of(blocks_.front()->type);
    std::vector<char> others(blocks_.size() > 1 ? 2 * bytes : 0);
    for (size_t i = 0; i < blocks_.size(); ++i) {
      bool const is_result = (blocks_.size() - i) % 2 == 1;
      token.sum = is_result ? to_pointer(sum) : others.data();
      token.out = is_result ? to_pointer(out) : others.data() + bytes;
      token.keys = places_[i].keys;
      token.values = places_[i].values;
      token.scaling = places_[i].scaling;
      host::run_block(*blocks_[i], token, threads);
      token.x = token.out;
      token.residual = token.sum;
    }
  }

 private:
  struct Place {
    CachedHeads keys, values;
    float scaling;
  };

  std::vector<DecoderBlock const*> blocks_;
  std::vector<Place> places_;
};

}  // namespace

void register_decoder_block(py::module_& module) {
  py::class_<DecoderBlock>(module, "DecoderBlock")
      .def(py::init(&block_of), py::kw_only(), "type"_a, "heads"_a, "kv_heads"_a, "size"_a, "activation"_a, "qkv"_a,
           "output"_a, "gate_up"_a, "down"_a, "query_norm"_a, "key_norm"_a, "mlp_norm"_a, "next_norm"_a);
  // Positional arguments alone: names would take longer than a small call.
  py::class_<PlacedBlocks>(module, "PlacedBlocks")
      .def(py::init<std::vector<DecoderBlock const*>, std::vector<PlaceTuple> const&>())
      .def("run", &PlacedBlocks::run);
}

}  // namespace qcutlass::python
