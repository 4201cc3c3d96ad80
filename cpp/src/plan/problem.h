// The problem: what is multiplied by what, operand by operand. Made once from the arguments of a product; selection,
// the cost model, workspaces, launches and the names of tactics take it, and ask nothing else what kind of product it
// is.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "qcutlass/gemm.h"
#include "qcutlass/layout.h"

namespace qcutlass {

/// How scales and zeros reach the products: what the main loop does between loading weights and adding up.
enum class ScaleMode : uint8_t {
  kNative,   ///< weights scaled in 16 bits: scales of the activations' type, zeros uint8 or none, a group per 64 k
  kFine,     ///< the same with groups of any multiple of 16
  kFloat,    ///< weights scaled in fp32, rounded once: any type of scales and zeros, real-valued zeros
  kMinimum,  ///< the same with minimums taken off scaled codes, and with super-blocks
  kNone,     ///< weights as they are; the epilogue scales the sums
  kBlock,    ///< weights as they are; the sums of every 128 k are scaled into fp32 ones
  kBlock64,  ///< the same with those of every 64 k
  kBlock32,  ///< the same with those of every 32 k
  kGroup,    ///< codes less zeros; the sums of every 128 k are scaled into fp32 ones, by scales of channels
  kGroup32,  ///< the same with those of every 32 k
};

inline constexpr char const* kScaleModeNames[] = {"native", "fine",    "float",   "minimum", "none",
                                                  "block",  "block64", "block32", "group",   "group32"};

/// Whether promoted sums are scaled by block scales, of tokens and of weights.
constexpr bool is_blockwise(ScaleMode mode) {
  return mode == ScaleMode::kBlock || mode == ScaleMode::kBlock64 || mode == ScaleMode::kBlock32;
}
/// Whether promoted sums are scaled by the scales of groups of columns of the weights.
constexpr bool scales_groups_of_sums(ScaleMode mode) {
  return mode == ScaleMode::kGroup || mode == ScaleMode::kGroup32;
}
/// Whether sums leave the tensor cores' accumulators before the epilogue, to be scaled and added in fp32.
constexpr bool is_promoted(ScaleMode mode) { return is_blockwise(mode) || scales_groups_of_sums(mode); }
/// The k after which sums leave the accumulators, for modes that are promoted.
constexpr int promoted_k(ScaleMode mode) {
  return mode == ScaleMode::kBlock || mode == ScaleMode::kGroup ? 128 : mode == ScaleMode::kBlock64 ? 64 : 32;
}

/// Whether weights, or sums, are scaled in fp32, so that scales and zeros may have any type.
constexpr bool takes_any_type(ScaleMode mode) {
  return mode == ScaleMode::kFloat || mode == ScaleMode::kMinimum || scales_groups_of_sums(mode);
}

/// Whether, in wgmma kernels, other warps than the consumers prepare scales and zeros for the conversions. They do so
/// for integer codes whose scales and zeros may have many types, or two levels.
constexpr bool makes_operands(Packing packing, ScaleMode mode) {
  return !has_float_codes(packing) && (mode == ScaleMode::kFloat || mode == ScaleMode::kMinimum);
}

/// Whether scales, and minimums, may have two levels.
constexpr bool takes_super_blocks(ScaleMode mode) { return mode == ScaleMode::kMinimum; }

/// The kinds of products that a tactic is built for, as a set.
enum Products : uint16_t {
  kInt4Weights = 1,     ///< 16-bit activations by int4 weights, scaled in 16 bits
  kInt8Weights = 2,     ///< 16-bit activations by int8 weights, likewise
  kInt8 = 4,            ///< int8 by int8, a scale for each row and channel
  kFloat8 = 8,          ///< fp8 by fp8, a scale for each row and channel
  kBlockwise = 16,      ///< int8 by int8 or fp8 by fp8, a scale for each block of 128
  kSmallBlocks = 32,    ///< int8 by int8, a scale for each smaller block
  kE2M1Weights = 64,    ///< 16-bit activations by e2m1 weights
  kE4M3Weights = 128,   ///< 16-bit activations by e4m3 weights
  kMinimums = 256,      ///< 16-bit activations by integer weights with minimums, or with super-blocks
  kFourByEight = 512,   ///< 8-bit activations by int4 weights
  kFloatScales = 1024,  ///< 16-bit activations by integer weights that are scaled in fp32, without minimums
};
constexpr Products operator|(Products a, Products b) { return Products(uint16_t(a) | uint16_t(b)); }
inline constexpr Products kNoProducts{};
inline constexpr Products kWeightOnly = kInt4Weights | kInt8Weights, kFloatWeights = kE2M1Weights | kE4M3Weights,
                          kFp32Scaled = kFloatScales | kMinimums, kRareWeights = kFloatWeights | kFp32Scaled,
                          kEightByEight = kInt8 | kFloat8, kEightBits = kEightByEight | kBlockwise,
                          kAnyBlocks = kBlockwise | kSmallBlocks, kCommon = kWeightOnly | kEightByEight,
                          kAllProducts = kCommon | kAnyBlocks | kRareWeights | kFourByEight;

/// The types that kernels are compiled for: a family has one. It follows from the types and scales of the operands.
struct Kind {
  DType activations = DType::kNone;
  Packing packing = Packing::kW4A16;
  ScaleMode mode = ScaleMode::kNative;

  constexpr int weight_bits() const { return bits_of(packing); }
  constexpr int activation_bytes() const { return qcutlass::activation_bytes(packing); }
  /// Scaled weights of 16 bits are multiplied; otherwise both operands have 8 bits.
  constexpr bool dequantises() const { return activation_bytes() == 2; }
  /// Codes are converted in registers.
  constexpr bool converts() const { return layout::in_fragment_order(packing); }
  constexpr bool is_float8() const { return qcutlass::is_float8(activations); }
  /// Sums leave the tensor cores' accumulators before the epilogue.
  constexpr bool is_promoted() const { return qcutlass::is_promoted(mode); }
  /// Compute capability that the instructions need.
  constexpr int capability() const { return is_float8() ? 89 : 80; }

  constexpr Products product() const {
    if (packing == Packing::kW4A8) return kFourByEight;
    if (is_promoted()) return mode == ScaleMode::kBlock ? kBlockwise : kSmallBlocks;
    if (has_float_codes(packing)) return weight_bits() == 4 ? kE2M1Weights : kE4M3Weights;
    if (mode == ScaleMode::kMinimum) return kMinimums;
    if (mode == ScaleMode::kFloat) return kFloatScales;
    if (dequantises()) return weight_bits() == 4 ? kInt4Weights : kInt8Weights;
    return is_float8() ? kFloat8 : kInt8;
  }

  /// Whether the kind has kernels for experts.
  constexpr bool takes_experts() const { return dequantises(); }
  /// Whether it has wgmma kernels for experts: only for modes that are common in mixtures.
  constexpr bool takes_experts_on_wgmma() const {
    return dequantises() && (has_float_codes(packing) || !takes_any_type(mode));
  }

  constexpr bool operator==(Kind const& other) const {
    return activations == other.activations && packing == other.packing && mode == other.mode;
  }
  constexpr bool operator!=(Kind const& other) const { return !(*this == other); }

  /// The beginning of its tactics' names: `<packing>_<activation type>_`.
  std::string prefix() const;
};

/// Whether the streaming loop scales the sums of groups of any size. It does so for floating codes, which are MMA
/// operands as they are, or after one instruction.
constexpr bool streams_scaled_groups(Packing packing, ScaleMode mode) {
  return packing == Packing::kE2M1A16 ? mode != ScaleMode::kNative
                                      : packing == Packing::kE4M3A16 && mode == ScaleMode::kFloat;
}
constexpr bool streams_scaled_groups(Kind const& kind) { return streams_scaled_groups(kind.packing, kind.mode); }

/// Whether the streaming loop scales sums for codes with minimums, in tiles of so many tokens. The minimums' share of a
/// sum takes MMAs of its own. These cost more than converting the codes, except with the fewest tokens.
constexpr bool streams_minimum_sums(ScaleMode mode, int tokens) { return mode == ScaleMode::kMinimum && tokens == 8; }

/// Whether a 4-by-8-bit kernel for tiles of so many tokens takes residuals of 16 bits that are not aligned: the largest
/// tile has no registers for them.
constexpr bool takes_any_residual(int tokens) { return tokens <= 128; }

/// The number of elements that share a scale.
enum class Granularity : uint8_t {
  kNone,   ///< no scales: the elements are the numbers
  kRow,    ///< those of a row, a token or a channel, or all
  kGroup,  ///< `group` neighbours in a row
  kBlock,  ///< `group` neighbours in a row; of weights, in each of `group` rows
};

struct Operand {
  DType type = DType::kNone;
  Granularity granularity = Granularity::kNone;
  int64_t group = 0;
  int64_t super_block = 0;  ///< columns that share a number of the second level; 0: scales have one
  DType scale_type = DType::kNone, zero_type = DType::kNone;  ///< the latter also of minimums
  /// Whether the launch copies the operand first. Kernels read rows in whole vectors, so rows that are not aligned are
  /// copied, and so are activations that have to be permuted or scaled.
  bool copied = false, copied_scales = false, copied_zeros = false, copied_supers = false;
};

struct Problem {
  int64_t m = 0, n = 0, k = 0;
  int64_t groups = 1;           ///< matrices of weights
  bool grouped = false;         ///< each for rows of its own, data on the device (experts); otherwise there is one
  int64_t activation_rows = 0;  ///< m, but for grouped products, which gather them
  Operand activations, weights, output;
  Kind kind;
  bool gathers_rows = false;    ///< of the activations: rows of experts are anywhere
  bool gathers = false;         ///< the activations' columns are permuted or scaled before
  bool finishes = false;        ///< a bias, an activation or a residual follows
  bool loose_residual = false;  ///< a residual of 16 bits whose rows, or those of the output, are not aligned
  bool gated = false;           ///< half of the channels are gates of the others: tiles have whole pairs
  Activation activation = Activation::kNone;
  bool one_order = false;  ///< batch-invariant, and its bits depend on the order of sums: one order for every m

  /// Rows of the weights' scales, of all matrices.
  constexpr int64_t scale_rows() const {
    return groups * (weights.granularity == Granularity::kGroup ? layout::ceil_div(k, weights.group) : 1);
  }

  /// Rows of the second level of scales, of all matrices.
  constexpr int64_t super_rows() const {
    return weights.super_block == 0 ? 0 : groups * layout::ceil_div(k, weights.super_block);
  }

  /// The expected number of matrices with rows, if a row is equally likely to belong to each. (Offsets are not known
  /// when plans are made.)
  int64_t matrices() const;

  /// The expected number of tiles of so many tokens. See the definition for how rows spread over experts.
  int64_t token_tiles(int tokens) const;
};

/// The kind of any product, whether or not the CUDA kernels cover it.
Kind kind_of(GemmArguments const& arguments);

/// Throws InvalidArgument for gates, residuals and rows of the output that do not fit the product, on any device.
void check_epilogue(GemmArguments const& arguments);

/// Throws InvalidArgument unless the channels of scales of gate and up come in pairs, on any device.
void check_turns(GemmArguments const& arguments);

/// Throws InvalidArgument or Unsupported, with the reason, for what no CUDA kernel covers.
Problem make_problem(GemmArguments const& arguments);

/// Bytes of one vector access; rows of every operand of the kernels start at multiples of it.
inline constexpr int kAlignment = 16;

/// Largest k, and largest row stride of the activations, in elements: kernels have 32-bit offsets within a row and
/// between the neighbouring rows that a thread copies.
inline constexpr int64_t kMaxStride = int64_t(1) << 24;

/// Whether rows of `columns` elements can be read in whole vectors.
bool rows_aligned(void const* data, int64_t stride, int64_t columns, int64_t rows, DType type);

}  // namespace qcutlass
