// Dot products of unsigned by signed bytes, four in each 32-bit lane, in the instructions of one kind of processor.
//
// Each kind is a class of one operation: sums[lane] += the sum over i < 4 of byte i of codes[lane] * that of a[lane],
// exactly; or of a[0], the same for every lane.
// Codes have kBits bits. Compilers know none of these instructions for vectors of this form, and their own functions
// for them cannot be called from functions that are compiled for several processors.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "host/channel_vector.h"
#include "host/multiversion.h"

namespace qcutlass::host {

/// Any processor.
struct PlainBytes {
  static constexpr int kLanes = 8;
  using Int = Vectors<kLanes>::Int;

  template <int kBits>
  static QCUTLASS_INLINE void add_dot(Int& sums, Int const& codes, int8_t const* a) {
    for (int i = 0; i < 4; ++i) sums += ((codes >> (8 * i)) & 0xff) * int32_t{a[i]};
  }
  template <int kBits>
  static QCUTLASS_INLINE void add_dot(Int& sums, Int const& codes, Int const& a) {
    for (int i = 0; i < 4; ++i) sums += ((codes >> (8 * i)) & 0xff) * ((a << (24 - 8 * i)) >> 24);
  }
};

#if defined(QCUTLASS_X86_LEVELS)

/// The four bytes of `a` in every lane.
template <class Int>
QCUTLASS_INLINE Int broadcast_bytes(int8_t const* a) {
  int32_t word;
  std::memcpy(&word, a, sizeof(word));
  return Int{} + word;
}

struct Avx2Bytes {
  static constexpr int kLanes = 8;
  using Int = Vectors<kLanes>::Int;

  /// Pairs are added in saturating int16, which hold those of 4-bit codes alone: 2 * 15 * 128.
  template <int kBits>
  static QCUTLASS_INLINE void add_dot(Int& sums, Int const& codes, int8_t const* a) {
    add_dot<kBits>(sums, codes, broadcast_bytes<Int>(a));
  }
  template <int kBits>
  static QCUTLASS_INLINE void add_dot(Int& sums, Int const& codes, Int const& bytes) {
    if constexpr (kBits == 4) {
      sums += dot_nibbles(codes, bytes, 1);
    } else {
      sums += dot_nibbles(codes & 0x0f0f0f0f, bytes, 1) + dot_nibbles((codes >> 4) & 0x0f0f0f0f, bytes, 16);
    }
  }

 private:
  static QCUTLASS_INLINE Int dot_nibbles(Int const& nibbles, Int const& bytes, int factor) {
    Int pairs, dot;
    asm("vpmaddubsw %2, %1, %0" : "=x"(pairs) : "x"(nibbles), "x"(bytes));
    asm("vpmaddwd %2, %1, %0" : "=x"(dot) : "x"(pairs), "x"(Int{} + (factor | factor << 16)));
    return dot;
  }
};

struct AvxVnniBytes {
  static constexpr int kLanes = 8;
  using Int = Vectors<kLanes>::Int;

  template <int kBits>
  static QCUTLASS_INLINE void add_dot(Int& sums, Int const& codes, int8_t const* a) {
    add_dot<kBits>(sums, codes, broadcast_bytes<Int>(a));
  }
  template <int kBits>
  static QCUTLASS_INLINE void add_dot(Int& sums, Int const& codes, Int const& a) {
    Int sum = sums;  // an element of an array as an operand would keep the array in memory
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(codes), "x"(a));
    sums = sum;
  }
};

struct Avx512VnniBytes {
  static constexpr int kLanes = 16;
  using Int = Vectors<kLanes>::Int;

  template <int kBits>
  static QCUTLASS_INLINE void add_dot(Int& sums, Int const& codes, int8_t const* a) {
    Int sum = sums;
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*reinterpret_cast<int8_t const(*)[4]>(a)));
    sums = sum;
  }
  template <int kBits>
  static QCUTLASS_INLINE void add_dot(Int& sums, Int const& codes, Int const& a) {
    Int sum = sums;
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(a));
    sums = sum;
  }
};

#else
using Avx2Bytes = PlainBytes;
using AvxVnniBytes = PlainBytes;
using Avx512VnniBytes = PlainBytes;
#endif

/// Which of the classes.
enum class ByteKernels : uint8_t { kPlain, kAvx2, kAvxVnni, kAvx512Vnni };

/// A function for each kind of processor: Kernel::multiply<Bytes>, which is QCUTLASS_INLINE, so that it is compiled for
/// the instructions of its caller.
template <class Kernel, class... Arguments>
struct ByteFunctions {
  using Function = void (*)(Arguments... arguments);

  static Function choose(ByteKernels kernels) {
    switch (kernels) {
      case ByteKernels::kAvx2: return avx2;
      case ByteKernels::kAvxVnni: return avx_vnni;
      case ByteKernels::kAvx512Vnni: return avx512_vnni;
      case ByteKernels::kPlain: break;
    }
    return plain;
  }

 private:
  static void plain(Arguments... arguments) { Kernel::template multiply<PlainBytes>(arguments...); }
  QCUTLASS_AVX2 static void avx2(Arguments... arguments) { Kernel::template multiply<Avx2Bytes>(arguments...); }
  QCUTLASS_AVX2 static void avx_vnni(Arguments... arguments) { Kernel::template multiply<AvxVnniBytes>(arguments...); }
  QCUTLASS_AVX512_VNNI static void avx512_vnni(Arguments... arguments) {
    Kernel::template multiply<Avx512VnniBytes>(arguments...);
  }
};

/// Those that this processor can run, the fastest one last.
inline std::vector<ByteKernels> byte_kernels() {
  std::vector<ByteKernels> found{ByteKernels::kPlain};
  if (has_avx2()) found.push_back(ByteKernels::kAvx2);
  if (has_avx_vnni()) found.push_back(ByteKernels::kAvxVnni);
  if (has_avx512_vnni()) found.push_back(ByteKernels::kAvx512Vnni);
  return found;
}

}  // namespace qcutlass::host
