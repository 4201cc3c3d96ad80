// Dot products of unsigned by signed bytes, four in each 32-bit lane, in the instructions of one kind of processor.
//
// Each kind is a class of one operation: sums[lane] += the sum over i < 4 of byte i of codes[lane] * that of a[lane],
// or of a[0], the same for every lane. All is exact. What is summed up are partial sums, in whatever form is added up
// fastest: plus() adds two of them, kMostPartialSums in all, whole() makes numbers of them.
// Compilers know none of these instructions for vectors of this form, and their own functions for them cannot be called
// from functions that are compiled for several processors.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "host/channel_vector.h"
#include "host/multiversion.h"
#include "host/numeric.h"
#include "qcutlass/types.h"

namespace qcutlass::host {

/// What codes, and the activations that they are multiplied by, may be.
enum class ByteRange {
  kFourBits,  ///< codes in [0, 15]
  kWeights,   ///< codes in [0, 255], activations in [-127, 127]
  kAll,       ///< codes in [0, 255], activations in [-128, 127]
};

/// Partial sums that hold the sum of so many dot products.
inline constexpr int kMostPartialSums = 8;

constexpr ByteRange range_of(Packing packing) {
  return bits_of(packing) == 4 ? ByteRange::kFourBits : ByteRange::kWeights;
}

/// Partial sums that are numbers, of codes as they are.
template <int kLanes_>
struct WholeSums {
  static constexpr int kLanes = kLanes_;
  using Int = typename Vectors<kLanes>::Int;

  /// Whether partial sums are numbers.
  template <ByteRange>
  static constexpr bool kIsWhole = true;
  /// What is taken off each code.
  template <ByteRange>
  static constexpr int32_t kLess = 0;
  /// Whether there is pairs().
  static constexpr bool kHasPairs = false;

  template <ByteRange>
  static QCUTLASS_INLINE Int plus(Int const& x, Int const& y) {
    return x + y;
  }
  template <ByteRange>
  static QCUTLASS_INLINE Int whole(Int const& partial) {
    return partial;
  }
};

/// Any processor.
struct PlainBytes : WholeSums<8> {
  template <ByteRange>
  static QCUTLASS_INLINE void add_dot(Int& sums, Int const& codes, int8_t const* a) {
    for (int i = 0; i < 4; ++i) sums += ((codes >> (8 * i)) & 0xff) * int32_t{a[i]};
  }
  template <ByteRange>
  static QCUTLASS_INLINE void add_dot(Int& sums, Int const& codes, Int const& a) {
    for (int i = 0; i < 4; ++i) sums += ((codes >> (8 * i)) & 0xff) * ((a << (24 - 8 * i)) >> 24);
  }
};

#if defined(QCUTLASS_X86_LEVELS)

/// The four bytes of `a` in every lane. The compiler would load those of eight rows at once, and run out of registers.
template <class Int>
QCUTLASS_INLINE Int broadcast_bytes(int8_t const* a) {
  Int lanes;
  asm("vpbroadcastd %1, %0" : "=x"(lanes) : "m"(*reinterpret_cast<int8_t const(*)[4]>(a)));
  return lanes;
}

/// vpmaddubsw adds two products of unsigned by signed bytes in int16, which saturates.
///
/// kFourBits: a product is at most 15 * 128, so that int16 holds 16 of them, kMostPartialSums pairs.
/// kWeights: codes less 128 are signed, and their magnitudes, at most 128, times activations of their signs: a pair is
/// at most 2 * 128 * 127 = 32512.
/// kAll: the products of both halves of a code, 4 bits each.
struct Avx2Bytes : WholeSums<8> {
  template <ByteRange kRange>
  static constexpr bool kIsWhole = kRange != ByteRange::kFourBits;
  template <ByteRange kRange>
  static constexpr int32_t kLess = kRange == ByteRange::kWeights ? 128 : 0;
  static constexpr bool kHasPairs = true;

  template <ByteRange kRange>
  static QCUTLASS_INLINE Int plus(Int const& x, Int const& y) {
    if constexpr (kIsWhole<kRange>)
      return x + y;
    else
      return bit_cast<Int>(bit_cast<Pairs>(x) + bit_cast<Pairs>(y));
  }
  template <ByteRange kRange>
  static QCUTLASS_INLINE Int whole(Int const& partial) {
    return kIsWhole<kRange> ? partial : add_pairs(partial, 1);
  }

  template <ByteRange kRange>
  static QCUTLASS_INLINE void add_dot(Int& sums, Int const& codes, int8_t const* a) {
    add_dot<kRange>(sums, codes, broadcast_bytes<Int>(a));
  }
  template <ByteRange kRange>
  static QCUTLASS_INLINE void add_dot(Int& sums, Int const& codes, Int const& a) {
    if constexpr (kRange == ByteRange::kFourBits) {
      Int sum = sums;  // as in add()
      asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(multiply(codes, a)));
      sums = sum;
    } else if constexpr (kRange == ByteRange::kWeights) {
      add(sums, add_pairs(pairs(codes, a), 1));
    } else {
      add(sums, add_pairs(multiply(codes & 0x0f0f0f0f, a), 1));
      add(sums, add_pairs(multiply((codes >> 4) & 0x0f0f0f0f, a), 16));
    }
  }

  /// Of codes less 128 the products of the first two bytes in the lower half of a lane, of the others in the upper one.
  static QCUTLASS_INLINE Int pairs(Int const& codes, Int const& a) {
    Int const centred = codes ^ static_cast<int32_t>(0x80808080);
    Int magnitudes, of_signs;
    asm("vpabsb %1, %0" : "=x"(magnitudes) : "x"(centred));
    asm("vpsignb %2, %1, %0" : "=x"(of_signs) : "x"(a), "x"(centred));
    return multiply(magnitudes, of_signs);
  }

 private:
  typedef int16_t Pairs __attribute__((vector_size(sizeof(Int))));

  static QCUTLASS_INLINE Int multiply(Int const& codes, Int const& a) {
    Int pairs;
    asm("vpmaddubsw %2, %1, %0" : "=x"(pairs) : "x"(codes), "x"(a));
    return pairs;
  }
  /// Here and now: the compiler would keep the products of many words, and add them up behind.
  static QCUTLASS_INLINE void add(Int& sums, Int const& dots) {
    Int sum = sums;
    asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(dots));
    sums = sum;
  }
  static QCUTLASS_INLINE Int add_pairs(Int const& pairs, int factor) {
    Int sums;
    asm("vpmaddwd %2, %1, %0" : "=x"(sums) : "x"(pairs), "x"(Int{} + (factor | factor << 16)));
    return sums;
  }
};

struct AvxVnniBytes : WholeSums<8> {
  template <ByteRange kRange>
  static QCUTLASS_INLINE void add_dot(Int& sums, Int const& codes, int8_t const* a) {
    add_dot<kRange>(sums, codes, broadcast_bytes<Int>(a));
  }
  template <ByteRange>
  static QCUTLASS_INLINE void add_dot(Int& sums, Int const& codes, Int const& a) {
    Int sum = sums;  // an element of an array as an operand would keep the array in memory
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(codes), "x"(a));
    sums = sum;
  }
};

struct Avx512VnniBytes : WholeSums<16> {
  template <ByteRange>
  static QCUTLASS_INLINE void add_dot(Int& sums, Int const& codes, int8_t const* a) {
    Int sum = sums;
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*reinterpret_cast<int8_t const(*)[4]>(a)));
    sums = sum;
  }
  template <ByteRange>
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
