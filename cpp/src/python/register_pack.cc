// Layout queries, packing, unpacking, dequantising.
#include "qcutlass/layout.h"
#include "qcutlass/pack.h"
#include "register.h"

namespace py = pybind11;
using namespace py::literals;

namespace qcutlass::python {

namespace {

/// Binds a function of PackArguments that exists on the host and on GPUs.
template <auto kHost, auto kCuda>
void def_pack(py::module_& module, char const* name) {
  module.def(
      name,
      [](Packing packing, int64_t n, int64_t k, uintptr_t codes, int64_t codes_stride, uintptr_t packed, int device,
         uintptr_t stream, int threads) {
        PackArguments const arguments{
            packing, n, k, to_pointer<uint8_t>(codes), codes_stride, to_pointer<uint8_t>(packed)};
        py::gil_scoped_release release;
        device < 0 ? kHost(arguments, threads) : kCuda(arguments, to_pointer(stream));
      },
      "packing"_a, "n"_a, "k"_a, "codes"_a, "codes_stride"_a, "packed"_a, py::kw_only(), "device"_a = -1,
      "stream"_a = 0, "threads"_a = 1);
}

void dequantize(WeightArguments const& weights, int64_t row_begin, int64_t row_end, DType out_type, uintptr_t out,
                int64_t out_stride, int device, uintptr_t stream, int threads) {
  DequantizeArguments const arguments{weights, row_begin, row_end, out_type, to_pointer(out), out_stride};
  py::gil_scoped_release release;
  device < 0 ? host::dequantize(arguments, threads) : cuda::dequantize(arguments, to_pointer(stream));
}

}  // namespace

void register_pack(py::module_& module) {
  module.attr("LAYOUT_VERSION") = layout::kVersion;
  module.attr("SUPER_BLOCK_STEP") = kSuperBlockStep;
  module.def("tile_k", &layout::tile_k, "packing"_a);
  module.def(
      "position",
      [](Packing packing, int64_t k_extent, int64_t n, int64_t k) {
        layout::Position const p = layout::position(packing, k_extent, n, k);
        return py::make_tuple(p.byte, p.bit);
      },
      "packing"_a, "k_extent"_a, "n"_a, "k"_a);
  def_pack<&host::pack, &cuda::pack>(module, "pack");
  def_pack<&host::unpack, &cuda::unpack>(module, "unpack");
  module.def("dequantize", &dequantize, "weights"_a, "row_begin"_a, "row_end"_a, "out_type"_a, "out"_a, "out_stride"_a,
             py::kw_only(), "device"_a = -1, "stream"_a = 0, "threads"_a = 1);
}

}  // namespace qcutlass::python
