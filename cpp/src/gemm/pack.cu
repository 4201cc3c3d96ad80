// Packing and unpacking on the GPU. One thread a lane of a packed tile: 16 bytes, read or written at once.
#include <algorithm>
#include <type_traits>

#include "gemm/cuda_check.h"
#include "qcutlass/pack.h"

namespace qcutlass::cuda {
namespace {

constexpr int kThreads = 256;

/// Codes of a lane of a tile.
constexpr int kMaxCodes = layout::kLaneBytes * 2;

struct LaneCode {
  uint8_t row, k;
};

/// Where each of a lane's codes comes from: entry i is the (row, k) of the tile whose code has index i within lane 0.
/// Lanes differ by a shift of row and k only, so lane 4g + t holds (row + g, k + offset(t)); the constructor checks
/// that against layout.h.
struct LaneMap {
  LaneCode codes[kMaxCodes] = {};
  int count = 0;   // codes a lane
  int t_step = 0;  // k offset from one t to the next

  constexpr explicit LaneMap(Packing packing) {
    int const bits = bits_of(packing), width = layout::tile_k(packing);
    count = layout::kLaneBytes * 8 / bits;
    t_step = packing == Packing::kW8A8 ? 4 : 2;
    for (int row = 0; row < layout::kTileN; ++row)
      for (int k = 0; k < width; ++k) {
        auto const p = layout::position_in_tile(packing, row, k);
        if (p.byte < layout::kLaneBytes) codes[(p.byte * 8 + p.bit) / bits] = {uint8_t(row), uint8_t(k)};
      }
  }

  constexpr bool holds(Packing packing) const {
    int const bits = bits_of(packing);
    for (int lane = 0; lane < layout::kLanes; ++lane)
      for (int i = 0; i < count; ++i) {
        auto const p = layout::position_in_tile(packing, codes[i].row + lane / 4, codes[i].k + lane % 4 * t_step);
        if (p.byte * 8 + p.bit != lane * layout::kLaneBytes * 8 + i * bits) return false;
      }
    return true;
  }
};

template <Packing kPacking>
constexpr LaneMap kLaneMap{kPacking};
static_assert(kLaneMap<Packing::kW4A16>.holds(Packing::kW4A16));
static_assert(kLaneMap<Packing::kW8A16>.holds(Packing::kW8A16));
static_assert(kLaneMap<Packing::kW8A8>.holds(Packing::kW8A8));

/// Calls visit(i, n, k) for every code i of the lane that thread `index` of all lanes owns.
template <Packing kPacking, class Visit>
__device__ void for_each_code(int64_t index, int64_t tiles_k, Visit visit) {
  constexpr LaneMap kMap = kLaneMap<kPacking>;
  int const lane = int(index % layout::kLanes);
  int64_t const tile = index / layout::kLanes;
  int64_t const n = tile / tiles_k * layout::kTileN + lane / 4;
  int64_t const k = tile % tiles_k * layout::tile_k(kPacking) + lane % 4 * kMap.t_step;
#pragma unroll
  for (int i = 0; i < kMap.count; ++i) visit(i, n + kMap.codes[i].row, k + kMap.codes[i].k);
}

template <Packing kPacking>
__global__ void pack_kernel(PackArguments a, int64_t lanes, int64_t tiles_k) {
  constexpr int kBits = bits_of(kPacking);
  for (int64_t index = blockIdx.x * int64_t(kThreads) + threadIdx.x; index < lanes;
       index += int64_t(gridDim.x) * kThreads) {
    uint32_t words[4] = {};
    for_each_code<kPacking>(index, tiles_k, [&](int i, int64_t n, int64_t k) {
      uint32_t const code = n < a.n && k < a.k ? a.codes[n * a.codes_stride + k] & ((1u << kBits) - 1) : 0;
      words[i * kBits / 32] |= code << i * kBits % 32;
    });
    reinterpret_cast<uint4*>(a.packed)[index] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

__device__ inline uint32_t word_of(uint4 const& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

template <int kBits>
__device__ uint32_t code_of(uint4 const& v, int i) {
  return word_of(v, i * kBits / 32) >> i * kBits % 32 & ((1u << kBits) - 1);
}

template <Packing kPacking>
__global__ void unpack_kernel(PackArguments a, int64_t lanes, int64_t tiles_k) {
  for (int64_t index = blockIdx.x * int64_t(kThreads) + threadIdx.x; index < lanes;
       index += int64_t(gridDim.x) * kThreads) {
    uint4 const v = reinterpret_cast<uint4 const*>(a.packed)[index];
    for_each_code<kPacking>(index, tiles_k, [&](int i, int64_t n, int64_t k) {
      if (n < a.n && k < a.k) a.codes[n * a.codes_stride + k] = uint8_t(code_of<bits_of(kPacking)>(v, i));
    });
  }
}

unsigned blocks_for(int64_t lanes) { return unsigned(std::min<int64_t>(layout::ceil_div(lanes, kThreads), 1 << 20)); }

/// Runs `launch` with the packing as a constant.
template <class Launch>
void dispatch(Packing packing, Launch launch) {
  switch (packing) {
    case Packing::kW4A16: launch(std::integral_constant<Packing, Packing::kW4A16>{}); break;
    case Packing::kW8A16: launch(std::integral_constant<Packing, Packing::kW8A16>{}); break;
    case Packing::kW8A8: launch(std::integral_constant<Packing, Packing::kW8A8>{}); break;
  }
  QCUTLASS_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void pack(PackArguments const& a, void* stream) {
  int64_t const tiles_k = layout::tiles_k(a.packing, a.k), lanes = layout::tiles_n(a.n) * tiles_k * layout::kLanes;
  if (lanes == 0) return;
  dispatch(a.packing, [&](auto packing) {
    pack_kernel<packing.value>
        <<<blocks_for(lanes), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a, lanes, tiles_k);
  });
}

void unpack(PackArguments const& a, void* stream) {
  int64_t const tiles_k = layout::tiles_k(a.packing, a.k), lanes = layout::tiles_n(a.n) * tiles_k * layout::kLanes;
  if (lanes == 0) return;
  dispatch(a.packing, [&](auto packing) {
    unpack_kernel<packing.value>
        <<<blocks_for(lanes), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a, lanes, tiles_k);
  });
}

}  // namespace qcutlass::cuda
