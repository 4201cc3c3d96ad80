// Packed weights to a dense matrix, row by row.
#include <algorithm>
#include <vector>

#include "host/channel_parameters.h"
#include "host/check.h"
#include "host/lane_group.h"
#include "host/multiversion.h"
#include "host/numeric.h"
#include "host/parallel.h"
#include "qcutlass/pack.h"

namespace qcutlass::host {

namespace {

/// Weights that one range of the parallel loop should at least hold.
constexpr int64_t kGrainWeights = int64_t{1} << 19;

void check_dequantize(DequantizeArguments const& arguments, int threads) {
  check_threads(threads);
  check_weights(arguments.weights);
  check_floating("out_type", arguments.out_type);
  check(
      0 <= arguments.row_begin && arguments.row_begin <= arguments.row_end && arguments.row_end <= arguments.weights.n,
      "row_begin, row_end must satisfy 0 <= row_begin <= row_end <= n = ", arguments.weights.n, ", got ",
      arguments.row_begin, ", ", arguments.row_end);
  if (arguments.row_begin == arguments.row_end) return;
  check_not_null("out", arguments.out);
  check_at_least("out_stride", arguments.out_stride,
                 arguments.row_end - arguments.row_begin > 1 ? arguments.weights.k : 0);
}

template <Packing kPacking>
QCUTLASS_INLINE float code_to_float(uint8_t code) {
  if constexpr (kPacking == Packing::kE4M3A16) return to_float(Float8E4M3{code});
  if constexpr (kPacking == Packing::kE2M1A16) return decode_e2m1<float>(int32_t{code});
  return to_float(code);
}

/// code * scale - minimum, rounded once: the product is exact in fp64, whose rounding of the difference is no other one
/// where the operands have the few digits that files have.
QCUTLASS_INLINE float scaled_less(uint8_t code, float scale, float minimum) {
  return static_cast<float>(static_cast<double>(code) * scale - minimum);
}

/// One row of a tile: `count` codes from column k, in runs that share a group.
template <Packing kPacking>
QCUTLASS_INLINE void dequantize_run(WeightArguments const& weights, ChannelParameters const* groups, int channel,
                                    uint8_t const* codes, int64_t k, int64_t count, float* __restrict out) {
  int64_t const end = k + count;
  for (int64_t group = k / weights.group_size; k < end; ++group) {
    int64_t const run = std::min(end, group >= weights.groups() - 1 ? end : (group + 1) * weights.group_size) - k;
    float const scale = groups[group].scales[channel];
    float const offset = groups[group].offsets[channel];
    if (weights.has_minimums())
      for (int64_t i = 0; i < run; ++i) out[i] = scaled_less(codes[i], scale, offset);
    else
      for (int64_t i = 0; i < run; ++i) out[i] = (code_to_float<kPacking>(codes[i]) - offset) * scale;
    k += run;
    codes += run;
    out += run;
  }
}

template <Packing kPacking>
QCUTLASS_INLINE void dequantize_strip(DequantizeArguments const& arguments, int64_t strip, ChannelParameters* groups) {
  using Group = LaneGroup<kPacking>;
  WeightArguments const& weights = arguments.weights;
  for (int64_t group = 0; group < weights.groups(); ++group) groups[group].load(weights, strip, group);
  int64_t const tiles_k = layout::tiles_k(kPacking, weights.k);
  uint8_t const* const packed = static_cast<uint8_t const*>(weights.packed) + strip * tiles_k * layout::kTileBytes;

  for (int g = 0; g < Group::kGroups; ++g) {
    bool wanted[2];
    for (int upper = 0; upper < 2; ++upper) {
      int64_t const n = strip * layout::kTileN + 8 * upper + g;
      wanted[upper] = arguments.row_begin <= n && n < arguments.row_end;
    }
    if (!wanted[0] && !wanted[1]) continue;
    for (int64_t tile = 0; tile < tiles_k; ++tile) {
      typename Group::Codes codes;
      Group::unpack(packed + tile * layout::kTileBytes + g * Group::kBytes, codes);
      int64_t const k = tile * Group::kTileK;
      int64_t const count = std::min<int64_t>(Group::kTileK, weights.k - k);
      for (int upper = 0; upper < 2; ++upper) {
        if (!wanted[upper]) continue;
        int const channel = 8 * upper + g;
        float values[Group::kTileK];
        dequantize_run<kPacking>(weights, groups, channel, upper == 0 ? codes.lower : codes.upper, k, count, values);
        int64_t const row = strip * layout::kTileN + channel - arguments.row_begin;
        store_floats(arguments.out_type, values, count, arguments.out, row * arguments.out_stride + k);
      }
    }
  }
}

QCUTLASS_MULTIVERSION void dequantize_strip_w4(DequantizeArguments const& arguments, int64_t strip,
                                               ChannelParameters* groups) {
  dequantize_strip<Packing::kW4A16>(arguments, strip, groups);
}
QCUTLASS_MULTIVERSION void dequantize_strip_w8(DequantizeArguments const& arguments, int64_t strip,
                                               ChannelParameters* groups) {
  dequantize_strip<Packing::kW8A16>(arguments, strip, groups);
}
QCUTLASS_MULTIVERSION void dequantize_strip_e2m1(DequantizeArguments const& arguments, int64_t strip,
                                                 ChannelParameters* groups) {
  dequantize_strip<Packing::kE2M1A16>(arguments, strip, groups);
}
QCUTLASS_MULTIVERSION void dequantize_strip_e4m3(DequantizeArguments const& arguments, int64_t strip,
                                                 ChannelParameters* groups) {
  dequantize_strip<Packing::kE4M3A16>(arguments, strip, groups);
}

auto choose_dequantize_strip(Packing packing) {
  switch (packing) {
    case Packing::kW4A8:
    case Packing::kW4A16: return dequantize_strip_w4;
    case Packing::kE2M1A16: return dequantize_strip_e2m1;
    case Packing::kE4M3A16: return dequantize_strip_e4m3;
    default: return dequantize_strip_w8;
  }
}

}  // namespace

void dequantize(DequantizeArguments const& arguments, int threads) {
  check_dequantize(arguments, threads);
  if (arguments.row_begin == arguments.row_end) return;
  WeightArguments const& weights = arguments.weights;
  auto const strip = choose_dequantize_strip(weights.packing);
  int64_t const first = arguments.row_begin / layout::kTileN;
  int64_t const grain = kGrainWeights / layout::kTileN / weights.k;
  parallel_for(layout::tiles_n(arguments.row_end) - first, grain, threads, [&](int64_t begin, int64_t end) {
    std::vector<ChannelParameters> groups(weights.groups());
    for (int64_t i = begin; i < end; ++i) strip(arguments, first + i, groups.data());
  });
}

}  // namespace qcutlass::host
