// fp16 and bf16 to and from fp32, exact and round-to-nearest-even, as bit operations that the compiler can vectorise;
// 8-bit floats to fp32.
#pragma once

#include <cstdint>
#include <cstring>

#include "host/multiversion.h"
#include "qcutlass/types.h"

namespace qcutlass::host {

template <class To, class From>
QCUTLASS_INLINE To bit_cast(From const& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

/// Storage of the 16-bit floating types.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
/// Storage of the 8-bit ones.
struct Float8E4M3 {
  uint8_t bits;
};
struct Float8E8M0 {
  uint8_t bits;
};
struct Float8E5M2 {
  uint8_t bits;
};

/// The value of an fp16 number, or of a vector of them, in the low bits of 32-bit integers.
template <class Float, class Int>
QCUTLASS_INLINE Float decode_half(Int bits) {
  Int const sign = (bits & 0x8000) << 16;
  Int const magnitude = (bits & 0x7fff) << 13;
  Int const normal = magnitude + (112 << 23);
  Int const special = magnitude + (224 << 23);  // infinity and NaN: the exponent becomes all ones
  // A subnormal's bits, put below the exponent of 2^-14, are a normal number that is 2^-14 too large.
  Int const subnormal = bit_cast<Int>(bit_cast<Float>(magnitude + (113 << 23)) - 0x1p-14f);
  Int const finite = magnitude < (1 << 23) ? subnormal : normal;
  return bit_cast<Float>((magnitude >= (31 << 23) ? special : finite) | sign);
}
QCUTLASS_INLINE float to_float(Half value) { return decode_half<float>(int32_t{value.bits}); }
QCUTLASS_INLINE float to_float(BFloat16 value) { return bit_cast<float>(uint32_t{value.bits} << 16); }

/// The value of an e4m3 number, or of a vector of them, in the low bits of 32-bit integers.
template <class Float, class Int>
QCUTLASS_INLINE Float decode_e4m3(Int bits) {
  Int const sign = (bits & 0x80) << 24;
  Int const magnitude = (bits & 0x7f) << 20;
  Int const normal = magnitude + (120 << 23);
  // As for fp16: the bits below the exponent of 2^-6 are a normal number that is 2^-6 too large.
  Int const subnormal = bit_cast<Int>(bit_cast<Float>(magnitude + (121 << 23)) - 0x1p-6f);
  Int const nan = magnitude * 0 + 0x7fc00000;  // the format has one, and no infinities
  Int const finite = magnitude < (1 << 23) ? subnormal : normal;
  return bit_cast<Float>((magnitude == 0x7f << 20 ? nan : finite) | sign);
}

/// The value of an e2m1 number, or of a vector of them, in the low bits of 32-bit integers.
template <class Float, class Int>
QCUTLASS_INLINE Float decode_e2m1(Int bits) {
  Int const sign = (bits & 8) << 28;
  Int const magnitude = bits & 7;
  Int const normal = (magnitude << 22) + (126 << 23);
  Int const half = (magnitude & 1) * (126 << 23);  // the only subnormal
  return bit_cast<Float>((magnitude < 2 ? half : normal) | sign);
}
QCUTLASS_INLINE float to_float(Float8E4M3 value) { return decode_e4m3<float>(int32_t{value.bits}); }
QCUTLASS_INLINE float to_float(Float8E8M0 value) {
  uint32_t const exponent = uint32_t{value.bits} << 23;
  // 0 is 2^-127, an fp32 subnormal.
  return bit_cast<float>(value.bits == 0 ? 1u << 22 : value.bits == 0xff ? 0x7fc00000u : exponent);
}
QCUTLASS_INLINE float to_float(Float8E5M2 value) { return to_float(Half{static_cast<uint16_t>(value.bits << 8)}); }
QCUTLASS_INLINE float to_float(float value) { return value; }
QCUTLASS_INLINE float to_float(uint8_t value) { return value; }
QCUTLASS_INLINE float to_float(int8_t value) { return value; }
QCUTLASS_INLINE float to_float(int32_t value) { return static_cast<float>(value); }

QCUTLASS_INLINE void from_float(float value, Half* out) {
  uint32_t const bits = bit_cast<uint32_t>(value);
  uint32_t const sign = bits >> 16 & 0x8000u;
  uint32_t const magnitude = bits & 0x7fffffffu;
  // Subnormal results: adding 1/2 makes the fp32 unit in the last place that of a subnormal half, so the addition
  // rounds.
  uint32_t const subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - bit_cast<uint32_t>(0.5f);
  uint32_t const normal = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
  uint32_t const special = magnitude > 0x7f800000u ? 0x7e00u | (magnitude >> 13 & 0x3ffu) : 0x7c00u;
  uint32_t const result = magnitude < (113u << 23) ? subnormal : magnitude >= (143u << 23) ? special : normal;
  out->bits = static_cast<uint16_t>(result | sign);
}
QCUTLASS_INLINE void from_float(float value, BFloat16* out) {
  uint32_t const bits = bit_cast<uint32_t>(value);
  uint32_t const rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  uint32_t const quiet_nan = bits >> 16 | 0x40u;
  out->bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}
QCUTLASS_INLINE void from_float(float value, float* out) { *out = value; }

template <class T>
QCUTLASS_INLINE void load_floats(void const* data, int64_t offset, int64_t count, float* __restrict out) {
  T const* source = static_cast<T const*>(data) + offset;
  for (int64_t i = 0; i < count; ++i) out[i] = to_float(source[i]);
}

template <class T>
QCUTLASS_INLINE void store_floats(float const* __restrict values, int64_t count, void* data, int64_t offset) {
  T* out = static_cast<T*>(data) + offset;
  for (int64_t i = 0; i < count; ++i) from_float(values[i], out + i);
}

/// out[i] = element offset + i of `data`, as fp32.
QCUTLASS_INLINE void load_floats(DType type, void const* data, int64_t offset, int64_t count, float* __restrict out) {
  switch (type) {
    case DType::kNone:
    case DType::kUInt4:
    case DType::kFloat4E2M1: break;  // no elements in memory
    case DType::kFloat16: return load_floats<Half>(data, offset, count, out);
    case DType::kBFloat16: return load_floats<BFloat16>(data, offset, count, out);
    case DType::kFloat32: return load_floats<float>(data, offset, count, out);
    case DType::kUInt8: return load_floats<uint8_t>(data, offset, count, out);
    case DType::kInt8: return load_floats<int8_t>(data, offset, count, out);
    case DType::kInt32: return load_floats<int32_t>(data, offset, count, out);
    case DType::kFloat8E4M3: return load_floats<Float8E4M3>(data, offset, count, out);
    case DType::kFloat8E5M2: return load_floats<Float8E5M2>(data, offset, count, out);
    case DType::kFloat8E8M0: return load_floats<Float8E8M0>(data, offset, count, out);
  }
}

/// So many elements of `data` from `offset` on as fp32: where they are, or in `scratch`.
QCUTLASS_INLINE float const* floats_at(DType type, void const* data, int64_t offset, int64_t count, float* scratch) {
  if (type == DType::kFloat32) return static_cast<float const*>(data) + offset;
  load_floats(type, data, offset, count, scratch);
  return scratch;
}

/// Element offset + i of `data` = values[i], rounded to nearest even. `type` is a floating type.
QCUTLASS_INLINE void store_floats(DType type, float const* __restrict values, int64_t count, void* data,
                                  int64_t offset) {
  switch (type) {
    case DType::kFloat16: return store_floats<Half>(values, count, data, offset);
    case DType::kBFloat16: return store_floats<BFloat16>(values, count, data, offset);
    default: return store_floats<float>(values, count, data, offset);
  }
}

/// values[i] rounded to a floating type and back.
template <class T>
QCUTLASS_INLINE void round_floats(int64_t count, float* values) {
  for (int64_t i = 0; i < count; ++i) {
    T rounded;
    from_float(values[i], &rounded);
    values[i] = to_float(rounded);
  }
}
QCUTLASS_INLINE void round_floats(DType type, int64_t count, float* values) {
  if (type == DType::kFloat16) round_floats<Half>(count, values);
  if (type == DType::kBFloat16) round_floats<BFloat16>(count, values);
}

}  // namespace qcutlass::host
