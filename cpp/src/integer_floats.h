// Integers in the last bits of floats.
//
// From 2^23 to 2^24 floats are the integers, and their bits are consecutive. So 1.5 * 2^23, in the middle, plus a
// number of magnitude up to 2^22 is that number rounded to even, and the low bits of the sum are those of the integer;
// the other way round, integers added to its bits become floats by one exact subtraction. Conversions run at a fraction
// of the rate of either.
#pragma once

#include <cstdint>

namespace qcutlass {

inline constexpr float kIntegerFloat = 0x1.8p23f;
inline constexpr int32_t kIntegerFloatBits = 0x4b400000;

#ifdef __CUDACC__
/// The lowest bytes of four words, the first one's lowest.
__device__ inline uint32_t pack_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}
#endif

}  // namespace qcutlass
