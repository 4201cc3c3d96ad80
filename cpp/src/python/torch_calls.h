// What the extension asks of torch, through Python: the library links no torch, so that one build serves every version.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "dlpack.h"

namespace qcutlass::python {

/// Functions and types of torch, looked up at their first use. They are never released: the interpreter may end first.
struct TorchCalls {
  pybind11::object tensor, parameter;                ///< the types whose instances are plain tensors
  pybind11::object dtype;                            ///< the type of torch.float16 and the like
  pybind11::object data_ptr, is_contiguous, stride;  ///< methods of tensors, as their class has them
  pybind11::object version, type, shape, is_cpu, is_cuda, requires_grad;  ///< attributes of tensors, likewise
  dlpack::Describe describe;                                              ///< nullptr where torch is too old to have it
  pybind11::object get_num_threads, is_grad_enabled, increment_version;
  pybind11::object forward_ad;                              ///< a module; its _current_level is -1 outside dual levels
  pybind11::object dispatch_modes, transforms, tracing;     ///< what may look at calls instead of running them
  pybind11::object current_device, current_stream, device;  ///< of CUDA; None where torch was built without it

  static TorchCalls const& instance();

  /// Whether instances of a type are plain tensors.
  bool is_plain(PyTypeObject const* type) const {
    auto const* const object = reinterpret_cast<PyObject const*>(type);
    return object == tensor.ptr() || object == parameter.ptr();
  }

  /// Whether something traces this thread's calls, pushes derivatives through them, or sees them before they run.
  bool calls_are_watched() const;

  /// Whether this thread's calls record what gradients need.
  bool records_gradients() const;
};

/// The name of an attribute, as one string object for the life of the process.
class Name {
 public:
  explicit Name(char const* name) : name_(PyUnicode_InternFromString(name)) {}
  PyObject* get() const { return name_; }

 private:
  PyObject* name_;
};

/// The value of an attribute; throws what Python raises.
inline pybind11::object get(PyObject* self, Name const& name) {
  PyObject* const value = PyObject_GetAttr(self, name.get());
  if (value == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(value);
}

/// The result of a method without arguments; throws what Python raises.
inline pybind11::object call(PyObject* self, Name const& name) {
  PyObject* const value = PyObject_CallMethodNoArgs(self, name.get());
  if (value == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(value);
}

/// The result of a function without arguments; throws what Python raises.
inline pybind11::object call(pybind11::object const& function) {
  PyObject* const value = PyObject_CallNoArgs(function.ptr());
  if (value == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(value);
}

/// An integer of Python's; throws what Python raises.
inline int64_t to_integer(PyObject* value) {
  int64_t const result = PyLong_AsLongLong(value);
  if (result == -1 && PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
  return result;
}

/// The value of an attribute of tensors, given as their class has it, which spares looking it up; throws what Python
/// raises.
inline pybind11::object get(PyObject* tensor, pybind11::object const& attribute) {
  PyObject* const value = Py_TYPE(attribute.ptr())->tp_descr_get(attribute.ptr(), tensor, nullptr);
  if (value == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(value);
}

/// The result of a method of tensors without arguments, given as their class has it; throws what Python raises.
inline pybind11::object call(PyObject* tensor, pybind11::object const& method) {
  PyObject* const value = PyObject_CallOneArg(method.ptr(), tensor);
  if (value == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(value);
}

/// The address of a tensor's first element.
uintptr_t data_ptr(PyObject* tensor);

/// How often a tensor was changed in place; changes through `.data` do not count.
int64_t version(PyObject* tensor);

}  // namespace qcutlass::python
