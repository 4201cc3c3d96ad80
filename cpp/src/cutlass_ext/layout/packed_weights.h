// Layout tag of the packed weights: what the iterators and converters need to know of qcutlass/layout.h, and proof that
// they agree.
#pragma once

#include "cutlass/cutlass.h"
#include "qcutlass/layout.h"

namespace cutlass::layout {

/// Fragment-order weights for 16-bit activations. A lane's 16 bytes of a tile are `kSteps` k16 steps of `kWords` 32-bit
/// words.
template <qcutlass::Packing kPacking_>
struct PackedWeights {
  static constexpr qcutlass::Packing kPacking = kPacking_;
  static constexpr int kBits = qcutlass::bits_of(kPacking);
  static constexpr int kTileK = qcutlass::layout::tile_k(kPacking);
  static constexpr int kTileBytes = qcutlass::layout::kTileBytes;
  static constexpr int kTileChannels = qcutlass::layout::kTileN;
  static constexpr int kSteps = kTileK / 16;
  static constexpr int kWords = 4 / kSteps;

  /// The register converters (arch/dequantize.h) take element `odd` of register `reg` of step `step` of a lane's
  /// fragment from this bit of the lane's 128 bits.
  static constexpr int converter_bit(int step, int reg, int odd) {
    return kBits == 4 ? step * 32 + (reg + 4 * odd) * 4 : step * 64 + (2 * reg + odd) * 8;
  }

  /// Whether that is the place where layout.h keeps the code of the m16n8k16 A fragment's element: register `reg` of
  /// lane 4g + t holds row g + 8 * (reg % 2), k = 2t + 8 * (reg / 2) + odd (PTX ISA, "Matrix Fragments for
  /// mma.m16n8k16").
  static constexpr bool agrees_with_layout() {
    for (int lane = 0; lane < 32; ++lane)
      for (int step = 0; step < kSteps; ++step)
        for (int reg = 0; reg < 4; ++reg)
          for (int odd = 0; odd < 2; ++odd) {
            int const row = lane / 4 + 8 * (reg % 2), k = step * 16 + lane % 4 * 2 + 8 * (reg / 2) + odd;
            auto const p = qcutlass::layout::position_in_tile(kPacking, row, k);
            if (p.byte * 8 + p.bit != lane * 128 + converter_bit(step, reg, odd)) return false;
          }
    return true;
  }
};

static_assert(PackedWeights<qcutlass::Packing::kW4A16>::agrees_with_layout());
static_assert(PackedWeights<qcutlass::Packing::kW8A16>::agrees_with_layout());

}  // namespace cutlass::layout
