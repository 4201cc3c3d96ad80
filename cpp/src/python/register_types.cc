// Enumerations, the argument structs and exceptions.
#include "qcutlass/error.h"
#include "qcutlass/gemm.h"
#include "qcutlass/quantize.h"
#include "qcutlass/scheme.h"
#include "qcutlass/types.h"
#include "register.h"

namespace py = pybind11;

namespace qcutlass::python {

namespace {

/// A pointer member as a read-write integer property.
template <class Class, class Struct, class Pointer>
void def_pointer(Class& cls, char const* name, Pointer Struct::*member) {
  cls.def_property(
      name, [member](Struct const& self) { return reinterpret_cast<uintptr_t>(self.*member); },
      [member](Struct& self, uintptr_t address) { self.*member = reinterpret_cast<Pointer>(address); });
}

void register_enumerations(py::module_& module) {
  py::enum_<DType>(module, "DType")
      .value("NONE", DType::kNone)
      .value("FLOAT16", DType::kFloat16)
      .value("BFLOAT16", DType::kBFloat16)
      .value("FLOAT32", DType::kFloat32)
      .value("UINT8", DType::kUInt8)
      .value("INT8", DType::kInt8)
      .value("INT32", DType::kInt32)
      .value("FLOAT8_E4M3", DType::kFloat8E4M3)
      .value("FLOAT8_E5M2", DType::kFloat8E5M2)
      .value("FLOAT8_E8M0", DType::kFloat8E8M0);
  py::enum_<Activation>(module, "Activation")
      .value("NONE", Activation::kNone)
      .value("RELU", Activation::kRelu)
      .value("GELU", Activation::kGelu)
      .value("GELU_TANH", Activation::kGeluTanh)
      .value("SILU", Activation::kSilu);
  py::enum_<Gate>(module, "Gate")
      .value("NONE", Gate::kNone)
      .value("INTERLEAVED", Gate::kInterleaved)
      .value("HALVES", Gate::kHalves);
  py::enum_<Packing>(module, "Packing")
      .value("W4A16", Packing::kW4A16)
      .value("W8A16", Packing::kW8A16)
      .value("W8A8", Packing::kW8A8)
      .value("E2M1A16", Packing::kE2M1A16)
      .value("E4M3A16", Packing::kE4M3A16);
}

void register_arguments(py::module_& module) {
  py::class_<WeightArguments> weights(module, "WeightArguments");
  weights.def(py::init<>())
      .def_readwrite("packing", &WeightArguments::packing)
      .def_readwrite("n", &WeightArguments::n)
      .def_readwrite("k", &WeightArguments::k)
      .def_readwrite("group_size", &WeightArguments::group_size)
      .def_readwrite("scale_type", &WeightArguments::scale_type)
      .def_readwrite("scale_stride", &WeightArguments::scale_stride)
      .def_readwrite("zero_type", &WeightArguments::zero_type)
      .def_readwrite("zero_stride", &WeightArguments::zero_stride)
      .def_readwrite("minimum_type", &WeightArguments::minimum_type)
      .def_readwrite("minimum_stride", &WeightArguments::minimum_stride)
      .def_readwrite("super_groups", &WeightArguments::super_groups)
      .def_readwrite("super_scale_stride", &WeightArguments::super_scale_stride)
      .def_readwrite("super_minimum_stride", &WeightArguments::super_minimum_stride)
      .def_readwrite("by_strip", &WeightArguments::by_strip);
  def_pointer(weights, "packed", &WeightArguments::packed);
  def_pointer(weights, "scales", &WeightArguments::scales);
  def_pointer(weights, "zeros", &WeightArguments::zeros);
  def_pointer(weights, "global_scale", &WeightArguments::global_scale);
  def_pointer(weights, "minimums", &WeightArguments::minimums);
  def_pointer(weights, "super_scales", &WeightArguments::super_scales);
  def_pointer(weights, "super_minimums", &WeightArguments::super_minimums);

  py::class_<SumScales> sums(module, "SumScales");
  sums.def(py::init<>())
      .def_readwrite("a_scale_stride", &SumScales::a_scale_stride)
      .def_readwrite("w_scale_stride", &SumScales::w_scale_stride)
      .def_readwrite("azp_stride", &SumScales::azp_stride);
  def_pointer(sums, "a_scale", &SumScales::a_scale);
  def_pointer(sums, "w_scale", &SumScales::w_scale);
  def_pointer(sums, "azp", &SumScales::azp);
  def_pointer(sums, "channel_sums", &SumScales::channel_sums);

  py::class_<BlockScales> blocks(module, "BlockScales");
  blocks.def(py::init<>())
      .def_readwrite("size", &BlockScales::size)
      .def_readwrite("a_stride", &BlockScales::a_stride)
      .def_readwrite("w_stride", &BlockScales::w_stride)
      .def_readwrite("up_offset", &BlockScales::up_offset);
  def_pointer(blocks, "a", &BlockScales::a);
  def_pointer(blocks, "w", &BlockScales::w);

  py::class_<QuantizedOutput> quantized(module, "QuantizedOutput");
  quantized.def(py::init<>())
      .def_readwrite("size", &QuantizedOutput::size)
      .def_readwrite("stride", &QuantizedOutput::stride);
  def_pointer(quantized, "scales", &QuantizedOutput::scales);

  py::class_<ExpertRows> experts(module, "ExpertRows");
  experts.def(py::init<>()).def_readwrite("count", &ExpertRows::count).def_readwrite("a_rows", &ExpertRows::a_rows);
  def_pointer(experts, "offsets", &ExpertRows::offsets);
  def_pointer(experts, "rows", &ExpertRows::rows);
  def_pointer(experts, "row_scale", &ExpertRows::row_scale);

  py::class_<GemmArguments> gemm(module, "GemmArguments");
  gemm.def(py::init<>())
      .def_readwrite("m", &GemmArguments::m)
      .def_readwrite("weights", &GemmArguments::weights)
      .def_readwrite("a_type", &GemmArguments::a_type)
      .def_readwrite("out_type", &GemmArguments::out_type)
      .def_readwrite("sums", &GemmArguments::sums)
      .def_readwrite("blocks", &GemmArguments::blocks)
      .def_readwrite("quantized", &GemmArguments::quantized)
      .def_readwrite("int8_activations", &GemmArguments::int8_activations)
      .def_readwrite("batch_invariant", &GemmArguments::batch_invariant)
      .def_readwrite("experts", &GemmArguments::experts)
      .def_readwrite("a_stride", &GemmArguments::a_stride)
      .def_readwrite("out_stride", &GemmArguments::out_stride)
      .def_readwrite("bias_type", &GemmArguments::bias_type)
      .def_readwrite("act_scale_type", &GemmArguments::act_scale_type)
      .def_readwrite("activation", &GemmArguments::activation)
      .def_readwrite("gate", &GemmArguments::gate)
      .def_readwrite("residual_stride", &GemmArguments::residual_stride)
      .def_readwrite("workspace_bytes", &GemmArguments::workspace_bytes);
  def_pointer(gemm, "a", &GemmArguments::a);
  def_pointer(gemm, "out", &GemmArguments::out);
  def_pointer(gemm, "bias", &GemmArguments::bias);
  def_pointer(gemm, "act_scale", &GemmArguments::act_scale);
  def_pointer(gemm, "perm", &GemmArguments::perm);
  def_pointer(gemm, "residual", &GemmArguments::residual);
  def_pointer(gemm, "workspace", &GemmArguments::workspace);
}

void register_quantize_arguments(py::module_& module) {
  py::class_<QuantizeArguments> quantize(module, "QuantizeArguments");
  quantize.def(py::init<>())
      .def_readwrite("rows", &QuantizeArguments::rows)
      .def_readwrite("columns", &QuantizeArguments::columns)
      .def_readwrite("a_type", &QuantizeArguments::a_type)
      .def_readwrite("a_stride", &QuantizeArguments::a_stride)
      .def_readwrite("per_tensor", &QuantizeArguments::per_tensor)
      .def_readwrite("block", &QuantizeArguments::block)
      .def_readwrite("square", &QuantizeArguments::square)
      .def_readwrite("powers_of_two", &QuantizeArguments::powers_of_two)
      .def_readwrite("gated", &QuantizeArguments::gated)
      .def_readwrite("asymmetric", &QuantizeArguments::asymmetric)
      .def_readwrite("code_type", &QuantizeArguments::code_type);
  def_pointer(quantize, "a", &QuantizeArguments::a);
  def_pointer(quantize, "smooth", &QuantizeArguments::smooth);
  def_pointer(quantize, "given_scale", &QuantizeArguments::given_scale);
  def_pointer(quantize, "given_azp", &QuantizeArguments::given_azp);
  def_pointer(quantize, "codes", &QuantizeArguments::codes);
  def_pointer(quantize, "scale", &QuantizeArguments::scale);
  def_pointer(quantize, "azp", &QuantizeArguments::azp);
  def_pointer(quantize, "workspace", &QuantizeArguments::workspace);
}

}  // namespace

void register_types(py::module_& module) {
  // InvalidArgument and CudaError need no entry: pybind11 raises std::invalid_argument as ValueError and any other
  // std::runtime_error as RuntimeError.
  py::register_exception<Unsupported>(module, "UnsupportedError", PyExc_NotImplementedError);
  register_enumerations(module);
  register_arguments(module);
  register_quantize_arguments(module);
}

}  // namespace qcutlass::python
