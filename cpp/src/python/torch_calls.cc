#include "torch_calls.h"

#include <pybind11/gil_safe_call_once.h>

namespace py = pybind11;

namespace qcutlass::python {

namespace {

/// Whether a function describes a tensor as its attributes do: versions of torch lay out more than one number says.
bool is_right(dlpack::Describe describe, py::object const& tensor) {
  dlpack::Tensor found{};
  if (describe(tensor.ptr(), &found) != 0) {
    PyErr_Clear();
    return false;
  }
  py::tuple const shape = tensor.attr("shape"), strides = tensor.attr("stride")();
  if (found.device_type != dlpack::kCpu || found.dimensions != static_cast<int32_t>(shape.size())) return false;
  for (size_t i = 0; i < shape.size(); ++i)
    if (found.sizes[i] != shape[i].cast<int64_t>() || found.strides[i] != strides[i].cast<int64_t>()) return false;
  return reinterpret_cast<uintptr_t>(found.data) + found.byte_offset == tensor.attr("data_ptr")().cast<uintptr_t>();
}

dlpack::Describe find_describe(py::module_ const& torch, py::object const& tensor) {
  py::object const capsule = py::getattr(tensor, dlpack::kAttribute, py::none());
  if (!PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsule)) return nullptr;
  auto const* found = static_cast<dlpack::Exchange*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsule));
  while (found != nullptr && found->major != 1) found = found->older;
  if (found == nullptr || found->describe == nullptr) return nullptr;
  try {
    py::object const known = torch.attr("empty")(py::make_tuple(3, 4), py::arg("device") = "cpu").attr("t")();
    return is_right(found->describe, known) ? found->describe : nullptr;
  } catch (py::error_already_set const&) {  // a mode makes tensors without memory: attributes serve as well
    return nullptr;
  }
}

}  // namespace

TorchCalls const& TorchCalls::instance() {
  // Torch's functions let other threads run: one that waited here for a plain static variable, with Python's lock,
  // would wait for good.
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<TorchCalls const*> calls;
  auto const find = []() -> TorchCalls const* {
    py::module_ const torch = py::module_::import("torch");
    py::object const c = torch.attr("_C"), cuda = torch.attr("cuda"), none = py::none();
    auto* const found = new TorchCalls{};
    found->tensor = torch.attr("Tensor");
    found->parameter = torch.attr("nn").attr("Parameter");
    found->dtype = torch.attr("dtype");
    found->data_ptr = found->tensor.attr("data_ptr");
    found->is_contiguous = found->tensor.attr("is_contiguous");
    found->stride = found->tensor.attr("stride");
    found->version = found->tensor.attr("_version");
    found->type = found->tensor.attr("dtype");
    found->shape = found->tensor.attr("shape");
    found->is_cpu = found->tensor.attr("is_cpu");
    found->is_cuda = found->tensor.attr("is_cuda");
    found->requires_grad = found->tensor.attr("requires_grad");
    found->describe = find_describe(torch, found->tensor);
    found->get_num_threads = torch.attr("get_num_threads");
    found->is_grad_enabled = torch.attr("is_grad_enabled");
    found->increment_version = torch.attr("autograd").attr("graph").attr("increment_version");
    found->forward_ad = torch.attr("autograd").attr("forward_ad");
    found->dispatch_modes = c.attr("_len_torch_dispatch_stack");
    found->transforms = c.attr("_functorch").attr("peek_interpreter_stack");
    found->tracing = c.attr("_get_tracing_state");
    found->current_device = py::getattr(c, "_cuda_getDevice", none);
    found->current_stream = py::getattr(c, "_cuda_getCurrentRawStream", none);
    found->device = cuda.attr("device");
    return found;
  };
  return *calls.call_once_and_store_result(find).get_stored();
}

bool TorchCalls::calls_are_watched() const {
  static Name const kLevel("_current_level");
  return to_integer(get(forward_ad.ptr(), kLevel).ptr()) >= 0 || to_integer(call(dispatch_modes).ptr()) > 0 ||
         !call(transforms).is_none() || !call(tracing).is_none();
}

bool TorchCalls::records_gradients() const { return call(is_grad_enabled).ptr() == Py_True; }

uintptr_t data_ptr(PyObject* tensor) {
  uintptr_t const result = PyLong_AsSize_t(call(tensor, TorchCalls::instance().data_ptr).ptr());
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return result;
}

int64_t version(PyObject* tensor) { return to_integer(get(tensor, TorchCalls::instance().version).ptr()); }

}  // namespace qcutlass::python
