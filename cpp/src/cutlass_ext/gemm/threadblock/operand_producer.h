// Turns scales and zeros of integer weights that are scaled in fp32 into the operands of conversions, from global to
// shared memory. The three warps of the producing warpgroup that request nothing do this.
//
// The types of scales and zeros, the size of groups and the number of levels are known at run time alone, so each row
// of scales takes branches, divisions and conversions. When consumers did this between their MMAs, it took them longer
// than converting codes. Now a lane reads its operands of a step by one 128-bit load, whatever the types are.
#pragma once

#include "cutlass_ext/gemm/threadblock/ring_producer.h"
#include "cutlass_ext/gemm/threadblock/scale_loader.h"
#include "cutlass_ext/gemm/warp/group_scales.h"

namespace cutlass::gemm::threadblock {

/// Scales, and zeros or minimums, of one level or two, [groups, channels] in global memory.
template <qcutlass::ScaleMode kMode>
struct OperandMatrices {
  GroupMatrix scales, zeros;
  SuperBlocksOf<kMode> supers;
  int k;  // columns; operands of those beyond are zeros
};

/// The slot, of a strip's eight, that holds the operands of channels c and c + 8. A strip's eight slots of 16 bytes
/// span all 32 banks. Eight lanes store at once, to four strips, two slots each, 4 apart. With the same order in every
/// strip four lanes would store to the same banks.
CUTLASS_DEVICE int operand_slot(int strip, int c) { return c ^ (strip & 3); }

/// One of kOperandWarps warps, which take rows of scales in turns, whatever stage they are of. SharedStorage has the
/// kRows rows of operands of a stage, of 16 columns each, at operands(place, row, strip), eight lanes' of a strip.
/// Every product begins in place 0; phases are kept per place.
///
/// Its own instructions, one after the other, are its limit: a lane loads four neighbours at once, finds its channels
/// once a tile, asks once whether scales have two levels, and requests its next numbers, all of them, when those before
/// are converted, so that they are there when the other warps have had their turns.
template <class SharedStorage, int kStages, int kStageK, int kChannels, int kRows, qcutlass::ScaleMode kMode, int kBits>
class OperandProducer {
 public:
  static constexpr int kOperandWarps = 3;
  /// Arrivals at the barrier of a full stage: every lane's, behind what it has stored.
  static constexpr int kArrivals = kOperandWarps * 32;

  CUTLASS_DEVICE OperandProducer(SharedStorage& storage, RingBarriers<kStages>& barriers,
                                 OperandMatrices<kMode> const& from, GroupSize const& group_size, int warp, int lane)
      : storage_(storage),
        barriers_(barriers),
        from_(from),
        group_size_(group_size),
        lane_(lane),
        until_mine_(warp),
        row_steps_(group_size.is_multiple_of(2 * kRowK) && from.k % (2 * kRowK) == 0 ? 2 : 1) {}

  /// Makes the operands of a tile's stages.
  CUTLASS_DEVICE void load(int channel, int first_k, int stages) {
    scales_ = Places(from_.scales, channel + own_channel());
    zeros_ = Places(from_.zeros, channel + own_channel());
    if constexpr (kTakesLevels) {
      if (from_.supers.scales.data != nullptr) {
        supers_ = Places(from_.supers.scales, channel + own_channel());
        return make_stages<true>(first_k, stages);
      }
    }
    make_stages<false>(first_k, stages);
  }

 private:
  static constexpr int kRowK = kStageK / kRows;
  static_assert(kRowK == qcutlass::kGroupStep);
  static constexpr bool kTakesLevels = qcutlass::takes_super_blocks(kMode);

  /// A lane makes the operands of a strip's channels c to c + 3 and c + 8 to c + 11, a warp those of all channels of a
  /// row, or of two.
  static constexpr int kVector = 4, kRowLanes = kChannels / 8, kWarpRows = 32 / kRowLanes;
  static_assert(kRowLanes * kWarpRows == 32);
  static_assert(!kTakesLevels || qcutlass::kSuperBlockStep % (2 * kRowK) == 0, "a row of scales has one super-block");

  /// Numbers of both halves of a lane's channels as they are stored, at the beginning of each; integers of two levels
  /// have the numbers of their super-block behind them.
  struct Stored {
    uint4 halves[2];
  };
  /// What becomes of them: for each of four channels scales of both halves, then zeros.
  struct Operands {
    uint32_t words[kVector][4];
  };
  /// Bytes from the beginning of a row to both halves. Channels beyond the last one, which nobody asks for, have the
  /// numbers of others: rows have 16 bytes and more.
  struct Places {
    unsigned halves[2];

    Places() = default;
    CUTLASS_DEVICE Places(GroupMatrix const& m, int channel) {
      int const last = m.row_bytes - kVector * m.element_bytes;
      halves[0] = fast_min(channel * m.element_bytes, last);
      halves[1] = fast_min((channel + 8) * m.element_bytes, last);
    }
  };

  /// Numbers of a row that are on their way.
  struct Row {
    Stored scales, zeros;
  };

  /// This lane's first channel of the tile.
  CUTLASS_DEVICE int own_channel() const { return lane_ % kRowLanes / 2 * 16 + lane_ % 2 * kVector; }

  template <bool kLevels>
  CUTLASS_DEVICE void make_stages(int k, int stages) {
    int const rows = kWarpRows * row_steps_;         // of operands, that a warp makes in its turn
    int const row = lane_ / kRowLanes * row_steps_;  // this lane's first one
    Row numbers;
    request<kLevels>(numbers, k + (until_mine_ * rows + row) * kRowK);
    int place = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int left = stages; left > 0; --left) {
      // A barrier's parity tells a phase only from the next one. So a warp waits, and all its lanes arrive, even for a
      // stage of which it has no row: a stage is full only when no warp can miss a phase any more.
      barriers_.empty[place].wait(~phases_ >> place & 1);
      CUTLASS_PRAGMA_NO_UNROLL
      for (; until_mine_ * rows < kRows; until_mine_ += kOperandWarps)
        make_row<kLevels>(place, until_mine_ * rows + row, k, numbers);
      until_mine_ -= kRows / rows;
      barriers_.full[place].arrive();
      phases_ ^= 1u << place;
      place = place + 1 == kStages ? 0 : place + 1;
      k += kStageK;
    }
  }

  /// Makes a row of operands of the stage at k, whose numbers are requested, and requests those of this lane's next
  /// row.
  template <bool kLevels>
  CUTLASS_DEVICE void make_row(int place, int row, int k, Row& numbers) {
    Operands operands;
    convert<kLevels, 0>(operands, numbers.scales, from_.scales.type);
    if (from_.zeros.data != nullptr)
      convert<kLevels, 2>(operands, numbers.zeros, from_.zeros.type);
    else
      set_symmetric(operands);
    k += row * kRowK;
    // Columns that do not exist have activations of 0, which scales that are not finite would make NaN.
    if (k >= from_.k) operands = Operands{};
    request<kLevels>(numbers, k + kOperandWarps * kWarpRows * row_steps_ * kRowK);
    store(place, row, operands);
  }

  /// The row of the group that column k lies in, or the last one's.
  template <bool kLevels>
  CUTLASS_DEVICE void request(Row& to, int k) const {
    k = fast_min(k, from_.k - 1);
    int const group = group_size_.group(k);
    bool const has_zeros = from_.zeros.data != nullptr;
    fetch<kLevels>(to.scales, scales_, group, from_.scales);
    if (has_zeros) fetch<kLevels>(to.zeros, kLevels ? scales_ : zeros_, group, from_.zeros);
    if constexpr (kLevels) {  // several rows have the same, so that most find them in L1
      int const block = from_.supers.size.group(k);
      fetch_supers(to.scales, block, from_.supers.scales);
      if (has_zeros) fetch_supers(to.zeros, block, from_.supers.minimums);
    }
  }

  template <bool kBytes>
  static CUTLASS_DEVICE void fetch(Stored& to, Places const& places, int row, GroupMatrix const& m) {
    if (kBytes || m.element_bytes == 1)
      return read(places, row, m,
                  [&](int half, uint8_t const* p) { to.halves[half].x = *reinterpret_cast<uint32_t const*>(p); });
    if (m.element_bytes == 2)
      return read(places, row, m, [&](int half, uint8_t const* p) {
        uint2 const pairs = *reinterpret_cast<uint2 const*>(p);
        to.halves[half].x = pairs.x, to.halves[half].y = pairs.y;
      });
    read(places, row, m, [&](int half, uint8_t const* p) { to.halves[half] = *reinterpret_cast<uint4 const*>(p); });
  }
  CUTLASS_DEVICE void fetch_supers(Stored& to, int block, GroupMatrix const& m) const {
    read(supers_, block, m, [&](int half, uint8_t const* p) {
      uint2 const pairs = *reinterpret_cast<uint2 const*>(p);
      to.halves[half].z = pairs.x, to.halves[half].w = pairs.y;
    });
  }
  template <class Read>
  static CUTLASS_DEVICE void read(Places const& places, int row, GroupMatrix const& m, Read const& read_half) {
    uint64_t const first = uint64_t(unsigned(row)) * unsigned(m.stride);
    read_half(0, m.data + (first + places.halves[0]));
    read_half(1, m.data + (first + places.halves[1]));
  }

  /// Makes numbers, words kWord and kWord + 1 of the operands, of those that are stored; of two levels each is an
  /// integer times its super-block's number.
  template <bool kLevels, int kWord>
  static CUTLASS_DEVICE void convert(Operands& to, Stored const& stored, qcutlass::DType type) {
    auto const set = [&](auto const& number) {
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        float4 const v = number(stored.halves[half]);
        to.words[0][kWord + half] = __float_as_uint(v.x), to.words[1][kWord + half] = __float_as_uint(v.y);
        to.words[2][kWord + half] = __float_as_uint(v.z), to.words[3][kWord + half] = __float_as_uint(v.w);
      }
    };
    if constexpr (kLevels) {
      uint32_t const flip = warp::level_flip(type), flips = flip * 0x01010101;
      return set([&](uint4 v) {
        uint32_t const bytes = v.x ^ flips;
        float4 const s = halfs(v.z, v.w);
        return float4{warp::level_number<0>(bytes, flip, s.x), warp::level_number<1>(bytes, flip, s.y),
                      warp::level_number<2>(bytes, flip, s.z), warp::level_number<3>(bytes, flip, s.w)};
      });
    }
    switch (type) {
      case qcutlass::DType::kFloat16: return set([](uint4 v) { return halfs(v.x, v.y); });
      case qcutlass::DType::kBFloat16:
        return set([](uint4 v) { return floats(v.x << 16, v.x & 0xffff0000, v.y << 16, v.y & 0xffff0000); });
      case qcutlass::DType::kUInt8:
        return set([](uint4 v) {
          return float4{float(v.x & 0xff), float(v.x >> 8 & 0xff), float(v.x >> 16 & 0xff), float(v.x >> 24)};
        });
      case qcutlass::DType::kInt8:
        return set([](uint4 v) {
          return float4{float(int8_t(v.x)), float(int8_t(v.x >> 8)), float(int8_t(v.x >> 16)),
                        float(int8_t(v.x >> 24))};
        });
      case qcutlass::DType::kInt32:
        return set([](uint4 v) { return float4{float(int(v.x)), float(int(v.y)), float(int(v.z)), float(int(v.w))}; });
      default: return set([](uint4 v) { return floats(v.x, v.y, v.z, v.w); });
    }
  }

  static CUTLASS_DEVICE float4 halfs(uint32_t a, uint32_t b) {
    float2 const low = __half22float2(reinterpret_cast<__half2 const&>(a)),
                 high = __half22float2(reinterpret_cast<__half2 const&>(b));
    return {low.x, low.y, high.x, high.y};
  }
  static CUTLASS_DEVICE float4 floats(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return {__uint_as_float(a), __uint_as_float(b), __uint_as_float(c), __uint_as_float(d)};
  }

  /// What codes are relative to where there are no zeros. Of minimums, 2^(kBits - 1) scale, exact, so that the fused
  /// step rounds (code - 2^(kBits - 1)) scale.
  static CUTLASS_DEVICE void set_symmetric(Operands& operands) {
    constexpr float kZero = float(qcutlass::symmetric_zero(kBits));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector * 2; ++i) {
      auto& words = operands.words[i / 2];
      words[2 + i % 2] = __float_as_uint(kTakesLevels ? __uint_as_float(words[i % 2]) * kZero : kZero);
    }
  }

  /// Stores the operands of a row, which serves row_steps_ steps.
  CUTLASS_DEVICE void store(int place, int row, Operands const& operands) {
    int const strip = own_channel() / 16;
    uint4* const to = storage_.operands(place, row, strip);
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < 2; ++step) {
      if (step == row_steps_) break;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVector; ++i) {
        auto const& words = operands.words[i];
        to[step * (kChannels / 2) + operand_slot(strip, own_channel() % 16 + i)] = {words[0], words[1], words[2],
                                                                                    words[3]};
      }
    }
  }

  SharedStorage& storage_;
  RingBarriers<kStages>& barriers_;
  OperandMatrices<kMode> const& from_;
  GroupSize const& group_size_;
  int const lane_;
  Places scales_, zeros_, supers_;  // of the tile; of two levels integers have one place
  int until_mine_;                  // turns of others until this warp's
  int const row_steps_;             // steps that a row of scales serves
  uint32_t phases_ = 0;             // bit `place`: parity of the next phase that fills it
};

}  // namespace cutlass::gemm::threadblock
