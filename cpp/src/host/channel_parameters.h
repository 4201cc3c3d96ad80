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

// Eight numbers of 16 bits, or eight integers that were widened to them, as fp32.

/// fp16 by arithmetic on integers.
struct PlainHalves {
  static QCUTLASS_INLINE Vectors<8>::Float decode(Vectors<8>::Words const& words) {
    return decode_half<Vectors<8>::Float>(__builtin_convertvector(words, Vectors<8>::Int));
  }
};

/// The same in one instruction of x86-64-v3. GCC 12 converts vectors of _Float16 one by one.
#if defined(QCUTLASS_X86_LEVELS)
struct F16cHalves {
  static QCUTLASS_INLINE Vectors<8>::Float decode(Vectors<8>::Words const& words) {
    Vectors<8>::Float numbers;
    asm("vcvtph2ps %1, %0" : "=x"(numbers) : "x"(words));
    return numbers;
  }
};
#else
using F16cHalves = PlainHalves;
#endif

struct BFloat16s {
  static QCUTLASS_INLINE Vectors<8>::Float decode(Vectors<8>::Words const& words) {
    return bit_cast<Vectors<8>::Float>(__builtin_convertvector(words, Vectors<8>::Int) << 16);
  }
};

struct UnsignedBytes {
  static QCUTLASS_INLINE Vectors<8>::Float decode(Vectors<8>::Words const& words) {
    return __builtin_convertvector(__builtin_convertvector(words, Vectors<8>::Int), Vectors<8>::Float);
  }
};

struct SignedBytes {
  static QCUTLASS_INLINE Vectors<8>::Float decode(Vectors<8>::Words const& words) {
    Vectors<8>::Int const bits = __builtin_convertvector(words, Vectors<8>::Int);
    return __builtin_convertvector((bits ^ 0x80) - 0x80, Vectors<8>::Float);
  }
};

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
  /// product of many rows its branches cost more than they save. `Halves`: a class from above.
  template <class Halves>
  static QCUTLASS_INLINE void load(WeightArguments const& weights, int64_t strip, int64_t first, int64_t count,
                                   ChannelParameters* groups) {
    int64_t const n = strip * layout::kTileN;
    int64_t const channels = std::min<int64_t>(layout::kTileN, weights.n - n);
    load_all<Halves>(weights.group_scales(), n, first, count, channels, 0.0f, &ChannelParameters::scales, groups);
    load_all<Halves>(weights.offsets(), n, first, count, channels, implied_offset(weights), &ChannelParameters::offsets,
                     groups);
    for (int64_t i = 0; i < count; ++i) apply_global_scale(weights, groups[i]);
  }

  /// Asks for the scales and offsets of all groups of a strip, if there is such a strip. They lie a row of all channels
  /// apart, which no hardware foresees: a strip is multiplied in the time of a few misses, and has two for each group.
  static QCUTLASS_INLINE void prefetch(WeightArguments const& weights, int64_t strip) {
    int64_t const n = strip * layout::kTileN;
    if (n >= weights.n) return;
    for (GroupParameters const& from : {weights.group_scales(), weights.offsets()}) {
      prefetch(from.data, from.type, n, from.stride, weights.groups());
      if (from.supers != nullptr) prefetch(from.supers, DType::kFloat16, n, from.super_stride, weights.super_blocks());
    }
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

  /// `count` channels from n on of one group.
  static QCUTLASS_INLINE void load(GroupParameters const& from, int64_t group, int64_t n, int64_t count, float* out) {
    load_floats(from.type, from.data, group * from.stride + n, count, out);
    if (from.supers == nullptr) return;
    float supers[layout::kTileN];
    load_floats(DType::kFloat16, from.supers, group / from.super_groups * from.super_stride + n, count, supers);
    for (int64_t i = 0; i < count; ++i) out[i] *= supers[i];
  }

  using Channels = float[layout::kTileN];
  using Float = Vectors<8>::Float;
  using Words = Vectors<8>::Words;
  typedef uint8_t Bytes __attribute__((vector_size(16)));

  static float implied_offset(WeightArguments const& weights) {
    return weights.offsets().type == DType::kNone ? static_cast<float>(symmetric_zero(weights.packing)) : 0.0f;
  }

  /// Loads groups [first, first + count), over the value that others than the `channels` get. Whole strips of the usual
  /// types are vectors: the compiler would unroll loops of kTileN before it sees vectors in them.
  template <class Halves>
  static QCUTLASS_INLINE void load_all(GroupParameters const& from, int64_t n, int64_t first, int64_t count,
                                       int64_t channels, float other, Channels ChannelParameters::*values,
                                       ChannelParameters* groups) {
    bool const is_whole = channels == layout::kTileN;
    if (is_whole && from.supers != nullptr) return load_super_blocks<Halves>(from, n, first, count, values, groups);
    for (int64_t i = 0; i < count; ++i) {
      int64_t const at = (first + i) * from.stride + n;
      float* const out = groups[i].*values;
      if (is_whole && from.type == DType::kFloat16) {
        load_words<Halves>(from.data, at, out);
      } else if (is_whole && from.type == DType::kBFloat16) {
        load_words<BFloat16s>(from.data, at, out);
      } else if (is_whole && from.type == DType::kFloat32) {
        std::memcpy(out, static_cast<float const*>(from.data) + at, sizeof(Channels));
      } else if (is_whole && from.type == DType::kUInt8) {
        load_bytes<UnsignedBytes>(from.data, at, out);
      } else {
        std::fill_n(out, layout::kTileN, other);
        load(from, first + i, n, channels, out);
      }
    }
  }

  /// Integers of whole strips, each times the number of its super-block, which is loaded once.
  template <class Halves>
  static QCUTLASS_INLINE void load_super_blocks(GroupParameters const& from, int64_t n, int64_t first, int64_t count,
                                                Channels ChannelParameters::*values, ChannelParameters* groups) {
    bool const has_sign = from.type == DType::kInt8;
    for (int64_t i = 0; i < count;) {
      int64_t const block = (first + i) / from.super_groups;
      int64_t const end = std::min(count, (block + 1) * from.super_groups - first);
      Channels supers;
      load_words<Halves>(from.supers, block * from.super_stride + n, supers);
      for (; i < end; ++i) {
        int64_t const at = (first + i) * from.stride + n;
        float* const out = groups[i].*values;
        if (has_sign)
          load_bytes<SignedBytes>(from.data, at, out);
        else
          load_bytes<UnsignedBytes>(from.data, at, out);
        multiply(out, supers);
      }
    }
  }

  static QCUTLASS_INLINE void multiply(float* values, float const* factors) {
    for (int lane = 0; lane < layout::kTileN; lane += 8) {
      Float value, factor;
      std::memcpy(&value, values + lane, sizeof(value));
      std::memcpy(&factor, factors + lane, sizeof(factor));
      value *= factor;
      std::memcpy(values + lane, &value, sizeof(value));
    }
  }

  /// `Decode`: a class from above.
  template <class Decode>
  static QCUTLASS_INLINE void load_words(void const* data, int64_t offset, float* out) {
    for (int i = 0; i < layout::kTileN; i += 8) {
      Words words;
      std::memcpy(&words, static_cast<uint16_t const*>(data) + offset + i, sizeof(words));
      Float const values = Decode::decode(words);
      std::memcpy(out + i, &values, sizeof(values));
    }
  }

  template <class Decode>
  static QCUTLASS_INLINE void load_bytes(void const* data, int64_t offset, float* out) {
    Bytes bytes;
    std::memcpy(&bytes, static_cast<uint8_t const*>(data) + offset, sizeof(bytes));
    Bytes const words[] = {
        __builtin_shufflevector(bytes, Bytes{}, 0, 16, 1, 16, 2, 16, 3, 16, 4, 16, 5, 16, 6, 16, 7, 16),
        __builtin_shufflevector(bytes, Bytes{}, 8, 16, 9, 16, 10, 16, 11, 16, 12, 16, 13, 16, 14, 16, 15, 16)};
    load_words<Decode>(words, 0, out);
  }
};

/// Loads groups [first, first + count) of a strip as this machine does it fastest.
void load_groups(WeightArguments const& weights, int64_t strip, int64_t first, int64_t count,
                 ChannelParameters* groups);

}  // namespace qcutlass::host
