// From the sums of warpgroups whose rows are tokens to the output, and their addition over the blocks of a cluster that
// share k.
//
// Sums become values where they are. What they need of their tokens and channels is requested before the main loop,
// since loads here would keep the tensor cores waiting: of its two tokens by each thread, of the channels by one thread
// each, which share them through shared memory. Values of 16 bits and codes leave in whole rows by way of a buffer of
// the warp, beside the ring, which the producer already fills for the next tile; those of 32 bits straight from
// registers, in sectors of 32 bytes.
#pragma once

#include "cute/arch/copy_sm90.hpp"
#include "cutlass_ext/arch/cluster.h"
#include "cutlass_ext/arch/named_barrier.h"
#include "cutlass_ext/arch/wgmma.h"
#include "cutlass_ext/epilogue/cluster_shares.h"
#include "cutlass_ext/epilogue/output_op.h"
#include "cutlass_ext/epilogue/row_quantizer.h"

namespace cutlass::epilogue::threadblock {

template <class Mma>
class RowEpilogue {
 public:
  using Shape = typename Mma::Shape;
  using Sum = typename Mma::Accumulator;
  using Sums = typename Mma::FragmentC;
  using Output = thread::OutputOpOf<typename Mma::Element, Sum, Mma::kMode>;
  using Params = typename Output::Params;
  static constexpr int kChannels = Mma::kWarpChannels, kTokens = 16;  // of a warp
  static_assert(kChannels == 64 || kChannels == 128);
  static constexpr int kRowBytes = kChannels * 2 + 16;  // an odd multiple of 16: words of eight rows lie in other banks

  struct SharedStorage {
    alignas(16) uint8_t buffers[Mma::kWarpgroups * 4][kTokens * kRowBytes];
  };

  CUTLASS_DEVICE RowEpilogue(SharedStorage& storage, int warpgroup, int thread)
      : storage_(storage), warpgroup_(warpgroup), warp_(thread / 32), lane_(thread % 32) {}

  /// Requests what the sums of the next tile need. Channel and token: the tile's first, here and below.
  CUTLASS_DEVICE void request(Params const& params, int channel, int token) {
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half)
      tokens_[half] = Output::load_token(params, token + first_token() + half * 8 + lane_ / 4);
    own_ = Output::load_channel(params, channel + first_channel() + thread());
  }

  /// Bytes that a block receives when `blocks` of them exchange sums.
  static constexpr int exchange_bytes(int blocks) { return (blocks - 1) * Shares::most_parts(blocks) * kSlotBytes; }

  /// Where `blocks` > 1 blocks of a cluster share k, each finishes some parts of the tile, eight tokens of a warp each:
  /// sends the sums of the others' parts into their memory at `slots`. Before it and after it all threads of the
  /// cluster must meet.
  CUTLASS_DEVICE void send(Sums const& sums, uint4* slots, int blocks, int rank) const {
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const part = part_of(half), owner = Shares::owner_of(part, blocks);
      if (owner == rank) continue;
      uint4* slot = slots + slot_of(part, owner, rank, blocks);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kWords; ++i) {  // two n8 blocks of a row
        Sum words[4];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4; ++j) words[j] = Sum(sums[index(2 * i + j / 2, half, j % 2)]);
        arch::store_to_cluster(slot + i * kSlotThreads, owner, words);
      }
    }
  }

  /// Writes what this block finishes of a tile, the other blocks' sums added in order; all of it if its `rank` among
  /// them is negative. `partials`: where to instead of the output, if shares of k are added later. `meanwhile`: called
  /// once, when what was requested has been used.
  template <class Meanwhile>
  CUTLASS_DEVICE void run(Params const& params, int channel, int token, Sums& sums, uint4 const* slots, int blocks,
                          int rank, thread::PartialSums<Sum> const& partials, Meanwhile const& meanwhile) {
    channel += first_channel();
    token += first_token();
    bool mine[2];
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      mine[half] = rank < 0 || Shares::owner_of(part_of(half), blocks) == rank;
      if (rank >= 0 && mine[half]) add(sums, half, slots, part_of(half), blocks, rank);
    }
    if (partials.data != nullptr) {
      meanwhile();
      store_pairs(reinterpret_cast<Word*>(partials.data), partials.stride, params.tokens - partials.token,
                  int(partials.stride), true, sums, channel - partials.channel, token - partials.token, mine);
      return;
    }
    bool const shares = Output::uses_channels(params), shifts = Output::shifts(params);
    if (shares) share_channels();
    if (Output::stores_sums(params)) {
      if (shifts) each(sums, sums, [](Sum sum, Token t, Channel c) { return Output::shifted(sum, t, c); });
      if (shares) synchronize();
      meanwhile();
      store_pairs(static_cast<Word*>(params.output), params.stride, params.tokens, params.channels, params.vectors,
                  sums, channel, token, mine);
      return;
    }
    float values[kValues];
    if (!shares)
      copy(sums, values);
    else if (shifts)
      each(sums, values, [](Sum sum, Token t, Channel c) { return Output::value(sum, t, c, true); });
    else
      each(sums, values, [](Sum sum, Token t, Channel c) { return Output::value(sum, t, c, false); });
    if (shares) synchronize();
    meanwhile();
    thread::activate_all(values, params.activation);
    store(params, values, channel, token, mine);
  }

 private:
  using Word = std::remove_extent_t<Sums>;  // a sum as the instruction has it
  using Token = typename Output::Token;
  using Channel = typename Output::Channel;
  struct alignas(sizeof(Channel) < 8 ? 8 : 16) Pair {  // one load
    Channel odd[2];
  };
  using Shares = ClusterShares<8>;  // four warps of a warpgroup, two halves
  static constexpr int kBlocks = kChannels / 8, kValues = kBlocks * 4;
  static constexpr int kWords = kBlocks / 2;  // of 16 bytes a thread, of a part
  static constexpr int kSlotThreads = Mma::kWarpgroups * 32;
  static constexpr int kSlotBytes = kWords * 16 * kSlotThreads;
  static_assert(sizeof(Channel) * 32 <= kTokens * kRowBytes && sizeof(Sums) == kValues * sizeof(Sum));
  // Another warp may still read what it exchanges with this one when this one shares what the next tile needs.
  static_assert(!qcutlass::is_blockwise(Mma::kMode) || (RowQuantizer<kChannels>::kBytes <= kTokens * kRowBytes &&
                                                        RowQuantizer<kChannels>::kExchange >= sizeof(Channel) * 32));

  CUTLASS_DEVICE int thread() const { return warp_ * 32 + lane_; }
  CUTLASS_DEVICE int first_channel() const { return warpgroup_ * kChannels % Shape::kM; }
  CUTLASS_DEVICE int first_token() const { return warpgroup_ * arch::kWarpgroupRows % Shape::kN + warp_ * kTokens; }
  CUTLASS_DEVICE uint8_t* buffer(int warp) const { return storage_.buffers[warpgroup_ * 4 + warp]; }
  CUTLASS_DEVICE void synchronize() const { arch::named_barrier_sync<arch::kWarpgroupThreads>(warpgroup_); }

  /// Of the value of channel 2t + odd of an n8 block, row g or g + 8.
  static CUTLASS_HOST_DEVICE constexpr int index(int block, int half, int odd) { return block * 4 + half * 2 + odd; }

  /// Passes the parameters of the channels, through the buffers of the warps that requested them, to the warpgroup.
  CUTLASS_DEVICE void share_channels() const {
    reinterpret_cast<Channel*>(buffer(warp_))[lane_] = own_;
    synchronize();
  }

  /// results = function(sum, what its token needs, what its channel needs)
  template <class Result, class Function>
  CUTLASS_DEVICE void each(Sums const& sums, Result (&results)[kValues], Function const& function) const {
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      Channel const* const of_warp = reinterpret_cast<Channel const*>(buffer(block / 4));
      Pair const channels = reinterpret_cast<Pair const&>(of_warp[block % 4 * 8 + lane_ % 4 * 2]);
      CUTLASS_PRAGMA_UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < 2; ++half)
          results[index(block, half, odd)] =
              function(Sum(sums[index(block, half, odd)]), tokens_[half], channels.odd[odd]);
      }
    }
  }

  static CUTLASS_DEVICE void copy(Sums const& sums, float (&values)[kValues]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues; ++i) values[i] = float(Sum(sums[i]));
  }

  CUTLASS_DEVICE void store(Params const& params, float const (&values)[kValues], int channel, int token,
                            bool const (&mine)[2]) const {
    switch (params.output_type) {
      case qcutlass::DType::kFloat16: store_rows<half_t>(params, values, channel, token, mine); break;
      case qcutlass::DType::kBFloat16: store_rows<bfloat16_t>(params, values, channel, token, mine); break;
      case qcutlass::DType::kFloat32:
        store_pairs(static_cast<float*>(params.output), params.stride, params.tokens, params.channels, params.vectors,
                    values, channel, token, mine);
        break;
      default:
        if constexpr (qcutlass::is_blockwise(Mma::kMode)) {
          int const other = (warpgroup_ ^ 1) * 4 + warp_;  // has the other channels where kChannels is 64
          RowQuantizer<kChannels>(params, buffer(warp_), storage_.buffers[other], Mma::kWarpgroups + warp_, lane_)
              .run(values, token, channel, mine);
        }
    }
  }

  /// Rounds to 16 bits, and stores rows of vectors of 8 channels.
  template <class Element>
  CUTLASS_DEVICE void store_rows(Params const& params, float const (&values)[kValues], int channel, int token,
                                 bool const (&mine)[2]) const {
    uint32_t words[2][kBlocks];
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBlocks; ++i)
        words[half][i] = thread::pack_pair<Element>(values[index(i, half, 0)], values[index(i, half, 1)]);
    }
    uint8_t* const to = buffer(warp_) + lane_ % 8 * kRowBytes + lane_ / 8 * 16;
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t const(&w)[kBlocks] = words[half];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBlocks; i += 4)
        cute::SM90_U32x4_STSM_N::copy(w[i], w[i + 1], w[i + 2], w[i + 3],
                                      *reinterpret_cast<cute::uint128_t*>(to + half * 8 * kRowBytes + i * 16));
    }
    __syncwarp();
    constexpr int kLanes = kChannels / 8, kRows = 32 / kLanes, kSteps = kTokens / kRows;  // of a row; at once
    uint8_t const* const from = buffer(warp_) + lane_ / kLanes * kRowBytes + lane_ % kLanes * 16;
    uint4 rows[kSteps];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSteps; ++i) rows[i] = *reinterpret_cast<uint4 const*>(from + i * kRows * kRowBytes);
    // Keeps the words until here: in registers of theirs, rows would wait for the stores to have read them.
    arch::fence_registers(words[0]);
    arch::fence_registers(words[1]);
    channel += lane_ % kLanes * 8;
    token += lane_ / kLanes;
    Element* out = static_cast<Element*>(params.output) + token * params.stride + channel;
    int64_t const step = kRows * params.stride;
    if (params.vectors) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i, out += step)
        if (mine[i * kRows / 8] && token + i * kRows < params.tokens && channel < params.channels)
          *reinterpret_cast<uint4*>(out) = rows[i];
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i, out += step)
        if (mine[i * kRows / 8] && token + i * kRows < params.tokens)
          thread::store_words(out, rows[i], params.channels - channel, false);
    }
    __syncwarp();
  }

  /// Two channels a store. `vectors`: rows of 8 channels are complete, and aligned.
  template <class Value>
  CUTLASS_DEVICE void store_pairs(Value* out, int64_t stride, int tokens, int channels, bool vectors,
                                  Value const (&values)[kValues], int channel, int token, bool const (&mine)[2]) const {
    channel += lane_ % 4 * 2;
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const out_token = token + half * 8 + lane_ / 4;
      if (!mine[half] || out_token >= tokens) continue;
      Value* const row = out + out_token * stride;
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        int const first = channel + block * 8;
        AlignedArray<Value, 2> pair;
        pair[0] = values[index(block, half, 0)], pair[1] = values[index(block, half, 1)];
        if (vectors) {
          if (first < channels) *reinterpret_cast<AlignedArray<Value, 2>*>(row + first) = pair;
        } else {
          if (first < channels) row[first] = pair[0];
          if (first + 1 < channels) row[first + 1] = pair[1];
        }
      }
    }
  }

  CUTLASS_DEVICE int part_of(int half) const { return half * 4 + warp_; }
  /// This thread's place for the sums of `part` from block `source` in the memory of block `owner`.
  CUTLASS_DEVICE int slot_of(int part, int owner, int source, int blocks) const {
    return Shares::slot_of(part, owner, source, blocks) * (kSlotBytes / 16) + warpgroup_ * 32 + lane_;
  }

  CUTLASS_DEVICE void add(Sums& sums, int half, uint4 const* slots, int part, int blocks, int rank) const {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int source = 0; source < blocks; ++source) {
      if (source == rank) continue;
      uint4 const* slot = slots + slot_of(part, rank, source, blocks);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kWords; ++i) {
        uint4 const words = slot[i * kSlotThreads];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4; ++j) sums[index(2 * i + j / 2, half, j % 2)] += reinterpret_cast<Sum const*>(&words)[j];
      }
    }
  }

  SharedStorage& storage_;
  int const warpgroup_, warp_, lane_;
  Token tokens_[2];  // of rows g and g + 8
  Channel own_;      // of channel thread() of the warpgroup
};

}  // namespace cutlass::epilogue::threadblock
