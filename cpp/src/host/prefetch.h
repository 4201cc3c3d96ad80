// What weights ask of the caches.
#pragma once

#include "host/multiversion.h"

namespace qcutlass::host {

/// Asks for a line of weights that are read soon, and once: they should not push out what the caches hold for the code
/// that runs between products.
QCUTLASS_INLINE void prefetch_once(void const* line) { __builtin_prefetch(line, /*rw=*/0, /*locality=*/0); }

}  // namespace qcutlass::host
