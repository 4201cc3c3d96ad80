// Scales and offsets of the 16 channels of a strip, as fp32.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "host/channel_numbers.h"
#include "host/multiversion.h"
#include "host/numeric.h"
#include "host/prefetch.h"
#include "qcutlass/layout.h"
#include "qcutlass/scheme.h"

namespace qcutlass::host {

/// Neighbouring strips of 16 channels, whose parameters share lines of the cache.
struct StripRange {
  static constexpr int kMost = 4;  ///< a line has bytes for 64 channels

  int64_t first;
  int count;
};

/// The scales or offsets of a weight as they lie in memory: a matrix, or strip by strip.
struct GroupNumbers : GroupParameters {
  /// Elements from the first channel of a strip to that of the next.
  int64_t strip_stride = layout::kTileN, super_strip_stride = layout::kTileN;

  static QCUTLASS_INLINE GroupNumbers scales_of(WeightArguments const& weights) {
    return {weights.group_scales(), weights};
  }
  static QCUTLASS_INLINE GroupNumbers offsets_of(WeightArguments const& weights) {
    return {weights.offsets(), weights};
  }

 private:
  QCUTLASS_INLINE GroupNumbers(GroupParameters const& of_matrix, WeightArguments const& weights)
      : GroupParameters(of_matrix) {
    if (!weights.by_strip) return;
    stride = super_stride = layout::kTileN;
    strip_stride = weights.groups() * layout::kTileN;
    if (weights.has_super_blocks()) super_strip_stride = weights.super_blocks() * layout::kTileN;
  }
};

/// What the offsets of a weight are.
enum class Offsets {
  kZeros,
  kMinimums,
  kImplied,  ///< symmetric_zero() of each channel and group
};

QCUTLASS_INLINE Offsets kind_of_offsets(WeightArguments const& weights) {
  if (weights.has_minimums()) return Offsets::kMinimums;
  return weights.offsets().type == DType::kNone ? Offsets::kImplied : Offsets::kZeros;
}

struct ChannelParameters {
  float scales[layout::kTileN];
  float offsets[layout::kTileN];  ///< zeros or minimums

  /// Loads group `group` of the strip's channels; channels past n get scale and offset 0.
  QCUTLASS_INLINE void load(WeightArguments const& weights, int64_t strip, int64_t group) {
    int64_t const n = strip * layout::kTileN;
    int64_t const count = std::min<int64_t>(layout::kTileN, weights.n - n);
    std::fill_n(scales, layout::kTileN, 0.0f);
    std::fill_n(offsets, layout::kTileN, implied_offset(weights));
    load(GroupNumbers::scales_of(weights), group, strip, count, scales);
    load(GroupNumbers::offsets_of(weights), group, strip, count, offsets);
    apply_global_scale(weights, *this);
  }

  /// Loads groups [first, first + count) of some strips, to [group][strip]. It is for callers that spend much of their
  /// time on loading; inlined into a product of many rows its branches cost more than they save. It goes row by row,
  /// because the addresses of rows may differ by a multiple of a large power of two, so that the first-level cache
  /// holds few rows at once. `Numbers`: a class of channel_numbers.h. `implied`: whether to write implied offsets.
  template <class Numbers>
  static QCUTLASS_INLINE void load(WeightArguments const& weights, StripRange strips, int64_t first, int64_t count,
                                   bool implied, ChannelParameters* groups) {
    load_all<Numbers>(GroupNumbers::scales_of(weights), weights.n, strips, first, count, 0.0f,
                      &ChannelParameters::scales, groups);
    if (implied || kind_of_offsets(weights) != Offsets::kImplied)
      load_all<Numbers>(GroupNumbers::offsets_of(weights), weights.n, strips, first, count, implied_offset(weights),
                        &ChannelParameters::offsets, groups);
    if (weights.global_scale == nullptr) return;
    for (int64_t i = 0; i < count * strips.count; ++i) apply_global_scale(weights, groups[i]);
  }

  /// Prefetches groups [first, first + count) of some strips. The hardware's prefetcher does not foresee groups that
  /// are a row of all channels apart. Of groups that lie together it fetches all but the first ones by itself.
  static QCUTLASS_INLINE void prefetch(WeightArguments const& weights, StripRange strips, int64_t first,
                                       int64_t count) {
    for (GroupNumbers const& from : {GroupNumbers::scales_of(weights), GroupNumbers::offsets_of(weights)}) {
      prefetch(from.data, from.type, from.stride, from.strip_stride, strips, first, count);
      if (from.supers == nullptr || count == 0) continue;
      int64_t const block = first / from.super_groups, end = (first + count - 1) / from.super_groups + 1;
      prefetch(from.supers, DType::kFloat16, from.super_stride, from.super_strip_stride, strips, block, end - block);
    }
  }

 private:
  static QCUTLASS_INLINE void apply_global_scale(WeightArguments const& weights, ChannelParameters& parameters) {
    if (weights.global_scale == nullptr) return;
    for (float& scale : parameters.scales) scale *= *weights.global_scale;
  }

  static QCUTLASS_INLINE void prefetch(void const* data, DType type, int64_t stride, int64_t strip_stride,
                                       StripRange strips, int64_t first, int64_t count) {
    if (type == DType::kNone) return;
    bool const are_rows = strip_stride < stride;  // of strips that follow one another, or strips of groups that do
    int64_t const size = size_of(type), pieces = are_rows ? count : strips.count;
    int64_t const bytes = (are_rows ? strips.count : count) * layout::kTileN * size;
    char const* piece = static_cast<char const*>(data) + (first * stride + strips.first * strip_stride) * size;
    for (int64_t i = 0; i < pieces; ++i, piece += (are_rows ? stride : strip_stride) * size) {
      for (int64_t byte = 0; byte < bytes; byte += kCacheLine) __builtin_prefetch(piece + byte);
    }
  }

  /// The first `count` channels of a strip, of one group.
  static QCUTLASS_INLINE void load(GroupNumbers const& from, int64_t group, int64_t strip, int64_t count, float* out) {
    load_floats(from.type, from.data, strip * from.strip_stride + group * from.stride, count, out);
    if (from.supers == nullptr) return;
    float supers[layout::kTileN];
    load_floats(DType::kFloat16, from.supers,
                strip * from.super_strip_stride + group / from.super_groups * from.super_stride, count, supers);
    for (int64_t i = 0; i < count; ++i) out[i] *= supers[i];
  }

  using Channels = float[layout::kTileN];

  static float implied_offset(WeightArguments const& weights) {
    return kind_of_offsets(weights) == Offsets::kImplied ? static_cast<float>(symmetric_zero(weights.packing)) : 0.0f;
  }

  /// Loads groups [first, first + count), over the value that channels past n get. Whole strips of the usual types are
  /// vectors: the compiler would unroll loops of kTileN before it sees vectors in them.
  template <class Numbers>
  static QCUTLASS_INLINE void load_all(GroupNumbers const& from, int64_t n, StripRange strips, int64_t first,
                                       int64_t count, float other, Channels ChannelParameters::*values,
                                       ChannelParameters* groups) {
    if (from.type == DType::kNone) {
      for (int64_t i = 0; i < count * strips.count; ++i) std::fill_n(groups[i].*values, layout::kTileN, other);
      return;
    }
    int const whole = load_vectors<Numbers>(from, n, strips, first, count, values, groups);
    for (int64_t i = 0; i < count; ++i) {
      for (int strip = whole; strip < strips.count; ++strip) {
        float* const out = groups[i * strips.count + strip].*values;
        int64_t const number = strips.first + strip, channels = n - number * layout::kTileN;
        std::fill_n(out, layout::kTileN, other);
        load(from, first + i, number, std::min<int64_t>(layout::kTileN, channels), out);
      }
    }
  }

  /// Loads those of the first strips; how many.
  template <class Numbers>
  static QCUTLASS_INLINE int load_vectors(GroupNumbers const& from, int64_t n, StripRange strips, int64_t first,
                                          int64_t count, Channels ChannelParameters::*values,
                                          ChannelParameters* groups) {
    auto const whole = static_cast<int>(std::min<int64_t>(strips.count, n / layout::kTileN - strips.first));
    int const at_once = from.strip_stride < from.stride ? whole : 1;  // in the order of memory
    auto const load_rows = [&](auto const& load_numbers) {
      int64_t const size = size_of(from.type), apart = from.strip_stride * size;
      for (int begin = 0; begin < whole; begin += at_once) {
        char const* row = static_cast<char const*>(from.data) + strips.first * apart + first * from.stride * size;
        for (int64_t i = 0; i < count; ++i, row += from.stride * size) {
          for (int strip = begin; strip < begin + at_once; ++strip)
            load_strip<Numbers>(row + strip * apart, size, load_numbers, groups[i * strips.count + strip].*values);
        }
      }
      return whole;
    };
    auto const load_integers = [&](auto const& load_numbers) {
      for (int begin = 0; begin < whole; begin += at_once)
        load_super_blocks<Numbers>(from, {strips.first + begin, at_once}, first, count, load_numbers, values,
                                   groups + begin, strips.count);
      return whole;
    };
    // Not the functions themselves: what is only called inline has no address in code that is not optimised.
    auto const unsigned_bytes = [](void const* bytes) { return Numbers::unsigned_bytes(bytes); };
    auto const signed_bytes = [](void const* bytes) { return Numbers::signed_bytes(bytes); };
    if (from.supers != nullptr && from.type == DType::kInt8) return load_integers(signed_bytes);
    if (from.supers != nullptr) return load_integers(unsigned_bytes);
    if (from.type == DType::kFloat16) return load_rows([](void const* words) { return Numbers::halves(words); });
    if (from.type == DType::kBFloat16) return load_rows([](void const* words) { return Numbers::bfloat16s(words); });
    if (from.type == DType::kFloat32)
      return load_rows([](void const* floats) { return loaded<typename Numbers::Float>(floats); });
    if (from.type == DType::kUInt8) return load_rows(unsigned_bytes);
    return 0;
  }

  /// Integers of whole strips, each times the number of its super-block, which is loaded once. `apart`: from one
  /// group's first strip to the next's.
  template <class Numbers, class Load>
  static QCUTLASS_INLINE void load_super_blocks(GroupNumbers const& from, StripRange strips, int64_t first,
                                                int64_t count, Load const& load_numbers,
                                                Channels ChannelParameters::*values, ChannelParameters* groups,
                                                int apart) {
    constexpr int kParts = layout::kTileN / Numbers::kLanes;
    auto const halves = [](void const* words) { return Numbers::halves(words); };
    typename Numbers::Float of_block[StripRange::kMost][kParts];
    auto const* const supers = static_cast<uint16_t const*>(from.supers) + strips.first * from.super_strip_stride;
    auto const* row = static_cast<uint8_t const*>(from.data) + strips.first * from.strip_stride + first * from.stride;
    for (int64_t i = 0; i < count;) {
      int64_t const block = (first + i) / from.super_groups;
      int64_t const end = std::min(count, (block + 1) * from.super_groups - first);
      for (int strip = 0; strip < strips.count; ++strip)
        load_strip<Numbers>(supers + strip * from.super_strip_stride + block * from.super_stride, sizeof(*supers),
                            halves, of_block[strip]);
      for (; i < end; ++i, row += from.stride) {
        for (int strip = 0; strip < strips.count; ++strip) {
          uint8_t const* const integers = row + strip * from.strip_stride;
          auto const scaled = [&](uint8_t const* lanes) {
            return load_numbers(lanes) * of_block[strip][(lanes - integers) / Numbers::kLanes];
          };
          load_strip<Numbers>(integers, 1, scaled, groups[i * apart + strip].*values);
        }
      }
    }
  }

  /// 16 numbers of `size` bytes that lie together.
  template <class Numbers, class Load>
  static QCUTLASS_INLINE void load_strip(void const* from, int64_t size, Load const& load_numbers, void* out) {
#pragma GCC unroll 2
    for (int lane = 0; lane < layout::kTileN; lane += Numbers::kLanes) {
      typename Numbers::Float const numbers = load_numbers(static_cast<uint8_t const*>(from) + lane * size);
      std::memcpy(static_cast<float*>(out) + lane, &numbers, sizeof(numbers));
    }
  }
};

/// Loads groups [first, first + count) of at most StripRange::kMost strips, [group][strip], as this machine does it
/// fastest. `implied`: whether to write implied offsets, too.
void load_groups(WeightArguments const& weights, StripRange strips, int64_t first, int64_t count, bool implied,
                 ChannelParameters* groups);

}  // namespace qcutlass::host
