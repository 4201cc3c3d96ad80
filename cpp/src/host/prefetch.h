// What weights ask of the caches.
#pragma once

#include <cstdint>

#include "host/multiversion.h"
#include "qcutlass/layout.h"

namespace qcutlass::host {

inline constexpr int64_t kCacheLine = 64;  ///< bytes: of x86 and of most Arm processors

/// How far ahead of what is read, in bytes: some 300 ns at 14 GB/s, what memory takes to answer. Processors do it
/// themselves within pages of as many bytes, and begin anew behind each.
inline constexpr int64_t kPrefetchDistance = 4096;

/// Asks for a line of weights that are read soon, and once: they should not push out what the caches hold for the code
/// that runs between products. It may lie behind the end of the weights.
QCUTLASS_INLINE void prefetch_once(void const* line) { __builtin_prefetch(line, /*rw=*/0, /*locality=*/0); }

/// Asks for the packed tile that is `distance` bytes behind this one.
QCUTLASS_INLINE void prefetch_tile(uint8_t const* packed, int64_t distance = kPrefetchDistance) {
#pragma GCC unroll 8
  for (int64_t byte = 0; byte < layout::kTileBytes; byte += kCacheLine) prefetch_once(packed + distance + byte);
}

}  // namespace qcutlass::host
