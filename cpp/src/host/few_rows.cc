#include "host/few_rows.h"

#include <algorithm>
#include <type_traits>

#include "host/lane_product.h"
#include "host/lane_strip.h"
#include "host/multiversion.h"

namespace qcutlass::host {

namespace {

constexpr int64_t kAlignment = 64;  ///< of the activations: a cache line, the widest vector

// Instruction sets. Vectors are their registers; rows are as many as their sums fit into the registers.

struct Avx512 {
  static constexpr int kLanes = 16;
  static constexpr int kMostRows = 8;
  template <class Codes, int kRows, bool kSteady>
  QCUTLASS_AVX512 static void multiply(WeightArguments const& weights, float const* activations, int64_t strip,
                                       float* sums) {
    LaneProduct<Codes, kRows, kSteady>::multiply(weights, activations, strip, sums);
  }
  template <class Codes, int kRows>
  QCUTLASS_AVX512 static void multiply_parts(WeightArguments const& weights, float const* const* parts, int64_t count,
                                             int64_t strip, float* sums) {
    LaneStrip<Codes, kRows>::multiply(weights, parts, count, strip, sums);
  }
};

struct Avx2 {
  static constexpr int kLanes = 8;
  static constexpr int kMostRows = 4;
  template <class Codes, int kRows, bool kSteady>
  QCUTLASS_AVX2 static void multiply(WeightArguments const& weights, float const* activations, int64_t strip,
                                     float* sums) {
    LaneProduct<Codes, kRows, kSteady>::multiply(weights, activations, strip, sums);
  }
  template <class Codes, int kRows>
  QCUTLASS_AVX2 static void multiply_parts(WeightArguments const& weights, float const* const* parts, int64_t count,
                                           int64_t strip, float* sums) {
    LaneStrip<Codes, kRows>::multiply(weights, parts, count, strip, sums);
  }
};

struct Baseline {
  static constexpr int kLanes = 4;
  static constexpr int kMostRows = 4;
  template <class Codes, int kRows, bool kSteady>
  static void multiply(WeightArguments const& weights, float const* activations, int64_t strip, float* sums) {
    LaneProduct<Codes, kRows, kSteady>::multiply(weights, activations, strip, sums);
  }
  template <class Codes, int kRows>
  static void multiply_parts(WeightArguments const& weights, float const* const* parts, int64_t count, int64_t strip,
                             float* sums) {
    LaneStrip<Codes, kRows>::multiply(weights, parts, count, strip, sums);
  }
};

/// Rows that kernels are made for: the least that hold m.
int padded_rows(int64_t m) {
  for (int rows : {1, 2, 4, 6}) {
    if (m <= rows) return rows;
  }
  return 8;
}

/// Rows that a kernel multiplies, and whether their sums may not depend on how many they are.
struct RowsOfSums {
  int count;
  bool steady;
};

/// As many rows as parts of them have.
struct RowsOfParts {};

using Multiply = void (*)(WeightArguments const& weights, float const* activations, int64_t strip, float* sums);
using MultiplyParts = void (*)(WeightArguments const& weights, float const* const* parts, int64_t count, int64_t strip,
                               float* sums);

template <class Level, class Codes, bool kSteady>
Multiply choose(int rows) {
  if constexpr (Level::kLanes == 16) {
    if (rows == 8) return &Level::template multiply<Codes, 8, kSteady>;
    if (rows == 6) return &Level::template multiply<Codes, 6, kSteady>;
  }
  if (rows == 4) return &Level::template multiply<Codes, 4, kSteady>;
  if (rows == 2) return &Level::template multiply<Codes, 2, kSteady>;
  return &Level::template multiply<Codes, 1, kSteady>;
}
template <class Level, class Codes>
Multiply choose(RowsOfSums rows) {
  return rows.steady ? choose<Level, Codes, true>(rows.count) : choose<Level, Codes, false>(rows.count);
}
template <class Level, class Codes>
MultiplyParts choose(RowsOfParts) {
  return &Level::template multiply_parts<Codes, Level::kMostRows>;
}

template <Packing kPacking, int kSteps>
bool has_whole_steps(WeightArguments const& weights) {
  return StripParameters<kPacking, kSteps>::can_hold(weights);
}

template <Packing kPacking, int kLanes, int kSteps, bool kMinimums>
using ArithmeticCodes =
    std::conditional_t<kMinimums, ScaledCodes<kPacking, kLanes, kSteps>, ConvertedCodes<kPacking, kLanes, kSteps>>;

/// Vectors of four lanes hold a channel's values of four steps as they lie; wider ones take a scalar more easily.
template <class Level, Packing kPacking, bool kMinimums = false, class Rows>
auto choose_converted(WeightArguments const& weights, Rows rows) {
  if constexpr (Level::kLanes > 4) {
    if (has_whole_steps<kPacking, 1>(weights))
      return choose<Level, ArithmeticCodes<kPacking, Level::kLanes, 1, kMinimums>>(rows);
  }
  return choose<Level, ArithmeticCodes<kPacking, Level::kLanes, 4, kMinimums>>(rows);
}

template <class Level, Packing kPacking, bool kMinimums = false, class Rows>
auto choose_four_bits(WeightArguments const& weights, Rows rows) {
  if constexpr (kHasLookups && Level::kLanes == 16) {
    if (has_whole_steps<kPacking, 1>(weights)) return choose<Level, LookedUpCodes<kPacking, 1, kMinimums>>(rows);
    if (has_whole_steps<kPacking, 2>(weights)) return choose<Level, LookedUpCodes<kPacking, 2, kMinimums>>(rows);
    return choose<Level, ArithmeticCodes<kPacking, Level::kLanes, 4, kMinimums>>(rows);
  } else {
    return choose_converted<Level, kPacking, kMinimums>(weights, rows);
  }
}

template <class Level, class Rows>
auto choose(WeightArguments const& weights, Rows rows) {
  bool const minimums = weights.has_minimums();
  switch (weights.packing) {
    case Packing::kW4A8:
    case Packing::kW4A16:
      return minimums ? choose_four_bits<Level, Packing::kW4A16, true>(weights, rows)
                      : choose_four_bits<Level, Packing::kW4A16>(weights, rows);
    case Packing::kE2M1A16: return choose_four_bits<Level, Packing::kE2M1A16>(weights, rows);
    case Packing::kE4M3A16: return choose_converted<Level, Packing::kE4M3A16>(weights, rows);
    default:
      return minimums ? choose_converted<Level, Packing::kW8A16, true>(weights, rows)
                      : choose_converted<Level, Packing::kW8A16>(weights, rows);
  }
}

template <class Rows>
auto choose(WeightArguments const& weights, Rows rows) {
  switch (vector_level()) {
    case VectorLevel::kAvx512: return choose<Avx512>(weights, rows);
    case VectorLevel::kAvx2: return choose<Avx2>(weights, rows);
    default: return choose<Baseline>(weights, rows);
  }
}

/// Rows [m][k] as [tile][rows][code of a word][word], padded with zeros.
template <Packing kPacking>
void arrange(float const* in, int64_t m, int64_t k_extent, int rows, float* out) {
  using Words = LaneWords<kPacking>;
  for (int64_t begin = 0; begin < k_extent; begin += Words::kTileK, out += rows * Words::kTileK) {
    for (int64_t row = 0; row < m; ++row) {
      float tile[Words::kTileK] = {};
      std::copy_n(in + row * k_extent + begin, std::min<int64_t>(Words::kTileK, k_extent - begin), tile);
      for (int i = 0; i < Words::kTileK; ++i) {
        out[row * Words::kTileK + i] = tile[Words::kColumn[i % Words::kWords * Words::kCodes + i / Words::kWords]];
      }
    }
  }
}

}  // namespace

int FewRows::most() { return vector_level() == VectorLevel::kAvx512 ? Avx512::kMostRows : Avx2::kMostRows; }

bool FewRows::serves(WeightArguments const& weights, int64_t m) {
  if (m > most()) return false;
  return weights.bits() == 4 ? has_whole_steps<Packing::kW4A16, 4>(weights)
                             : has_whole_steps<Packing::kW8A16, 4>(weights);
}

FewRows::FewRows(WeightArguments const& weights, float const* activations, int64_t m, bool steady)
    : weights_(weights), rows_(padded_rows(m)), multiply_(choose(weights, RowsOfSums{rows_, steady})) {
  int64_t const k = layout::tiles_k(weights.packing, weights.k) * layout::tile_k(weights.packing);
  storage_.resize(k * rows_ + kAlignment / sizeof(float));
  auto const address = reinterpret_cast<uintptr_t>(storage_.data());
  activations_ = storage_.data() + (kAlignment - address % kAlignment) % kAlignment / sizeof(float);
  auto const order = weights.bits() == 4 ? arrange<Packing::kW4A16> : arrange<Packing::kW8A16>;
  order(activations, m, weights.k, rows_, activations_);
}

void FewRows::multiply(std::vector<FewRows const*> const& parts, int64_t strip, float* sums) {
  std::vector<float const*> activations;
  for (FewRows const* part : parts) activations.push_back(part->activations_);
  choose(parts[0]->weights_, RowsOfParts{})(parts[0]->weights_, activations.data(), parts.size(), strip, sums);
}

}  // namespace qcutlass::host
