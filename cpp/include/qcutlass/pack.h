// Packing, unpacking and dequantising weights, on the host and on a GPU.
#pragma once

#include <cstdint>

#include "qcutlass/layout.h"
#include "qcutlass/scheme.h"
#include "qcutlass/types.h"

namespace qcutlass {

/// Codes [n, k], one byte each, row stride in bytes, and their packed form (layout.h).
struct PackArguments {
  Packing packing = Packing::kW4A16;
  int64_t n = 0;
  int64_t k = 0;
  uint8_t* codes = nullptr;  ///< read by pack, written by unpack; int8 values of kW8A8 as their bytes
  int64_t codes_stride = 0;
  uint8_t* packed = nullptr;  ///< written by pack (every byte, padding included), read by unpack
};

/// Rows [row_begin, row_end) of the dequantised matrix, `w = (code - zero) * scale`, rounded once to out_type
/// (scheme.h).
struct DequantizeArguments {
  WeightArguments weights;
  int64_t row_begin = 0;
  int64_t row_end = 0;
  DType out_type = DType::kFloat32;
  void* out = nullptr;  ///< [row_end - row_begin, k]
  int64_t out_stride = 0;
};

namespace host {

/// All throw InvalidArgument on wrong arguments before anything is written; pack on 4-bit codes above 15, too.
/// `threads` >= 1.
void pack(PackArguments const& arguments, int threads);
void unpack(PackArguments const& arguments, int threads);
void dequantize(DequantizeArguments const& arguments, int threads);

}  // namespace host

namespace cuda {

/// The same on the device that `stream` belongs to, which must be current; pointers are device pointers. Codes are not
/// checked: only the low 4 bits of a 4-bit code are taken.
void pack(PackArguments const& arguments, void* stream);
void unpack(PackArguments const& arguments, void* stream);
void dequantize(DequantizeArguments const& arguments, void* stream);

}  // namespace cuda

}  // namespace qcutlass
