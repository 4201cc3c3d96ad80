#include "layer_calls.h"

#include <algorithm>
#include <utility>

#include "register.h"
#include "torch_calls.h"

namespace py = pybind11;

namespace qcutlass::python {

namespace {

constexpr size_t kNumbersOfBuffer = 12;    // of a signature: those of a matrix, and two more
constexpr size_t kScratchAlignment = 256;  // of parts of a scratch tensor: vectors and workspaces need no more

/// What a name stands for in a dictionary, borrowed; nullptr: nothing.
PyObject* find(PyObject* place, PyObject* name) {
  PyObject* const found = PyDict_GetItemWithError(place, name);
  if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return found;
}

uintptr_t to_address(void const* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

int64_t identity(void const* object) { return static_cast<int64_t>(to_address(object)); }

/// Appends a buffer that is not None; returns the address of its memory, 0 where it has none. Nothing where it is no
/// plain tensor that a launch could read.
std::optional<uintptr_t> append_buffer(PyObject* value, bool records_gradients, Signature& signature) {
  TorchCalls const& torch = TorchCalls::instance();
  PyTypeObject* const type = Py_TYPE(value);
  if (!torch.is_plain(type)) return std::nullopt;
  if (records_gradients && get(value, torch.requires_grad).ptr() != Py_False) return std::nullopt;
  std::optional<uintptr_t> const address = append_layout(value, signature);
  if (!address) return std::nullopt;
  signature.push_back(identity(type));
  signature.push_back(static_cast<int64_t>(*address));
  return address;
}

/// Takes a layer's buffers; false where it has none, or one is no plain tensor.
bool take(py::dict const& layer, bool records_gradients, LayerBuffers& found) {
  PyObject *name = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  static Name const kBuffers("_buffers");
  auto const buffers = py::reinterpret_borrow<py::object>(find(layer.ptr(), kBuffers.get()));
  if (!buffers || !PyDict_Check(buffers.ptr())) return false;
  size_t const count = static_cast<size_t>(PyDict_GET_SIZE(buffers.ptr()));
  found.names.reserve(count);
  found.tensors.reserve(count);
  found.addresses.reserve(count);
  found.signature.reserve(count * kNumbersOfBuffer);
  while (PyDict_Next(buffers.ptr(), &position, &name, &value)) {
    found.names.push_back(py::reinterpret_borrow<py::object>(name));
    found.signature.push_back(identity(name));
    found.signature.push_back(identity(value));
    if (value == Py_None) continue;
    found.tensors.push_back(py::reinterpret_borrow<py::object>(value));
    std::optional<uintptr_t> const address = append_buffer(value, records_gradients, found.signature);
    if (!address) return false;
    found.addresses.push_back(*address);
  }
  return true;
}

/// take(), false as well where Python raises: of sparse and nested tensors, say.
bool try_to_take(py::dict const& layer, bool records_gradients, LayerBuffers& found) {
  try {
    return take(layer, records_gradients, found);
  } catch (py::error_already_set const& error) {
    if (!error.matches(PyExc_Exception)) throw;
    return false;
  }
}

}  // namespace

bool LayerBuffers::has(void const* address) const {
  return std::find(addresses.begin(), addresses.end(), to_address(address)) != addresses.end();
}

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
  std::shared_ptr<LayerBuffers const> const before = buffers_;  // another thread may change all of this meanwhile
  TorchCalls const& torch = TorchCalls::instance();
  if (torch.calls_are_watched()) return py::none();
  bool const gradients = torch.records_gradients();
  LayerBuffers buffers;
  if (!try_to_take(layer, gradients, buffers) || buffers.signature != before->signature) return py::none();
  Signature signature;
  std::optional<uintptr_t> const address = write(a, layer, activation, gradients, signature);
  if (!address || before != buffers_) return py::none();
  auto const found = entries_.find(signature);
  if (found == entries_.end()) return py::none();
  std::shared_ptr<Entry const> const entry = found->second;
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
  Before quantizing{quantizer.arguments, to_pointer(begin + quantizer.workspace_of_product)};
  quantizing.quantizer.a = to_pointer(*address);
  quantizing.quantizer.codes = to_pointer(begin);
  quantizing.quantizer.scale = to_pointer<float>(begin + quantizer.scale);
  quantizing.quantizer.workspace = to_pointer(begin + quantizer.workspace);
  if (quantizing.quantizer.azp != nullptr) quantizing.quantizer.azp = to_pointer<int32_t>(begin + quantizer.azp);
  addresses.front() = begin;
  for (size_t place : quantizer.scales) addresses[place] = begin + quantizer.scale;
  for (size_t place : quantizer.azps) addresses[place] = begin + quantizer.azp;
  return entry->launch->run(addresses, a, py::none(), &quantizing);
}

std::optional<LayerCalls::Quantizer> LayerCalls::place(QuantizeArguments const& arguments, LayerBuffers const& buffers,
                                                       Launch const& launch, std::vector<uintptr_t> const& addresses,
                                                       py::object new_scratch) {
  for (void const* given : {static_cast<void const*>(arguments.smooth), static_cast<void const*>(arguments.given_scale),
                            static_cast<void const*>(arguments.given_azp)}) {
    if (given != nullptr && !buffers.has(given)) return std::nullopt;
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

std::shared_ptr<LayerState> LayerCalls::begin(py::handle a, py::dict const& layer, py::handle activation) {
  TorchCalls const& torch = TorchCalls::instance();
  return torch.calls_are_watched() ? nullptr : state(a, layer, activation, torch.records_gradients());
}

std::shared_ptr<LayerState> LayerCalls::state(py::handle a, py::dict const& layer, py::handle activation,
                                              bool records_gradients) const {
  auto found = std::make_shared<LayerState>(LayerState{py::reinterpret_borrow<py::object>(a),
                                                       layer,
                                                       py::reinterpret_borrow<py::object>(activation),
                                                       std::make_shared<LayerBuffers>(),
                                                       {},
                                                       0});
  if (!try_to_take(layer, records_gradients, *found->buffers)) return nullptr;
  std::optional<uintptr_t> const address = write(a, layer, activation, records_gradients, found->signature);
  if (!address) return nullptr;
  found->address = *address;
  return found;
}

void LayerCalls::remember(LayerState const& begin, Launches& launches, py::tuple const& call,
                          std::optional<QuantizeArguments> const& quantizer, py::object new_scratch) {
  drop_forgotten();
  TorchCalls const& torch = TorchCalls::instance();
  if (torch.calls_are_watched()) return;
  auto entry = std::make_shared<Entry>();
  entry->launch = launches.find(call, entry->addresses);
  if (!entry->launch) return;
  std::shared_ptr<LayerState> const now = state(begin.a, begin.layer, begin.activation, torch.records_gradients());
  if (!now || now->signature != begin.signature || now->address != begin.address ||
      now->buffers->signature != begin.buffers->signature) {
    return;
  }
  LayerBuffers& buffers = *now->buffers;
  std::vector<size_t> made{0};
  if (quantizer) {
    if (now->address != to_address(quantizer->a)) return;  // a copy was quantised
    entry->quantizer = place(*quantizer, buffers, *entry->launch, entry->addresses, std::move(new_scratch));
    if (!entry->quantizer) return;
    made.insert(made.end(), entry->quantizer->scales.begin(), entry->quantizer->scales.end());
    made.insert(made.end(), entry->quantizer->azps.begin(), entry->quantizer->azps.end());
  } else if (now->address != entry->addresses.front()) {
    return;
  }
  for (size_t i = 0; i < entry->addresses.size(); ++i) {
    bool const is_made = std::find(made.begin(), made.end(), i) != made.end();
    if (!is_made && entry->addresses[i] != 0 && !buffers.has(to_pointer(entry->addresses[i]))) return;
  }
  buffers.tensors.clear();  // they are not kept
  if (!buffers_ || buffers_->signature != buffers.signature) {
    entries_.clear();
    buffers_ = now->buffers;
  }
  if (entries_.size() >= most_) entries_.clear();
  entries_.insert_or_assign(now->signature, std::move(entry));
}

}  // namespace qcutlass::python
