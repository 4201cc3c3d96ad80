// The products, of 16-bit activations by packed codes and of 8-bit activations by weights of 8 bits.
//
// Weight-only: out[m, n] = activation(sum_k a'[m, k] * w[n, k] + bias[n]) + residual[m, n], fp32 accumulation.
//
//   a'[m, k] = round_to_a_type(a[m, p] * act_scale[p]),  p = perm ? perm[k] : k
//
// act_scale is indexed by columns of a, that is, before perm.
//
// With int8_activations a' is then quantised in blocks of 32 columns kb, and meets exact sums of codes:
//
//   a'[m, k] ~ a_q[m, k] * scale[m, kb],  scale = max |a'[m, k in kb]| / 127,  a_q = round(a' / scale)
//
// With a gate, channels come in pairs g, u: out[m, n] = activation(sum_g + bias[g]) * (sum_u + bias[u]) + residual.
// Everything after the sums is computed in fp32. The host rounds once. GPUs also round sums before a gate, and values
// before a residual, so that their bits are those of separate operators.
//
// 4 by 8 bits (Packing::kW4A16 with a_type int8 or fp8 e4m3):
//
//   out[m, n] = activation(sum * a_scale[m] + bias[n]) + residual
//   sum = sum_g scale[g, n] * sum_{k in group g} a[m, k] * (code[n, k] - zero[g, n])
//
// in fp32, where inner sums of int8 over up to 512 k are exact if groups are multiples of 16 or one a channel.
//
// 8 by 8 bits (Packing::kW8A8): out[m, n] = activation(sum * a_scale[m] * w_scale[n] + bias[n]) + residual, with
//
//   sum = sum_k (a[m, k] - azp[m]) * w[n, k]      int8: exact in int32; fp8: fp32 accumulation, no azp
//
// evaluated in fp32 from the left (the bias may be added in a fused step), rounded once. Kernels for sm_90a add fp8
// sums of 128 k in fp32; their MMAs keep some 14 bits of each such sum. int32 outputs are the sums themselves.
//
// Blockwise (the same weights; BlockScales): out[m, n] = activation(sum + bias[n]) + residual, fp32 accumulation, with
//
//   sum = sum_kb (sum_{k in block kb} a[m, k] * w[n, k]) * a_scale[m, kb] * w_scale[n / size, kb]
//
// with inner sums that are exact in int32 (int8), or rounded in fp32 (e4m3). int8 products may quantise their output:
// see QuantizedOutput.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "qcutlass/scheme.h"
#include "qcutlass/types.h"

namespace qcutlass {

/// Operands that scale the sums of a product of 8-bit activations. A stride is 1, or 0 where one element serves all.
struct SumScales {
  float const* a_scale = nullptr;  ///< [m] or [1]; nullptr where out_type is kInt32
  int a_scale_stride = 0;
  float const* w_scale = nullptr;  ///< [n] or [1]; likewise
  int w_scale_stride = 0;
  int32_t const* azp = nullptr;  ///< zero points of int8 activations, [m] or [1]; nullptr: 0
  int azp_stride = 0;
  int32_t const* channel_sums = nullptr;  ///< sum_k w[n, k], [n]; with azp
};

/// Scales of blockwise products: of `size` columns of a token, and of `size` channels by `size` columns of the weights.
/// The last block of either extent may be short. Where two matrices, a gate's and up's, lie in turns of 16 channels,
/// each has scales of its own: a row of theirs serves `size` channels of one, among 2 * `size` as they lie.
struct BlockScales {
  int64_t size = 0;          ///< 32, 64 or 128; 0: the product is not blockwise
  float const* a = nullptr;  ///< [m, blocks of k]
  int64_t a_stride = 0;
  float const* w = nullptr;  ///< [blocks of n, blocks of k]
  int64_t w_stride = 0;
  int64_t up_offset = 0;  ///< elements of w from a gate's scales to those of up; 0: channels lie in no turns

  /// Channels, as they lie, that a row of w serves.
  int64_t channels() const { return up_offset != 0 ? 2 * size : size; }
};

/// The output of out_type kInt8: each row quantised by blocks of `size` channels, as quantisers of activations do. The
/// last block may be short.
struct QuantizedOutput {
  int64_t size = 0;         ///< 32, 64 or 128
  float* scales = nullptr;  ///< [m, blocks of n]
  int64_t stride = 0;
};

/// Largest k of int8 products: sums of products of two int8 stay below 2^31. (What zero points take off is subtracted
/// in 64 bits; int32 outputs are exact modulo 2^32.)
inline constexpr int64_t kMaxInt8K = (int64_t(1) << 31) / (128 * 128) - 1;
static_assert(kMaxInt8K == 131071);

/// The matrices of a mixture's experts, each of which multiplies rows of its own. Every operand lists the experts one
/// after the other: packed [count][packed_bytes(n, k)], scales, zeros, minimums [count][groups][n], global scale
/// [count], bias [count][n].
///
///   out[r, n] = activation(sum_k a[rows[r], k] * w[e, n, k] + bias[e, n]) * row_scale[r]
///
/// for offsets[e] <= r < offsets[e + 1].
///
/// With a gate, Gate::kHalves, out has n / 2 columns: activation(y[r, i]) * y[r, n / 2 + i] with y = sum + bias, which
/// GPUs round to the type of a before.
///
/// Rows before offsets[0] and from offsets[count] on are zeros. The host checks that offsets do not decrease and that
/// rows lie in a; on a GPU, where they are data that no host code reads, they are clamped instead.
struct ExpertRows {
  int64_t count = 0;                 ///< experts; 0: one matrix of weights, for all rows
  int32_t const* offsets = nullptr;  ///< [count + 1]
  int32_t const* rows = nullptr;     ///< [m]: rows of a; nullptr: row r multiplies a[r]
  float const* row_scale = nullptr;  ///< [m], of finished rows; nullptr: none
  int64_t a_rows = 0;                ///< rows of a
};

/// One product. Plain data: pointers, sizes and strides in elements; nothing is owned. Unit stride along the last
/// dimension.
struct GemmArguments {
  int64_t m = 0;  ///< rows of out, and of a but for experts; n and k are those of the weights
  WeightArguments weights;
  /// fp16, bf16, on the host also fp32, with Packing::kW4A16 int8 and fp8 e4m3; with Packing::kW8A8 int8, fp8 e4m3, fp8
  /// e5m2 (the weights then are e4m3).
  DType a_type = DType::kNone;
  /// kNone: a_type. With 8-bit a_type and Packing::kW4A16 fp16, bf16, fp32. With Packing::kW8A8 fp16, bf16, fp32 or,
  /// from int8, int32: then scales, bias and activation are none. Blockwise fp16, bf16, fp32 or, from int8, int8.
  DType out_type = DType::kNone;
  void const* a = nullptr;  ///< [m, k]
  int64_t a_stride = 0;
  void* out = nullptr;  ///< [m, out_columns()]
  int64_t out_stride = 0;
  DType bias_type = DType::kNone;  ///< floating, or kNone: no bias
  void const* bias = nullptr;      ///< [n]
  DType act_scale_type = DType::kNone;
  void const* act_scale = nullptr;  ///< [k]
  int32_t const* perm = nullptr;    ///< [k]
  Activation activation = Activation::kNone;
  /// Of Packing::kW8A8, whose weights have no scales and zeros of their own; of 4 by 8 bits a_scale alone.
  SumScales sums;
  BlockScales blocks;  ///< of blockwise products, instead of sums
  QuantizedOutput quantized;
  /// No kernel that may still run when the launch starts writes the weights, scales or zeros, so the launch may read
  /// them early. Such kernels are the launch's predecessor in the stream and, if that is a kernel of decoder.h or
  /// quantize.h (which start early themselves), the predecessor of that one, and so on.
  bool settled = false;
  void* workspace = nullptr;  ///< workspace_bytes() bytes, 16-byte aligned, contents undefined before and after
  size_t workspace_bytes = 0;
  /// On the host, of weight-only products: activations are quantised to int8 first, in blocks of 32 columns.
  bool int8_activations = false;
  /// A row of the output is the same bits whatever m is, and whatever the other rows are: for numbers of rows that
  /// change from call to call, on one machine and GPU model.
  bool batch_invariant = false;
  ExpertRows experts;
  /// Of kSilu or kGeluTanh, and for multiples of 32 channels: kHalves for experts, without row_scale, kInterleaved for
  /// others. Residuals are not for experts, neither is for outputs of integers.
  Gate gate = Gate::kNone;
  void const* residual = nullptr;  ///< [m, out_columns()], of the output's type; nullptr: none
  int64_t residual_stride = 0;

  int64_t out_columns() const { return gate == Gate::kNone ? weights.n : weights.n / 2; }
  DType type_of_out() const { return out_type == DType::kNone ? a_type : out_type; }
  /// Codes for 16-bit activations meet those of 8 bits.
  constexpr bool has_eight_bit_activations() const {
    return weights.packing != Packing::kW8A8 && (a_type == DType::kInt8 || a_type == DType::kFloat8E4M3);
  }
};

namespace host {

/// Reads the packed weights directly: meant for small m (the cost grows with m; nothing but O(m + threads) rows is
/// allocated).
void gemm(GemmArguments const& arguments, int threads);

}  // namespace host

/// A kernel configuration and how to launch it for one problem.
struct Plan {
  std::string tactic;    ///< name of the configuration, as in tactics()
  int row = -1;          ///< of the configuration in tactics(); -1 if dense
  int split_k = 1;       ///< blocks that share the k extent of one output tile, where it is shared
  bool cluster = false;  ///< those blocks form a thread block cluster (sm_90) and need no workspace for their sums
  bool early = false;    ///< may start, and load weights, while the kernel before it in the stream ends (sm_90)
  /// First channel and token of the tiles whose k is shared: of several waves of wgmma tiles, only the last one's.
  int64_t shared_channel = 0, shared_token = 0;
  size_t workspace_bytes = 0;  ///< scratch memory the launch needs
  /// Weights are rounded to the activations' type before the product; if not, (code - zero) * scale enters unrounded.
  bool rounds_weights = true;
  /// The caller dequantises `slice` rows of the weights at a time and multiplies them with a dense 16-bit product;
  /// cuda::gemm refuses such a plan.
  bool dense = false;
  int64_t slice = 0;  ///< rows of a slice but the last; 0 unless dense
};

/// Parts of a predicted time, microseconds.
struct Cost {
  double load = 0;     ///< bytes through DRAM, L2 and the copy rings; dequantising, if dense
  double compute = 0;  ///< issue slots of MMAs and conversions; the dense product, if dense
  double fixed = 0;    ///< launches, prologue, epilogue, and the exchange of partial sums
  double total = 0;    ///< less than the sum where loads and arithmetic overlap
};

/// A plan and what it is expected to take.
struct Candidate {
  Plan plan;
  Cost cost;
};

/// The traits of a GPU that selection needs. Plain data, so that selection can be tested without one.
struct DeviceTraits {
  int compute_capability = 0;  ///< 10 * major + minor
  int sm_count = 0;
  int shared_memory_per_block = 0;  ///< opt-in limit, bytes
  /// The architecture that the GPU's code was compiled for: older than the GPU where only older PTX was built.
  int code_capability = compute_capability;
  bool wgmma = false;  ///< it runs kernels for sm_90a, and they are built
};

/// The resources of a kernel configuration, for one scheme.
struct TacticTraits {
  std::string name;
  int channels = 0, tokens = 0, k = 0;  ///< output tile and k extent of a stage
  int warps = 0, stages = 0;
  int shared_memory = 0;    ///< bytes a block
  int max_registers = 0;    ///< bound a thread, set by the launch bounds; what a thread begins with if `wgmma`
  bool wgmma = false;       ///< needs DeviceTraits::wgmma
  bool superseded = false;  ///< is not there where DeviceTraits::wgmma is
};

/// Every configuration that is built for this kind of problem (types, packing, zeros, group size), whatever the GPU.
std::vector<TacticTraits> tactics(GemmArguments const& arguments);

/// Name of the tactic that dequantises and multiplies densely: `<packing>_<activation type>_dequantize_dense`.
std::string dense_tactic(GemmArguments const& arguments);

/// The plans for the problem on the device, the least predicted time first; a pure function of its arguments. `tactic`
/// forces a configuration by name (empty: any) and `split_k` its split (0: any); `dense` says that the caller runs
/// dense plans. Of batch-invariant products they are those whose sums have one order, which does not depend on m.
/// Throws Unsupported if nothing fits, InvalidArgument for an unknown name.
std::vector<Candidate> candidates(GemmArguments const& arguments, DeviceTraits const& device,
                                  std::string const& tactic = {}, int split_k = 0, bool dense = false);

/// The first of the candidates.
Plan select(GemmArguments const& arguments, DeviceTraits const& device, std::string const& tactic = {}, int split_k = 0,
            bool dense = false);

/// Identifies the table of configurations and what it was built with: `build` names architectures and versions.
/// Measured times of another set of kernels say nothing about this one.
std::string kernel_set_hash(std::vector<std::string> const& build);

namespace cuda {

/// Whether the CUDA backend was compiled in, and for which architectures ("80-real", "90-virtual", ...).
bool is_built();
std::vector<std::string> built_architectures();

/// Versions of nvcc and CUTLASS that compiled the backend, or "none".
std::string toolkit_version();
std::string cutlass_version();

/// Traits of a device, queried once. Throws Unsupported when no kernel was built for it.
DeviceTraits const& device_traits(int device);

/// Launches the plan on `stream` of the current device. No allocation, no synchronisation, no device query after the
/// first call for a device: safe under graph capture.
void gemm(GemmArguments const& arguments, Plan const& plan, void* stream);

/// The steps around the products of a caller that runs dense plans, as safe under graph capture as gemm.
///
/// Writes the activations as the product sees them, permuted and scaled: `a_out` [m, k].
void prepare_activations(GemmArguments const& arguments, void* a_out, int64_t a_out_stride, void* stream);
/// Finishes the sums over k of channels [begin, end), with a gate multiples of 32, and writes what they give of out.
/// `sums` [m, end - begin], 32-byte aligned, its stride a multiple of 8.
void finish(GemmArguments const& arguments, float const* sums, int64_t sums_stride, int64_t begin, int64_t end,
            void* stream);

}  // namespace cuda

}  // namespace qcutlass
