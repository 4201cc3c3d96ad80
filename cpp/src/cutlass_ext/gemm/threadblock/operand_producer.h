// Scales and zeros of integer weights that are scaled in fp32, from global memory to the operands of conversions: made
// by the warps of a wgmma kernel that have nothing else to do, those beside the producing thread.
//
// Types, sizes of groups and two levels are the launch's: they take branches, divisions and conversions for every row
// of scales. Consumers, each for its strip and between their MMAs, waited longer for these than they converted codes.
// Now they read a lane's operands of a step by one 128-bit load, whatever the types are.
#pragma once

#include "cutlass_ext/gemm/threadblock/ring_producer.h"
#include "cutlass_ext/gemm/threadblock/scale_loader.h"
#include "cutlass_ext/gemm/warp/group_scales.h"

namespace cutlass::gemm::threadblock {

/// Where they are: scales, and zeros or minimums, of one level or two, [groups, channels].
template <qcutlass::ScaleMode kMode>
struct OperandMatrices {
  GroupMatrix scales, zeros;
  SuperBlocksOf<kMode> supers;
  int k;  // columns; operands of those beyond are zeros
};

/// One of kOperandWarps warps, which take stages in turns: that many are on their way at once. SharedStorage has the
/// kRows rows of operands of a stage, of 16 columns each, at operands(place, row, strip), eight lanes' of a strip.
/// Every product begins in place 0; phases are kept per place.
template <class SharedStorage, int kStages, int kStageK, int kChannels, int kRows, qcutlass::ScaleMode kMode, int kBits>
class OperandProducer {
 public:
  static constexpr int kOperandWarps = 3;

  CUTLASS_DEVICE OperandProducer(SharedStorage& storage, RingBarriers<kStages>& barriers,
                                 OperandMatrices<kMode> const& from, GroupSize const& group_size, int warp, int lane)
      : storage_(storage),
        barriers_(barriers),
        from_(from),
        group_size_(group_size),
        lane_(lane),
        until_mine_(warp),
        row_steps_(group_size.is_multiple_of(2 * kRowK) ? 2 : 1) {}

  CUTLASS_DEVICE void load(int channel, int first_k, int stages) {
    int place = 0, k = first_k;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int left = stages; left > 0; --left) {
      // Every phase is waited for, by those whose stage it is not, too: parities tell one from the next alone.
      auto const wait = [&] { barriers_.empty[place].wait(~phases_ >> place & 1); };
      if (until_mine_ == 0)
        make(place, channel, k, wait);
      else
        wait();
      until_mine_ = until_mine_ == 0 ? kOperandWarps - 1 : until_mine_ - 1;
      phases_ ^= 1u << place;
      place = place + 1 == kStages ? 0 : place + 1;
      k += kStageK;
    }
  }

 private:
  static constexpr int kRowK = kStageK / kRows;
  static_assert(kRowK == qcutlass::kGroupStep);
  // A lane makes the operands of a strip's channels c, c + 1, c + 8 and c + 9: pairs, so that a load has two numbers.
  static constexpr int kWarpChannels = 32 * 4, kSets = kChannels / kWarpChannels;
  static_assert(kSets * kWarpChannels == kChannels);
  /// Items, lanes' operands of a row, whose loads are under way together: as registers allow.
  static constexpr int kTogether = 2;

  /// Of channels c, c + 1 and c + 8, c + 9: what is loaded, and in its place the two fp32 numbers that it becomes. Of
  /// two levels `x` has two bytes, integers of groups, and `y` two numbers of the second level.
  using Pairs = uint2[kTogether][2];

  template <class Wait>
  CUTLASS_DEVICE void make(int place, int channel, int k, Wait const& wait) {
    auto const& scales = from_.scales;
    auto const& zeros = from_.zeros;
    int const items = kRows / row_steps_ * kSets;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int first = 0; first < items; first += kTogether) {
      Pairs scale, zero;
      load(scale, scales, channel, k, first);
      if (zeros.data != nullptr) load(zero, zeros, channel, k, first);
      bool two_levels = false;
      if constexpr (qcutlass::takes_super_blocks(kMode)) {
        two_levels = from_.supers.scales.data != nullptr;
        if (two_levels) load_supers(scale, from_.supers.scales, channel, k, first);
        if (two_levels && zeros.data != nullptr) load_supers(zero, from_.supers.minimums, channel, k, first);
      }
      if (first == 0) wait();
      convert(scale, scales.type, two_levels);
      if (zeros.data != nullptr)
        convert(zero, zeros.type, two_levels);
      else
        set_symmetric(zero, scale);
      store(place, first, scale, zero);
    }
    __syncwarp();
    if (lane_ == 0) barriers_.full[place].arrive();
  }

  /// Column, from the stage's first, and channel, from the block's, of an item.
  CUTLASS_DEVICE int column(int item) const { return item / kSets * row_steps_ * kRowK; }
  CUTLASS_DEVICE int first_channel(int item) const {
    return item % kSets * kWarpChannels + lane_ / 4 * 16 + lane_ % 4 * 2;
  }

  /// Calls visit(raw, bytes) for the places of all items' numbers that exist, `bytes` in the matrix; others are zeros.
  template <class Visit>
  CUTLASS_DEVICE void for_each_pair(Pairs& raw, GroupMatrix const& m, GroupSize const& size, int channel, int k,
                                    int first, Visit const& visit) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      int const item_k = k + column(first + i);
      bool const exists = column(first + i) < kStageK && item_k < from_.k;
      uint8_t const* const row = m.data + int64_t(size.group(item_k)) * m.stride;
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        int const byte = (channel + first_channel(first + i) + 8 * half) * m.element_bytes;
        if (exists && byte < m.row_bytes) visit(raw[i][half], row + byte);
      }
    }
  }

  /// Loads without a use that would wait for them: one branch for all, by their size.
  CUTLASS_DEVICE void load(Pairs& raw, GroupMatrix const& m, int channel, int k, int first) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTogether; ++i) raw[i][0] = raw[i][1] = {0, 0};
    auto const each = [&](auto const& visit) { for_each_pair(raw, m, group_size_, channel, k, first, visit); };
    switch (m.element_bytes) {
      case 1: return each([](uint2& to, uint8_t const* p) { to.x = *reinterpret_cast<uint16_t const*>(p); });
      case 2: return each([](uint2& to, uint8_t const* p) { to.x = *reinterpret_cast<uint32_t const*>(p); });
      default: return each([](uint2& to, uint8_t const* p) { to = *reinterpret_cast<uint2 const*>(p); });
    }
  }
  CUTLASS_DEVICE void load_supers(Pairs& raw, GroupMatrix const& m, int channel, int k, int first) const {
    for_each_pair(raw, m, from_.supers.size, channel, k, first,
                  [](uint2& to, uint8_t const* p) { to.y = *reinterpret_cast<uint32_t const*>(p); });
  }

  /// Makes numbers of what was loaded.
  static CUTLASS_DEVICE void convert(Pairs& pairs, qcutlass::DType type, bool two_levels) {
    if (two_levels) {
      uint32_t const flip = warp::level_flip(type);
      return for_each(pairs, [&](uint2 v) {
        auto const& supers = reinterpret_cast<half_t const(&)[2]>(v.y);
        return float2{warp::level_number(v.x & 0xff, flip, supers[0]), warp::level_number(v.x >> 8, flip, supers[1])};
      });
    }
    switch (type) {
      case qcutlass::DType::kFloat16:
        return for_each(pairs, [](uint2 v) { return __half22float2(reinterpret_cast<__half2 const&>(v.x)); });
      case qcutlass::DType::kBFloat16:
        return for_each(pairs, [](uint2 v) {
          return float2{__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000)};
        });
      case qcutlass::DType::kUInt8:
        return for_each(pairs, [](uint2 v) { return float2{float(v.x & 0xff), float(v.x >> 8)}; });
      case qcutlass::DType::kInt8:
        return for_each(pairs, [](uint2 v) { return float2{float(int8_t(v.x)), float(int8_t(v.x >> 8))}; });
      case qcutlass::DType::kInt32:
        return for_each(pairs, [](uint2 v) { return float2{float(int32_t(v.x)), float(int32_t(v.y))}; });
      default: return;  // fp32 as it is
    }
  }
  template <class Function>
  static CUTLASS_DEVICE void for_each(Pairs& pairs, Function const& function) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTogether * 2; ++i) {
      float2 const numbers = function(pairs[i / 2][i % 2]);
      pairs[i / 2][i % 2] = {__float_as_uint(numbers.x), __float_as_uint(numbers.y)};
    }
  }

  /// What codes are relative to where there are no zeros. Of minimums, 2^(kBits - 1) scale, exact, so that the fused
  /// step rounds (code - 2^(kBits - 1)) scale.
  static CUTLASS_DEVICE void set_symmetric(Pairs& zero, Pairs const& scale) {
    constexpr float kZero = float(qcutlass::symmetric_zero(kBits));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTogether * 2; ++i) zero[i / 2][i % 2] = scale[i / 2][i % 2];
    for_each(zero, [](uint2 v) {
      if (kMode != qcutlass::ScaleMode::kMinimum) return float2{kZero, kZero};
      return float2{__uint_as_float(v.x) * kZero, __uint_as_float(v.y) * kZero};
    });
  }

  /// A row that serves two steps is stored for each.
  CUTLASS_DEVICE void store(int place, int first, Pairs const& s, Pairs const& z) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      int const row = column(first + i) / kRowK, channel = first_channel(first + i);
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < 2; ++step) {
        if (step == row_steps_ || row + step >= kRows) break;
        uint4* const to = storage_.operands(place, row + step, channel / 16) + channel % 16;
        to[0] = {s[i][0].x, s[i][1].x, z[i][0].x, z[i][1].x};
        to[1] = {s[i][0].y, s[i][1].y, z[i][0].y, z[i][1].y};
      }
    }
  }

  SharedStorage& storage_;
  RingBarriers<kStages>& barriers_;
  OperandMatrices<kMode> const& from_;
  GroupSize const& group_size_;
  int const lane_;
  int until_mine_;       // stages until one that is this warp's
  int const row_steps_;  // rows that have the same numbers
  uint32_t phases_ = 0;  // bit `place`: parity of the next phase that fills it
};

}  // namespace cutlass::gemm::threadblock
