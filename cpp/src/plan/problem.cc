#include "plan/problem.h"

#include <algorithm>
#include <cmath>

#include "plan/sum_order.h"
#include "plan/tactics.h"
#include "plan/workspace.h"
#include "qcutlass/error.h"
#include "qcutlass/layout.h"

namespace qcutlass {
namespace {

void check_blockwise(GemmArguments const& arguments) {
  int64_t const size = arguments.blocks.size, out_size = arguments.quantized.size;
  bool const is_float8 = arguments.a_type == DType::kFloat8E4M3;
  if (arguments.weights.packing != Packing::kW8A8 || (arguments.a_type != DType::kInt8 && !is_float8))
    throw Unsupported("a: blockwise products are of int8 or float8_e4m3fn activations and weights packed for them");
  if (!is_block_size(size)) throw InvalidArgument("block size: expected 32, 64 or 128, got " + std::to_string(size));
  if (is_float8 && size != 128)
    throw Unsupported("block size: the CUDA kernels of float8_e4m3fn take blocks of 128, got " + std::to_string(size) +
                      "; quantise in blocks of 128, or use CPU tensors");
  if (is_float8 && out_size != 0)
    throw Unsupported("out_type: products of float8_e4m3fn do not quantise their output; quantise it afterwards");
  if (out_size != 0 && !is_block_size(out_size))
    throw InvalidArgument("block size of the output: expected 32, 64 or 128, got " + std::to_string(out_size));
  if ((arguments.out_type == DType::kInt8) != (out_size != 0) || (out_size == 0 && !is_floating(arguments.out_type)))
    throw InvalidArgument("out_type: expected float16, bfloat16 or float32, or int8 for an output that is quantised");
  check_turns(arguments);
}

void check_eight_bits(GemmArguments const& arguments) {
  WeightArguments const& w = arguments.weights;
  bool const is_int8 = arguments.a_type == DType::kInt8, blockwise = arguments.blocks.size != 0;
  if (!is_int8 && !is_float8(arguments.a_type))
    throw Unsupported("a: weights packed for activations of 8 bits meet int8 or float8 ones only");
  if (is_int8 && !blockwise && w.k > kMaxInt8K)
    throw InvalidArgument("a: int8 products have at most K = " + std::to_string(kMaxInt8K) +
                          ", where int32 sums cannot overflow; got " + std::to_string(w.k) + ". Split K");
  if (arguments.out_type == DType::kNone || (arguments.out_type == DType::kInt8 && !blockwise) ||
      (arguments.out_type == DType::kInt32 && !is_int8))
    throw InvalidArgument("out_type: expected float16, bfloat16, float32 or, from int8, int32");
  if (arguments.perm != nullptr || arguments.act_scale != nullptr)
    throw Unsupported("perm, act_scale: activations of 8 bits are multiplied as they are");
  if (arguments.sums.azp != nullptr && !is_int8) throw Unsupported("azp: float8 activations have no zero points");
  constexpr int64_t kMaxRows = int64_t(1) << 25;  // a grid of the smaller tiles, where nothing is dequantised
  if (arguments.m > kMaxRows)
    throw Unsupported("a: the CUDA kernels take up to 2^25 rows of 8-bit activations; split the product");
}

void check_sixteen_bits(GemmArguments const& arguments) {
  WeightArguments const& w = arguments.weights;
  if (arguments.int8_activations)
    throw Unsupported("activations: only the CPU quantises activations to int8 for packed codes; use None, or the CPU");
  if (w.super_blocks() > 1 && w.super_groups * w.group_size % kSuperBlockStep != 0)
    throw Unsupported("super_scales: the CUDA kernels take super-blocks of multiples of " +
                      std::to_string(kSuperBlockStep) + " columns, got " +
                      std::to_string(w.super_groups * w.group_size) + "; expand them: qcutlass.expand_scales");
  if (arguments.a_type != DType::kFloat16 && arguments.a_type != DType::kBFloat16)
    throw Unsupported("a: the CUDA kernels take float16 or bfloat16 activations; convert a, or use the CPU");
  if (w.groups() > 1 && w.group_size % kGroupStep != 0)
    throw Unsupported("group_size: the CUDA kernels take multiples of " + std::to_string(kGroupStep) +
                      " or one group a channel, got " + std::to_string(w.group_size) + "; re-quantise, or use the CPU");
}

void check_four_by_eight(GemmArguments const& arguments) {
  WeightArguments const& w = arguments.weights;
  if (w.packing != Packing::kW4A16)
    throw Unsupported("a_q: activations of 8 bits meet int4 codes, or weights packed for them");
  if (w.has_minimums() || w.has_super_blocks() || is_floating(w.zero_type))
    throw Unsupported("zeros, minimums, super_scales: with 8-bit activations weights have integer zeros, or none");
  if (arguments.perm != nullptr || arguments.act_scale != nullptr)
    throw Unsupported("perm, act_scale: activations of 8 bits are multiplied as they are");
  if (!is_floating(arguments.out_type)) throw InvalidArgument("out_type: expected float16, bfloat16 or float32");
  int64_t const step = promoted_k(ScaleMode::kGroup32);
  if (w.groups() > 1 && w.group_size % step != 0)
    throw Unsupported("group_size: with 8-bit activations the CUDA kernels take multiples of " + std::to_string(step) +
                      " or one group a channel, got " + std::to_string(w.group_size) +
                      "; use gemm with 16-bit activations, or CPU tensors");
}

void check_experts(GemmArguments const& arguments) {
  constexpr int64_t kMostExperts = int64_t(1) << 16;  // every block goes over their offsets
  int64_t const count = arguments.experts.count;
  if (count < 0 || count > kMostExperts)
    throw InvalidArgument("experts: expected up to " + std::to_string(kMostExperts) + ", got " + std::to_string(count));
  if (arguments.experts.rows == nullptr && arguments.experts.a_rows < arguments.m)
    throw InvalidArgument("rows: without them row r multiplies a[r], and a has " +
                          std::to_string(arguments.experts.a_rows) + " rows for " + std::to_string(arguments.m));
  if (arguments.weights.packing == Packing::kW8A8 || arguments.has_eight_bit_activations() ||
      arguments.perm != nullptr || arguments.act_scale != nullptr)
    throw Unsupported("offsets: products of experts take 16-bit activations as they are");
}

void check_sizes(GemmArguments const& arguments) {
  // Indices of rows, and offsets within a row or between neighbouring ones, are 32-bit in the kernels.
  constexpr int64_t kMaxRows = int64_t(1) << 30, kMaxChannels = int64_t(1) << 28;
  if (std::max(arguments.m, arguments.experts.a_rows) > kMaxRows || arguments.weights.n > kMaxChannels ||
      arguments.weights.k > kMaxStride)
    throw Unsupported(
        "a, w_packed: the CUDA kernels take up to 2^30 rows, 2^28 channels and 2^24 columns; split the product");
}

/// Of floating codes, for which there are fewer modes: groups of any kind go with the finest.
ScaleMode float_code_mode(GemmArguments const& arguments) {
  WeightArguments const& w = arguments.weights;
  bool const same = w.scale_type == arguments.a_type;
  if (w.packing == Packing::kE2M1A16) return same || size_of(w.scale_type) == 1 ? ScaleMode::kFine : ScaleMode::kFloat;
  return same && (w.group_size >= w.k || w.group_size % kNativeGroup == 0) ? ScaleMode::kNative : ScaleMode::kFloat;
}

ScaleMode scale_mode(GemmArguments const& arguments) {
  WeightArguments const& w = arguments.weights;
  switch (arguments.blocks.size) {
    case 0: break;
    case 64: return ScaleMode::kBlock64;
    case 32: return ScaleMode::kBlock32;
    default: return ScaleMode::kBlock;
  }
  if (w.packing == Packing::kW8A8) return ScaleMode::kNone;
  if (arguments.has_eight_bit_activations())
    return w.groups() == 1 || w.group_size % promoted_k(ScaleMode::kGroup) == 0 ? ScaleMode::kGroup
                                                                                : ScaleMode::kGroup32;
  if (has_float_codes(w.packing)) return float_code_mode(arguments);
  if (w.has_minimums() || w.has_super_blocks()) return ScaleMode::kMinimum;
  bool const native = w.scale_type == arguments.a_type && (w.zero_type == DType::kNone || w.zero_type == DType::kUInt8);
  if (!native) return ScaleMode::kFloat;
  return w.group_size >= w.k || w.group_size % kNativeGroup == 0 ? ScaleMode::kNative : ScaleMode::kFine;
}

DType weight_type(GemmArguments const& arguments) {
  switch (arguments.weights.packing) {
    case Packing::kW4A16:
    case Packing::kW4A8: return DType::kUInt4;
    case Packing::kW8A16: return DType::kUInt8;
    case Packing::kW8A8: return is_float8(arguments.a_type) ? DType::kFloat8E4M3 : DType::kInt8;
    case Packing::kE2M1A16: return DType::kFloat4E2M1;
    case Packing::kE4M3A16: return DType::kFloat8E4M3;
  }
  return DType::kNone;
}

/// Rows of scales or zeros that the kernels cannot read where they are.
bool copies(void const* data, DType type, int64_t stride, WeightArguments const& w, int64_t rows) {
  constexpr int64_t kMaxRowBytes = (int64_t(1) << 31) - 1;  // the kernels keep strides in 32 bits
  return type != DType::kNone &&
         ((rows > 1 && stride * size_of(type) > kMaxRowBytes) || !rows_aligned(data, stride, w.n, rows, type));
}

int64_t activation_rows(GemmArguments const& a) { return a.experts.count != 0 ? a.experts.a_rows : a.m; }

Operand activations_of(GemmArguments const& a) {
  WeightArguments const& w = a.weights;
  int64_t const rows = activation_rows(a);
  Operand operand;
  operand.type = a.a_type;
  if (w.packing == Packing::kW8A8 || a.has_eight_bit_activations()) {
    operand.granularity = a.blocks.size != 0 ? Granularity::kBlock : Granularity::kRow;
    operand.group = a.blocks.size;
    operand.scale_type = DType::kFloat32;
    operand.zero_type = a.sums.azp != nullptr ? DType::kInt32 : DType::kNone;
  }
  // The same pass gathers columns and applies act_scale. The kernels' offsets within a tile of rows are 32-bit. Rows
  // that overlap are copied too: tensor maps do not take them.
  bool const overlap = rows > 1 && a.a_stride < w.k;
  operand.copied = a.perm != nullptr || a.act_scale != nullptr || a.a_stride > kMaxStride || overlap ||
                   !rows_aligned(a.a, a.a_stride, w.k, rows, a.a_type);
  return operand;
}

Operand weights_of(GemmArguments const& a) {
  WeightArguments const& w = a.weights;
  Operand operand;
  operand.type = weight_type(a);
  if (w.packing == Packing::kW8A8) {
    operand.granularity = a.blocks.size != 0 ? Granularity::kBlock : Granularity::kRow;
    operand.group = a.blocks.size;
    operand.scale_type = DType::kFloat32;
    return operand;
  }
  operand.granularity = w.groups() > 1 ? Granularity::kGroup : Granularity::kRow;
  operand.group = w.groups() > 1 ? w.group_size : 0;
  operand.scale_type = w.scale_type;
  GroupParameters const offsets = w.offsets();
  operand.zero_type = offsets.type;
  int64_t const rows = w.groups() * std::max<int64_t>(a.experts.count, 1);
  operand.copied_scales = copies(w.scales, w.scale_type, w.scale_stride, w, rows);
  operand.copied_zeros = copies(offsets.data, offsets.type, offsets.stride, w, rows);
  if (w.has_super_blocks()) {
    operand.super_block =
        w.super_blocks() > 1 ? w.super_groups * w.group_size : layout::ceil_div(w.k, kSuperBlockStep) * kSuperBlockStep;
    int64_t const blocks = w.super_blocks() * std::max<int64_t>(a.experts.count, 1);
    auto const copied = [&](void const* supers, int64_t stride) {
      return supers != nullptr && copies(supers, DType::kFloat16, stride, w, blocks);
    };
    // Kernels go from expert to expert by one stride.
    bool const apart = w.super_minimums != nullptr && w.super_minimum_stride != w.super_scale_stride;
    operand.copied_supers =
        apart || copied(w.super_scales, w.super_scale_stride) || copied(w.super_minimums, w.super_minimum_stride);
  }
  return operand;
}

Operand output_of(GemmArguments const& a) {
  Operand operand;
  operand.type = a.out_type == DType::kNone ? a.a_type : a.out_type;
  operand.granularity = a.quantized.size != 0 ? Granularity::kBlock : Granularity::kNone;
  operand.group = a.quantized.size;
  operand.scale_type = a.quantized.size != 0 ? DType::kFloat32 : DType::kNone;
  return operand;
}

}  // namespace

std::string Kind::prefix() const {
  std::string result;
  switch (packing) {
    case Packing::kW4A16: result = "w4a16_"; break;
    case Packing::kW8A16: result = "w8a16_"; break;
    case Packing::kW8A8: result = "w8a8_"; break;
    case Packing::kE2M1A16: result = "e2m1a16_"; break;
    case Packing::kE4M3A16: result = "e4m3a16_"; break;
    case Packing::kW4A8: result = "w4a8_"; break;
  }
  switch (activations) {
    case DType::kFloat16: return result + "f16_";
    case DType::kBFloat16: return result + "bf16_";
    case DType::kInt8: return result + "s8_";
    case DType::kFloat8E4M3: return result + "e4m3_";
    case DType::kFloat8E5M2: return result + "e5m2_";
    default: return result;
  }
}

Kind kind_of(GemmArguments const& arguments) {
  Packing const packing = arguments.has_eight_bit_activations() ? Packing::kW4A8 : arguments.weights.packing;
  return {arguments.a_type, packing, scale_mode(arguments)};
}

void check_epilogue(GemmArguments const& arguments) {
  bool const gated = arguments.gate != Gate::kNone, adds = arguments.residual != nullptr;
  if (arguments.out != nullptr && arguments.m > 1 && arguments.out_stride < arguments.out_columns())
    throw InvalidArgument("out_stride must be at least " + std::to_string(arguments.out_columns()) + ", got " +
                          std::to_string(arguments.out_stride));
  if (!gated && !adds) return;
  if (!is_floating(arguments.type_of_out()))
    throw InvalidArgument("gate, residual: expected an output of float16, bfloat16 or float32");
  bool const grouped = arguments.experts.count != 0;
  if (grouped && adds) throw InvalidArgument("residual: expected none for the rows of experts");
  if (gated) {
    if (arguments.gate != (grouped ? Gate::kHalves : Gate::kInterleaved))
      throw InvalidArgument("gate must be of halves for the rows of experts, and interleaved for others");
    if (arguments.experts.row_scale != nullptr)
      throw InvalidArgument("row_scale: expected none with a gate; the product behind it takes it");
    if (arguments.activation != Activation::kSilu && arguments.activation != Activation::kGeluTanh)
      throw InvalidArgument("activation must be silu or gelu_tanh with a gate");
    if (arguments.weights.n % (2 * layout::kTileN) != 0)
      throw InvalidArgument("n must be a multiple of 32 with a gate, got " + std::to_string(arguments.weights.n));
  }
  if (adds && arguments.m > 1 && arguments.residual_stride < 0)
    throw InvalidArgument("residual_stride must be at least 0, got " + std::to_string(arguments.residual_stride));
}

void check_turns(GemmArguments const& arguments) {
  if (arguments.blocks.up_offset != 0 && arguments.weights.n % (2 * layout::kTileN) != 0)
    throw InvalidArgument("n must be a multiple of 32 where gate and up have scales of their own, got " +
                          std::to_string(arguments.weights.n));
}

int64_t Problem::matrices() const {
  if (!grouped) return 1;
  auto const all = static_cast<double>(groups);
  return std::max<int64_t>(1, std::llround(all * (1 - std::pow(1 - 1 / all, static_cast<double>(m)))));
}

int64_t Problem::token_tiles(int tokens) const {
  if (!grouped) return layout::ceil_div(m, tokens);
  auto const experts = static_cast<double>(matrices());
  double const rows = static_cast<double>(m) / experts;  // of an expert
  // An expert with R rows has one tile, and one more for each multiple of `tokens` that R exceeds. R is taken to follow
  // a logistic distribution whose standard deviation is the root of its mean, as chance has it. Far above a tile's
  // tokens routers' preferences spread R more than chance does; the last tile then counts as half full.
  constexpr double kFar = 4;         // mean rows, in tiles, from which on the second rule holds
  constexpr double kLogistic = 1.8;  // pi / sqrt(3): standard deviation of a logistic distribution of scale 1
  double tiles = rows / tokens + 0.5;
  if (rows < kFar * tokens) {
    double const width = std::sqrt(rows) / kLogistic;
    tiles = 1;
    for (double more = tokens + 0.5, share = 1; share > 1e-3; more += tokens)
      tiles += share = 1 / (1 + std::exp((more - rows) / width));
  }
  return std::llround(experts * tiles);
}

Problem make_problem(GemmArguments const& arguments) {
  check_epilogue(arguments);
  bool const gated = arguments.gate != Gate::kNone, adds = arguments.residual != nullptr;
  if (arguments.blocks.size != 0)
    check_blockwise(arguments);
  else if (arguments.quantized.size != 0)
    throw Unsupported("out: only blockwise products quantise their output");
  if (arguments.weights.packing == Packing::kW8A8)
    check_eight_bits(arguments);
  else if (arguments.has_eight_bit_activations())
    check_four_by_eight(arguments);
  else
    check_sixteen_bits(arguments);
  if (arguments.experts.count != 0) check_experts(arguments);
  check_sizes(arguments);

  Problem problem;
  problem.m = arguments.m, problem.n = arguments.weights.n, problem.k = arguments.weights.k;
  problem.grouped = arguments.experts.count != 0;
  if (problem.grouped) problem.groups = arguments.experts.count;
  problem.activation_rows = activation_rows(arguments);
  problem.activations = activations_of(arguments);
  problem.weights = weights_of(arguments);
  problem.output = output_of(arguments);
  problem.kind = kind_of(arguments);
  problem.gathers_rows = problem.grouped && arguments.experts.rows != nullptr;
  problem.gathers = arguments.perm != nullptr || arguments.act_scale != nullptr;
  problem.activation = arguments.activation;
  problem.gated = gated;
  problem.loose_residual = adds && size_of(problem.output.type) == 2 && !stores_vectors(arguments, problem.output.type);
  problem.finishes = arguments.bias_type != DType::kNone || arguments.activation != Activation::kNone || adds;
  problem.one_order = arguments.batch_invariant && !sums_exactly(problem.kind, problem.activation);
  return problem;
}

bool rows_aligned(void const* data, int64_t stride, int64_t columns, int64_t rows, DType type) {
  return reinterpret_cast<uintptr_t>(data) % kAlignment == 0 && columns * size_of(type) % kAlignment == 0 &&
         (rows <= 1 || stride * size_of(type) % kAlignment == 0);
}

}  // namespace qcutlass
