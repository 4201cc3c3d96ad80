#include "host/few_rows.h"

#include <algorithm>

#include "host/lane_product.h"
#include "host/multiversion.h"

namespace qcutlass::host {

namespace {

// Instruction sets and their vectors. Eight lanes are an AVX register; others than AVX-512 split them.

struct Avx512 {
  static constexpr int kLanes = 16;
  static constexpr int kMostRows = 8;  ///< whose sums fit into the registers
  template <class Codes, int kRows>
  QCUTLASS_AVX512 static void multiply(WeightArguments const& weights, float const* activations, int64_t strip,
                                       float* sums) {
    LaneProduct<Codes, kRows>::multiply(weights, activations, strip, sums);
  }
};

struct Avx2 {
  static constexpr int kLanes = 8;
  static constexpr int kMostRows = 4;
  template <class Codes, int kRows>
  QCUTLASS_AVX2 static void multiply(WeightArguments const& weights, float const* activations, int64_t strip,
                                     float* sums) {
    LaneProduct<Codes, kRows>::multiply(weights, activations, strip, sums);
  }
};

struct Baseline {
  static constexpr int kLanes = 8;
  static constexpr int kMostRows = 4;
  template <class Codes, int kRows>
  static void multiply(WeightArguments const& weights, float const* activations, int64_t strip, float* sums) {
    LaneProduct<Codes, kRows>::multiply(weights, activations, strip, sums);
  }
};

using Multiply = void (*)(WeightArguments const& weights, float const* activations, int64_t strip, float* sums);

template <class Level, class Codes>
Multiply choose(int rows) {
  if constexpr (Level::kMostRows >= 8) {
    if (rows == 8) return &Level::template multiply<Codes, 8>;
  }
  if (rows == 4) return &Level::template multiply<Codes, 4>;
  if (rows == 2) return &Level::template multiply<Codes, 2>;
  return &Level::template multiply<Codes, 1>;
}

template <class Level>
Multiply choose(WeightArguments const& weights, int rows) {
  if (weights.packing == Packing::kW8A16) {
    return choose<Level, ConvertedCodes<Packing::kW8A16, Level::kLanes>>(rows);
  }
  if constexpr (Level::kLanes == LookedUpCodes::kLanes) {
    bool const zeros_of_whole_tiles =
        weights.zero_type == DType::kNone || weights.groups() == 1 || weights.group_size % layout::tile_k(Packing::kW4A16) == 0;
    if (zeros_of_whole_tiles) return choose<Level, LookedUpCodes>(rows);
  }
  return choose<Level, ConvertedCodes<Packing::kW4A16, Level::kLanes>>(rows);
}

Multiply choose(WeightArguments const& weights, int rows) {
  switch (vector_level()) {
    case VectorLevel::kAvx512: return choose<Avx512>(weights, rows);
    case VectorLevel::kAvx2: return choose<Avx2>(weights, rows);
    default: return choose<Baseline>(weights, rows);
  }
}

int most_rows() { return vector_level() == VectorLevel::kAvx512 ? Avx512::kMostRows : Avx2::kMostRows; }

int padded_rows(int64_t m) { return m > 4 ? 8 : m > 2 ? 4 : static_cast<int>(m); }

/// Rows [m][k] as [tile][rows][code of a word][word].
template <Packing kPacking>
void arrange(float const* in, int64_t m, int64_t k_extent, int rows, float* out) {
  using Words = LaneWords<kPacking>;
  for (int64_t begin = 0; begin < k_extent; begin += Words::kTileK) {
    for (int row = 0; row < rows; ++row) {
      if (row < m) {
        float tile[Words::kTileK] = {};
        std::copy_n(in + row * k_extent + begin, std::min<int64_t>(Words::kTileK, k_extent - begin), tile);
        for (int i = 0; i < Words::kTileK; ++i) {
          out[i] = tile[Words::kColumn[i % Words::kWords * Words::kCodes + i / Words::kWords]];
        }
      }
      out += Words::kTileK;
    }
  }
}

constexpr int64_t kAlignment = 64;

}  // namespace

bool FewRows::serves(WeightArguments const& weights, int64_t m) {
  if (m > most_rows()) return false;
  return weights.bits() == 4 ? StripParameters<Packing::kW4A16, 1>::can_hold(weights)
                             : StripParameters<Packing::kW8A16, 1>::can_hold(weights);
}

FewRows::FewRows(WeightArguments const& weights, float const* activations, int64_t m)
    : weights_(weights), rows_(padded_rows(m)), multiply_(choose(weights, rows_)) {
  int64_t const k = layout::tiles_k(weights.packing, weights.k) * layout::tile_k(weights.packing);
  storage_.resize(k * rows_ + kAlignment / sizeof(float));
  auto const address = reinterpret_cast<uintptr_t>(storage_.data());
  activations_ = storage_.data() + (kAlignment - address % kAlignment) % kAlignment / sizeof(float);
  auto const order = weights.bits() == 4 ? arrange<Packing::kW4A16> : arrange<Packing::kW8A16>;
  order(activations, m, weights.k, rows_, activations_);
}

}  // namespace qcutlass::host
