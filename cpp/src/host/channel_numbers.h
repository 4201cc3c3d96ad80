// Numbers of few bits that lie together, as vectors of fp32: by instructions where the machine has them. GCC 12 makes
// several of each conversion, and converts vectors of _Float16 one by one.
#pragma once

#include <cstdint>
#include <cstring>

#include "host/channel_vector.h"
#include "host/multiversion.h"
#include "host/numeric.h"

namespace qcutlass::host {

template <class Vector>
QCUTLASS_INLINE Vector loaded(void const* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

typedef uint8_t Bytes8 __attribute__((vector_size(8)));
typedef uint8_t Bytes16 __attribute__((vector_size(16)));

/// By arithmetic on integers.
struct PlainNumbers {
  static constexpr int kLanes = 8;
  using Float = Vectors<kLanes>::Float;

  static QCUTLASS_INLINE Float halves(void const* from) { return decode_half<Float>(words(from)); }
  static QCUTLASS_INLINE Float bfloat16s(void const* from) { return bit_cast<Float>(words(from) << 16); }
  static QCUTLASS_INLINE Float unsigned_bytes(void const* from) { return __builtin_convertvector(bytes(from), Float); }
  static QCUTLASS_INLINE Float signed_bytes(void const* from) {
    return __builtin_convertvector((bytes(from) ^ 0x80) - 0x80, Float);
  }

 private:
  using Int = Vectors<kLanes>::Int;

  static QCUTLASS_INLINE Int words(void const* from) {
    return __builtin_convertvector(loaded<Vectors<kLanes>::Words>(from), Int);
  }
  static QCUTLASS_INLINE Int bytes(void const* from) {
    Bytes8 const narrow = loaded<Bytes8>(from);
    Bytes16 const wide = __builtin_shufflevector(narrow, Bytes8{}, 0, 8, 1, 8, 2, 8, 3, 8, 4, 8, 5, 8, 6, 8, 7, 8);
    return words(&wide);
  }
};

#if defined(QCUTLASS_X86_LEVELS)
/// By the instruction of x86-64-v3 or -v4 that converts so many numbers, 8 or 16, at once.
template <int kNumbers>
struct X86Numbers {
  static constexpr int kLanes = kNumbers;
  using Float = typename Vectors<kLanes>::Float;

  static QCUTLASS_INLINE Float halves(void const* from) {
    Float numbers;
    asm("vcvtph2ps %1, %0" : "=v"(numbers) : "v"(loaded<Words>(from)));
    return numbers;
  }
  static QCUTLASS_INLINE Float bfloat16s(void const* from) {
    Int words;
    asm("vpmovzxwd %1, %0" : "=v"(words) : "v"(loaded<Words>(from)));
    return bit_cast<Float>(words << 16);
  }
  static QCUTLASS_INLINE Float unsigned_bytes(void const* from) {
    Int bytes;
    asm("vpmovzxbd %1, %0" : "=v"(bytes) : "m"(as_bytes(from)));
    return __builtin_convertvector(bytes, Float);
  }
  static QCUTLASS_INLINE Float signed_bytes(void const* from) {
    Int bytes;
    asm("vpmovsxbd %1, %0" : "=v"(bytes) : "m"(as_bytes(from)));
    return __builtin_convertvector(bytes, Float);
  }

 private:
  using Int = typename Vectors<kLanes>::Int;
  using Words = typename Vectors<kLanes>::Words;
  using Bytes = uint8_t[kLanes];

  static QCUTLASS_INLINE Bytes const& as_bytes(void const* from) { return *static_cast<Bytes const*>(from); }
};

using Avx2Numbers = X86Numbers<8>;     ///< for functions of QCUTLASS_AVX2
using Avx512Numbers = X86Numbers<16>;  ///< for functions of QCUTLASS_AVX512
#else
using Avx2Numbers = PlainNumbers;
using Avx512Numbers = PlainNumbers;
#endif

}  // namespace qcutlass::host
