// Problem -> configuration: a pure function over the table of tactics.
#include <algorithm>
#include <cstdio>
#include <initializer_list>

#include "plan/cost_model.h"
#include "plan/dense.h"
#include "plan/gpu_class.h"
#include "plan/shared_tiles.h"
#include "plan/workspace.h"
#include "qcutlass/error.h"

namespace qcutlass {
namespace {

/// How many blocks may share k. Clusters of sizes between powers of two fit the groups of SMs badly.
constexpr std::initializer_list<int> kSplits = {1, 2, 4, 8, 16};
/// With one block an SM there is little choice: these fill more of them.
constexpr std::initializer_list<int> kWgmmaSplits = {1, 2, 3, 4, 5, 6, 8};
/// Largest cluster size that every GPU with clusters supports.
constexpr int kMaxCluster = 8;

/// What the names of tactics begin with.
std::string tactic_prefix(GemmArguments const& arguments) {
  std::string packing, type;
  switch (arguments.weights.packing) {
    case Packing::kW4A16: packing = "w4a16_"; break;
    case Packing::kW8A16: packing = "w8a16_"; break;
    case Packing::kW8A8: packing = "w8a8_"; break;
  }
  switch (arguments.a_type) {
    case DType::kFloat16: type = "f16_"; break;
    case DType::kBFloat16: type = "bf16_"; break;
    case DType::kInt8: type = "s8_"; break;
    case DType::kFloat8E4M3: type = "e4m3_"; break;
    case DType::kFloat8E5M2: type = "e5m2_"; break;
    default: break;
  }
  return packing + type;
}

/// Compute capability that the kernels' instructions need.
int instruction_capability(GemmArguments const& arguments) { return is_float8(arguments.a_type) ? 89 : 80; }

/// `<packing>_<activation type>_[<scale mode>_]sm<80, 89 or 90a>_[stream_]n<channels>m<tokens>k<stage's
/// k>[w<warps>]_s<stages>`.
std::string tactic_name(GemmArguments const& arguments, Tactic const& t) {
  bool const stream = t.mainloop == Mainloop::kStream;
  ScaleMode const mode = scale_mode(arguments);
  return tactic_prefix(arguments) +
         (mode == ScaleMode::kNone ? "" : kScaleModeNames[static_cast<int>(mode)] + std::string("_")) + "sm" +
         (t.mainloop == Mainloop::kWgmma ? "90a" : std::to_string(instruction_capability(arguments))) +
         (stream ? "_stream_n" : "_n") + std::to_string(t.channels) + "m" + std::to_string(t.tokens) + "k" +
         std::to_string(t.stage_k(arguments.weights.packing)) + (stream ? "w" + std::to_string(t.warps()) : "") + "_s" +
         std::to_string(stages_of(t, arguments.weights.packing, mode));
}

void check_blockwise(GemmArguments const& arguments) {
  int64_t const size = arguments.blocks.size, out_size = arguments.quantized.size;
  if (arguments.weights.packing != Packing::kW8A8 || arguments.a_type != DType::kInt8)
    throw Unsupported("a: blockwise products are of int8 activations and weights packed for them");
  if (!is_block_size(size)) throw InvalidArgument("block size: expected 32, 64 or 128, got " + std::to_string(size));
  if (out_size != 0 && !is_block_size(out_size))
    throw InvalidArgument("block size of the output: expected 32, 64 or 128, got " + std::to_string(out_size));
  if ((arguments.out_type == DType::kInt8) != (out_size != 0) || (out_size == 0 && !is_floating(arguments.out_type)))
    throw InvalidArgument("out_type: expected float16, bfloat16 or float32, or int8 for an output that is quantised");
}

/// What the CUDA kernels cover, beyond what the arguments' types already say.
void check_supported(GemmArguments const& arguments) {
  WeightArguments const& w = arguments.weights;
  if (arguments.blocks.size != 0)
    check_blockwise(arguments);
  else if (arguments.quantized.size != 0)
    throw Unsupported("out: only blockwise products quantise their output");
  bool const sixteen_bits = arguments.a_type == DType::kFloat16 || arguments.a_type == DType::kBFloat16;
  bool const eight_bits = arguments.a_type == DType::kInt8 || is_float8(arguments.a_type);
  if (w.packing == Packing::kW8A8) {
    if (!eight_bits) throw Unsupported("a: weights packed for activations of 8 bits meet int8 or float8 ones only");
    if (arguments.a_type == DType::kInt8 && arguments.blocks.size == 0 && w.k > kMaxInt8K)
      throw InvalidArgument("a: int8 products have at most K = " + std::to_string(kMaxInt8K) +
                            ", where int32 sums cannot overflow; got " + std::to_string(w.k) + ". Split K");
    if (arguments.out_type == DType::kNone || (arguments.out_type == DType::kInt8 && arguments.blocks.size == 0) ||
        (arguments.out_type == DType::kInt32 && arguments.a_type != DType::kInt8))
      throw InvalidArgument("out_type: expected float16, bfloat16, float32 or, from int8, int32");
    if (arguments.perm != nullptr || arguments.act_scale != nullptr)
      throw Unsupported("perm, act_scale: activations of 8 bits are multiplied as they are");
    if (arguments.sums.azp != nullptr && arguments.a_type != DType::kInt8)
      throw Unsupported("azp: float8 activations have no zero points");
  } else if (!sixteen_bits) {
    throw Unsupported("a: the CUDA kernels take float16 or bfloat16 activations; convert a, or use the CPU");
  }
  if (w.groups() > 1 && w.group_size % kGroupStep != 0)
    throw Unsupported("group_size: the CUDA kernels take multiples of " + std::to_string(kGroupStep) +
                      " or one group a channel, got " + std::to_string(w.group_size) + "; re-quantise, or use the CPU");
  // Indices of rows, and offsets within a row or between neighbouring ones, are 32-bit in the kernels.
  constexpr int64_t kMaxRows = int64_t(1) << 30, kMaxChannels = int64_t(1) << 28;
  if (arguments.m > kMaxRows || w.n > kMaxChannels || w.k > kMaxStride)
    throw Unsupported(
        "a, w_packed: the CUDA kernels take up to 2^30 rows, 2^28 channels and 2^24 columns; split the product");
  constexpr int64_t kMaxEightBitRows = int64_t(1) << 25;  // a grid of the smaller tiles, where nothing is dequantised
  if (w.packing == Packing::kW8A8 && arguments.m > kMaxEightBitRows)
    throw Unsupported("a: the CUDA kernels take up to 2^25 rows of 8-bit activations; split the product");
}

/// Blocks of channels that are quantised together lie within a tile.
bool fits_output(GemmArguments const& arguments, Tactic const& t) {
  return arguments.quantized.size == 0 || t.channels % arguments.quantized.size == 0;
}

bool splittable(GemmArguments const& arguments, Tactic const& t, int split_k) {
  constexpr int kMostShares = 65535;  // the grid's third dimension
  return split_k <= kMostShares &&
         split_k <= layout::ceil_div(arguments.weights.k, t.stage_k(arguments.weights.packing));
}

/// Tiles of tokens, eight by eight (see the kernels' swizzle), are the grid's second dimension, which has 16 bits.
bool fits_grid(GemmArguments const& arguments, Tactic const& t) {
  constexpr int64_t kMostRows = 65535, kSwizzled = 8, kMostTiles = int64_t(1) << 26;
  if (t.mainloop == Mainloop::kWgmma) return tiles(arguments, t) <= kMostTiles;
  return layout::ceil_div(arguments.m, t.tokens) <= kMostRows * kSwizzled;
}

/// Clusters and early starts are compiled into code for sm_90 and newer, whatever the GPU. Where an SM holds one block,
/// clusters may not all run at once although there are SMs for their blocks: partial sums then go through memory.
bool uses_cluster(GemmArguments const& arguments, DeviceTraits const& device, Tactic const& t, int split_k) {
  if (split_k == 1 || device.code_capability < 90) return false;
  if (t.mainloop != Mainloop::kWgmma) return split_k <= kMaxCluster;
  if (split_k > kMostWgmmaCluster) return false;
  int const resident = resident_clusters(device.sm_count, split_k);
  SharedTiles const tiles(arguments, device, t, split_k);
  if (tiles.only_last())  // all SMs must be in clusters, for the sake of the tiles that are not shared
    return resident * split_k == device.sm_count && tiles.fits_clusters(device.sm_count, split_k);
  return tiles.tiles <= device.sm_count && (tiles.tiles <= resident || tiles.tiles * split_k > device.sm_count);
}

/// Sharing k pays where tiles leave SMs idle: all of them or, where blocks persist, those of the last wave.
bool split_pays(GemmArguments const& arguments, DeviceTraits const& device, Tactic const& t, int split_k) {
  if (split_k == 1) return true;
  int64_t const count = tiles(arguments, t), shared = SharedTiles(arguments, device, t, split_k).shared;
  if (shared < count) return shared > 0 && shared * split_k <= device.sm_count;
  return count <= device.sm_count &&
         count * split_k <= int64_t(device.sm_count) * resident_blocks(arguments, device, t);
}

/// Whether early blocks of the next product could pile up on some SMs while others idle, where a launch leaves room for
/// many. Measured: such launches lose up to half by starting early, all others gain 1 to 2 us. Streaming blocks, which
/// wait for memory most of the time, suffer only where several of them meet.
bool piles_up(GemmArguments const& arguments, DeviceTraits const& device, Tactic const& t, int split_k) {
  int64_t const blocks = tiles(arguments, t) * split_k;
  if (t.mainloop == Mainloop::kStream)
    return resident_blocks(arguments, device, t) >= 4 * layout::ceil_div(blocks, device.sm_count);
  return t.min_blocks > 1 && blocks <= int64_t(device.sm_count) * t.min_blocks;
}

Candidate candidate(GemmArguments const& arguments, DeviceTraits const& device, int row, int wanted_split) {
  Tactic const& t = kTactics[row];
  int const split_k = SharedTiles(arguments, device, t, wanted_split).shared > 0 ? wanted_split : 1;
  SharedTiles const shared(arguments, device, t, split_k);
  bool const cluster = uses_cluster(arguments, device, t, split_k);
  Candidate result;
  result.plan.tactic = tactic_name(arguments, t);
  result.plan.row = row;
  result.plan.split_k = split_k;
  result.plan.cluster = cluster;
  result.plan.early = device.code_capability >= 90 && !piles_up(arguments, device, t, split_k);
  result.plan.shared_channel = shared.first_channel;
  result.plan.shared_token = shared.first_token;
  result.plan.workspace_bytes = Workspace(arguments, result.plan).bytes;
  result.plan.rounds_weights = rounds_weights(t, scale_mode(arguments));
  result.cost = predict(arguments, device, t, split_k, cluster);
  return result;
}

/// Row of kTactics that has the name.
int tactic_row(GemmArguments const& arguments, std::string const& name) {
  for (int i = 0; i < kTacticCount; ++i)
    if (kTactics[i].serves(arguments.weights.packing, scale_mode(arguments), arguments.a_type) &&
        tactic_name(arguments, kTactics[i]) == name)
      return i;
  throw InvalidArgument("tactic: '" + name + "' is not a configuration for this problem, which has e.g. '" +
                        tactics(arguments).front().name + "'; qcutlass.tactics() lists them");
}

[[noreturn]] void throw_nothing_fits(DeviceTraits const& device, std::string const& tactic, int split_k) {
  throw Unsupported("no kernel configuration" + (tactic.empty() ? "" : " '" + tactic + "'") +
                    (split_k > 0 ? " with split_k = " + std::to_string(split_k) : "") +
                    " fits this problem on a GPU of compute capability " +
                    std::to_string(device.compute_capability / 10) + "." +
                    std::to_string(device.compute_capability % 10) + ", " +
                    std::to_string(device.shared_memory_per_block) + " bytes of shared memory a block");
}

}  // namespace

ScaleMode scale_mode(GemmArguments const& arguments) {
  WeightArguments const& w = arguments.weights;
  switch (arguments.blocks.size) {
    case 128: return ScaleMode::kBlock;
    case 64: return ScaleMode::kBlock64;
    case 32: return ScaleMode::kBlock32;
    default: break;
  }
  if (w.packing == Packing::kW8A8) return ScaleMode::kNone;
  bool const native = w.scale_type == arguments.a_type && (w.zero_type == DType::kNone || w.zero_type == DType::kUInt8);
  if (!native) return ScaleMode::kFloat;
  return w.group_size >= w.k || w.group_size % kNativeGroup == 0 ? ScaleMode::kNative : ScaleMode::kFine;
}

std::vector<TacticTraits> tactics(GemmArguments const& arguments) {
  check_supported(arguments);
  std::vector<TacticTraits> result;
  for (Tactic const& t : kTactics) {
    if (!t.serves(arguments.weights.packing, scale_mode(arguments), arguments.a_type)) continue;
    result.push_back(
        {tactic_name(arguments, t), t.channels, t.tokens, t.stage_k(arguments.weights.packing), t.warps(),
         stages_of(t, arguments.weights.packing, scale_mode(arguments)),
         shared_memory_bytes(t, arguments.weights.packing, scale_mode(arguments), std::max<int64_t>(arguments.m, 1)),
         t.max_registers(), t.mainloop == Mainloop::kWgmma});
  }
  return result;
}

std::string dense_tactic(GemmArguments const& arguments) { return tactic_prefix(arguments) + "dequantize_dense"; }

std::vector<Candidate> candidates(GemmArguments const& arguments, DeviceTraits const& device, std::string const& tactic,
                                  int split_k, bool dense) {
  check_supported(arguments);
  if (is_float8(arguments.a_type) && device.code_capability < instruction_capability(arguments))
    throw Unsupported(
        "a: products of float8 need a GPU of compute capability 8.9 or newer and code built for it; this one has " +
        std::to_string(device.compute_capability / 10) + "." + std::to_string(device.compute_capability % 10) +
        ", and runs code for " + std::to_string(device.code_capability / 10) + "." +
        std::to_string(device.code_capability % 10) + ". Use int8 activations, or CPU tensors");
  bool const dense_forced = tactic == dense_tactic(arguments);
  if (dense_forced && !dense)
    throw Unsupported("tactic: '" + tactic + "' is run by the caller of the library, and this one does not offer to");
  int const only = tactic.empty() || dense_forced ? -1 : tactic_row(arguments, tactic);
  std::vector<Candidate> result;
  for (int i = 0; i < kTacticCount && !dense_forced; ++i) {
    Tactic const& t = kTactics[i];
    if ((only >= 0 && i != only) || resident_blocks(arguments, device, t) == 0 || !fits_grid(arguments, t) ||
        !fits_output(arguments, t))
      continue;
    if (split_k > 0) {
      if (splittable(arguments, t, split_k)) result.push_back(candidate(arguments, device, i, split_k));
      continue;
    }
    for (int split : t.mainloop == Mainloop::kWgmma ? kWgmmaSplits : kSplits)
      if (splittable(arguments, t, split) && split_pays(arguments, device, t, split))
        result.push_back(candidate(arguments, device, i, split));
  }
  bool const dense_wanted = dense_forced || (dense && tactic.empty() && arguments.m >= dense::kMinRows);
  if (dense_wanted && split_k <= 1 && dense::fits(arguments)) result.push_back(dense::candidate(arguments, device));
  if (result.empty()) throw_nothing_fits(device, tactic, split_k);
  std::stable_sort(result.begin(), result.end(),
                   [](Candidate const& a, Candidate const& b) { return a.cost.total < b.cost.total; });
  return result;
}

Plan select(GemmArguments const& arguments, DeviceTraits const& device, std::string const& tactic, int split_k,
            bool dense) {
  return candidates(arguments, device, tactic, split_k, dense).front().plan;
}

std::string kernel_set_hash(std::vector<std::string> const& build) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  auto const add = [&hash](std::string const& text) {
    for (char c : text + '\n') hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  };
  for (std::string const& fact : build) add(fact);
  add("layout " + std::to_string(layout::kVersion));
  for (Tactic const& t : kTactics)
    for (int64_t field :
         {int64_t(t.mainloop), int64_t{t.channels}, int64_t{t.tokens}, int64_t{t.warp_channels}, int64_t{t.warp_tokens},
          int64_t{t.slices}, int64_t{t.stages}, int64_t{t.min_blocks}, int64_t(t.products)})
      add(std::to_string(field));
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(hash));
  return digits;
}

}  // namespace qcutlass
