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

/// The buffers of a layer.
struct LayerBuffers {
  Signature signature;                    ///< which objects they are, and of each where its memory is and its layout
  std::vector<uintptr_t> addresses;       ///< of their memory
  std::vector<pybind11::object> names;    ///< kept, as the signature has where these objects are
  std::vector<pybind11::object> tensors;  ///< another thread may take them from the layer meanwhile

  bool has(void const* address) const;
};

/// A call of a layer, and what it depends on.
struct LayerState {
  pybind11::object a;
  pybind11::dict layer;
  pybind11::object activation;
  std::shared_ptr<LayerBuffers> buffers;
  Signature signature;  ///< of the call
  uintptr_t address;    ///< of its input
};

/// How a layer was called before, by the signature of its input. A repeated call quantises its input, where the layer
/// does, and multiplies it.
///
/// Buffers of the layer are those of before if they are the same objects, of the same shape, strides and type, and
/// their memory is where it was. None of them is kept alive, nor has a weak reference, with which torch could not swap
/// it: an object in the place of one that is gone, the same in all of this, serves as well.
class LayerCalls {
 public:
  /// `settings`: attributes of the layer, besides its activation, that its calls depend on. `most` calls are
  /// remembered.
  LayerCalls(std::vector<std::string> const& settings, size_t most);

  /// The layer's output, where one of the call's signature is remembered and nothing watches this thread's calls; None
  /// where it has to be checked first. `layer`: its attributes by name.
  pybind11::object repeat(pybind11::handle a, pybind11::dict const& layer, pybind11::handle activation);

  /// All that a call depends on, before the layer is looked at for it; none where it cannot be remembered.
  std::shared_ptr<LayerState> begin(pybind11::handle a, pybind11::dict const& layer, pybind11::handle activation);

  /// Remembers a call that `launches` remember the product of, which is `call`. `quantizer`: what made its activations
  /// of `a`; none: they are `a`. It is dropped where anything but the layer's buffers and `a` is read, or the layer is
  /// not what it was at its `begin`: another thread changed it. `new_scratch`: makes a tensor of so many bytes.
  void remember(LayerState const& begin, Launches& launches, pybind11::tuple const& call,
                std::optional<QuantizeArguments> const& quantizer, pybind11::object new_scratch);

  size_t size();

 private:
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
  /// The signature of a call and the address of `a`; nothing where it has to be looked at closely.
  std::optional<uintptr_t> write(pybind11::handle a, pybind11::dict const& layer, pybind11::handle activation,
                                 bool records_gradients, Signature& signature) const;
  /// As `begin`, in this state of torch.
  std::shared_ptr<LayerState> state(pybind11::handle a, pybind11::dict const& layer, pybind11::handle activation,
                                    bool records_gradients) const;
  /// The offsets of what quantises for `launch`, and which of its operands, at `addresses`, are made.
  static std::optional<Quantizer> place(QuantizeArguments const& arguments, LayerBuffers const& buffers,
                                        Launch const& launch, std::vector<uintptr_t> const& addresses,
                                        pybind11::object new_scratch);

  std::vector<pybind11::object> settings_;
  size_t most_;
  int64_t generation_ = 0;
  std::shared_ptr<LayerBuffers const> buffers_;  ///< of all entries
  std::unordered_map<Signature, std::shared_ptr<Entry const>, SignatureHash> entries_;
};

}  // namespace qcutlass::python
