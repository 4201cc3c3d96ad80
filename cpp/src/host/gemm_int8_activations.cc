#include "host/gemm_int8_activations.h"

#include <algorithm>
#include <string>

#include "host/byte_tiles.h"
#include "host/few_byte_rows.h"
#include "qcutlass/error.h"

namespace qcutlass::host {

namespace {

/// Products that one range of the parallel loop should at least hold: some 10 microseconds.
constexpr int64_t kGrainOperations = int64_t{1} << 19;

/// The same of few rows, whose time is that of reading weights: 64 KB of 4-bit codes.
constexpr int64_t kFewRowsGrain = int64_t{1} << 17;

template <Packing kPacking>
struct TilesKernel {
  /// Adds the products of one strip of 16 channels to sums [m][16].
  template <class Bytes>
  static QCUTLASS_INLINE void multiply(WeightArguments const& weights, QuantizedRows const& rows, int64_t strip,
                                       float* sums) {
    using Tiles = ByteTiles<Bytes, kPacking>;
    int64_t const tiles_k = layout::tiles_k(kPacking, weights.k);
    uint8_t const* const packed = static_cast<uint8_t const*>(weights.packed) + strip * tiles_k * layout::kTileBytes;
    Tiles tiles(rows.run);
    for (int64_t tile = 0; tile < tiles_k; tile += Tiles::kTiles) {
      int64_t const count = std::min<int64_t>(Tiles::kTiles, tiles_k - tile), begin = tile * Tiles::kTileK;
      tiles.load(weights, strip, begin, packed + tile * layout::kTileBytes, count);
      tiles.multiply(rows, begin, std::min(count * Tiles::kTileK, weights.k - begin), sums);
    }
  }
};

template <Packing kPacking>
using TilesFunctions =
    ByteFunctions<TilesKernel<kPacking>, WeightArguments const&, QuantizedRows const&, int64_t, float*>;

void multiply_rows(GemmArguments const& arguments, QuantizedRows const& rows, int threads, StorePart store,
                   ByteKernels kernels) {
  WeightArguments const& weights = arguments.weights;
  bool const few = arguments.m <= kFewByteRows;
  int64_t const grain = (few ? kFewRowsGrain : kGrainOperations) / (layout::kTileN * weights.k) / (arguments.m / 8 + 1);
  if (few) {
    FewByteRows const multiply = few_byte_rows(weights, rows, kernels);
    return multiply_ranges<StripRange::kMost>(arguments, arguments.m, grain, threads, multiply, store);
  }
  auto const multiply = weights.packing == Packing::kW4A16 ? TilesFunctions<Packing::kW4A16>::choose(kernels)
                                                           : TilesFunctions<Packing::kW8A16>::choose(kernels);
  auto const multiply_one = [&](int64_t strip, float* sums) {
    if (strip + 1 < layout::tiles_n(weights.n))
      ChannelParameters::prefetch(weights, {strip + 1, 1}, 0, weights.groups());
    multiply(weights, rows, strip, sums);
  };
  multiply_strips(arguments, arguments.m, grain, threads, multiply_one, store);
}

/// The largest power of two that divides a group of weights, the extent of whole tiles and what is decoded at once.
///
/// Of so many columns sums of products are exact, as integers and in fp32: |sum a * code| <= 512 * 128 * 15 < 2^20, and
/// |sum a| * zero <= 512 * 128 * 16 = 2^20 for the zeros of 4-bit codes.
int run_of(WeightArguments const& weights) {
  using Tiles = ByteTiles<PlainBytes, Packing::kW4A16>;
  int64_t const extent = layout::tiles_k(Packing::kW4A16, weights.k) * Tiles::kTileK;
  int run = Tiles::kColumns;
  while (extent % run != 0 || (weights.groups() > 1 && weights.group_size % run != 0)) run /= 2;
  return run;
}

}  // namespace

bool has_whole_steps(WeightArguments const& weights) {
  return weights.groups() <= 1 || weights.group_size % kStepK == 0;
}

void check_int8_activations(WeightArguments const& weights) {
  if (has_float_codes(weights.packing)) throw Unsupported("activations: only products of integer codes quantise them");
  if (!has_whole_steps(weights))
    throw Unsupported("group_size: int8 activations take groups of multiples of " + std::to_string(kStepK) +
                      " columns, or one group a channel, got " + std::to_string(weights.group_size));
}

void gemm_int8_activations(GemmArguments const& arguments, float const* activations, int threads, StorePart store,
                           ByteKernels kernels) {
  WeightArguments const& weights = arguments.weights;
  int const run = weights.groups() > 1 && weights.group_size % kActivationBlock != 0 ? kStepK : kActivationBlock;
  QuantizedRows const rows = quantize_rows(weights.packing, activations, arguments.m, weights.k, run, threads);
  multiply_rows(arguments, rows, threads, store, kernels);
}

void gemm_int8_rows(GemmArguments const& arguments, int threads, StorePart store, ByteKernels kernels) {
  WeightArguments const& weights = arguments.weights;
  QuantizedRows const rows = arrange_rows(static_cast<int8_t const*>(arguments.a), arguments.a_stride, arguments.m,
                                          weights.k, run_of(weights), threads);
  multiply_rows(arguments, rows, threads, store, kernels);
}

}  // namespace qcutlass::host
