// Launching a plan: operands aligned if need be, the kernel family picked by type, partial results added.
#include <atomic>

#include "cuda/copy_rows.cuh"
#include "cuda/cuda_check.h"
#include "cuda/device.h"
#include "cuda/family.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/output.cuh"
#include "plan/fit.h"
#include "plan/footprint.h"
#include "plan/gpu_class.h"
#include "plan/workspace.h"
#include "qcutlass/error.h"

namespace qcutlass::cuda {
namespace {

using FamilyLaunch = void (*)(int, Launch const&, void*);

/// A family at run time; cpp/cmake/instances.cmake lists them.
struct FamilyEntry {
  Kind kind;
  FamilyLaunch launch;
  FamilyLaunch launch_wgmma;                          // nullptr: not built
  FamilyLaunch launch_grouped, launch_wgmma_grouped;  // for experts
};

template <DType kType, Packing kPacking, ScaleMode kMode>
constexpr FamilyLaunch grouped_launch() {
  if constexpr (Kind{kType, kPacking, kMode}.takes_experts()) return GroupedFamily<kType, kPacking, kMode>::launch;
  return nullptr;
}

template <DType kType, Packing kPacking, ScaleMode kMode, bool kWgmma>
constexpr FamilyLaunch wgmma_launch() {
#ifdef QCUTLASS_SM90A
  if constexpr (kWgmma) return WgmmaFamily<kType, kPacking, kMode>::launch;
#endif
  return nullptr;
}

template <DType kType, Packing kPacking, ScaleMode kMode>
constexpr FamilyLaunch wgmma_grouped_launch() {
#ifdef QCUTLASS_SM90A
  if constexpr (Kind{kType, kPacking, kMode}.takes_experts_on_wgmma())
    return WgmmaGroupedFamily<kType, kPacking, kMode>::launch;
#endif
  return nullptr;
}

template <DType kType, Packing kPacking, ScaleMode kMode, bool kWgmma>
constexpr FamilyEntry kFamily = {{kType, kPacking, kMode},
                                 Family<kType, kPacking, kMode>::launch,
                                 wgmma_launch<kType, kPacking, kMode, kWgmma>(),
                                 grouped_launch<kType, kPacking, kMode>(),
                                 wgmma_grouped_launch<kType, kPacking, kMode>()};
constexpr FamilyEntry kFamilies[] = {
#include "families.inc"
};
constexpr int kFamilyCount = sizeof(kFamilies) / sizeof(kFamilies[0]);

int family_index(Kind const& kind) {
  int i = 0;
  while (i < kFamilyCount && kFamilies[i].kind != kind) ++i;
  if (i == kFamilyCount) throw Unsupported("a: no kernels are built for its type with weights packed like these");
  return i;
}

/// Scales, zeros or minimums, copied into rows of whole vectors where they are not already.
Launch::Groups groups(bool copy, void const* data, DType type, int64_t stride, int64_t n, int64_t rows, void* copy_to,
                      int64_t copy_stride, cudaStream_t stream) {
  Launch::Groups result;
  if (type == DType::kNone) return result;
  int64_t const size = size_of(type);
  if (copy) {
    auto const run = [&](auto word) {
      using Word = decltype(word);
      copy_rows<<<row_grid(copy_stride, rows), kCopyThreads, 0, stream>>>(static_cast<Word const*>(data), stride, rows,
                                                                          n, static_cast<Word*>(copy_to), copy_stride);
      QCUTLASS_CUDA_CHECK(cudaGetLastError());
    };
    size == 1 ? run(uint8_t{}) : size == 2 ? run(uint16_t{}) : run(uint32_t{});
    data = copy_to;
    stride = copy_stride;
  }
  result.data = data;
  result.stride_bytes = stride * size;
  result.element_bytes = int(size);
  result.row_bytes = int(round_up(n * size, kAlignment));
  result.type = type;
  return result;
}

/// Rows of activations in the order of their experts, for kernels that read neighbours alone. Indices outside the
/// activations are clamped, as kernels that gather by themselves do.
void order_rows(Launch& launch, int64_t size, void* to, int64_t to_stride, cudaStream_t stream) {
  int64_t const vectors = to_stride * size / kAlignment;
  ExpertRows& experts = launch.experts;
  if (experts.a_rows > 0) {
    cutlass::gemm::threadblock::GatheredRows const source{experts.rows, int(experts.a_rows)};
    gather_rows<<<row_grid(vectors, launch.tokens), kCopyThreads, 0, stream>>>(
        static_cast<uint4 const*>(launch.activations), launch.activation_stride * size / kAlignment, source,
        launch.tokens, vectors, static_cast<uint4*>(to), vectors);
    QCUTLASS_CUDA_CHECK(cudaGetLastError());
  }
  launch.activations = to;
  launch.activation_stride = to_stride;
  experts.rows = nullptr;
}

template <class OutputOp>
void reduce(Launch const& launch, cudaStream_t stream) {
  dim3 const grid = row_grid(launch.partial_stride / OutputOp::kVector, launch.tokens - launch.shared_token);
  launch_kernel(reduce_partials<OutputOp>, launch, {grid, dim3(1), kCopyThreads, 0, 0}, stream,
                partial_sums<typename OutputOp::Sum const>(launch), launch.split_k,
                typename OutputOp::Params(launch.output));
}

void reduce(Kind const& kind, Launch const& launch, cudaStream_t stream) {
  namespace output = cutlass::epilogue::thread;
  if (is_blockwise(kind.mode)) return reduce<output::BlockwiseOutput>(launch, stream);
  if (kind.is_promoted()) return reduce<output::ScaledSums<float>>(launch, stream);
  switch (kind.activations) {
    case DType::kFloat16: reduce<output::BiasActivation<cutlass::half_t>>(launch, stream); break;
    case DType::kBFloat16: reduce<output::BiasActivation<cutlass::bfloat16_t>>(launch, stream); break;
    case DType::kInt8: reduce<output::ScaledSums<int32_t>>(launch, stream); break;
    default: reduce<output::ScaledSums<float>>(launch, stream); break;
  }
}

}  // namespace

void gemm(GemmArguments const& a, Plan const& plan, void* stream_handle) {
  WeightArguments const& w = a.weights;
  if (a.m == 0 || w.n == 0) return;
  auto const stream = static_cast<cudaStream_t>(stream_handle);
  if (plan.row < 0 || plan.row >= kTacticCount)
    throw InvalidArgument("plan: '" + plan.tactic + "' is run by the caller of the library, not by a kernel");
  int const tactic = plan.row;
  Problem const problem = make_problem(a);
  int const device = current_device();
  DeviceTraits const& traits = device_traits(device);
  check_plan(problem, traits, plan);
  Workspace const space(problem, plan);
  if (space.bytes > a.workspace_bytes)
    throw InvalidArgument("workspace: " + std::to_string(space.bytes) +
                          " bytes are needed for this plan and these operands, got " +
                          std::to_string(a.workspace_bytes));
  if (reinterpret_cast<uintptr_t>(w.packed) % kAlignment != 0)
    throw InvalidArgument("w_packed: expected a 16-byte aligned tensor; clone() it");
  char* const base = static_cast<char*>(a.workspace);

  Launch launch{};
  launch.weights = w.packed;
  launch.tiles_n = int(layout::tiles_n(w.n));
  launch.tiles_k = int(layout::tiles_k(w.packing, w.k));
  launch.activations = problem.activations.copied ? base + space.activations : a.a;
  launch.activation_stride = problem.activations.copied ? space.activation_stride : a.a_stride;
  launch.channels = int(w.n);
  launch.tokens = int(a.m);
  launch.k = int(w.k);
  launch.group_size = int(w.groups() == 1 ? round_up(w.k, kNativeGroup) : w.group_size);
  int64_t const scale_rows = problem.scale_rows();
  launch.experts = a.experts;
  launch.scale_rows = w.groups();
  launch.scales = groups(problem.weights.copied_scales, w.scales, w.scale_type, w.scale_stride, w.n, scale_rows,
                         base + space.scales, space.scale_stride, stream);
  GroupParameters const offsets = w.offsets();
  launch.zeros = groups(problem.weights.copied_zeros, offsets.data, offsets.type, offsets.stride, w.n, scale_rows,
                        base + space.zeros, space.zero_stride, stream);
  launch.super_block = int(std::max(problem.weights.super_block, kSuperBlockStep));  // of one level: no divisor is 0
  if (w.has_super_blocks()) {
    auto const supers = [&](void const* data, int64_t stride, size_t copy) {
      return groups(problem.weights.copied_supers, data, data == nullptr ? DType::kNone : DType::kFloat16, stride, w.n,
                    problem.super_rows(), base + copy, space.super_stride, stream);
    };
    launch.super_scales = supers(w.super_scales, w.super_scale_stride, space.super_scales);
    launch.super_minimums = supers(w.super_minimums, w.super_minimum_stride, space.super_minimums);
    launch.super_rows = w.super_blocks();
  }
  launch.global_scale = w.global_scale;
  launch.blocks = a.blocks;
  launch.output = output_arguments(a, problem.output.type);
  launch.split_k = plan.split_k;
  launch.cluster = plan.cluster;
  launch.programmatic = plan.early;
  // Copies made by this call are there only after the wait.
  Operand const& weights = problem.weights;
  bool const copied = weights.copied_scales || weights.copied_zeros || weights.copied_supers;
  launch.prefetch = launch.programmatic && a.settled && !copied;
  launch.partials = space.partial_bytes > 0 ? base + space.partials : nullptr;
  launch.partial_stride = space.partial_stride;
  launch.shared_channel = int(plan.shared_channel);
  launch.shared_token = int(plan.shared_token);

  int const family = family_index(problem.kind);
  static std::atomic<bool> used[2][kMaxDevices][kFamilyCount][kTacticCount];
  bool const second = problem.grouped || a.blocks.up_offset != 0;  // for which the tactic has another kernel
  std::atomic<bool>& seen = used[second][device][family][tactic];
  launch.first_use = !seen.load(std::memory_order_acquire);
  launch.shared_memory_limit = traits.shared_memory_per_block;
  launch.sm_count = traits.sm_count;
  if (plan.early && kTactics[tactic].mainloop == Mainloop::kStream && !problem.grouped)
    launch.least_shared_memory = spread_shared_memory(
        busiest_blocks(tiles(problem, kTactics[tactic]), plan.split_k, plan.cluster, traits.sm_count),
        traits.shared_memory_per_block);

  FamilyEntry const& entry = kFamilies[family];
  bool const wgmma = is_wgmma(kTactics[tactic].mainloop);
  FamilyLaunch const run = problem.grouped ? wgmma ? entry.launch_wgmma_grouped : entry.launch_grouped
                           : wgmma         ? entry.launch_wgmma
                                           : entry.launch;
  if (run == nullptr) throw Unsupported("plan: '" + plan.tactic + "' needs a build for 90a-real");
  if (problem.activations.copied && problem.activation_rows > 0) {
    GemmArguments copied = a;
    copied.m = problem.activation_rows;
    prepare_activations(copied, base + space.activations, space.activation_stride, stream);
  }
  if (space.row_bytes > 0) order_rows(launch, size_of(a.a_type), base + space.rows, space.activation_stride, stream);
  run(tactic, launch, stream);
  seen.store(true, std::memory_order_release);
  if (launch.partials != nullptr) reduce(problem.kind, launch, stream);
}

}  // namespace qcutlass::cuda
