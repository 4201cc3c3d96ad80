// Element types, weight packings and epilogue activations: each enumeration of the library, listed once.
#pragma once

#include <cstdint>

namespace qcutlass {

/// kFloat8E4M3 has no infinities (torch.float8_e4m3fn); kFloat8E5M2 is IEEE-like. kFloat8E8M0 is powers of two, 2^(code
/// - 127), and NaN (OCP MX). kUInt4 and kFloat4E2M1 (a sign and 0, .5, 1, 1.5, 2, 3, 4, 6) are those of packed codes
/// alone.
enum class DType : uint8_t {
  kNone,
  kFloat16,
  kBFloat16,
  kFloat32,
  kUInt8,
  kInt8,
  kInt32,
  kFloat8E4M3,
  kFloat8E5M2,
  kFloat8E8M0,
  kUInt4,
  kFloat4E2M1
};

/// Activation applied to the fp32 result after the bias. kGelu is the exact (erf) form, kGeluTanh its tanh
/// approximation.
enum class Activation : uint8_t { kNone, kRelu, kGelu, kGeluTanh, kSilu };

/// How the channels of a gated MLP lie: of gate g and up u the output is activation(g) * u.
enum class Gate : uint8_t {
  kNone,         ///< none: each channel is an output
  kInterleaved,  ///< 16 channels g, then the 16 u that they multiply, and so on
  kHalves,       ///< all channels g, then all u: those of experts
};

/// The codes inside a packed weight tensor: their order (layout.h), which follows from the bits of weights and
/// activations, and the numbers that they are before zeros and scales. The name is W<weight bits>A<activation bits>, or
/// <weight type>A<activation bits>.
enum class Packing : uint8_t {
  kW4A16,    ///< 4-bit integers for fp16 / bf16 activations (mma m16n8k16)
  kW8A16,    ///< 8-bit integers for fp16 / bf16 activations (mma m16n8k16)
  kW8A8,     ///< int8 or fp8 weights for activations of 8 bits (mma m16n8k32); nothing to dequantise
  kE2M1A16,  ///< in the order of kW4A16, e2m1 numbers
  kE4M3A16,  ///< in the order of kW8A16, e4m3 numbers
  kW4A8,     ///< kW4A16 where it meets 8-bit activations: kinds of products have it, weights are packed as kW4A16
};

constexpr int bits_of(DType type) {
  switch (type) {
    case DType::kNone: return 0;
    case DType::kUInt4:
    case DType::kFloat4E2M1: return 4;
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
    case DType::kFloat8E8M0: return 8;
    case DType::kFloat16:
    case DType::kBFloat16: return 16;
    case DType::kFloat32:
    case DType::kInt32: return 32;
  }
  return 0;
}

/// Bytes of an element of a type of whole bytes.
constexpr int size_of(DType type) { return bits_of(type) / 8; }

constexpr bool is_floating(DType type) {
  return type == DType::kFloat16 || type == DType::kBFloat16 || type == DType::kFloat32;
}

constexpr bool is_float8(DType type) { return type == DType::kFloat8E4M3 || type == DType::kFloat8E5M2; }

/// Columns, or rows and columns, that share a scale in blockwise products.
constexpr bool is_block_size(int64_t size) { return size == 32 || size == 64 || size == 128; }

constexpr int bits_of(Packing packing) {
  return packing == Packing::kW8A16 || packing == Packing::kW8A8 || packing == Packing::kE4M3A16 ? 8 : 4;
}

/// Whether codes for 16-bit activations are floating numbers: these have no zeros.
constexpr bool has_float_codes(Packing packing) { return packing == Packing::kE2M1A16 || packing == Packing::kE4M3A16; }

/// Bytes of an element of the activations.
constexpr int activation_bytes(Packing packing) {
  return packing == Packing::kW8A8 || packing == Packing::kW4A8 ? 1 : 2;
}

}  // namespace qcutlass
