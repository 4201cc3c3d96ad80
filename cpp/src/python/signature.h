// The signature of a call: all that checks, plans and strides depend on. Two calls of one signature differ in
// addresses.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace qcutlass::python {

using Signature = std::vector<int64_t>;

/// Vector accesses are of so many bytes: an address counts modulo this.
inline constexpr int kAlignment = 16;

/// Appends an option by its type and value: True is not 1, and 1.0 is neither. False where its type is an odd one.
bool append_option(PyObject* option, Signature& signature);

/// Appends a plain tensor's shape, its strides unless it is contiguous, its type and its device; returns its address.
/// Nothing, with a part appended, where it is on a device of another kind. Throws what Python raises.
std::optional<uintptr_t> append_layout(PyObject* tensor, Signature& signature);

/// Appends the signature of an operand, which is None or a tensor; returns its address. Nothing, with a part appended,
/// where the call has to be looked at closely.
std::optional<uintptr_t> append_operand(PyObject* operand, bool records_gradients, Signature& signature);

/// Signatures by their numbers.
struct SignatureHash {
  size_t operator()(Signature const& signature) const;
};

/// Which fields of a call are operands, in the order of their addresses, and which are options.
struct Fields {
  std::vector<int> operands, options;
};

/// Writes the signature of `call`, a tuple, and of the tensor that takes its result, None for a new one; and the
/// addresses of its operands, 0 for None, that of `out` last. False, with either half written, where a call has to be
/// looked at closely: an operand is no plain tensor in memory, may record gradients, or an option is of an odd type.
bool write_signature(Fields const& fields, PyObject* call, PyObject* out, bool records_gradients, Signature& signature,
                     std::vector<uintptr_t>& addresses);

}  // namespace qcutlass::python
