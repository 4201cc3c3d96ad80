// One fp32 value for each of the 16 channels of a strip, in vector registers.
#pragma once

#include <cstdint>
#include <cstring>

#include "host/multiversion.h"
#include "host/numeric.h"
#include "qcutlass/layout.h"

namespace qcutlass::host {

/// GCC's vectors: lane by lane arithmetic in whatever registers the target has.
template <int kLanes>
struct Vectors {
  typedef float Float __attribute__((vector_size(4 * kLanes)));
  typedef int32_t Int __attribute__((vector_size(4 * kLanes)));
  typedef uint16_t Words __attribute__((vector_size(2 * kLanes)));
  typedef __int128 Quads __attribute__((vector_size(4 * kLanes)));  ///< as quads of lanes
};

/// `kLanes`: channels that a register holds.
template <int kLanes>
class ChannelVector {
 public:
  static constexpr int kParts = layout::kTileN / kLanes;
  using Float = typename Vectors<kLanes>::Float;
  using Int = typename Vectors<kLanes>::Int;
  using Half = Vectors<layout::kTileN / 2>::Int;

  /// Integers of channels 0 to 7 and 8 to 15, as registers hold them.
  static QCUTLASS_INLINE void join(Half lower, Half upper, Int (&bits)[kParts]) {
    if constexpr (kParts == 1) {
      bits[0] = __builtin_shufflevector(lower, upper, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    } else {
      bits[0] = lower;
      bits[1] = upper;
    }
  }

  // Part by part: a copy of the whole array would keep it in memory.
  QCUTLASS_INLINE void load(float const* source) {
    for (int i = 0; i < kParts; ++i) std::memcpy(&part_[i], source + i * kLanes, sizeof(Float));
  }
  QCUTLASS_INLINE void store(float* target) const {
    for (int i = 0; i < kParts; ++i) std::memcpy(target + i * kLanes, &part_[i], sizeof(Float));
  }

  /// Bits [shift, shift + width of mask) of each channel's integer.
  QCUTLASS_INLINE void extract(Int const (&bits)[kParts], int shift, int mask) {
    for (int i = 0; i < kParts; ++i) part_[i] = __builtin_convertvector((bits[i] >> shift) & mask, Float);
  }

  /// The numbers of codes in bits [shift, shift + width of mask) of each channel's integer.
  template <Packing kPacking>
  QCUTLASS_INLINE void extract_codes(Int const (&bits)[kParts], int shift, int mask) {
    if constexpr (kPacking == Packing::kE4M3A16) {
      extract_e4m3(bits, shift);
    } else if constexpr (kPacking == Packing::kE2M1A16) {
      for (int i = 0; i < kParts; ++i) part_[i] = decode_e2m1<Float>(bits[i] >> shift);
    } else {
      extract(bits, shift, mask);
    }
  }

  /// The e4m3 number in bits [shift, shift + 8) of each channel's integer.
  QCUTLASS_INLINE void extract_e4m3(Int const (&bits)[kParts], int shift) {
    for (int i = 0; i < kParts; ++i) part_[i] = decode_e4m3<Float>(bits[i] >> shift);
  }

  /// this = (this - zero) * scale
  QCUTLASS_INLINE void dequantize(ChannelVector const& zero, ChannelVector const& scale) {
    for (int i = 0; i < kParts; ++i) part_[i] = (part_[i] - zero.part_[i]) * scale.part_[i];
  }
  /// this = this * scale - minimum
  QCUTLASS_INLINE void scale_less(ChannelVector const& minimum, ChannelVector const& scale) {
    for (int i = 0; i < kParts; ++i) part_[i] = part_[i] * scale.part_[i] - minimum.part_[i];
  }
  QCUTLASS_INLINE void add(ChannelVector const& x) {
    for (int i = 0; i < kParts; ++i) part_[i] += x.part_[i];
  }
  QCUTLASS_INLINE void add_product(ChannelVector const& x, float factor) {
    for (int i = 0; i < kParts; ++i) part_[i] += x.part_[i] * factor;
  }

 private:
  Float part_[kParts] = {};
};

}  // namespace qcutlass::host
