// Scales and offsets of the 16 channels of a strip, as fp32.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "host/channel_vector.h"
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
    GroupOffsets const from = weights.offsets();
    std::fill_n(offsets, layout::kTileN, implied_offset(weights));
    load_floats(weights.scale_type, weights.scales, group * weights.scale_stride + n, count, scales);
    load_floats(from.type, from.data, group * from.stride + n, count, offsets);
    apply_global_scale(weights, *this);
  }

  /// Loads groups [first, first + count): for callers to which loading is a large part of the work. Inlined beside a
  /// product of many rows its branches cost more than they save.
  static QCUTLASS_INLINE void load(WeightArguments const& weights, int64_t strip, int64_t first, int64_t count,
                                   ChannelParameters* groups) {
    int64_t const n = strip * layout::kTileN;
    int64_t const channels = std::min<int64_t>(layout::kTileN, weights.n - n);
    GroupOffsets const from = weights.offsets();
    int64_t const scale = first * weights.scale_stride + n, offset = first * from.stride + n;
    load_all(weights.scale_type, weights.scales, scale, weights.scale_stride, count, channels, 0.0f,
             &ChannelParameters::scales, groups);
    load_all(from.type, from.data, offset, from.stride, count, channels, implied_offset(weights),
             &ChannelParameters::offsets, groups);
    for (int64_t i = 0; i < count; ++i) apply_global_scale(weights, groups[i]);
  }

  /// Asks for the scales and offsets of all groups of a strip, if there is such a strip. They lie a row of all channels
  /// apart, which no hardware foresees: a strip is multiplied in the time of a few misses, and has two for each group.
  static QCUTLASS_INLINE void prefetch(WeightArguments const& weights, int64_t strip) {
    int64_t const n = strip * layout::kTileN;
    if (n >= weights.n) return;
    prefetch(weights.scales, weights.scale_type, n, weights.scale_stride, weights.groups());
    GroupOffsets const from = weights.offsets();
    prefetch(from.data, from.type, n, from.stride, weights.groups());
  }

 private:
  static QCUTLASS_INLINE void apply_global_scale(WeightArguments const& weights, ChannelParameters& parameters) {
    if (weights.global_scale == nullptr) return;
    for (float& scale : parameters.scales) scale *= *weights.global_scale;
  }

  static QCUTLASS_INLINE void prefetch(void const* data, DType type, int64_t offset, int64_t stride, int64_t count) {
    if (type == DType::kNone) return;
    char const* line = static_cast<char const*>(data) + offset * size_of(type);
    for (int64_t i = 0; i < count; ++i, line += stride * size_of(type)) __builtin_prefetch(line);
  }

  using Channels = float[layout::kTileN];
  using Float = Vectors<8>::Float;
  using Int = Vectors<8>::Int;
  typedef uint16_t Words __attribute__((vector_size(16)));
  typedef uint8_t Bytes __attribute__((vector_size(16)));

  static float implied_offset(WeightArguments const& weights) {
    return weights.offsets().type == DType::kNone ? static_cast<float>(symmetric_zero(weights.packing)) : 0.0f;
  }

  /// As load_floats, group by group, over the value that others than the `channels` get. Whole strips of the usual
  /// types are vectors: the compiler would unroll loops of kTileN before it sees vectors in them.
  static QCUTLASS_INLINE void load_all(DType type, void const* data, int64_t offset, int64_t stride, int64_t count,
                                       int64_t channels, float other, Channels ChannelParameters::*values,
                                       ChannelParameters* groups) {
    auto const each = [&](auto const& load) {
      for (int64_t i = 0; i < count; ++i) load(offset + i * stride, groups[i].*values);
    };
    bool const is_whole = channels == layout::kTileN;
    if (is_whole && type == DType::kFloat16) {
      each([&](int64_t at, float* out) { load_words(data, at, out, [](Int x) { return decode_half<Float>(x); }); });
    } else if (is_whole && type == DType::kBFloat16) {
      each([&](int64_t at, float* out) { load_words(data, at, out, [](Int x) { return bit_cast<Float>(x << 16); }); });
    } else if (is_whole && type == DType::kUInt8) {
      each([&](int64_t at, float* out) { load_bytes(data, at, out); });
    } else {
      each([&](int64_t at, float* out) {
        std::fill_n(out, layout::kTileN, other);
        load_floats(type, data, at, channels, out);
      });
    }
  }

  template <class ToFloat>
  static QCUTLASS_INLINE void load_words(void const* data, int64_t offset, float* out, ToFloat const& to_float) {
    for (int i = 0; i < layout::kTileN; i += 8) {
      Words words;
      std::memcpy(&words, static_cast<uint16_t const*>(data) + offset + i, sizeof(words));
      Float const values = to_float(__builtin_convertvector(words, Int));
      std::memcpy(out + i, &values, sizeof(values));
    }
  }

  static QCUTLASS_INLINE void load_bytes(void const* data, int64_t offset, float* out) {
    Bytes bytes;
    std::memcpy(&bytes, static_cast<uint8_t const*>(data) + offset, sizeof(bytes));
    Bytes const words[] = {
        __builtin_shufflevector(bytes, Bytes{}, 0, 16, 1, 16, 2, 16, 3, 16, 4, 16, 5, 16, 6, 16, 7, 16),
        __builtin_shufflevector(bytes, Bytes{}, 8, 16, 9, 16, 10, 16, 11, 16, 12, 16, 13, 16, 14, 16, 15, 16)};
    load_words(words, 0, out, [](Int x) { return __builtin_convertvector(x, Float); });
  }
};

}  // namespace qcutlass::host
