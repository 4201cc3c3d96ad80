// Scales and zeros of the 16 channels of a strip, as fp32.
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
  float zeros[layout::kTileN];

  /// Loads group `group` of the strip's channels; channels past n get scale and zero 0.
  QCUTLASS_INLINE void load(WeightArguments const& weights, int64_t strip, int64_t group) {
    int64_t const count = std::min<int64_t>(layout::kTileN, weights.n - strip * layout::kTileN);
    if (count == layout::kTileN) {
      int64_t const n = strip * layout::kTileN;
      load_all(weights.scale_type, weights.scales, group * weights.scale_stride + n, scales);
      if (weights.zero_type == DType::kNone) return fill(static_cast<float>(symmetric_zero(weights.bits())), zeros);
      return load_all(weights.zero_type, weights.zeros, group * weights.zero_stride + n, zeros);
    }
    int64_t const n = strip * layout::kTileN;
    fill(0.0f, scales);
    fill(weights.zero_type == DType::kNone ? static_cast<float>(symmetric_zero(weights.bits())) : 0.0f, zeros);
    load_floats(weights.scale_type, weights.scales, group * weights.scale_stride + n, count, scales);
    load_floats(weights.zero_type, weights.zeros, group * weights.zero_stride + n, count, zeros);
  }

 private:
  using Channels = float[layout::kTileN];
  using Float = Vectors<8>::Float;
  using Int = Vectors<8>::Int;
  typedef uint16_t Words __attribute__((vector_size(16)));
  typedef uint8_t Bytes __attribute__((vector_size(16)));

  static QCUTLASS_INLINE void fill(float value, Channels& out) {
    for (float& x : out) x = value;
  }

  /// As load_floats of kTileN elements, whose loop the compiler would unroll before it sees vectors in it.
  static QCUTLASS_INLINE void load_all(DType type, void const* data, int64_t offset, Channels& out) {
    Words words[2];
    auto const convert = [&](auto const& to_float) {
      for (int i = 0; i < 2; ++i) {
        Float const values = to_float(__builtin_convertvector(words[i], Int));
        std::memcpy(out + 8 * i, &values, sizeof(values));
      }
    };
    switch (type) {
      case DType::kFloat16:
        std::memcpy(words, static_cast<uint16_t const*>(data) + offset, sizeof(words));
        return convert([](Int x) { return decode_half<Float>(x); });
      case DType::kBFloat16:
        std::memcpy(words, static_cast<uint16_t const*>(data) + offset, sizeof(words));
        return convert([](Int x) { return bit_cast<Float>(x << 16); });
      case DType::kUInt8: {
        Bytes bytes;
        std::memcpy(&bytes, static_cast<uint8_t const*>(data) + offset, sizeof(bytes));
        Bytes const low =
            __builtin_shufflevector(bytes, Bytes{}, 0, 16, 1, 16, 2, 16, 3, 16, 4, 16, 5, 16, 6, 16, 7, 16);
        Bytes const high =
            __builtin_shufflevector(bytes, Bytes{}, 8, 16, 9, 16, 10, 16, 11, 16, 12, 16, 13, 16, 14, 16, 15, 16);
        words[0] = bit_cast<Words>(low);
        words[1] = bit_cast<Words>(high);
        return convert([](Int x) { return __builtin_convertvector(x, Float); });
      }
      default: return load_floats(type, data, offset, layout::kTileN, out);
    }
  }
};

}  // namespace qcutlass::host
