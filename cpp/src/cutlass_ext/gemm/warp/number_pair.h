// Shared memory -> registers of what sums are scaled by: the numbers of a lane's rows g and g + 8 of a strip in a row
// of scales.
#pragma once

#include "cutlass/array.h"
#include "cutlass/float8.h"
#include "cutlass/half.h"
#include "cutlass_ext/arch/packed_math.h"
#include "qcutlass/types.h"

namespace cutlass::gemm::warp {

/// Words, aligned ones, that elements `index` and `index + 8` of a row lie in, in its bytes.
class ElementPair {
 public:
  CUTLASS_DEVICE ElementPair(int index, int element_bytes)
      : first_(index * element_bytes / 4 * 4), step_(8 * element_bytes), byte_(index * element_bytes % 4) {}

  CUTLASS_DEVICE uint32_t word(uint8_t const* row, int i) const {
    return *reinterpret_cast<uint32_t const*>(row + first_ + i * step_);
  }
  /// Where the element begins in its word: the same for both.
  CUTLASS_DEVICE uint32_t byte() const { return byte_; }

 private:
  int const first_, step_;
  uint32_t const byte_;
};

/// Scales of a lane's rows g and g + 8, of type float16, bfloat16, float32, e8m0 or e4m3. Words come early, without a
/// branch, so that nothing waits for them; numbers are made of them when they are needed. kHasBytes: the last two
/// types, which cost a branch, are possible.
template <bool kHasBytes>
class NumberPair {
 public:
  using Words = Array<uint32_t, 2>;

  /// Of elements `index` and `index + 8` of the first strip.
  CUTLASS_DEVICE NumberPair(int index, qcutlass::DType type)
      : type_(type), bytes_(size(type)), pair_(index, bytes_), selector_(selector(type, pair_.byte())) {}

  CUTLASS_DEVICE bool are_powers() const { return kHasBytes && type_ == qcutlass::DType::kFloat8E8M0; }

  CUTLASS_DEVICE Words load(uint8_t const* row, int strip) const {
    row += strip * 16 * bytes_;
    return {pair_.word(row, 0), pair_.word(row, 1)};
  }

  /// kPowers: the type is known to be e8m0.
  template <bool kPowers>
  CUTLASS_DEVICE float2 numbers(Words const& words) const {
    uint32_t const low = arch::permute_bytes(words[0], 0, selector_),
                   high = arch::permute_bytes(words[1], 0, selector_);
    if constexpr (kPowers) return {power(low), power(high)};
    if constexpr (kHasBytes) {
      if (type_ == qcutlass::DType::kFloat8E8M0) return {power(low), power(high)};
      if (type_ == qcutlass::DType::kFloat8E4M3) return {float8(low), float8(high)};
    }
    bool const is_half = type_ == qcutlass::DType::kFloat16;  // no branch
    return {is_half ? half(low) : __uint_as_float(low), is_half ? half(high) : __uint_as_float(high)};
  }

 private:
  static CUTLASS_DEVICE int size(qcutlass::DType type) {
    if (type == qcutlass::DType::kFloat16 || type == qcutlass::DType::kBFloat16) return 2;
    return type == qcutlass::DType::kFloat32 ? 4 : 1;
  }

  /// Digit by digit the source of a byte: 0 to 3 the element's word, 4 to 7 zeros.
  static CUTLASS_DEVICE uint32_t selector(qcutlass::DType type, uint32_t byte) {
    switch (type) {
      case qcutlass::DType::kFloat16: return 0x4410 + byte * 0x11;
      case qcutlass::DType::kBFloat16: return 0x1044 + byte * 0x1100;  // the upper half of a float
      case qcutlass::DType::kFloat32: return 0x3210;
      default: return 0x4440 + byte;
    }
  }

  static CUTLASS_DEVICE float half(uint32_t bits) { return float(half_t::bitcast(uint16_t(bits))); }
  static CUTLASS_DEVICE float float8(uint32_t bits) { return float(float_e4m3_t::bitcast(uint8_t(bits))); }
  /// 2^(code - 127), whose least is a subnormal; 255 is NaN.
  static CUTLASS_DEVICE float power(uint32_t code) {
    float const value = __uint_as_float(max(code << 23, 0x00400000u));
    return fmaf(value, 0.f, value);  // infinity times 0 is NaN
  }

  qcutlass::DType const type_;
  int const bytes_;  // of an element
  ElementPair const pair_;
  uint32_t const selector_;
};

}  // namespace cutlass::gemm::warp
