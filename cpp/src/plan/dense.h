// The tactic that dequantises slices of the weights, rows n to n + slice, into a workspace and multiplies each with the
// vendor's dense 16-bit product. The caller runs it; here it is named, sized and priced.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "plan/gpu_class.h"
#include "plan/problem.h"

namespace qcutlass::dense {

/// Fewer rows of activations never pay.
inline constexpr int64_t kMinRows = 128;
/// Bounds the dequantised weights of a slice, and the fp32 sums of one where a bias or an activation follows.
inline constexpr int64_t kMaxSliceBytes = int64_t(64) << 20;
/// Slices but the last are multiples of this many rows.
inline constexpr int64_t kSliceRows = 128;

/// Its name.
std::string tactic(Problem const& problem);

/// Whether a slice of some width keeps to the bounds.
bool fits(Problem const& problem);

/// Prediction for slices of so many rows.
Cost predict(Problem const& problem, DeviceTraits const& device, GpuClass const& gpu, int64_t slice);

/// The slice with the least predicted time, and that time. `workspace_bytes` holds, each rounded up to 256 bytes: the
/// weights `[slice, k]`; the fp32 sums `[m, slice rounded up to 8]` if there is a bias or an activation; and the
/// activations `[m, k]` if they are permuted or scaled.
Candidate candidate(Problem const& problem, DeviceTraits const& device);

}  // namespace qcutlass::dense
