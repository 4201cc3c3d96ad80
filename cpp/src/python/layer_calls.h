// Eager calls of one layer: it always passes the same tensors, so that only its input is looked at closely.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "launch.h"

namespace qcutlass::python {

/// How a layer was called before, by the signature of its input. A repeated call quantises its input, where the layer
/// does, and multiplies it.
///
/// Buffers of the layer are those of before if they are the same objects, and their memory is where it was. None of
/// them is kept alive.
class LayerCalls {
 public:
  /// `settings`: attributes of the layer, besides its activation, that its calls depend on. `most` calls are
  /// remembered.
  LayerCalls(std::vector<std::string> const& settings, size_t most);

  /// The layer's output, where one of the call's signature is remembered and nothing watches this thread's calls; None
  /// where it has to be checked first. `layer`: its attributes by name.
  pybind11::object repeat(pybind11::handle a, pybind11::dict const& layer, pybind11::handle activation);

  /// Remembers a call that `launches` remember the product of, which is `call`. `quantizer`: what made its activations
  /// of `a`; none: they are `a`. It is dropped where anything but the layer's buffers and `a` is read.
  /// `new_scratch`: makes a tensor of so many bytes.
  void remember(pybind11::handle a, pybind11::dict const& layer, pybind11::handle activation, Launches& launches,
                pybind11::tuple const& call, std::optional<QuantizeArguments> const& quantizer,
                pybind11::object new_scratch);

  size_t size();

 private:
  /// A buffer as it was; without a tensor `reference` is none.
  struct Buffer {
    pybind11::object name, reference;  ///< a weak one
    PyTypeObject* type;
    uintptr_t address;
  };

  /// What is quantised first, and where its outputs lie in a scratch tensor.
  struct Quantizer {
    QuantizeArguments arguments;
    size_t scale, azp, workspace, workspace_of_product;  ///< offsets; codes are at 0
    pybind11::object new_scratch, bytes;
    std::vector<size_t> scales, azps;  ///< which operands of the product they are
  };

  struct Entry {
    std::shared_ptr<Launch> launch;
    std::vector<uintptr_t> addresses;  ///< of the product's operands: the first one, and those that are made, are not
    std::optional<Quantizer> quantizer;
  };

  void drop_forgotten();
  /// Whether the layer has the buffers of before; adds them to `alive`: another thread may take them from the layer.
  bool are_buffers(pybind11::dict const& layer, bool records_gradients, std::vector<pybind11::object>& alive) const;
  void take_buffers(pybind11::dict const& layer);
  bool is_buffer(void const* address) const;
  std::optional<uintptr_t> write(pybind11::handle a, pybind11::dict const& layer, pybind11::handle activation,
                                 bool records_gradients, Signature& signature) const;
  /// The offsets of what quantises for `launch`, and which of its operands, at `addresses`, are made.
  std::optional<Quantizer> place(QuantizeArguments const& arguments, Launch const& launch,
                                 std::vector<uintptr_t> const& addresses, pybind11::object new_scratch) const;

  std::vector<pybind11::object> settings_;
  size_t most_;
  int64_t generation_ = 0;
  std::vector<Buffer> buffers_;
  std::unordered_map<Signature, std::shared_ptr<Entry const>, SignatureHash> entries_;
};

}  // namespace qcutlass::python
