#include "layer_calls.h"

#include <algorithm>
#include <utility>

#include "register.h"
#include "torch_calls.h"

namespace py = pybind11;

namespace qcutlass::python {

namespace {

constexpr size_t kScratchAlignment = 256;  // of parts of a scratch tensor: vectors and workspaces need no more

/// What a name stands for in a dictionary, borrowed; nullptr: nothing.
PyObject* find(PyObject* place, PyObject* name) {
  PyObject* const found = PyDict_GetItemWithError(place, name);
  if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return found;
}

PyObject* buffers_of(py::dict const& layer) {
  static Name const kBuffers("_buffers");
  PyObject* const found = find(layer.ptr(), kBuffers.get());
  if (found == nullptr || !PyDict_Check(found)) throw py::type_error("layer: expected the attributes of a module");
  return found;
}

/// Whether a weak reference is one to this object.
bool refers_to(PyObject* reference, PyObject* object) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  if (PyWeakref_GetRef(reference, &found) < 0) throw py::error_already_set();
  Py_XDECREF(found);
  return found == object;
#else
  return PyWeakref_GET_OBJECT(reference) == object;
#endif
}

uintptr_t to_address(void const* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace

LayerCalls::LayerCalls(std::vector<std::string> const& settings, size_t most) : most_(most) {
  for (std::string const& name : settings) {
    settings_.push_back(py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name.c_str())));
  }
}

void LayerCalls::drop_forgotten() {
  if (generation_ == Launches::generation()) return;
  entries_.clear();
  generation_ = Launches::generation();
}

size_t LayerCalls::size() {
  drop_forgotten();
  return entries_.size();
}

bool LayerCalls::are_buffers(py::dict const& layer, bool records_gradients, std::vector<py::object>& alive) const {
  static Name const kRequiresGrad("requires_grad");
  PyObject* const buffers = buffers_of(layer);
  if (static_cast<size_t>(PyDict_GET_SIZE(buffers)) != buffers_.size()) return false;
  PyObject *name = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  alive.reserve(buffers_.size());
  for (Buffer const& buffer : buffers_) {
    if (!PyDict_Next(buffers, &position, &name, &value) || name != buffer.name.ptr()) return false;
    if (!buffer.reference) {
      if (value != Py_None) return false;
      continue;
    }
    if (!refers_to(buffer.reference.ptr(), value) || Py_TYPE(value) != buffer.type) return false;
    alive.push_back(py::reinterpret_borrow<py::object>(value));
    if (data_ptr(value) != buffer.address) return false;  // was given other data
    if (records_gradients && get(value, kRequiresGrad).ptr() != Py_False) return false;
  }
  return true;
}

void LayerCalls::take_buffers(py::dict const& layer) {
  std::vector<Buffer> found;
  PyObject *name = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  PyObject* const buffers = buffers_of(layer);
  while (PyDict_Next(buffers, &position, &name, &value)) {
    Buffer buffer{py::reinterpret_borrow<py::object>(name), {}, Py_TYPE(value), 0};
    if (value != Py_None) {
      buffer.reference = py::reinterpret_steal<py::object>(PyWeakref_NewRef(value, nullptr));
      if (!buffer.reference) throw py::error_already_set();
      buffer.address = data_ptr(value);
    }
    found.push_back(std::move(buffer));
  }
  entries_.clear();
  buffers_ = std::move(found);
}

bool LayerCalls::is_buffer(void const* address) const {
  return std::any_of(buffers_.begin(), buffers_.end(),
                     [&](Buffer const& buffer) { return buffer.address == to_address(address); });
}

std::optional<uintptr_t> LayerCalls::write(py::handle a, py::dict const& layer, py::handle activation,
                                           bool records_gradients, Signature& signature) const {
  if (!append_option(activation.ptr(), signature)) return std::nullopt;
  for (py::object const& name : settings_) {
    PyObject* const setting = find(layer.ptr(), name.ptr());
    if (!append_option(setting == nullptr ? Py_None : setting, signature)) return std::nullopt;  // None: the class's
  }
  if (a.is_none()) return std::nullopt;
  return append_operand(a.ptr(), records_gradients, signature);
}

py::object LayerCalls::repeat(py::handle a, py::dict const& layer, py::handle activation) {
  drop_forgotten();
  if (entries_.empty()) return py::none();
  TorchCalls const& torch = TorchCalls::instance();
  if (torch.calls_are_watched()) return py::none();
  bool const gradients = torch.records_gradients();
  std::vector<py::object> alive;
  if (!are_buffers(layer, gradients, alive)) return py::none();
  Signature signature;
  std::optional<uintptr_t> const address = write(a, layer, activation, gradients, signature);
  if (!address) return py::none();
  auto const found = entries_.find(signature);
  if (found == entries_.end()) return py::none();
  std::shared_ptr<Entry const> const entry = found->second;  // another thread may forget it meanwhile
  if (!entry->launch->is_ready()) return py::none();
  std::vector<uintptr_t> addresses = entry->addresses;
  if (!entry->quantizer) {
    addresses.front() = *address;
    return entry->launch->run(addresses, a, py::none());
  }
  // Torch's allocator hands the memory out again in the order of the stream.
  Quantizer const& quantizer = *entry->quantizer;
  PyObject* const made = PyObject_CallOneArg(quantizer.new_scratch.ptr(), quantizer.bytes.ptr());
  if (made == nullptr) throw py::error_already_set();
  py::object const scratch = py::reinterpret_steal<py::object>(made);
  uintptr_t const begin = data_ptr(scratch.ptr());
  Before before{quantizer.arguments, to_pointer(begin + quantizer.workspace_of_product)};
  before.quantizer.a = to_pointer(*address);
  before.quantizer.codes = to_pointer(begin);
  before.quantizer.scale = to_pointer<float>(begin + quantizer.scale);
  before.quantizer.workspace = to_pointer(begin + quantizer.workspace);
  if (before.quantizer.azp != nullptr) before.quantizer.azp = to_pointer<int32_t>(begin + quantizer.azp);
  addresses.front() = begin;
  for (size_t place : quantizer.scales) addresses[place] = begin + quantizer.scale;
  for (size_t place : quantizer.azps) addresses[place] = begin + quantizer.azp;
  return entry->launch->run(addresses, a, py::none(), &before);
}

std::optional<LayerCalls::Quantizer> LayerCalls::place(QuantizeArguments const& arguments, Launch const& launch,
                                                       std::vector<uintptr_t> const& addresses,
                                                       py::object new_scratch) const {
  for (void const* given : {static_cast<void const*>(arguments.smooth), static_cast<void const*>(arguments.given_scale),
                            static_cast<void const*>(arguments.given_azp)}) {
    if (given != nullptr && !is_buffer(given)) return std::nullopt;
  }
  if (launch.is_dense() || addresses.front() != to_address(arguments.codes)) return std::nullopt;
  Quantizer found{arguments, 0, 0, 0, 0, std::move(new_scratch), {}, {}, {}};
  size_t bytes = 0;
  auto const reserve = [&bytes](size_t size) {
    size_t const begin = bytes;
    bytes += (size + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
    return begin;
  };
  auto const scales = static_cast<size_t>(scales_of(arguments));
  reserve(static_cast<size_t>(arguments.rows * arguments.columns));
  found.scale = reserve(scales * sizeof(float));
  found.azp = reserve(arguments.azp == nullptr ? 0 : scales * sizeof(int32_t));
  found.workspace = reserve(kQuantizeWorkspaceBytes);
  found.workspace_of_product = reserve(launch.workspace_bytes());
  found.bytes = py::int_(bytes);
  for (size_t i = 1; i < addresses.size(); ++i) {
    if (addresses[i] == to_address(arguments.scale)) found.scales.push_back(i);
    if (arguments.azp != nullptr && addresses[i] == to_address(arguments.azp)) found.azps.push_back(i);
  }
  return found;
}

void LayerCalls::remember(py::handle a, py::dict const& layer, py::handle activation, Launches& launches,
                          py::tuple const& call, std::optional<QuantizeArguments> const& quantizer,
                          py::object new_scratch) {
  drop_forgotten();
  TorchCalls const& torch = TorchCalls::instance();
  if (torch.calls_are_watched()) return;
  bool const gradients = torch.records_gradients();
  auto entry = std::make_shared<Entry>();
  entry->launch = launches.find(call, entry->addresses);
  if (!entry->launch) return;
  Signature signature;
  std::optional<uintptr_t> const address = write(a, layer, activation, gradients, signature);
  if (!address) return;
  std::vector<py::object> alive;
  if (!are_buffers(layer, gradients, alive)) take_buffers(layer);
  std::vector<size_t> made{0};
  if (quantizer) {
    if (*address != to_address(quantizer->a)) return;  // a copy was quantised
    entry->quantizer = place(*quantizer, *entry->launch, entry->addresses, std::move(new_scratch));
    if (!entry->quantizer) return;
    made.insert(made.end(), entry->quantizer->scales.begin(), entry->quantizer->scales.end());
    made.insert(made.end(), entry->quantizer->azps.begin(), entry->quantizer->azps.end());
  } else if (*address != entry->addresses.front()) {
    return;
  }
  for (size_t i = 0; i < entry->addresses.size(); ++i) {
    bool const is_made = std::find(made.begin(), made.end(), i) != made.end();
    if (!is_made && entry->addresses[i] != 0 && !is_buffer(to_pointer(entry->addresses[i]))) return;
  }
  if (entries_.size() >= most_) entries_.clear();
  entries_.insert_or_assign(std::move(signature), std::move(entry));
}

}  // namespace qcutlass::python
