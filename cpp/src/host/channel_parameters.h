// Scales and offsets of the 16 channels of a strip, as fp32.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "host/channel_numbers.h"
#include "host/multiversion.h"
#include "host/numeric.h"
#include "qcutlass/layout.h"
#include "qcutlass/scheme.h"

namespace qcutlass::host {

struct ChannelParameters {
  float scales[layout::kTileN];
  float offsets[layout::kTileN];  ///< zeros or minimums

  /// Loads group `group` of the strip's channels; channels past n get scale and offset 0.
  QCUTLASS_INLINE void load(WeightArguments const& weights, int64_t strip, int64_t group) {
    int64_t const n = strip * layout::kTileN;
    int64_t const count = std::min<int64_t>(layout::kTileN, weights.n - n);
    std::fill_n(scales, layout::kTileN, 0.0f);
    std::fill_n(offsets, layout::kTileN, implied_offset(weights));
    load(weights.group_scales(), group, n, count, scales);
    load(weights.offsets(), group, n, count, offsets);
    apply_global_scale(weights, *this);
  }

  /// Loads groups [first, first + count): for callers to which loading is a large part of the work. Inlined beside a
  /// product of many rows its branches cost more than they save. `Numbers`: a class of channel_numbers.h.
  template <class Numbers>
  static QCUTLASS_INLINE void load(WeightArguments const& weights, int64_t strip, int64_t first, int64_t count,
                                   ChannelParameters* groups) {
    int64_t const n = strip * layout::kTileN;
    int64_t const channels = std::min<int64_t>(layout::kTileN, weights.n - n);
    load_all<Numbers>(weights.group_scales(), n, first, count, channels, 0.0f, &ChannelParameters::scales, groups);
    load_all<Numbers>(weights.offsets(), n, first, count, channels, implied_offset(weights),
                      &ChannelParameters::offsets, groups);
    for (int64_t i = 0; i < count; ++i) apply_global_scale(weights, groups[i]);
  }

  /// Asks for the scales and offsets of strips behind one. They lie a row of all channels apart, which no hardware
  /// foresees, and a strip is multiplied in the time of a few misses. Each of the strips of a line asks for its share
  /// of the next lines, as only so many may be on their way at once.
  static QCUTLASS_INLINE void prefetch_behind(WeightArguments const& weights, int64_t strip) {
    for (GroupParameters const& from : {weights.group_scales(), weights.offsets()}) {
      prefetch_behind(from.data, from.type, strip, weights.n, from.stride, weights.groups());
      if (from.supers != nullptr)
        prefetch_behind(from.supers, DType::kFloat16, strip, weights.n, from.super_stride, weights.super_blocks());
    }
  }

 private:
  static QCUTLASS_INLINE void apply_global_scale(WeightArguments const& weights, ChannelParameters& parameters) {
    if (weights.global_scale == nullptr) return;
    for (float& scale : parameters.scales) scale *= *weights.global_scale;
  }

  static QCUTLASS_INLINE void prefetch_behind(void const* data, DType type, int64_t strip, int64_t n, int64_t stride,
                                              int64_t count) {
    if (type == DType::kNone) return;
    int64_t const size = size_of(type), strips = std::max<int64_t>(kLineBytes / (layout::kTileN * size), 1);
    int64_t const channel = (strip + strips) * layout::kTileN, first = strip % strips;
    if (channel >= n) return;
    char const* line = static_cast<char const*>(data) + (first * stride + channel) * size;
    for (int64_t i = first; i < count; i += strips, line += strips * stride * size) __builtin_prefetch(line);
  }

  static constexpr int64_t kLineBytes = 64;  ///< of a cache

  /// `count` channels from n on of one group.
  static QCUTLASS_INLINE void load(GroupParameters const& from, int64_t group, int64_t n, int64_t count, float* out) {
    load_floats(from.type, from.data, group * from.stride + n, count, out);
    if (from.supers == nullptr) return;
    float supers[layout::kTileN];
    load_floats(DType::kFloat16, from.supers, group / from.super_groups * from.super_stride + n, count, supers);
    for (int64_t i = 0; i < count; ++i) out[i] *= supers[i];
  }

  using Channels = float[layout::kTileN];

  static float implied_offset(WeightArguments const& weights) {
    return weights.offsets().type == DType::kNone ? static_cast<float>(symmetric_zero(weights.packing)) : 0.0f;
  }

  /// Loads groups [first, first + count), over the value that others than the `channels` get. Whole strips of the usual
  /// types are vectors: the compiler would unroll loops of kTileN before it sees vectors in them.
  template <class Numbers>
  static QCUTLASS_INLINE void load_all(GroupParameters const& from, int64_t n, int64_t first, int64_t count,
                                       int64_t channels, float other, Channels ChannelParameters::*values,
                                       ChannelParameters* groups) {
    char const* const data = static_cast<char const*>(from.data);
    auto const load_strips = [&](auto const& load_numbers) {
      int64_t const size = size_of(from.type), stride = from.stride * size;
      char const* at = data + (first * from.stride + n) * size;
      for (int64_t i = 0; i < count; ++i, at += stride) load_strip<Numbers>(at, size, load_numbers, groups[i].*values);
    };
    bool const is_whole = channels == layout::kTileN;
    if (is_whole && from.supers != nullptr) return load_super_blocks<Numbers>(from, n, first, count, values, groups);
    if (is_whole && from.type == DType::kFloat16) return load_strips(Numbers::halves);
    if (is_whole && from.type == DType::kBFloat16) return load_strips(Numbers::bfloat16s);
    if (is_whole && from.type == DType::kFloat32) return load_strips(loaded<typename Numbers::Float>);
    if (is_whole && from.type == DType::kUInt8) return load_strips(Numbers::unsigned_bytes);
    for (int64_t i = 0; i < count; ++i) {
      std::fill_n(groups[i].*values, layout::kTileN, other);
      load(from, first + i, n, channels, groups[i].*values);
    }
  }

  /// Integers of whole strips, each times the number of its super-block, which is loaded once.
  template <class Numbers>
  static QCUTLASS_INLINE void load_super_blocks(GroupParameters const& from, int64_t n, int64_t first, int64_t count,
                                                Channels ChannelParameters::*values, ChannelParameters* groups) {
    if (from.type == DType::kInt8)
      load_integers<Numbers>(from, n, first, count, Numbers::signed_bytes, values, groups);
    else
      load_integers<Numbers>(from, n, first, count, Numbers::unsigned_bytes, values, groups);
  }

  template <class Numbers, class Load>
  static QCUTLASS_INLINE void load_integers(GroupParameters const& from, int64_t n, int64_t first, int64_t count,
                                            Load const& load_numbers, Channels ChannelParameters::*values,
                                            ChannelParameters* groups) {
    using Float = typename Numbers::Float;
    auto const* const supers = static_cast<uint16_t const*>(from.supers);
    auto const* at = static_cast<uint8_t const*>(from.data) + first * from.stride + n;
    for (int64_t i = 0; i < count;) {
      int64_t const block = (first + i) / from.super_groups;
      int64_t const end = std::min(count, (block + 1) * from.super_groups - first);
      Float of_block[layout::kTileN / Numbers::kLanes];
      load_strip<Numbers>(supers + block * from.super_stride + n, sizeof(*supers), Numbers::halves, of_block);
      for (; i < end; ++i, at += from.stride) {
        auto const scaled = [&](uint8_t const* lanes) {
          return load_numbers(lanes) * of_block[(lanes - at) / Numbers::kLanes];
        };
        load_strip<Numbers>(at, 1, scaled, groups[i].*values);
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

/// Loads groups [first, first + count) of a strip as this machine does it fastest.
void load_groups(WeightArguments const& weights, int64_t strip, int64_t first, int64_t count,
                 ChannelParameters* groups);

}  // namespace qcutlass::host
