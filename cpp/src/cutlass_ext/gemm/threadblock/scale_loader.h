// Global -> shared copies of the scales and zeros of a stage.
#pragma once

#include <type_traits>

#include "cutlass/arch/memory_sm80.h"
#include "cutlass/fast_math.h"
#include "cutlass_ext/layout/gate_halves.h"
#include "plan/footprint.h"
#include "qcutlass/types.h"

namespace cutlass::gemm::threadblock {

/// A matrix [groups, channels] of scales or zeros. Its base, rows and row stride are multiples of 16 bytes.
struct GroupMatrix {
  uint8_t const* data;  // nullptr: absent, and row_bytes is 0
  int64_t stride;       // bytes
  int element_bytes;
  int row_bytes;
  qcutlass::DType type;

  /// The byte of a row at which a tile's byte `byte` lies, for a tile from `channel` on. `byte` is a multiple of 16,
  /// and the 16 bytes from there on belong to 16 channels at most.
  CUTLASS_DEVICE int byte(layout::NoHalves const&, int channel, int byte) const {
    return channel * element_bytes + byte;
  }
  CUTLASS_DEVICE int byte(layout::GateHalves const& halves, int channel, int byte) const {
    return halves.channel(channel + (byte >> (element_bytes >> 1))) * element_bytes;  // 1, 2 or 4: shifts 0, 1, 2
  }
};

/// k -> group without a branch: FastDivmod for any divisor but 1, so it counts in units of eight columns,
/// and groups are multiples of 16.
struct GroupSize {
  static constexpr int kUnit = 8;
  FastDivmod divisor;

  GroupSize() = default;
  explicit GroupSize(int group_size) : divisor(group_size / kUnit) {}

  /// Whether no group ends within any of the runs of k columns that the matrix is cut into.
  CUTLASS_DEVICE bool is_multiple_of(int k) const { return divisor.divisor * kUnit % k == 0; }

  CUTLASS_DEVICE int group(int k) const {
    return __umulhi(unsigned(k) / kUnit, divisor.multiplier) >> divisor.shift_right;
  }
};

/// The second level of scales and minimums: float16 [super-blocks, channels], without data where there is one level.
struct SuperBlocks {
  GroupMatrix scales, minimums;
  GroupSize size;           // columns, a multiple of kSuperBlockStep
  int64_t bytes_an_expert;  // of either

  CUTLASS_DEVICE void select(int expert) {
    scales.data += expert * bytes_an_expert;
    if (minimums.data != nullptr) minimums.data += expert * bytes_an_expert;
  }
};
struct NoSuperBlocks {
  CUTLASS_DEVICE void select(int /*expert*/) {}
};
template <qcutlass::ScaleMode kMode>
using SuperBlocksOf = std::conditional_t<qcutlass::takes_super_blocks(kMode), SuperBlocks, NoSuperBlocks>;

/// Where a stage has the numbers of its super-block. The first row has room for fp32 numbers; integers of groups use
/// its first quarter, and the float16 numbers of the super-block its second half.
CUTLASS_HOST_DEVICE constexpr int super_byte(int channels) { return 2 * channels; }

/// Copies the rows of scales and zeros of a stage: row r serves k = r * kRowK .. + kRowK and is that of the group that
/// k lies in. Both rows lie side by side in shared memory, so that one copy by a few threads brings both. Types that
/// are narrower than the widest leave the tail of their place unused, or to super-blocks.
template <int kChannels, int kRows, int kRowK, qcutlass::ScaleMode kMode, int kThreads>
class GroupRowLoader {
  static constexpr bool kLevels = qcutlass::takes_super_blocks(kMode);
  using Supers = SuperBlocksOf<kMode>;

 public:
  static constexpr int kZeros = kChannels * qcutlass::scale_bytes(kMode);  // where a row's zeros begin
  static constexpr int kRowBytes = kZeros + kChannels * qcutlass::zero_bytes(kMode);
  static constexpr int kStageBytes = kRows * kRowBytes;

  template <class Halves>
  CUTLASS_DEVICE GroupRowLoader(GroupMatrix const& scales, GroupMatrix const& zeros, GroupSize const& group_size,
                                Supers const& supers, Halves const& halves, int first_channel)
      : group_size_(group_size), supers_(supers) {
    int const chunk = threadIdx.x % kChunks;
    bool const zero = chunk * 16 >= kZeros;
    GroupMatrix const* matrix = zero ? &zeros : &scales;
    int byte = chunk * 16 - (zero ? kZeros : 0);
    row_ = threadIdx.x < kRowStep * kChunks ? threadIdx.x / kChunks : kRows;
    if constexpr (kLevels) {
      is_super_ = supers.scales.data != nullptr && byte >= super_byte(kChannels);
      if (is_super_) {
        matrix = zero ? &supers.minimums : &supers.scales;
        byte -= super_byte(kChannels);
        if (row_ > 0) row_ = kRows;
      }
    }
    int const first_byte = matrix->byte(halves, first_channel, byte);
    // Channels beyond the matrix keep what lies in the ring and are not stored.
    if (byte >= kChannels * matrix->element_bytes || first_byte >= matrix->row_bytes) row_ = kRows;
    data_ = matrix->data + first_byte;
    stride_ = unsigned(matrix->stride / 16);
  }

  /// The rows of the stage at k; zeros from end_k on, since what lies in the ring may be NaN.
  CUTLASS_DEVICE void copy(uint8_t* stage, int k, int end_k) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kIterations; ++i) {
      int const row_k = kRows == 1 ? k : k + (row_ + i * kRowStep) * kRowK;
      int group = group_size_.group(row_k);
      bool exists = row_ + i * kRowStep < kRows;
      if constexpr (kLevels) {
        if (is_super_) group = supers_.size.group(row_k);
        exists &= i == 0 || !is_super_;
      }
      if (exists)
        arch::cp_async_zfill<16, arch::CacheOperation::Global>(stage + threadIdx.x * 16 + i * kRowStep * kRowBytes,
                                                               data_ + uint64_t(unsigned(group)) * stride_ * 16,
                                                               row_k < end_k);
    }
  }

 private:
  static constexpr int kChunks = kRowBytes / 16;  // a row
  static constexpr int kRowStep = kThreads / kChunks;
  static constexpr int kIterations = (kRows + kRowStep - 1) / kRowStep;
  static_assert(kChannels % 16 == 0 && kRowStep > 0);

  GroupSize const& group_size_;
  Supers const& supers_;
  uint8_t const* data_;
  unsigned stride_;        // of the matrix, in chunks: 32 bits are enough
  int row_;                // this thread's first; kRows if it has none
  bool is_super_ = false;  // it copies numbers of super-blocks
};

/// The loader of products without scales before the sums: loads nothing.
struct NoGroupRows {
  static constexpr int kStageBytes = 0;
  template <class Halves>
  CUTLASS_DEVICE NoGroupRows(GroupMatrix const&, GroupMatrix const&, GroupSize const&, NoSuperBlocks const&,
                             Halves const&, int) {}
  CUTLASS_DEVICE void copy(uint8_t*, int, int) const {}
};

/// The loader of a scale mode: kRows rows for each of the kSlices slices of kSliceK columns of a stage.
template <int kChannels, int kSlices, int kRows, int kSliceK, qcutlass::ScaleMode kMode, int kThreads>
struct GroupRowLoaderOf {
  using Type = GroupRowLoader<kChannels, kSlices * kRows, kSliceK / kRows, kMode, kThreads>;
};
template <int kChannels, int kSlices, int kSliceK, qcutlass::ScaleMode kMode, int kThreads>
struct GroupRowLoaderOf<kChannels, kSlices, 0, kSliceK, kMode, kThreads> {
  using Type = NoGroupRows;
};

}  // namespace cutlass::gemm::threadblock
