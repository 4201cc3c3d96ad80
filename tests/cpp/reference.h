// References for the tests, written independently of the library: rounding by definition in double precision, products
// in float64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "qcutlass/types.h"

namespace qcutlass::test {

// Names for the cases of parameterised tests.
inline std::string name_of(DType type) {
  switch (type) {
    case DType::kNone: return "none";
    case DType::kFloat16: return "f16";
    case DType::kBFloat16: return "bf16";
    case DType::kFloat32: return "f32";
    case DType::kUInt8: return "u8";
    case DType::kInt8: return "i8";
    case DType::kInt32: return "i32";
    case DType::kFloat8E4M3: return "e4m3";
    case DType::kFloat8E5M2: return "e5m2";
    case DType::kFloat8E8M0: return "e8m0";
    case DType::kFloat4E2M1: return "e2m1";
    case DType::kUInt4: return "u4";
  }
  return "?";
}

inline std::string name_of(Packing packing) {
  switch (packing) {
    case Packing::kW4A16: return "w4a16";
    case Packing::kW8A16: return "w8a16";
    case Packing::kW8A8: return "w8a8";
    case Packing::kW4A8: return "w4a8";
    case Packing::kE2M1A16: return "e2m1a16";
    case Packing::kE4M3A16: return "e4m3a16";
  }
  return "?";
}

/// A binary floating format: significand bits (the hidden one included) and exponents of the smallest normal and of the
/// largest value.
struct Format {
  int precision;
  int min_exponent;
  int max_exponent;
};
constexpr Format kHalf{11, -14, 15};
constexpr Format kBFloat16{8, -126, 127};
constexpr Format kFloat{24, -126, 127};

inline Format format_of(DType type) {
  return type == DType::kFloat16 ? kHalf : type == DType::kBFloat16 ? kBFloat16 : kFloat;
}

/// Nearest value of the format, ties to even (nearbyint's default mode).
inline double round_to(Format format, double x) {
  if (x == 0 || !std::isfinite(x)) return x;
  int const exponent = std::max(std::ilogb(x), format.min_exponent);
  int const shift = format.precision - 1 - exponent;
  double const rounded = std::ldexp(std::nearbyint(std::ldexp(x, shift)), -shift);
  double const limit = std::ldexp(2.0, format.max_exponent);
  return std::fabs(rounded) < limit ? rounded : std::copysign(std::numeric_limits<double>::infinity(), x);
}

/// Value of a 16-bit pattern: sign, exponent field of `exponent_bits`, fraction.
inline double value_of_bits(uint16_t bits, int exponent_bits) {
  int const fraction_bits = 15 - exponent_bits;
  int const field = bits >> fraction_bits & ((1 << exponent_bits) - 1);
  int const fraction = bits & ((1 << fraction_bits) - 1);
  int const bias = (1 << (exponent_bits - 1)) - 1;
  double magnitude;
  if (field == (1 << exponent_bits) - 1) {
    magnitude = fraction == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  } else if (field == 0) {
    magnitude = std::ldexp(fraction, 1 - bias - fraction_bits);
  } else {
    magnitude = std::ldexp((1 << fraction_bits) + fraction, field - bias - fraction_bits);
  }
  return bits & 0x8000 ? -magnitude : magnitude;
}

/// Value of an e4m3 byte: exponents biased by 7, the largest of which is ordinary but for one NaN.
inline double value_of_e4m3(uint8_t bits) {
  int const field = bits >> 3 & 15, fraction = bits & 7;
  double const magnitude = field == 15 && fraction == 7 ? std::numeric_limits<double>::quiet_NaN()
                           : field == 0                 ? std::ldexp(fraction, -9)
                                                        : std::ldexp(8 + fraction, field - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}

/// Value of an e5m2 byte: the upper half of an fp16.
inline double value_of_e5m2(uint8_t bits) { return value_of_bits(static_cast<uint16_t>(bits << 8), 5); }

/// Element `index` of an array of `type`.
inline double get(DType type, void const* data, int64_t index) {
  switch (type) {
    case DType::kFloat16: return value_of_bits(static_cast<uint16_t const*>(data)[index], 5);
    case DType::kBFloat16: return value_of_bits(static_cast<uint16_t const*>(data)[index], 8);
    case DType::kFloat32: return static_cast<float const*>(data)[index];
    case DType::kUInt8: return static_cast<uint8_t const*>(data)[index];
    case DType::kInt8: return static_cast<int8_t const*>(data)[index];
    case DType::kInt32: return static_cast<int32_t const*>(data)[index];
    case DType::kFloat8E4M3: return value_of_e4m3(static_cast<uint8_t const*>(data)[index]);
    case DType::kFloat8E5M2: return value_of_e5m2(static_cast<uint8_t const*>(data)[index]);
    case DType::kNone:
    case DType::kFloat8E8M0:
    case DType::kFloat4E2M1:
    case DType::kUInt4: break;
  }
  return 0;
}

/// Stores a value that `type` holds exactly.
inline void set(DType type, void* data, int64_t index, double value) {
  float const single = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &single, sizeof(bits));
  switch (type) {
    case DType::kFloat16: {
      // Search-free: the fraction and exponent fields follow from frexp.
      double const magnitude = std::fabs(value);
      uint16_t result = 0x7e00;  // NaN
      if (std::isinf(value)) {
        result = 0x7c00;
      } else if (!std::isnan(value)) {
        int const exponent = magnitude == 0 ? -14 : std::max(std::ilogb(magnitude), -14);
        int const significand = static_cast<int>(std::ldexp(magnitude, 10 - exponent));
        result =
            static_cast<uint16_t>(significand < 1024 ? significand : ((exponent + 15) << 10) + (significand - 1024));
      }
      static_cast<uint16_t*>(data)[index] = static_cast<uint16_t>(result | (std::signbit(value) ? 0x8000 : 0));
      return;
    }
    case DType::kBFloat16: static_cast<uint16_t*>(data)[index] = static_cast<uint16_t>(bits >> 16); return;
    case DType::kFloat32: static_cast<float*>(data)[index] = single; return;
    case DType::kUInt8: static_cast<uint8_t*>(data)[index] = static_cast<uint8_t>(value); return;
    case DType::kInt8: static_cast<int8_t*>(data)[index] = static_cast<int8_t>(value); return;
    case DType::kInt32: static_cast<int32_t*>(data)[index] = static_cast<int32_t>(value); return;
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      for (int bits = 0; bits < 256; ++bits) {
        static_cast<uint8_t*>(data)[index] = static_cast<uint8_t>(bits);
        if (get(type, data, index) == value) return;
      }
      return;
    case DType::kNone:
    case DType::kFloat8E8M0:
    case DType::kFloat4E2M1:
    case DType::kUInt4: return;
  }
}

/// An array whose element type is known at run time.
class Array {
 public:
  Array() = default;
  Array(DType type, int64_t count) : type_(type), bytes_(count * size_of(type) + 1) {}

  double operator[](int64_t index) const { return get(type_, bytes_.data(), index); }
  void set(int64_t index, double value) {
    test::set(type_, bytes_.data(), index, is_floating(type_) ? round_to(format_of(type_), value) : value);
  }
  DType type() const { return type_; }
  void* data() { return bytes_.data(); }

 private:
  DType type_ = DType::kNone;
  std::vector<uint8_t> bytes_;
};

}  // namespace qcutlass::test
