// Global -> shared copies of the scales and zeros of a stage.
#pragma once

#include "cutlass/arch/memory_sm80.h"
#include "cutlass/fast_math.h"
#include "gemm/tactics.h"

namespace cutlass::gemm::threadblock {

/// A matrix [groups, channels] of scales or zeros. Its base, rows and row stride are multiples of 16 bytes.
struct GroupMatrix {
  uint8_t const* data;  // nullptr: absent, and row_bytes is 0
  int64_t stride;       // bytes
  int element_bytes;
  int row_bytes;
  qcutlass::DType type;
};

/// k -> group without a branch: FastDivmod for any divisor but 1, so it counts in eighths of k, and groups are
/// multiples of 16.
struct GroupSize {
  static constexpr int kUnit = 8;
  FastDivmod divisor;

  GroupSize() = default;
  explicit GroupSize(int group_size) : divisor(group_size / kUnit) {}

  CUTLASS_DEVICE int group(int k) const { return __umulhi(k / kUnit, divisor.multiplier) >> divisor.shift_right; }
};

/// Row r of a stage serves k = r * kRowK .. + kRowK, and is the row of the group that k lies in. A stage takes `kRows`
/// of them. kElementBytes is the widest type's size: rows of narrower types leave the tail of their place unused.
/// kSkipIdleWarps: a branch around the copies for the warps that have none, instead of predicates.
template <int kChannels, int kRows, int kRowK, int kElementBytes, int kThreads, bool kSkipIdleWarps>
struct GroupRowLoader {
  static constexpr int kRowBytes = kChannels * kElementBytes;
  static constexpr int kStageBytes = kRows * kRowBytes;

  /// All rows of the stage that starts at k, `left` before the end, in 16-byte chunks spread over the threads. Rows
  /// beyond the end are zeros, since what lies in the ring may be NaN; channels beyond the matrix are left as they are
  /// and not stored.
  static CUTLASS_DEVICE void copy(uint8_t* stage, GroupMatrix const& matrix, GroupSize const& group_size,
                                  int first_channel, int k, int left) {
    // Few threads have anything to do here, and a mainloop has no registers to spare: the thread index is read anew, so
    // that nothing computed from it is kept from one stage to the next.
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    if (kSkipIdleWarps && thread >= kActive) return;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kIterations; ++i) {
      int const row = thread / kChunks + i * kRowStep, byte = thread % kChunks * 16;
      int const first_byte = first_channel * matrix.element_bytes + byte;
      if (thread < kRowStep * kChunks && row < kRows && byte < kChannels * matrix.element_bytes &&
          first_byte < matrix.row_bytes)
        arch::cp_async_zfill<16, arch::CacheOperation::Global>(
            stage + row * kRowBytes + byte,
            matrix.data + group_size.group(k + row * kRowK) * matrix.stride + first_byte, row * kRowK < left);
    }
  }

 private:
  static constexpr int kChunks = kRowBytes / 16;  // a row
  static constexpr int kRowStep = kThreads / kChunks;
  static constexpr int kActive = (kChunks * kRows + 31) / 32 * 32;  // whole warps
  static constexpr int kIterations = (kRows + kRowStep - 1) / kRowStep;
};

}  // namespace cutlass::gemm::threadblock
