// Exceptions of the C++ library. The Python package maps them to ValueError, UnsupportedError and RuntimeError.
#pragma once

#include <stdexcept>
#include <string>

namespace qcutlass {

/// An argument breaks a documented rule: std::invalid_argument, raised as ValueError in Python.
using InvalidArgument = std::invalid_argument;

/// A valid request that this build or this GPU cannot serve; the message names what can.
class Unsupported : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A CUDA runtime call failed; the message holds the call's name and CUDA's own description.
class CudaError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace qcutlass
