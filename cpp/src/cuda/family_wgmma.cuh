// All wgmma configurations of one kernel family, as family.cuh has the others: compiled for sm_90a alone.
#pragma once

#include <algorithm>

#include "cuda/block_scales.cuh"
#include "cuda/family.h"
#include "cuda/group_matrices.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/tensor_map.h"
#include "cutlass_ext/element_type.h"
#include "cutlass_ext/gemm/kernel/packed_gemm_wgmma.h"
#include "plan/footprint.h"

namespace qcutlass::cuda {

template <DType kType, Packing kPacking, ScaleMode kMode>
struct WgmmaFamily<kType, kPacking, kMode>::Impl {
  using Element = decltype(element_of<kType>());
  static constexpr Kind kKind = {kType, kPacking, kMode};

  /// kExperts: for their rows, where the kernel converts weights. kTurns: of blocks, for gate and up in turns.
  template <int kIndex, bool kExperts = false, bool kTurns = false>
  struct MainloopOf {
    static constexpr Tactic kTactic = kTactics[kIndex];
    static constexpr int kWarpgroups = kTactic.warps / 4 - 1;
    using Shape = cutlass::gemm::GemmShape<kTactic.channels, kTactic.tokens, kTactic.stage_k(kPacking)>;
    static constexpr int kStages = stages_of(kTactic, kKind);
    template <Packing kOfWeights, class = void>
    struct MmaOf {
      using Type =
          cutlass::gemm::threadblock::MmaPackedWgmmaRs<Shape, kWarpgroups, kStages, wgmma_batch(kTactic, kPacking),
                                                       wgmma_turns(kTactic), Element, kPacking, kMode, kExperts>;
    };
    template <class Unused>
    struct MmaOf<Packing::kW4A8, Unused> {
      using Type = cutlass::gemm::threadblock::MmaPackedWgmmaGroups<Shape, kWarpgroups, kStages, Element, kMode>;
    };
    template <class Unused>
    struct MmaOf<Packing::kW8A8, Unused> {
      using Type =
          cutlass::gemm::threadblock::MmaPackedWgmmaSs<Shape, kTactic.warp_channels, kStages, Element, kMode, kTurns>;
    };
    using Mma = typename MmaOf<kPacking>::Type;
    static constexpr int kSharedMemory = shared_memory_bytes(kTactic, kKind, kTactic.tokens, kExperts);
    static_assert(Mma::kThreads == kTactic.threads());
  };

  template <int kIndex, bool kTurns = false>
  struct Configuration : MainloopOf<kIndex, false, kTurns> {
    using Base = MainloopOf<kIndex, false, kTurns>;
    using Base::kTactic, Base::kSharedMemory, typename Base::Mma, typename Base::Shape;
    using Kernel = cutlass::gemm::kernel::PackedGemmWgmma<Mma>;
    static_assert(sizeof(typename Kernel::SharedStorage) == kSharedMemory, "footprint.h states what the kernel uses");
    static constexpr bool has_room_to_exchange() {
      for (int blocks = 2; blocks <= kMostWgmmaCluster; ++blocks)
        if (may_cluster(kTactic, kKind, blocks) && !Kernel::has_room_to_exchange(blocks)) return false;
      return true;
    }
    static_assert(has_room_to_exchange());
  };

  /// Rows of scales or zeros, `channels` by `rows` a box; of experts, each one's apart.
  template <bool kExperts>
  static CUtensorMap group_map(Launch::Groups const& g, Launch const& launch, int channels, int rows) {
    int64_t const groups = layout::ceil_div(launch.k, launch.group_size), experts = launch.experts.count;
    // A single row may have any stride.
    int64_t const stride = groups * std::max<int64_t>(experts, 1) > 1 ? g.stride_bytes : g.row_bytes;
    TensorMapDimension const of_groups{groups, rows, stride};
    if constexpr (!kExperts) return make_tensor_map(g.data, g.element_bytes, {{launch.channels, channels}, of_groups});
    TensorMapDimension const of_experts{experts, 1, launch.scale_rows * stride};
    Halves const h(launch, layout::kTileN * g.element_bytes);
    if (!h.exist)
      return make_tensor_map(g.data, g.element_bytes,
                             {{launch.channels, channels}, {1, 1, stride}, {1, 1, stride}, of_groups, of_experts});
    return make_tensor_map(g.data, g.element_bytes,
                           {{layout::kTileN, layout::kTileN}, h.halves, h.pairs(channels), of_groups, of_experts});
  }

  /// The dimensions of gates and what they multiply: two halves, of strips of `bytes` each. (They need not be ordered
  /// by stride.)
  struct Halves {
    bool exist;
    int64_t strips, bytes;
    TensorMapDimension halves;

    Halves(Launch const& launch, int64_t bytes)
        : exist(launch.output.gate == Gate::kHalves),
          strips(launch.channels / (2 * layout::kTileN)),
          bytes(bytes),
          halves{2, 2, strips * bytes} {}
    TensorMapDimension pairs(int channels) const { return {strips, channels / (2 * layout::kTileN), bytes}; }
  };

  template <int kTokens>
  static cutlass::gemm::threadblock::TokenBoxes<kTokens> token_boxes(Launch const& launch, int columns) {
    constexpr int kElement = int(sizeof(Element));
    int64_t const row = int64_t(launch.k) * kElement;
    int64_t const stride = launch.tokens > 1 ? launch.activation_stride * kElement : (row + 15) / 16 * 16;
    auto const map = [&](int rows) {
      return make_tensor_map(launch.activations, kElement, {{launch.k, columns}, {launch.tokens, rows, stride}}, true);
    };
    return {map(kTokens), map((launch.tokens - 1) % kTokens + 1), launch.tokens};
  }

  /// So many tokens that none of the experts' tiles is taken to be the last: any may be.
  static constexpr int kWholeBoxes = 1 << 30;

  static uint64_t weight_policy(Launch const& launch, int tokens) {
    bool const once = launch.tokens <= tokens;  // weights are read by one tile of tokens
    return uint64_t(once ? cute::TMA::CacheHintSm90::EVICT_FIRST : cute::TMA::CacheHintSm90::EVICT_NORMAL);
  }

  /// Of 8-by-8-bit products.
  template <class Mma>
  static typename Mma::Arguments arguments(Launch const& launch, int sharers) {
    using Shape = typename Mma::Shape;
    constexpr int kTile = Mma::LayoutA::kTileBytes;
    typename Mma::Arguments args{};
    args.activations = token_boxes<Shape::kN>(launch, Shape::kK);
    // A box is [tiles of k][strips][tile]: the strips of a step lie together. Dimensions need not be ordered by stride.
    args.weights = make_tensor_map(launch.weights, 4,
                                   {{kTile / 4, kTile / 4},
                                    {launch.tiles_n, Shape::kM / 16, int64_t(launch.tiles_k) * kTile},
                                    {launch.tiles_k, Mma::kTiles / sharers, kTile}});
    args.weight_policy = weight_policy(launch, Shape::kN * sharers);
    args.sharers = sharers;
    args.blocks = block_scales(launch);
    return args;
  }

  template <class Mma>
  static CUtensorMap weight_map(Launch const& launch) {
    constexpr int kTile = Mma::LayoutA::kTileBytes, kStrips = Mma::Shape::kM / 16;
    TensorMapDimension const words{kTile / 4, kTile / 4}, tiles{launch.tiles_k, Mma::kTiles, kTile};
    int64_t const strip = int64_t(launch.tiles_k) * kTile;
    if constexpr (!Mma::kExperts)
      return make_tensor_map(launch.weights, 4, {words, tiles, {launch.tiles_n, kStrips, strip}});
    Halves const h(launch, strip);
    int64_t const experts = launch.experts.count, all = launch.tiles_n * strip;
    if (!h.exist)
      return make_tensor_map(launch.weights, 4,
                             {words, tiles, {1, 1, strip}, {experts * launch.tiles_n, kStrips, strip}, {1, 1, strip}});
    return make_tensor_map(launch.weights, 4, {words, tiles, h.halves, h.pairs(Mma::Shape::kM), {experts, 1, all}});
  }

  /// Of those that convert weights.
  template <class Mma>
  static typename Mma::Arguments arguments(Launch const& launch) {
    using Shape = typename Mma::Shape;
    using LayoutA = typename Mma::LayoutA;
    typename Mma::Arguments args{};
    args.activations = token_boxes<Shape::kN>(launch, Mma::kChunkK);
    if constexpr (Mma::kExperts) args.activations.tokens = kWholeBoxes;
    args.tiles_n = launch.tiles_n;
    args.weights = weight_map<Mma>(launch);
    if constexpr (Mma::kExperts) args.has_halves = launch.output.gate == Gate::kHalves;
    args.weight_bytes = Shape::kM / 16 * Mma::kTiles * LayoutA::kTileBytes;
    if constexpr (Mma::kMakesOperands) {
      args.scales = group_matrix(launch.scales);
      args.zeros = group_matrix(launch.zeros);
      if constexpr (takes_super_blocks(kMode)) args.supers = super_blocks(launch);
      args.k = launch.k;
    } else if constexpr (Mma::kRows > 0) {
      args.scale_type = launch.scales.type;
      args.zero_type = launch.zeros.type;
      args.scale_row = Shape::kM * launch.scales.element_bytes;
      args.zero_row = Shape::kM * launch.zeros.element_bytes;
      args.scales = group_map<Mma::kExperts>(launch.scales, launch, Shape::kM, Mma::kBoxRows);
      args.weight_bytes += Mma::kRows * args.scale_row;
      if (launch.zeros.type != DType::kNone) {
        args.zeros = group_map<Mma::kExperts>(launch.zeros, launch, Shape::kM, Mma::kBoxRows);
        args.weight_bytes += Mma::kRows * args.zero_row;
      }
    }
    args.weight_policy = weight_policy(launch, Shape::kN);
    args.group_size = cutlass::gemm::threadblock::GroupSize(launch.group_size);
    if constexpr (kPacking == Packing::kE2M1A16) args.global_scale = launch.global_scale;
    return args;
  }

  template <class C>
  static LaunchShape prepare(typename C::Kernel::Params& params, Launch const& launch) {
    using Shape = typename C::Shape;
    int64_t const token_tiles = layout::ceil_div(launch.tokens, Shape::kN);
    int const sharers = wgmma_sharers(C::kTactic.mainloop, token_tiles, launch.split_k);
    if constexpr (C::kTactic.mainloop == Mainloop::kWgmmaSs)
      params.mma = arguments<typename C::Mma>(launch, sharers);
    else
      params.mma = arguments<typename C::Mma>(launch);
    int const channel_tiles = int(layout::ceil_div(launch.channels, Shape::kM)),
              token_groups = int(layout::ceil_div(token_tiles, sharers)),
              shared = (channel_tiles - launch.shared_channel / Shape::kM) *
                       (token_groups - launch.shared_token / (Shape::kN * sharers));
    int const whole = channel_tiles * token_groups - shared;
    params.order = {channel_tiles, token_groups, whole, launch.split_k};
    int const together = launch.cluster ? launch.split_k : sharers;  // blocks of a cluster
    int64_t const all = int64_t(params.order.items) * sharers, fit = std::max(1, launch.sm_count / together) * together;
    int64_t const blocks = launch.cluster && whole == 0 ? all : std::min(all, fit);
    return {dim3(unsigned(blocks)), dim3(unsigned(together)), C::kTactic.threads(), C::kSharedMemory, C::kSharedMemory};
  }

  template <int kIndex>
  static constexpr LaunchFunction entry() {
    if constexpr (!is_wgmma(kTactics[kIndex].mainloop) || !is_compiled(kTactics[kIndex], kKind))
      return nullptr;
    else if constexpr (is_blockwise(kMode))
      return [](Launch const& launch, cudaStream_t stream) {
        auto const run = launch.blocks.up_offset != 0 ? launch_configuration<Impl, Configuration<kIndex, true>>
                                                      : launch_configuration<Impl, Configuration<kIndex>>;
        run(launch, stream);
      };
    else
      return launch_configuration<Impl, Configuration<kIndex>>;
  }
};

template <DType kType, Packing kPacking, ScaleMode kMode>
void WgmmaFamily<kType, kPacking, kMode>::launch(int tactic, Launch const& launch, void* stream) {
  LaunchFunction const run = launch_function<Impl>(tactic, std::make_integer_sequence<int, kTacticCount>{});
  run(launch, static_cast<cudaStream_t>(stream));
}

}  // namespace qcutlass::cuda
