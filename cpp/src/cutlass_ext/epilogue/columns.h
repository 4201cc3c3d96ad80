// Neighbouring elements of a row of the output: rounded, added, read and written with any alignment.
#pragma once

#include "cutlass/array.h"
#include "cutlass/bfloat16.h"
#include "cutlass/half.h"
#include "cutlass/numeric_conversion.h"
#include "cutlass_ext/arch/packed_math.h"

namespace cutlass::epilogue::thread {

/// Two values rounded to 16 bits.
template <class Element>
CUTLASS_DEVICE uint32_t pack_pair(float first, float second) {
  Array<float, 2> const pair = {first, second};
  Array<Element, 2> const result = NumericArrayConverter<Element, float, 2>::convert(pair);
  return reinterpret_cast<uint32_t const&>(result);
}

/// Rounds values as a store to memory between two separate operators would. Fused operators do this so that their bits
/// are those of separate ones.
template <class Element, int kCount>
CUTLASS_DEVICE void round_values(float (&values)[kCount]) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kCount; ++i) values[i] = float(Element(values[i]));
}

/// The elements of one access: kCount, or as many as 16 bytes hold.
template <class Element, int kCount>
using Access = AlignedArray<Element, kCount * sizeof(Element) < 16 ? kCount : 16 / int(sizeof(Element))>;

/// kCount elements that follow `from`, of which `count` exist. `vectors`: all do, or none, and they are aligned to an
/// Access.
template <class Element, int kCount>
CUTLASS_DEVICE AlignedArray<Element, kCount> load_columns(Element const* from, int count, bool vectors) {
  using Vector = Access<Element, kCount>;
  AlignedArray<Element, kCount> result;
  if (vectors) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount / int(Vector::kElements); ++i)
      if (count > 0) reinterpret_cast<Vector*>(&result)[i] = reinterpret_cast<Vector const*>(from)[i];
  } else {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i)
      if (i < count) result[i] = from[i];
  }
  return result;
}

/// A sum that is never fused with the product before it: rounded as the sum of a separate operator.
CUTLASS_DEVICE float add_separately(float a, float b) { return __fadd_rn(a, b); }

/// Rounds the values to Element and stores those that exist. `vectors`: all do, and `out` is aligned to an Access.
template <class Element, class Value, int kCount>
CUTLASS_DEVICE void store_channels(Element* out, Value const (&values)[kCount], int count, bool vectors) {
  using Vector = Access<Element, kCount>;
  Array<Element, kCount> const result =
      NumericArrayConverter<Element, Value, kCount>::convert(reinterpret_cast<Array<Value, kCount> const&>(values));
  if (vectors) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount / int(Vector::kElements); ++i)
      if (count > 0) reinterpret_cast<Vector*>(out)[i] = reinterpret_cast<Vector const*>(&result)[i];
  } else {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i)
      if (i < count) out[i] = result[i];
  }
}

/// Values rounded to elements.
template <class Element, int kCount>
CUTLASS_DEVICE AlignedArray<Element, kCount> round_columns(float const (&values)[kCount]) {
  AlignedArray<Element, kCount> result;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kCount / 2; ++i)
    reinterpret_cast<uint32_t*>(&result)[i] = pack_pair<Element>(values[2 * i], values[2 * i + 1]);
  return result;
}

/// The sums of elements, each rounded once.
template <class Element, int kCount>
CUTLASS_DEVICE AlignedArray<Element, kCount> add_columns(AlignedArray<Element, kCount> a,
                                                         AlignedArray<Element, kCount> const& b) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kCount / 2; ++i) {
    auto& pair = reinterpret_cast<uint32_t*>(&a)[i];
    pair = arch::PairMath<Element>::add(pair, reinterpret_cast<uint32_t const*>(&b)[i]);
  }
  return a;
}

/// Stores the first `count` elements of `words`. `vectors`: count covers all of them, or none.
template <class Element, class Words>
CUTLASS_DEVICE void store_words(Element* out, Words const& words, int count, bool vectors) {
  constexpr int kCount = int(sizeof(words) / sizeof(Element));
  if (vectors) {
    if (count > 0) *reinterpret_cast<Words*>(out) = words;
  } else {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i)
      if (i < count) out[i] = reinterpret_cast<Element const*>(&words)[i];
  }
}

}  // namespace cutlass::epilogue::thread
