// Tensors through the C interface that torch has from 2.10 on, as dlpack.h of version 1 lays it out: all of a tensor by
// one call, where attributes take one each and make objects of Python.
#pragma once

#include <cstdint>

namespace qcutlass::python::dlpack {

enum : int32_t { kCpu = 1, kCuda = 2 };

struct Tensor {
  void* data;
  int32_t device_type, device;
  int32_t dimensions;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  int64_t* sizes;
  int64_t* strides;  ///< of elements
  uint64_t byte_offset;
};

/// Describes a tensor without owning it; not 0, with Python's exception set, where it cannot.
using Describe = int (*)(void* py_object, Tensor* out);

struct Exchange {
  uint32_t major, minor;
  Exchange* older;  ///< none, or one of an older major version
  void *allocate, *to_owned, *from_owned;
  Describe describe;
  void* current_stream;
};

inline constexpr char kAttribute[] = "__dlpack_c_exchange_api__", kCapsule[] = "dlpack_exchange_api";

}  // namespace qcutlass::python::dlpack
