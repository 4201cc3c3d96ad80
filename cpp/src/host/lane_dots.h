// The product of few rows of int8 activations with a strip of 16 channels: packed bytes go from memory through
// registers into integer dot products, k across vector lanes, of which each channel has a vector. At the end of a run
// of columns the lanes of each channel are added up, which leaves a vector that has a lane for each channel.
//
// The sums are those of ByteTiles, in the same order: exact integers of a run, finished by the same function.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "host/byte_product.h"
#include "host/channel_parameters.h"
#include "host/channel_vector.h"
#include "host/lane_words.h"
#include "host/multiversion.h"
#include "host/prefetch.h"
#include "host/quantized_rows.h"
#include "qcutlass/layout.h"

namespace qcutlass::host {

/// A row's activations for a tile of codes, in the order of its words. A word of 8-bit codes has two of each of two
/// channels, g and g + 8, which meet the same activations.
template <Packing kPacking>
struct alignas(64) LaneBytes {
  using Words = LaneWords<kPacking>;

  int8_t codes[Words::kWords][4];

  /// `steps`: codes of a tile, each step of which is in step_order().
  void arrange(int8_t const* steps) {
    for (int i = 0; i < Words::kWords * 4; ++i) codes[i / 4][i % 4] = steps[kPlace[i]];
  }

 private:
  static constexpr std::array<uint8_t, Words::kWords * 4> make_places() {
    constexpr auto kOrder = step_order(kPacking);
    std::array<uint8_t, Words::kTileK> place_of{};  // of a column
    for (int i = 0; i < Words::kTileK; ++i)
      place_of[i / kStepK * kStepK + kOrder[i % kStepK]] = static_cast<uint8_t>(i);
    std::array<uint8_t, Words::kWords * 4> places{};
    for (int i = 0; i < Words::kWords * 4; ++i)
      places[i] = place_of[Words::kColumn[i / 4 * Words::kCodes + i % 4 % Words::kCodes]];
    return places;
  }
  static constexpr std::array<uint8_t, Words::kWords * 4> kPlace = make_places();
};

/// Rows for LaneDots. `run`: a power of two, as QuantizedRows has it.
template <Packing kPacking>
struct LaneRows {
  int64_t count;
  int run;
  std::vector<LaneBytes<kPacking>> tiles;      ///< [tile][row]
  std::vector<QuantizedRows::Run> parameters;  ///< [run][row]
};

/// The sums over lanes of 16 channels. Lane w of a channel's vector belongs to step w % 4 of a tile; there is a sum for
/// each of kRuns equal parts of the steps. Of several runs of 4-bit codes the lanes are partial sums of one tile, and
/// stay so to the end: of 16 / kLanes words, of at most four words of a step, thus kMostPartialSums for two steps.
template <class Bytes, ByteRange kRange, int kRuns>
class LaneSteps {
  static constexpr int kLanes = Bytes::kLanes, kParts = layout::kTileN / kLanes;
  using Int = typename Bytes::Int;

 public:
  static QCUTLASS_INLINE void add_up(Int (&lanes)[layout::kTileN], ChannelSums<Bytes> (&sums)[kRuns]) {
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      Int steps[4];  // [channel % 4], quad q of lanes: the four steps of channel 4 q + channel % 4
      if constexpr (kParts == 1) {
        Int halves[8];
#pragma GCC unroll 8
        for (int c = 0; c < 8; ++c) halves[c] = add_halves(lanes[c], lanes[c + 8]);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) steps[c] = add_quads(halves[c], halves[c + 4]);
      } else {
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) steps[c] = add_quads(lanes[8 * part + c], lanes[8 * part + c + 4]);
      }
      if constexpr (kRuns == 4) {
        Int const low02 = interleave<0>(steps[0], steps[2]), low13 = interleave<0>(steps[1], steps[3]);
        Int const high02 = interleave<2>(steps[0], steps[2]), high13 = interleave<2>(steps[1], steps[3]);
        sums[0].part[part] = whole(interleave<0>(low02, low13));
        sums[1].part[part] = whole(interleave<2>(low02, low13));
        sums[2].part[part] = whole(interleave<0>(high02, high13));
        sums[3].part[part] = whole(interleave<2>(high02, high13));
      } else {
        Int const even = add_neighbours(steps[0], steps[2]), odd = add_neighbours(steps[1], steps[3]);
        Int const first = interleave<0>(even, odd), second = interleave<2>(even, odd);
        if constexpr (kRuns == 2) {
          sums[0].part[part] = whole(first);
          sums[1].part[part] = whole(second);
        } else {
          sums[0].part[part] = plus(first, second);
        }
      }
    }
  }

 private:
  static constexpr bool kArePartial = kRuns > 1;

  static QCUTLASS_INLINE Int plus(Int const& x, Int const& y) {
    if constexpr (kArePartial) return Bytes::template plus<kRange>(x, y);
    return x + y;
  }
  static QCUTLASS_INLINE Int whole(Int const& sums) {
    if constexpr (kArePartial) return Bytes::template whole<kRange>(sums);
    return sums;
  }

  /// Lanes 0 to 7 plus 8 to 15: of x, then of y.
  static QCUTLASS_INLINE Int add_halves(Int const& x, Int const& y) {
    return plus(__builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
  }

  /// Of each eight lanes the lower four plus the upper ones: of x, then of y.
  static QCUTLASS_INLINE Int add_quads(Int const& x, Int const& y) {
    if constexpr (kLanes == 16) {
      return plus(__builtin_shufflevector(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
                  __builtin_shufflevector(x, y, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31));
    } else {
      return plus(__builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11),
                  __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15));
    }
  }

  /// Of each quad x0 + x1, y0 + y1, x2 + x3, y2 + y3.
  static QCUTLASS_INLINE Int add_neighbours(Int const& x, Int const& y) {
    Int const low = interleave<0>(x, y), high = interleave<2>(x, y);  // x0 y0 x1 y1, x2 y2 x3 y3
    return plus(pairs<0>(low, high), pairs<2>(low, high));
  }

  /// Of each quad lanes kFirst and kFirst + 1 of both, in turns.
  template <int kFirst>
  static QCUTLASS_INLINE Int interleave(Int const& x, Int const& y) {
    return in_quads<kFirst, kLanes + kFirst, kFirst + 1, kLanes + kFirst + 1>(x, y);
  }

  /// Of each quad lanes kFirst and kFirst + 1 of x, then of y.
  template <int kFirst>
  static QCUTLASS_INLINE Int pairs(Int const& x, Int const& y) {
    return in_quads<kFirst, kFirst + 1, kLanes + kFirst, kLanes + kFirst + 1>(x, y);
  }

  template <int a, int b, int c, int d>
  static QCUTLASS_INLINE Int in_quads(Int const& x, Int const& y) {
    if constexpr (kLanes == 16) {
      return __builtin_shufflevector(x, y, a, b, c, d, 4 + a, 4 + b, 4 + c, 4 + d, 8 + a, 8 + b, 8 + c, 8 + d, 12 + a,
                                     12 + b, 12 + c, 12 + d);
    } else {
      return __builtin_shufflevector(x, y, a, b, c, d, 4 + a, 4 + b, 4 + c, 4 + d);
    }
  }
};

/// `Bytes`: a class of byte_dot.h. kRuns: runs of a tile; 1: a run is one tile or several.
template <class Bytes, Packing kPacking, int kRuns, int kRows>
class LaneDots {
  static constexpr int kLanes = Bytes::kLanes, kParts = layout::kTileN / kLanes;
  static constexpr ByteRange kRange = range_of(kPacking);
  using Words = LaneWords<kPacking>;
  using Tile = LaneBytes<kPacking>;
  using Float = typename Vectors<kLanes>::Float;
  using Int = typename Bytes::Int;

  static_assert(bits_of(kPacking) == 8 ? Words::kUpperShift == 16 : Words::kUpperShift == 4);
  static_assert(Words::kSteps == 4);

 public:
  /// Adds the products of some strips' channels with the rows, of which there are kRows, to sums [strip][row][channel].
  static QCUTLASS_INLINE void multiply(WeightArguments const& weights, LaneRows<kPacking> const& rows,
                                       StripRange strips, float* sums) {
    switch (kind_of_offsets(weights)) {
      case Offsets::kZeros: return multiply_offset<Offsets::kZeros>(weights, rows, strips, sums);
      case Offsets::kMinimums: return multiply_offset<Offsets::kMinimums>(weights, rows, strips, sums);
      case Offsets::kImplied: return multiply_offset<Offsets::kImplied>(weights, rows, strips, sums);
    }
  }

 private:
  /// Tiles of a strip whose groups' parameters are loaded at once, for all strips; 16 KB of codes in one piece. In
  /// shorter pieces, as in turns of 4 tiles of each strip, a product from memory takes up to a quarter longer.
  static constexpr int64_t kPiece = 32;
  static constexpr int kMostGroups = kPiece * Words::kTileK / kStepK + 1;

  /// So many columns at a time that the parameters of their groups, for all strips, are loaded at once.
  template <Offsets kOffsets>
  static QCUTLASS_INLINE void multiply_offset(WeightArguments const& weights, LaneRows<kPacking> const& rows,
                                              StripRange strips, float* sums) {
    int64_t const tiles = layout::tiles_k(kPacking, weights.k);
    int64_t const piece = std::max<int64_t>(rows.run / Words::kTileK, kPiece);
    uint8_t const* const packed =
        static_cast<uint8_t const*>(weights.packed) + strips.first * tiles * layout::kTileBytes;
    ChannelParameters groups[kMostGroups * StripRange::kMost];
    int64_t loaded_first = -1, loaded_last = -1;
    for (int64_t tile = 0; tile < tiles; tile += piece) {
      int64_t const begin = tile * Words::kTileK, end = std::min(begin + piece * Words::kTileK, weights.k);
      int64_t const first = group_of(weights, begin), last = group_of(weights, end - 1);
      if (first != loaded_first || last != loaded_last) {
        load_groups(weights, strips, first, last + 1 - first, /*implied=*/false, groups);
        prefetch_groups(weights, strips, last + 1);
        loaded_first = first;
        loaded_last = last;
      }
      for (int strip = 0; strip < strips.count; ++strip) {
        add_columns<kOffsets>(weights, rows, packed + (strip * tiles + tile) * layout::kTileBytes, begin, end,
                              groups + strip, strips.count, sums + strip * kRows * layout::kTileN);
      }
    }
  }

  static QCUTLASS_INLINE int64_t group_of(WeightArguments const& weights, int64_t column) {
    return std::min(column / weights.group_size, weights.groups() - 1);
  }

  /// Asks for what is loaded next: the groups that follow, or the first ones of the next strips.
  static QCUTLASS_INLINE void prefetch_groups(WeightArguments const& weights, StripRange strips, int64_t group) {
    bool const is_last = group == weights.groups();
    StripRange const next{strips.first + (is_last ? strips.count : 0), strips.count};
    if (next.first + next.count > weights.n / layout::kTileN) return;
    int64_t const first = is_last ? 0 : group;
    ChannelParameters::prefetch(weights, next, first, std::min<int64_t>(kMostGroups, weights.groups() - first));
  }

  /// Adds columns [begin, end) of one strip. `groups`: those of the columns, `stride` apart.
  template <Offsets kOffsets>
  static QCUTLASS_INLINE void add_columns(WeightArguments const& weights, LaneRows<kPacking> const& rows,
                                          uint8_t const* packed, int64_t begin, int64_t end,
                                          ChannelParameters const* groups, int stride, float* sums) {
    int64_t const last = weights.groups() - 1, tiles_of_run = std::max(rows.run / Words::kTileK, 1);
    Tile const* activations = rows.tiles.data() + begin / Words::kTileK * kRows;
    QuantizedRows::Run const* parameters = rows.parameters.data() + begin / rows.run * kRows;
    int64_t group = group_of(weights, begin);
    int64_t group_end = group == last ? weights.k : (group + 1) * weights.group_size;
    Float total[kRows][kParts];
    std::memcpy(total, sums, sizeof(total));
    for (int64_t k = begin; k < end;) {
      Int dots[kRows][layout::kTileN] = {};
      if constexpr (kRuns > 1) {
        add_tile(packed, activations, dots);
      } else {
        int64_t const count = std::min(tiles_of_run, layout::ceil_div(end - k, Words::kTileK));
        for (int64_t i = 0; i < count; ++i) add_tile(packed + i * layout::kTileBytes, activations + i * kRows, dots);
      }
      packed += tiles_of_run * layout::kTileBytes;
      activations += tiles_of_run * kRows;
      ChannelSums<Bytes> runs[kRows][kRuns];
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) LaneSteps<Bytes, kRange, kRuns>::add_up(dots[row], runs[row]);
#pragma GCC unroll 4
      for (int run = 0; run < kRuns; ++run, k += rows.run, parameters += kRows) {
        if (k >= end) break;
        if (k >= group_end) {
          ++group;
          groups += stride;
          group_end = group == last ? weights.k : group_end + weights.group_size;
        }
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
          for (int part = 0; part < kParts; ++part)
            total[row][part] +=
                sum_of_run<Bytes, kRange, kOffsets>(runs[row][run].part[part], parameters[row], *groups, part * kLanes);
        }
      }
    }
    std::memcpy(sums, total, sizeof(total));
  }

  /// Adds the products of one tile: partial sums if it has several runs.
  static QCUTLASS_INLINE void add_tile(uint8_t const* packed, Tile const* rows, Int (&dots)[kRows][layout::kTileN]) {
#pragma GCC unroll 8
    for (int g = 0; g < Words::kGroups; ++g) {
      prefetch_once(packed + kPrefetchDistance + g * Words::kWords * 4);
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        Int &lower = dots[row][g], &upper = dots[row][Words::kGroups + g];
        Int of_tile[2] = {};  // the compiler keeps these in registers
#pragma GCC unroll 2
        for (int word = 0; word < Words::kWords; word += kLanes)
          add_words(load(packed + (g * Words::kWords + word) * 4), load(rows[row].codes[word]),
                    kAddAtOnce ? lower : of_tile[0], kAddAtOnce ? upper : of_tile[1]);
        if constexpr (kAddAtOnce) continue;
        lower = plus(lower, of_tile[0]);
        upper = plus(upper, of_tile[1]);
      }
    }
  }

  /// Whether the words of a tile are added to the sums of those before: where an instruction does it.
  static constexpr bool kAddAtOnce = !Bytes::kHasPairs;

  /// Of a run's tiles, if they are several, numbers are added up: partial sums would be too many.
  static QCUTLASS_INLINE Int plus(Int const& sums, Int const& of_tile) {
    if constexpr (kRuns > 1) return Bytes::template plus<kRange>(sums, of_tile);
    return sums + Bytes::template whole<kRange>(of_tile);
  }

  /// Adds the products of the codes of channel g, and of channel g + 8, in words of a lane group.
  static QCUTLASS_INLINE void add_words(Int const& words, Int const& a, Int& lower, Int& upper) {
    if constexpr (kRange == ByteRange::kFourBits) {
      Bytes::template add_dot<kRange>(lower, words & 0x0f0f0f0f, a);
      Bytes::template add_dot<kRange>(upper, (words >> 4) & 0x0f0f0f0f, a);
    } else if constexpr (Bytes::kHasPairs) {
      Int const pairs = Bytes::pairs(words, a);
      lower += pairs << 16 >> 16;
      upper += pairs >> 16;
    } else {
      Bytes::template add_dot<kRange>(lower, words, a & 0xffff);
      Bytes::template add_dot<kRange>(upper, words, a & ~0xffff);
    }
  }

  static QCUTLASS_INLINE Int load(void const* from) {
    Int vector;
    std::memcpy(&vector, from, sizeof(vector));
    return vector;
  }
};

}  // namespace qcutlass::host
