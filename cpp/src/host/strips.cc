#include "host/strips.h"

#include <algorithm>

#include "host/channel_parameters.h"
#include "host/multiversion.h"
#include "host/tile_math.h"

namespace qcutlass::host {

namespace {

/// Up to so many rows weights go from registers into the product.
constexpr int64_t kFewRows = 4;

/// Adds the products of one strip of 16 channels to sums [m][16]. kMinimums: what the offsets are.
template <Packing kPacking, int kLanes, bool kMinimums>
QCUTLASS_INLINE void multiply_lanes(WeightArguments const& weights, float const* activations, int64_t m, int64_t strip,
                                    float* sums) {
  constexpr int kTileK = layout::tile_k(kPacking);
  int64_t const tiles_k = layout::tiles_k(kPacking, weights.k);
  uint8_t const* const packed = static_cast<uint8_t const*>(weights.packed) + strip * tiles_k * layout::kTileBytes;
  ChannelParameters parameters;
  int64_t group = -1, group_end = 0;

  for (int64_t tile = 0; tile < tiles_k; ++tile) {
    TileMath<kPacking, kLanes> math;
    math.decode(packed + tile * layout::kTileBytes);
    int64_t const begin = tile * kTileK;
    int64_t const end = std::min(begin + kTileK, weights.k);
    for (int64_t k = begin; k < end;) {
      if (k == group_end) {
        parameters.load(weights, strip, ++group);
        group_end = group == weights.groups() - 1 ? weights.k : group_end + weights.group_size;
      }
      int64_t const run_end = std::min(end, group_end);
      auto const run_first = static_cast<int>(k - begin), run_last = static_cast<int>(run_end - begin);
      if (m <= kFewRows) {
        math.template dequantize_multiply<kMinimums>(run_first, run_last, parameters, activations, kTileK, m, sums);
      } else {
        math.template dequantize<kMinimums>(run_first, run_last, parameters);
      }
      k = run_end;
    }
    if (m > kFewRows) math.multiply(activations, kTileK, m, static_cast<int>(end - begin), sums);
    activations += m * kTileK;
  }
}

// Eight lanes are an AVX register; other instruction sets than AVX-512 split them.
template <Packing kPacking, bool kMinimums>
QCUTLASS_AVX2 void multiply_avx2(WeightArguments const& weights, float const* activations, int64_t m, int64_t strip,
                                 float* sums) {
  multiply_lanes<kPacking, 8, kMinimums>(weights, activations, m, strip, sums);
}
template <Packing kPacking, bool kMinimums>
QCUTLASS_AVX512 void multiply_avx512(WeightArguments const& weights, float const* activations, int64_t m, int64_t strip,
                                     float* sums) {
  multiply_lanes<kPacking, 16, kMinimums>(weights, activations, m, strip, sums);
}
template <Packing kPacking, bool kMinimums>
void multiply_baseline(WeightArguments const& weights, float const* activations, int64_t m, int64_t strip,
                       float* sums) {
  multiply_lanes<kPacking, 8, kMinimums>(weights, activations, m, strip, sums);
}

template <Packing kPacking, bool kMinimums = false>
MultiplyStrip for_this_machine() {
  switch (vector_level()) {
    case VectorLevel::kAvx512: return multiply_avx512<kPacking, kMinimums>;
    case VectorLevel::kAvx2: return multiply_avx2<kPacking, kMinimums>;
    default: return multiply_baseline<kPacking, kMinimums>;
  }
}

}  // namespace

void arrange_row(Packing packing, float const* activations, int64_t k, int64_t m, int64_t row, float* out) {
  int64_t const tile_k = layout::tile_k(packing);
  out += row * tile_k;
  for (int64_t begin = 0; begin < k; begin += tile_k, out += m * tile_k) {
    std::copy_n(activations + begin, std::min(tile_k, k - begin), out);
  }
}

int64_t arranged_size(Packing packing, int64_t k, int64_t m) {
  return layout::tiles_k(packing, k) * layout::tile_k(packing) * m;
}

MultiplyStrip multiply_strip(WeightArguments const& weights) {
  bool const minimums = weights.has_minimums();
  switch (weights.packing) {
    case Packing::kW4A8:
    case Packing::kW4A16:
      return minimums ? for_this_machine<Packing::kW4A16, true>() : for_this_machine<Packing::kW4A16>();
    case Packing::kE2M1A16: return for_this_machine<Packing::kE2M1A16>();
    case Packing::kE4M3A16: return for_this_machine<Packing::kE4M3A16>();
    default: return minimums ? for_this_machine<Packing::kW8A16, true>() : for_this_machine<Packing::kW8A16>();
  }
}

QCUTLASS_MULTIVERSION void store_part(GemmArguments const& arguments, Parts const& parts, int64_t part, int64_t rows,
                                      float const* sums) {
  Epilogue const epilogue(arguments, parts, part);
  float values[2 * layout::kTileN];
  for (int64_t m = 0; m < arguments.m; ++m) {
    for (int64_t i = 0; i < parts.strips(part); ++i) {
      float* const of_strip = values + i * layout::kTileN;
      std::copy_n(sums + (i * rows + m) * layout::kTileN, layout::kTileN, of_strip);
      if (arguments.sums.a_scale == nullptr) continue;
      float const a_scale = arguments.sums.a_scale[m * arguments.sums.a_scale_stride];
      for (int channel = 0; channel < layout::kTileN; ++channel) of_strip[channel] *= a_scale;
    }
    epilogue.store(m, values);
  }
}

}  // namespace qcutlass::host
