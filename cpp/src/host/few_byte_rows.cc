#include "host/few_byte_rows.h"

#include <algorithm>
#include <vector>

#include "host/int8_codes.h"
#include "host/lane_dots.h"
#include "host/multiversion.h"
#include "host/quantized_rows.h"

namespace qcutlass::host {

namespace {

// Instruction sets.

struct Plain {
  template <Packing kPacking, int kSteps, int kRows>
  static void multiply(WeightArguments const& weights, LaneBytes<kPacking> const* rows, int64_t strip, float* sums) {
    LaneDots<PlainBytes, kPacking, kSteps, kRows>::multiply(weights, rows, strip, sums);
  }
};

struct Avx2 {
  template <Packing kPacking, int kSteps, int kRows>
  QCUTLASS_AVX2 static void multiply(WeightArguments const& weights, LaneBytes<kPacking> const* rows, int64_t strip,
                                     float* sums) {
    LaneDots<Avx2Bytes, kPacking, kSteps, kRows>::multiply(weights, rows, strip, sums);
  }
};

struct AvxVnni {
  template <Packing kPacking, int kSteps, int kRows>
  QCUTLASS_AVX2 static void multiply(WeightArguments const& weights, LaneBytes<kPacking> const* rows, int64_t strip,
                                     float* sums) {
    LaneDots<AvxVnniBytes, kPacking, kSteps, kRows>::multiply(weights, rows, strip, sums);
  }
};

struct Avx512Vnni {
  template <Packing kPacking, int kSteps, int kRows>
  QCUTLASS_AVX512_VNNI static void multiply(WeightArguments const& weights, LaneBytes<kPacking> const* rows,
                                            int64_t strip, float* sums) {
    LaneDots<Avx512VnniBytes, kPacking, kSteps, kRows>::multiply(weights, rows, strip, sums);
  }
};

template <Packing kPacking>
using Multiply = void (*)(WeightArguments const& weights, LaneBytes<kPacking> const* rows, int64_t strip, float* sums);

/// Rows that kernels are made for: the least that hold m.
int64_t padded_rows(int64_t m) { return m <= 2 ? m : FewByteRows::kMost; }

template <class Set, Packing kPacking, int kSteps>
Multiply<kPacking> choose(int64_t rows) {
  static_assert(FewByteRows::kMost == 4);
  if (rows == 1) return &Set::template multiply<kPacking, kSteps, 1>;
  if (rows == 2) return &Set::template multiply<kPacking, kSteps, 2>;
  return &Set::template multiply<kPacking, kSteps, 4>;
}

template <class Set, Packing kPacking>
Multiply<kPacking> choose(WeightArguments const& weights, int64_t rows) {
  return StripParameters<kPacking, 1>::can_hold(weights) ? choose<Set, kPacking, 1>(rows)
                                                         : choose<Set, kPacking, 4>(rows);
}

template <Packing kPacking>
Multiply<kPacking> choose(WeightArguments const& weights, int64_t rows, ByteKernels kernels) {
  switch (kernels) {
    case ByteKernels::kAvx2: return choose<Avx2, kPacking>(weights, rows);
    case ByteKernels::kAvxVnni: return choose<AvxVnni, kPacking>(weights, rows);
    case ByteKernels::kAvx512Vnni: return choose<Avx512Vnni, kPacking>(weights, rows);
    case ByteKernels::kPlain: break;
  }
  return choose<Plain, kPacking>(weights, rows);
}

/// The codes of a tile, and the scale of each block of its columns.
template <Packing kPacking>
struct NaturalTile {
  static constexpr int kColumns = layout::tile_k(kPacking), kBlocks = kColumns / kActivationBlock;

  int8_t codes[kColumns] = {};
  float scales[kBlocks];
};

/// Columns [begin, begin + count) of a row.
template <Packing kPacking>
QCUTLASS_INLINE void quantize_tile(float const* row, int64_t count, NaturalTile<kPacking>& tile) {
  for (int block = 0; block < tile.kBlocks; ++block) {
    float values[kActivationBlock] = {};
    int64_t const first = block * kActivationBlock;
    std::copy_n(row + first, std::clamp<int64_t>(count - first, 0, kActivationBlock), values);
    tile.scales[block] = quantize_block(values, kActivationBlock, tile.codes + first);
  }
}

QCUTLASS_MULTIVERSION void quantize_tile_w4(float const* row, int64_t count, NaturalTile<Packing::kW4A16>& tile) {
  quantize_tile(row, count, tile);
}
QCUTLASS_MULTIVERSION void quantize_tile_w8(float const* row, int64_t count, NaturalTile<Packing::kW8A16>& tile) {
  quantize_tile(row, count, tile);
}

/// `fill(tile, row, first column, columns)`: the tile's codes and scales.
template <Packing kPacking, class Fill>
FewByteRows arrange(WeightArguments const& weights, int64_t m, ByteKernels kernels, Fill const& fill) {
  using Natural = NaturalTile<kPacking>;
  int64_t const tiles = layout::tiles_k(kPacking, weights.k), count = padded_rows(m);
  std::vector<LaneBytes<kPacking>> rows(tiles * count);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    int64_t const begin = tile * Natural::kColumns, columns = std::min<int64_t>(Natural::kColumns, weights.k - begin);
    for (int64_t row = 0; row < m; ++row) {
      Natural natural;
      fill(natural, row, begin, columns);
      rows[tile * count + row].arrange(natural.codes, [&](int k) { return natural.scales[k / kActivationBlock]; });
    }
  }
  return {count, [&weights, multiply = choose<kPacking>(weights, count, kernels), rows = std::move(rows)](
                     int64_t strip, float* sums) { multiply(weights, rows.data(), strip, sums); }};
}

template <Packing kPacking, class Quantize>
FewByteRows quantize(WeightArguments const& weights, float const* activations, int64_t m, ByteKernels kernels,
                     Quantize const& quantize_tile) {
  return arrange<kPacking>(weights, m, kernels, [&](auto& tile, int64_t row, int64_t begin, int64_t columns) {
    quantize_tile(activations + row * weights.k + begin, columns, tile);
  });
}

}  // namespace

FewByteRows FewByteRows::quantized(WeightArguments const& weights, float const* activations, int64_t m,
                                   ByteKernels kernels) {
  return weights.bits() == 4 ? quantize<Packing::kW4A16>(weights, activations, m, kernels, quantize_tile_w4)
                             : quantize<Packing::kW8A16>(weights, activations, m, kernels, quantize_tile_w8);
}

FewByteRows FewByteRows::of_codes(WeightArguments const& weights, int8_t const* codes, int64_t stride, int64_t m,
                                  ByteKernels kernels) {
  return arrange<Packing::kW4A16>(weights, m, kernels, [&](auto& tile, int64_t row, int64_t begin, int64_t columns) {
    std::copy_n(codes + row * stride + begin, columns, tile.codes);
    std::fill_n(tile.scales, tile.kBlocks, 1.0f);
  });
}

}  // namespace qcutlass::host
