#include "signature.h"

#include <cstring>

#include "torch_calls.h"

namespace py = pybind11;

namespace qcutlass::python {

namespace {

int64_t identity(PyObject* object) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(object)); }

/// torch.dtype objects live as long as torch: their addresses tell them apart.
bool is_dtype(PyObject* object) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == TorchCalls::instance().dtype.ptr();
}

void append_all(py::object const& sizes, Signature& signature) {
  for (Py_ssize_t i = 0, count = PyTuple_GET_SIZE(sizes.ptr()); i < count; ++i) {
    signature.push_back(to_integer(PyTuple_GET_ITEM(sizes.ptr(), i)));
  }
}

/// A device as one number: that of a GPU, -1 for the CPU; nothing for any other.
std::optional<int64_t> device_of(PyObject* tensor) {
  static Name const kGetDevice("get_device");
  TorchCalls const& torch = TorchCalls::instance();
  if (get(tensor, torch.is_cuda).ptr() == Py_True) return to_integer(call(tensor, kGetDevice).ptr());
  if (get(tensor, torch.is_cpu).ptr() == Py_True) return -1;
  return std::nullopt;
}

/// Whether a tensor is contiguous: strides of dimensions of one element do not count.
bool is_contiguous(dlpack::Tensor const& tensor) {
  int64_t expected = 1;
  for (int32_t i = tensor.dimensions - 1; i >= 0; --i) {
    if (tensor.sizes[i] == 0) return true;
    if (tensor.sizes[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.sizes[i];
  }
  return true;
}

std::optional<uintptr_t> append_described(dlpack::Tensor const& tensor, Signature& signature) {
  if (tensor.device_type != dlpack::kCpu && tensor.device_type != dlpack::kCuda) return std::nullopt;
  signature.push_back(1 + tensor.dimensions);
  signature.insert(signature.end(), tensor.sizes, tensor.sizes + tensor.dimensions);
  bool const contiguous = is_contiguous(tensor);
  signature.push_back(contiguous);
  if (!contiguous) signature.insert(signature.end(), tensor.strides, tensor.strides + tensor.dimensions);
  signature.push_back(int64_t{tensor.type_lanes} << 16 | tensor.type_bits << 8 | tensor.type_code);
  signature.push_back(tensor.device_type == dlpack::kCpu ? -1 : tensor.device);
  return reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset;
}

/// append_operand() of a plain tensor; throws what Python raises.
std::optional<uintptr_t> append_tensor(PyObject* tensor, bool records_gradients, Signature& signature) {
  static Name const kIsNeg("is_neg");
  if (records_gradients && get(tensor, TorchCalls::instance().requires_grad).ptr() != Py_False) return std::nullopt;
  if (call(tensor, kIsNeg).ptr() != Py_False) return std::nullopt;
  std::optional<uintptr_t> const address = append_layout(tensor, signature);
  if (!address || *address == 0) return std::nullopt;  // empty, or its storage was taken away
  signature.push_back(static_cast<int64_t>(*address % kAlignment));
  return address;
}

}  // namespace

bool append_option(PyObject* option, Signature& signature) {
  if (option == Py_None || option == Py_True || option == Py_False || is_dtype(option)) {
    signature.push_back(identity(option));
    return true;
  }
  signature.push_back(identity(reinterpret_cast<PyObject*>(Py_TYPE(option))));
  if (PyLong_CheckExact(option)) {
    int overflow = 0;
    signature.push_back(PyLong_AsLongLongAndOverflow(option, &overflow));
    return overflow == 0;
  }
  if (!PyUnicode_CheckExact(option)) return false;
  Py_ssize_t length = 0;
  char const* const text = PyUnicode_AsUTF8AndSize(option, &length);
  if (text == nullptr) {  // no text that can be encoded
    PyErr_Clear();
    return false;
  }
  signature.push_back(length);
  size_t const begin = signature.size(), words = (static_cast<size_t>(length) + sizeof(int64_t) - 1) / sizeof(int64_t);
  signature.resize(begin + words);
  if (words > 0) std::memcpy(signature.data() + begin, text, static_cast<size_t>(length));
  return true;
}

std::optional<uintptr_t> append_layout(PyObject* tensor, Signature& signature) {
  TorchCalls const& torch = TorchCalls::instance();
  if (torch.describe != nullptr) {
    dlpack::Tensor described{};
    if (torch.describe(tensor, &described) != 0) throw py::error_already_set();
    return append_described(described, signature);
  }
  std::optional<int64_t> const device = device_of(tensor);
  if (!device) return std::nullopt;
  uintptr_t const address = data_ptr(tensor);
  py::object const shape = get(tensor, torch.shape);
  signature.push_back(1 + PyTuple_GET_SIZE(shape.ptr()));
  append_all(shape, signature);
  bool const contiguous = call(tensor, torch.is_contiguous).ptr() == Py_True;
  signature.push_back(contiguous);
  if (!contiguous) append_all(call(tensor, torch.stride), signature);  // contiguous: any other strides serve as well
  signature.push_back(identity(get(tensor, torch.type).ptr()));
  signature.push_back(*device);
  return address;
}

std::optional<uintptr_t> append_operand(PyObject* operand, bool records_gradients, Signature& signature) {
  if (operand == Py_None) {
    signature.push_back(0);
    return 0;
  }
  if (!TorchCalls::instance().is_plain(Py_TYPE(operand))) return std::nullopt;
  try {
    return append_tensor(operand, records_gradients, signature);
  } catch (py::error_already_set const& error) {  // sparse tensors have no address, nested ones no shape
    if (!error.matches(PyExc_Exception)) throw;
    return std::nullopt;
  }
}

size_t SignatureHash::operator()(Signature const& signature) const {
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;  // 2^64 over the golden ratio: Fibonacci hashing
  uint64_t hash = signature.size();
  for (int64_t number : signature) hash = (hash ^ static_cast<uint64_t>(number)) * kGolden ^ (hash >> 29);
  return hash;
}

bool write_signature(Fields const& fields, PyObject* call, PyObject* out, bool records_gradients, Signature& signature,
                     std::vector<uintptr_t>& addresses) {
  signature.clear();
  addresses.clear();
  for (int place : fields.options) {
    if (!append_option(PyTuple_GET_ITEM(call, place), signature)) return false;
  }
  for (int place : fields.operands) {
    std::optional<uintptr_t> const address =
        append_operand(PyTuple_GET_ITEM(call, place), records_gradients, signature);
    if (!address) return false;
    addresses.push_back(*address);
  }
  std::optional<uintptr_t> const address = append_operand(out, records_gradients, signature);
  if (!address) return false;
  addresses.push_back(*address);
  return true;
}

}  // namespace qcutlass::python
