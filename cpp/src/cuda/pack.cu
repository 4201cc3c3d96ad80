// Packing and unpacking on the GPU. One thread 16 bytes of a packed tile, which it reads or writes at once.
#include <algorithm>
#include <type_traits>

#include "cuda/cuda_check.h"
#include "qcutlass/pack.h"

namespace qcutlass::cuda {
namespace {

constexpr int kThreads = 256;

constexpr int kUnitBytes = layout::kLaneBytes, kUnits = layout::kTileBytes / kUnitBytes;

struct Code {
  uint8_t row, k;
};

/// Where the codes of a tile's 16-byte units come from. Units differ by a shift of row and k only; holds() checks that
/// against layout.h.
template <Packing kPacking>
struct UnitMap {
  static constexpr int kBits = bits_of(kPacking);
  static constexpr int kCount = kUnitBytes * 8 / kBits;

  Code codes[kCount] = {};  // of unit 0

  constexpr UnitMap() {
    for (int row = 0; row < layout::kTileN; ++row)
      for (int k = 0; k < layout::tile_k(kPacking); ++k) {
        auto const p = layout::position_in_tile(kPacking, row, k);
        if (p.byte < kUnitBytes) codes[(p.byte * 8 + p.bit) / kBits] = {uint8_t(row), uint8_t(k)};
      }
  }

  /// Shift of a unit: it is half a row with 8-bit activations, else a lane.
  static constexpr int row(int unit) { return layout::in_fragment_order(kPacking) ? unit / 4 : unit / 2; }
  static constexpr int k(int unit) {
    return layout::in_fragment_order(kPacking) ? unit % 4 * 2 : (unit % 2 ^ unit / 8 % 2) * kUnitBytes;
  }

  constexpr bool holds() const {
    for (int unit = 0; unit < kUnits; ++unit)
      for (int i = 0; i < kCount; ++i) {
        auto const p = layout::position_in_tile(kPacking, codes[i].row + row(unit), codes[i].k + k(unit));
        if (p.byte * 8 + p.bit != unit * kUnitBytes * 8 + i * kBits) return false;
      }
    return true;
  }
};

static_assert(UnitMap<Packing::kW4A16>{}.holds());
static_assert(UnitMap<Packing::kW8A16>{}.holds());
static_assert(UnitMap<Packing::kW8A8>{}.holds());

/// Calls visit(i, n, k) for every code i of unit `index` of all tiles.
template <Packing kPacking, class Visit>
__device__ void for_each_code(int64_t index, int64_t tiles_k, Visit visit) {
  using Map = UnitMap<kPacking>;
  constexpr Map kMap;
  int const unit = int(index % kUnits);
  int64_t const tile = index / kUnits;
  int64_t const n = tile / tiles_k * layout::kTileN + Map::row(unit);
  int64_t const k = tile % tiles_k * layout::tile_k(kPacking) + Map::k(unit);
#pragma unroll
  for (int i = 0; i < Map::kCount; ++i) visit(i, n + kMap.codes[i].row, k + kMap.codes[i].k);
}

template <Packing kPacking>
__global__ void pack_kernel(PackArguments a, int64_t units, int64_t tiles_k) {
  constexpr int kBits = bits_of(kPacking);
  for (int64_t index = blockIdx.x * int64_t(kThreads) + threadIdx.x; index < units;
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
__global__ void unpack_kernel(PackArguments a, int64_t units, int64_t tiles_k) {
  for (int64_t index = blockIdx.x * int64_t(kThreads) + threadIdx.x; index < units;
       index += int64_t(gridDim.x) * kThreads) {
    uint4 const v = reinterpret_cast<uint4 const*>(a.packed)[index];
    for_each_code<kPacking>(index, tiles_k, [&](int i, int64_t n, int64_t k) {
      if (n < a.n && k < a.k) a.codes[n * a.codes_stride + k] = uint8_t(code_of<bits_of(kPacking)>(v, i));
    });
  }
}

unsigned blocks_for(int64_t units) { return unsigned(std::min<int64_t>(layout::ceil_div(units, kThreads), 1 << 20)); }

/// Runs `launch` with the packing as a constant.
template <class Launch>
void dispatch(Packing packing, Launch launch) {
  switch (packing) {
    case Packing::kW4A8:
    case Packing::kW4A16:
    case Packing::kE2M1A16: launch(std::integral_constant<Packing, Packing::kW4A16>{}); break;
    case Packing::kW8A16:
    case Packing::kE4M3A16: launch(std::integral_constant<Packing, Packing::kW8A16>{}); break;
    case Packing::kW8A8: launch(std::integral_constant<Packing, Packing::kW8A8>{}); break;
  }
  QCUTLASS_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void pack(PackArguments const& a, void* stream) {
  int64_t const tiles_k = layout::tiles_k(a.packing, a.k), units = layout::tiles_n(a.n) * tiles_k * kUnits;
  if (units == 0) return;
  dispatch(a.packing, [&](auto packing) {
    pack_kernel<packing.value>
        <<<blocks_for(units), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a, units, tiles_k);
  });
}

void unpack(PackArguments const& a, void* stream) {
  int64_t const tiles_k = layout::tiles_k(a.packing, a.k), units = layout::tiles_n(a.n) * tiles_k * kUnits;
  if (units == 0) return;
  dispatch(a.packing, [&](auto packing) {
    unpack_kernel<packing.value>
        <<<blocks_for(units), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a, units, tiles_k);
  });
}

}  // namespace qcutlass::cuda
