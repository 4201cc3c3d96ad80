// Dequantising on the GPU, at the speed of the memory that is written.
//
// A thread makes vectors of eight neighbouring weights for each of two channels, g and g + 8 of a strip of 16; a warp
// makes 256 neighbouring weights of both at once, so that its stores fill whole lines. In the packed layout the codes
// of two such vectors lie in one 32-bit word of each of the four lanes 4g .. 4g + 3.
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/cuda_check.h"
#include "cuda/vector.cuh"
#include "cutlass/float8.h"
#include "cutlass_ext/arch/dequantize.h"
#include "cutlass_ext/gemm/threadblock/scale_loader.h"
#include "qcutlass/pack.h"

namespace qcutlass::cuda {
namespace {

constexpr int kVector = 8;            // neighbouring weights of a channel
constexpr int kVectorsPerThread = 2;  // 32 vectors apart; loaded together
constexpr int kWarps = layout::kTileN / 2;
constexpr int kBlockK = kVectorsPerThread * 32 * kVector;
constexpr int64_t kMaxStrips = 65535;  // of a launch: the grid's limit
constexpr int kTileWords = layout::kTileBytes / 4, kLaneWords = layout::kLaneBytes / 4;

/// The places of a vector's codes.
template <Packing kPacking>
struct VectorCodes {
  static constexpr int kBits = bits_of(kPacking);
  static constexpr int kVectorsPerTile = layout::tile_k(kPacking) / kVector;

  /// Word of a lane that has codes k and k + 1 of both channels, and by how much to shift it so that they come to lie
  /// where the converters of cutlass_ext/arch/dequantize.h look for registers 0 (channel g) and 1 (channel g + 8).
  static constexpr int word(int vector) { return kBits == 4 ? vector / 2 : vector; }
  static constexpr int shift(int vector) { return kBits == 4 ? vector % 2 * 8 : 0; }
  /// Place of a code in the shifted word.
  static constexpr int bit(int channel, int odd) {
    return kBits == 4 ? channel * 4 + odd * 16 : channel * 16 + odd * 8;
  }

  static constexpr bool holds() {
    for (int row = 0; row < layout::kTileN; ++row)
      for (int k = 0; k < layout::tile_k(kPacking); ++k) {
        auto const p = layout::position_in_tile(kPacking, row, k);
        int const vector = k / kVector, lane = row % 8 * 4 + k % kVector / 2;
        int const place = (lane * kLaneWords + word(vector)) * 32 + shift(vector) + bit(row / 8, k % 2);
        if (p.byte * 8 + p.bit != place) return false;
      }
    return true;
  }
};
static_assert(VectorCodes<Packing::kW4A16>::holds() && VectorCodes<Packing::kW8A16>::holds());
static_assert(VectorCodes<Packing::kE2M1A16>::holds() && VectorCodes<Packing::kE4M3A16>::holds());

/// Codes of one vector of both channels: words of lanes 4g .. 4g + 3, shifted.
using Words = uint32_t[4];

/// Scales of the type of the weights, zeros uint8 or none, groups of pairs of vectors: 16-bit arithmetic, in which only
/// the product rounds, so that the weights are the same as in fp32. As in the products, bf16 takes zeros up to 128.
template <class Element_, Packing kPacking>
struct NativeMath {
  using Element = Element_;
  using Converter = cutlass::arch::NativeConverter<Element, bits_of(kPacking)>;

  cutlass::gemm::threadblock::GroupSize group_size;

  static bool serves(DequantizeArguments const& a) {
    WeightArguments const& w = a.weights;
    return !w.has_minimums() && w.scale_type == a.out_type &&
           (w.zero_type == DType::kNone || w.zero_type == DType::kUInt8) &&
           (w.groups() == 1 || w.group_size % (2 * kVector) == 0);
  }

  explicit NativeMath(WeightArguments const& w)
      : group_size(int(w.groups() == 1 ? layout::ceil_div(w.k, kVector) * kVector : w.group_size)) {}

  struct Group {
    typename Converter::Operands operands;
  };

  __device__ Group group(WeightArguments const& w, int k, int64_t const (&n)[2]) const {
    int64_t const index = group_size.group(k);
    uint16_t const* const scales = static_cast<uint16_t const*>(w.scales) + index * w.scale_stride;
    uint8_t const* const zeros = static_cast<uint8_t const*>(w.zeros) + index * w.zero_stride;
    uint32_t zero[2] = {symmetric_zero(kPacking), symmetric_zero(kPacking)};
    if (w.zero_type != DType::kNone) zero[0] = __ldg(zeros + n[0]), zero[1] = __ldg(zeros + n[1]);
    return {Converter::make(__ldg(scales + n[0]), __ldg(scales + n[1]), zero[0], zero[1])};
  }

  __device__ void weights(WeightArguments const&, Words const& words, Group const& group, int, int64_t const (&)[2],
                          Vector<Element, kVector> (&out)[2]) const {
#pragma unroll
    for (int pair = 0; pair < kVector / 2; ++pair) {
      reinterpret_cast<uint32_t*>(out[0].values)[pair] = Converter::template convert<0>(&words[pair], group.operands);
      reinterpret_cast<uint32_t*>(out[1].values)[pair] = Converter::template convert<1>(&words[pair], group.operands);
    }
  }
};

/// An element's bits, to be interpreted later: loads need not wait for each other.
__device__ inline uint32_t load_bits(void const* data, DType type, int64_t i) {
  switch (size_of(type)) {
    case 1: return __ldg(static_cast<uint8_t const*>(data) + i);
    case 2: return __ldg(static_cast<uint16_t const*>(data) + i);
    default: return __ldg(static_cast<uint32_t const*>(data) + i);
  }
}

/// Selects, no branches: the type is the same for all threads, but a switch would keep their loads from overlapping.
__device__ inline float to_float(uint32_t bits, DType type) {
  float result = __uint_as_float(type == DType::kBFloat16 ? bits << 16 : bits);  // fp32, and the symmetric zero
  result = type == DType::kFloat16 ? __half2float(__ushort_as_half(uint16_t(bits))) : result;
  int const integer = type == DType::kInt8 ? int8_t(bits) : int(bits);
  return type == DType::kUInt8 || type == DType::kInt8 || type == DType::kInt32 ? float(integer) : result;
}

/// The same of scales of floating codes.
__device__ inline float float_code_scale(uint32_t bits, DType type) {
  if (type == DType::kFloat8E8M0)
    return __uint_as_float(bits == 0 ? 1u << 22 : bits == 0xff ? 0x7fc00000u : bits << 23);
  if (type == DType::kFloat8E4M3) return float(cutlass::float_e4m3_t::bitcast(uint8_t(bits)));
  return to_float(bits, type);
}

/// The number that a code is.
template <Packing kPacking>
__device__ float number(uint32_t code) {
  if constexpr (kPacking == Packing::kE4M3A16) {
    return float(cutlass::float_e4m3_t::bitcast(uint8_t(code)));
  } else if constexpr (kPacking == Packing::kE2M1A16) {
    // Its bits at the ends of fp32's exponent and mantissa are the number times 2^-126, which 2^126 makes normal.
    return __uint_as_float((code & 8) << 28 | (code & 7) << 22) * 0x1p126f;
  } else {
    return float(code);
  }
}

/// Any types, any groups: fp32 arithmetic, one rounding to Element. kRagged: groups may end within a vector.
template <class Element_, Packing kPacking, bool kRagged>
struct FloatMath {
  using Element = Element_;
  using Codes = VectorCodes<kPacking>;

  unsigned group_size;

  explicit FloatMath(WeightArguments const& w) : group_size(unsigned(w.group_size < w.k ? w.group_size : w.k)) {}

  struct Group {
    uint32_t scale[2], offset[2];              // their bits
    uint32_t super_scale[2], super_offset[2];  // likewise, of the second level
  };

  __device__ Group group(WeightArguments const& w, int k, int64_t const (&n)[2]) const {
    unsigned const index = unsigned(k) / group_size;
    GroupParameters const offsets = w.offsets();
    Group result;
#pragma unroll
    for (int channel = 0; channel < 2; ++channel) {
      result.scale[channel] = load_bits(w.scales, w.scale_type, index * w.scale_stride + n[channel]);
      result.offset[channel] = offsets.type == DType::kNone
                                   ? __float_as_uint(float(symmetric_zero(kPacking)))
                                   : load_bits(offsets.data, offsets.type, index * offsets.stride + n[channel]);
    }
    if constexpr (!has_float_codes(kPacking)) {
      if (w.has_super_blocks()) {
        constexpr uint32_t kOne = 0x3c00;  // in fp16
        unsigned const block = index / unsigned(w.super_groups);
#pragma unroll
        for (int channel = 0; channel < 2; ++channel) {
          result.super_scale[channel] =
              load_bits(w.super_scales, DType::kFloat16, block * w.super_scale_stride + n[channel]);
          result.super_offset[channel] = w.has_minimums() ? load_bits(w.super_minimums, DType::kFloat16,
                                                                      block * w.super_minimum_stride + n[channel])
                                                          : kOne;
        }
      }
    }
    return result;
  }

  struct Parameters {
    float scale[2], offset[2];
  };

  static __device__ Parameters parameters(WeightArguments const& w, Group const& group) {
    Parameters result;
#pragma unroll
    for (int channel = 0; channel < 2; ++channel) {
      if constexpr (has_float_codes(kPacking)) {
        result.scale[channel] = float_code_scale(group.scale[channel], w.scale_type);
        if (w.global_scale != nullptr) result.scale[channel] = __fmul_rn(result.scale[channel], __ldg(w.global_scale));
      } else {
        result.scale[channel] = to_float(group.scale[channel], w.scale_type);
      }
      result.offset[channel] = to_float(group.offset[channel], w.offsets().type);
    }
    if constexpr (!has_float_codes(kPacking)) {
      if (w.has_super_blocks()) {
#pragma unroll
        for (int channel = 0; channel < 2; ++channel) {  // exact: 8 bits by 11
          result.scale[channel] *= to_float(group.super_scale[channel], DType::kFloat16);
          result.offset[channel] *= to_float(group.super_offset[channel], DType::kFloat16);
        }
      }
    }
    return result;
  }

  // A call, not inlined: there is one for each weight of a vector.
  __device__ __noinline__ Parameters next_group(WeightArguments const& w, int k, int64_t const (&n)[2]) const {
    return parameters(w, group(w, k, n));
  }

  __device__ void weights(WeightArguments const& w, Words const& words, Group const& group, int k,
                          int64_t const (&n)[2], Vector<Element, kVector> (&out)[2]) const {
    Parameters p = parameters(w, group);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (kRagged && i > 0 && (k + i) % group_size == 0 && k + i < w.k) p = next_group(w, k + i, n);
#pragma unroll
      for (int channel = 0; channel < 2; ++channel) {
        float const code = number<kPacking>(words[i / 2] >> Codes::bit(channel, i % 2) & ((1u << Codes::kBits) - 1));
        float const scale = p.scale[channel], offset = p.offset[channel];
        out[channel].values[i] =
            Element(w.has_minimums() ? __fmaf_rn(code, scale, -offset) : __fmul_rn(__fsub_rn(code, offset), scale));
      }
    }
  }
};

/// Block (x, y) makes columns kBlockK * x .. + kBlockK of strip first_strip + y.
template <Packing kPacking, class Math>
__global__ void __launch_bounds__(kWarps * 32)
    dequantize_kernel(__grid_constant__ DequantizeArguments const a, __grid_constant__ Math const math,
                      int64_t first_strip, bool aligned) {
  using Element = typename Math::Element;
  using Codes = VectorCodes<kPacking>;
  WeightArguments const& w = a.weights;
  int const lane = threadIdx.x % 32, g = threadIdx.x / 32, columns = int(w.k), last = (columns - 1) / kVector;
  int64_t const strip = first_strip + blockIdx.y;
  int64_t const rows[2] = {strip * layout::kTileN + g, strip * layout::kTileN + g + 8};
  int64_t const n[2] = {min(rows[0], w.n - 1), min(rows[1], w.n - 1)};  // the others are not stored
  uint32_t const* const packed =
      static_cast<uint32_t const*>(w.packed) + strip * layout::tiles_k(kPacking, w.k) * kTileWords + g * 4 * kLaneWords;

  int const first = blockIdx.x * kVectorsPerThread * 32 + lane;
  Words words[kVectorsPerThread];
  typename Math::Group groups[kVectorsPerThread];
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
    int const vector = min(first + i * 32, last), place = vector % Codes::kVectorsPerTile;
    uint32_t const* const tile = packed + int64_t(vector / Codes::kVectorsPerTile) * kTileWords;
#pragma unroll
    for (int t = 0; t < 4; ++t) words[i][t] = __ldg(tile + t * kLaneWords + Codes::word(place)) >> Codes::shift(place);
    groups[i] = math.group(w, vector * kVector, n);
  }
  Element* out[2];
  bool wanted[2];
#pragma unroll
  for (int channel = 0; channel < 2; ++channel) {
    wanted[channel] = rows[channel] >= a.row_begin && rows[channel] < a.row_end;
    out[channel] = static_cast<Element*>(a.out) + (rows[channel] - a.row_begin) * a.out_stride;
  }
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
    int const k = (first + i * 32) * kVector;
    if (k >= columns) return;
    Vector<Element, kVector> weights[2];
    math.weights(w, words[i], groups[i], k, n, weights);
#pragma unroll
    for (int channel = 0; channel < 2; ++channel) {
      if (!wanted[channel]) continue;
      if (aligned && k + kVector <= columns) {
        *reinterpret_cast<Vector<Element, kVector>*>(out[channel] + k) = weights[channel];
      } else {
#pragma unroll
        for (int j = 0; j < kVector; ++j)
          if (k + j < columns) out[channel][k + j] = weights[channel].values[j];
      }
    }
  }
}

template <Packing kPacking, class Math>
void launch(DequantizeArguments const& a, cudaStream_t stream) {
  using Element = typename Math::Element;
  constexpr int64_t kAlignment = alignof(Vector<Element, kVector>);
  bool const aligned =
      reinterpret_cast<uintptr_t>(a.out) % kAlignment == 0 && a.out_stride * int64_t(sizeof(Element)) % kAlignment == 0;
  unsigned const blocks = unsigned(layout::ceil_div(a.weights.k, kBlockK));
  int64_t const end = layout::tiles_n(a.row_end);
  for (int64_t strip = a.row_begin / layout::kTileN; strip < end; strip += kMaxStrips) {
    dim3 const grid(blocks, unsigned(end - strip < kMaxStrips ? end - strip : kMaxStrips));
    dequantize_kernel<kPacking><<<grid, kWarps * 32, 0, stream>>>(a, Math(a.weights), strip, aligned);
    QCUTLASS_CUDA_CHECK(cudaGetLastError());
  }
}

template <Packing kPacking, class Element>
void dequantize_as(DequantizeArguments const& a, cudaStream_t stream) {
  bool const ragged = a.weights.groups() > 1 && a.weights.group_size % kVector != 0;
  if (ragged) return launch<kPacking, FloatMath<Element, kPacking, true>>(a, stream);
  if constexpr (!std::is_same_v<Element, float> && !has_float_codes(kPacking))
    if (NativeMath<Element, kPacking>::serves(a)) return launch<kPacking, NativeMath<Element, kPacking>>(a, stream);
  return launch<kPacking, FloatMath<Element, kPacking, false>>(a, stream);
}

template <Packing kPacking>
void dequantize_packed(DequantizeArguments const& a, cudaStream_t stream) {
  switch (a.out_type) {
    case DType::kFloat16: return dequantize_as<kPacking, cutlass::half_t>(a, stream);
    case DType::kBFloat16: return dequantize_as<kPacking, cutlass::bfloat16_t>(a, stream);
    default: return dequantize_as<kPacking, float>(a, stream);
  }
}

}  // namespace

void dequantize(DequantizeArguments const& a, void* stream) {
  if (a.row_end <= a.row_begin || a.weights.k == 0) return;
  switch (a.weights.packing) {
    case Packing::kW4A8:
    case Packing::kW4A16: return dequantize_packed<Packing::kW4A16>(a, static_cast<cudaStream_t>(stream));
    case Packing::kW8A16: return dequantize_packed<Packing::kW8A16>(a, static_cast<cudaStream_t>(stream));
    case Packing::kE2M1A16: return dequantize_packed<Packing::kE2M1A16>(a, static_cast<cudaStream_t>(stream));
    case Packing::kE4M3A16: return dequantize_packed<Packing::kE4M3A16>(a, static_cast<cudaStream_t>(stream));
    case Packing::kW8A8: throw InvalidArgument("packing: weights for int8 activations have nothing to dequantise");
  }
}

}  // namespace qcutlass::cuda
