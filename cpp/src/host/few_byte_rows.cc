#include "host/few_byte_rows.h"

#include <utility>

#include "host/lane_dots.h"
#include "host/multiversion.h"

namespace qcutlass::host {

namespace {

// Instruction sets.

struct Plain {
  template <Packing kPacking, int kRuns, int kRows>
  static void multiply(WeightArguments const& weights, LaneRows<kPacking> const& rows, int64_t strip, float* sums) {
    LaneDots<PlainBytes, kPacking, kRuns, kRows>::multiply(weights, rows, strip, sums);
  }
};

struct Avx2 {
  template <Packing kPacking, int kRuns, int kRows>
  QCUTLASS_AVX2 static void multiply(WeightArguments const& weights, LaneRows<kPacking> const& rows, int64_t strip,
                                     float* sums) {
    LaneDots<Avx2Bytes, kPacking, kRuns, kRows>::multiply(weights, rows, strip, sums);
  }
};

struct AvxVnni {
  template <Packing kPacking, int kRuns, int kRows>
  QCUTLASS_AVX2 static void multiply(WeightArguments const& weights, LaneRows<kPacking> const& rows, int64_t strip,
                                     float* sums) {
    LaneDots<AvxVnniBytes, kPacking, kRuns, kRows>::multiply(weights, rows, strip, sums);
  }
};

struct Avx512Vnni {
  template <Packing kPacking, int kRuns, int kRows>
  QCUTLASS_AVX512_VNNI static void multiply(WeightArguments const& weights, LaneRows<kPacking> const& rows,
                                            int64_t strip, float* sums) {
    LaneDots<Avx512VnniBytes, kPacking, kRuns, kRows>::multiply(weights, rows, strip, sums);
  }
};

template <Packing kPacking>
using Multiply = void (*)(WeightArguments const& weights, LaneRows<kPacking> const& rows, int64_t strip, float* sums);

template <class Set, Packing kPacking, int kRuns>
Multiply<kPacking> choose(int64_t rows) {
  return rows == 1 ? &Set::template multiply<kPacking, kRuns, 1> : &Set::template multiply<kPacking, kRuns, 2>;
}

template <class Set, Packing kPacking>
Multiply<kPacking> choose(LaneRows<kPacking> const& rows) {
  constexpr int kTileK = layout::tile_k(kPacking);
  if constexpr (kTileK == 4 * kStepK) {
    if (rows.run == kStepK) return choose<Set, kPacking, 4>(rows.count);
  }
  if (kTileK == 2 * rows.run) return choose<Set, kPacking, 2>(rows.count);
  return choose<Set, kPacking, 1>(rows.count);
}

template <Packing kPacking>
Multiply<kPacking> choose(LaneRows<kPacking> const& rows, ByteKernels kernels) {
  switch (kernels) {
    case ByteKernels::kAvx2: return choose<Avx2>(rows);
    case ByteKernels::kAvxVnni: return choose<AvxVnni>(rows);
    case ByteKernels::kAvx512Vnni: return choose<Avx512Vnni>(rows);
    case ByteKernels::kPlain: break;
  }
  return choose<Plain>(rows);
}

/// The rows of a block that lie as ByteTiles takes them, [words of four codes][row], each step in step_order().
template <Packing kPacking>
LaneRows<kPacking> arrange(QuantizedRows const& rows) {
  constexpr int kTileK = layout::tile_k(kPacking);
  constexpr auto kOrder = step_order(kPacking);
  LaneRows<kPacking> lanes{rows.count, rows.run, {}, rows.parameters};
  lanes.tiles.resize(rows.stride / kTileK * rows.count);
  for (int64_t tile = 0; tile < rows.stride / kTileK; ++tile) {
    for (int64_t row = 0; row < rows.count; ++row) {
      int8_t natural[kTileK];
      for (int i = 0; i < kTileK; ++i) {
        int64_t const word = (tile * kTileK + i) / 4;
        natural[i / kStepK * kStepK + kOrder[i % kStepK]] = rows.codes[(word * rows.count + row) * 4 + i % 4];
      }
      lanes.tiles[tile * rows.count + row].arrange(natural);
    }
  }
  return lanes;
}

template <Packing kPacking>
FewByteRows arranged(WeightArguments const& weights, QuantizedRows const& quantized, ByteKernels kernels) {
  LaneRows<kPacking> rows = arrange<kPacking>(quantized);
  auto const multiply = choose<kPacking>(rows, kernels);
  return [&weights, multiply, rows = std::move(rows)](int64_t strip, float* sums) {
    multiply(weights, rows, strip, sums);
  };
}

}  // namespace

FewByteRows few_byte_rows(WeightArguments const& weights, QuantizedRows const& rows, ByteKernels kernels) {
  return weights.bits() == 4 ? arranged<Packing::kW4A16>(weights, rows, kernels)
                             : arranged<Packing::kW8A16>(weights, rows, kernels);
}

}  // namespace qcutlass::host
