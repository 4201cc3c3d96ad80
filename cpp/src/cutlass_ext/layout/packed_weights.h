// Layout tag of the packed weights: what the iterators and converters need to know of qcutlass/layout.h, and proof that
// they agree.
#pragma once

#include "cutlass/cutlass.h"
#include "qcutlass/layout.h"

namespace cutlass::layout {

/// Packed weights. A tile is `kSteps` steps, of 16 k for 16-bit activations and of 32 k for those of 8 bits; a lane's
/// part of a step is `kWords` 32-bit words. (Of kW4A8, whose codes lie as those of kW4A16, other lanes have them.)
template <qcutlass::Packing kPacking_>
struct PackedWeights {
  static constexpr qcutlass::Packing kPacking = kPacking_;
  static constexpr int kBits = qcutlass::bits_of(kPacking);
  static constexpr int kTileK = qcutlass::layout::tile_k(kPacking);
  static constexpr int kTileBytes = qcutlass::layout::kTileBytes;
  static constexpr int kTileChannels = qcutlass::layout::kTileN;
  static constexpr bool kConverts = qcutlass::layout::in_fragment_order(kPacking);
  static constexpr int kStepK = 32 / qcutlass::activation_bytes(kPacking);
  static constexpr int kSteps = kTileK / kStepK;
  static constexpr int kWords = 4 / kSteps;
  static constexpr int kRegisterK = kStepK / 8;  // elements of an A fragment's register

  /// The 16 bytes of a tile that a lane names: to a 128-bit load, to have them, or, where codes are not converted, to
  /// ldmatrix.x4, for which lane l names row l % 8 of matrix l / 8 and has word l % 4 of row l / 4 of every matrix.
  static constexpr int lane_byte(int lane) {
    if (kConverts) return lane * 16;
    return int(qcutlass::layout::position_in_tile(kPacking, lane % 16, lane / 16 * 16).byte);
  }

  /// Of kW4A8 a lane's four codes of a register are k 4t to 4t + 3, where words have k 2t, 2t + 1, 2t + 8 and 2t + 9 of
  /// each 16: those of two neighbours, from this byte of the tile on 16 bytes each ...
  static constexpr int codes_byte(int lane) { return (lane / 4 * 4 + lane * 2 % 4) * qcutlass::layout::kLaneBytes; }
  /// ... and of their two words, 0 to 3 of the first and 4 to 7 of the second, these bytes, a hexadecimal digit each. A
  /// byte has rows g and g + 8.
  static constexpr uint32_t bytes_of_k(int lane) { return lane % 4 < 2 ? 0x6420 : 0x7531; }

  /// Element `i` of register `reg` of step `step` of a lane's A fragment is taken from this bit of the tile: by the
  /// register converters (arch/dequantize.h), or, where they are not converted, by ldmatrix.
  static constexpr int fragment_bit(int lane, int step, int reg, int i) {
    if (!kConverts) return (lane_byte(8 * reg + lane / 4) + lane % 4 * 4 + i) * 8;
    if (kStepK == 32) {
      int const byte = bytes_of_k(lane) >> 4 * i & 7;
      return (codes_byte(lane) + byte / 4 * 16 + (step * kWords + reg / 2) * 4 + byte % 4) * 8 + reg % 2 * 4;
    }
    return lane_byte(lane) * 8 + (kBits == 4 ? step * 32 + (reg + 4 * i) * 4 : step * 64 + (2 * reg + i) * 8);
  }

  /// Whether that is the place where layout.h keeps the code of that element: register `reg` of lane 4g + t holds row
  /// g + 8 * (reg % 2) and the k from kRegisterK * t + kStepK / 2 * (reg / 2) on (PTX ISA, "Matrix Fragments for
  /// mma.m16n8k16" and "m16n8k32").
  static constexpr bool agrees_with_layout() {
    for (int lane = 0; lane < 32; ++lane)
      for (int step = 0; step < kSteps; ++step)
        for (int reg = 0; reg < 4; ++reg)
          for (int i = 0; i < kRegisterK; ++i) {
            int const row = lane / 4 + 8 * (reg % 2);
            int const k = step * kStepK + lane % 4 * kRegisterK + kStepK / 2 * (reg / 2) + i;
            auto const p = qcutlass::layout::position_in_tile(kPacking, row, k);
            if (p.byte * 8 + p.bit != fragment_bit(lane, step, reg, i)) return false;
          }
    return true;
  }
};

static_assert(PackedWeights<qcutlass::Packing::kW4A16>::agrees_with_layout());
static_assert(PackedWeights<qcutlass::Packing::kW8A16>::agrees_with_layout());
static_assert(PackedWeights<qcutlass::Packing::kE2M1A16>::agrees_with_layout());
static_assert(PackedWeights<qcutlass::Packing::kE4M3A16>::agrees_with_layout());
static_assert(PackedWeights<qcutlass::Packing::kW4A8>::agrees_with_layout());
static_assert(PackedWeights<qcutlass::Packing::kW8A8>::agrees_with_layout());

}  // namespace cutlass::layout
