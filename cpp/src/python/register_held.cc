// What Python objects have where, compared with what they had: a step asks for thousands of parts before each token.
#include <pybind11/stl.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "register.h"
#include "torch_calls.h"

namespace py = pybind11;
using namespace py::literals;

namespace qcutlass::python {

namespace {

using EntryTuple = std::tuple<py::dict, py::str, py::object>;    // a dictionary, a name, the value; None: no such
using WaysTuple = std::tuple<py::type, py::object, py::object>;  // see Held::Ways
using TensorTuple = std::tuple<py::object, bool, uintptr_t, uintptr_t>;  // see Held::Tensor

/// Asks for memory that is read soon, which need not be valid.
void prefetch(void const* address, int lines = 1) {
  for (int i = 0; i < lines; ++i) __builtin_prefetch(static_cast<char const*>(address) + 64 * i);
}

/// Parts of modules as they were. It keeps none of them alive, since Python's collector of garbage does not look into
/// it: its owner does.
///
/// Weights that were read since the last token have pushed all of it out of the caches. So each loop asks for what it
/// will look at some turns later, and reads that in order of addresses where the order is free.
class Held {
 public:
  Held(std::vector<EntryTuple> const& entries, std::vector<py::object> const& objects,
       std::vector<WaysTuple> const& ways, std::vector<py::dict> const& empty,
       std::vector<TensorTuple> const& tensors) {
    for (auto const& [place, name, value] : entries) entries_.push_back({place.ptr(), name.ptr(), value.ptr()});
    std::stable_sort(entries_.begin(), entries_.end(),
                     [](Entry const& one, Entry const& other) { return one.place < other.place; });
    for (py::object const& object : objects) objects_.push_back({object.ptr(), Py_TYPE(object.ptr())});
    for (auto const& [kind, forward, call] : ways) ways_.push_back({kind.ptr(), forward.ptr(), call.ptr()});
    for (py::dict const& place : empty) empty_.push_back(place.ptr());
    std::sort(empty_.begin(), empty_.end());
    for (auto const& [tensor, is_copied, implementation, storage] : tensors) {
      tensors_.push_back({tensor.ptr(), is_copied, to_pointer(implementation), to_pointer(storage),
                          data_ptr(tensor.ptr()), is_copied ? version(tensor.ptr()) : 0});
    }
  }

  bool is_unchanged() const { return have_values() && have_types() && are_empty() && have_memory(); }

 private:
  static constexpr size_t kAhead = 16;

  struct Entry {
    PyObject *place, *name, *value;
  };

  struct Object {
    PyObject* object;
    PyTypeObject* kind;
  };

  /// What a call of a module of a class runs.
  struct Ways {
    PyObject *kind, *forward, *call;
  };

  struct Tensor {
    PyObject* tensor;
    bool is_copied;                        ///< changes in place count, too
    void const *implementation, *storage;  ///< what torch reads for the rest
    uintptr_t address;
    int64_t version;
  };

  bool have_values() const {
    for (size_t i = 0; i < entries_.size(); ++i) {
      if (i + 4 * kAhead < entries_.size()) prefetch(entries_[i + 4 * kAhead].place);
      if (i + 2 * kAhead < entries_.size()) {
        prefetch(reinterpret_cast<PyDictObject*>(entries_[i + 2 * kAhead].place)->ma_keys, 4);
      }
      PyObject* const found = PyDict_GetItemWithError(entries_[i].place, entries_[i].name);
      if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
      if ((found == nullptr ? Py_None : found) != entries_[i].value) return false;
    }
    return true;
  }

  bool have_types() const {
    for (size_t i = 0; i < objects_.size(); ++i) {
      if (i + kAhead < objects_.size()) prefetch(objects_[i + kAhead].object);
      if (Py_TYPE(objects_[i].object) != objects_[i].kind) return false;
    }
    static Name const kForward("forward"), kCall("__call__");
    return std::all_of(ways_.begin(), ways_.end(), [](Ways const& before) {
      return get(before.kind, kForward).equal(py::handle(before.forward)) &&
             get(before.kind, kCall).equal(py::handle(before.call));
    });
  }

  bool are_empty() const {
    for (size_t i = 0; i < empty_.size(); ++i) {
      if (i + kAhead < empty_.size()) prefetch(empty_[i + kAhead]);
      Py_ssize_t const size = PyDict_Size(empty_[i]);
      if (size < 0) throw py::error_already_set();
      if (size > 0) return false;
    }
    return true;
  }

  /// Whether tensors are where they were: one that moves, or is given other data, stays the same object.
  bool have_memory() const {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (i + kAhead < tensors_.size()) {
        Tensor const& later = tensors_[i + kAhead];
        prefetch(later.tensor);
        prefetch(later.implementation, 3);
        prefetch(later.storage, 2);
      }
      if (data_ptr(tensors_[i].tensor) != tensors_[i].address) return false;
      if (tensors_[i].is_copied && version(tensors_[i].tensor) != tensors_[i].version) return false;
    }
    return true;
  }

  std::vector<Entry> entries_;
  std::vector<Object> objects_;
  std::vector<Ways> ways_;
  std::vector<PyObject*> empty_;
  std::vector<Tensor> tensors_;
};

}  // namespace

void register_held(py::module_& module) {
  py::class_<Held>(module, "Held")
      .def(py::init<std::vector<EntryTuple> const&, std::vector<py::object> const&, std::vector<WaysTuple> const&,
                    std::vector<py::dict> const&, std::vector<TensorTuple> const&>(),
           "entries"_a, "objects"_a, "ways"_a, "empty"_a, "tensors"_a)
      .def("is_unchanged", &Held::is_unchanged);
}

}  // namespace qcutlass::python
