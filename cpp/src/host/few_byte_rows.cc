#include "host/few_byte_rows.h"

#include <cstring>
#include <utility>

#include "host/lane_dots.h"
#include "host/multiversion.h"

namespace qcutlass::host {

namespace {

template <Packing kPacking, int kRuns, int kRows>
struct FewRowsKernel {
  template <class Bytes>
  static QCUTLASS_INLINE void multiply(WeightArguments const& weights, LaneRows<kPacking> const& rows,
                                       StripRange strips, float* sums) {
    LaneDots<Bytes, kPacking, kRuns, kRows>::multiply(weights, rows, strips, sums);
  }
};

template <Packing kPacking>
using Multiply = void (*)(WeightArguments const& weights, LaneRows<kPacking> const& rows, StripRange strips,
                          float* sums);

template <class Kernel, Packing kPacking>
Multiply<kPacking> choose(ByteKernels kernels) {
  return ByteFunctions<Kernel, WeightArguments const&, LaneRows<kPacking> const&, StripRange, float*>::choose(kernels);
}

template <Packing kPacking, int kRuns>
Multiply<kPacking> choose(int64_t rows, ByteKernels kernels) {
  return rows == 1 ? choose<FewRowsKernel<kPacking, kRuns, 1>, kPacking>(kernels)
                   : choose<FewRowsKernel<kPacking, kRuns, 2>, kPacking>(kernels);
}

template <Packing kPacking>
Multiply<kPacking> choose(LaneRows<kPacking> const& rows, ByteKernels kernels) {
  constexpr int kTileK = layout::tile_k(kPacking);
  if constexpr (kTileK == 4 * kStepK) {
    if (rows.run == kStepK) return choose<kPacking, 4>(rows.count, kernels);
  }
  if (kTileK == 2 * rows.run) return choose<kPacking, 2>(rows.count, kernels);
  return choose<kPacking, 1>(rows.count, kernels);
}

/// The rows of a block that lie as ByteTiles takes them, [words of four codes][row], each step in step_order().
template <Packing kPacking>
LaneRows<kPacking> arrange(QuantizedRows const& rows) {
  constexpr int kTileK = layout::tile_k(kPacking);
  LaneRows<kPacking> lanes{rows.count, rows.run, {}, rows.parameters};
  lanes.tiles.resize(rows.stride / kTileK * rows.count);
  for (int64_t tile = 0; tile < rows.stride / kTileK; ++tile) {
    for (int64_t row = 0; row < rows.count; ++row) {
      int8_t codes[kTileK];
      for (int word = 0; word < kTileK / 4; ++word)
        std::memcpy(codes + 4 * word, rows.codes.data() + ((tile * kTileK / 4 + word) * rows.count + row) * 4, 4);
      lanes.tiles[tile * rows.count + row].arrange(codes);
    }
  }
  return lanes;
}

template <Packing kPacking>
FewByteRows arranged(WeightArguments const& weights, QuantizedRows const& quantized, ByteKernels kernels) {
  LaneRows<kPacking> rows = arrange<kPacking>(quantized);
  auto const multiply = choose(rows, kernels);
  return [&weights, multiply, rows = std::move(rows)](StripRange strips, float* sums) {
    multiply(weights, rows, strips, sums);
  };
}

}  // namespace

FewByteRows few_byte_rows(WeightArguments const& weights, QuantizedRows const& rows, ByteKernels kernels) {
  return weights.bits() == 4 ? arranged<Packing::kW4A16>(weights, rows, kernels)
                             : arranged<Packing::kW8A16>(weights, rows, kernels);
}

}  // namespace qcutlass::host
