// Stores the sums of warpgroups whose rows are tokens, and adds the sums of blocks of a cluster that share k.
//
// Scale, bias and activation are applied to the sums in their registers. The scales of tokens and channels are
// requested before the main loop, since loads here would keep the tensor cores waiting. Each thread requests those of
// its two tokens and of one channel; the threads share the channels' through shared memory. Values of 16 bits and codes
// are stored in whole rows, through a buffer of the warp beside the ring, since the producer already fills the ring for
// the next tile. Values of 32 bits are stored from registers, in sectors of 32 bytes.
#pragma once

#include "cute/arch/copy_sm90.hpp"
#include "cutlass_ext/arch/cluster.h"
#include "cutlass_ext/arch/named_barrier.h"
#include "cutlass_ext/arch/packed_math.h"
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

  /// For `blocks` > 1 blocks of a cluster that share k. Each block finishes some parts of the tile, of eight tokens of
  /// a warp each. This sends the sums of parts that other blocks finish to these, into their memory at `slots`. All
  /// threads of the cluster must meet before and after.
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
        arch::store_to_cluster(arch::cluster_address(slot + i * kSlotThreads, owner), words);
      }
    }
  }

  /// Writes a tile: all of it if `rank` is negative; otherwise the parts that this block of `blocks` finishes, with all
  /// blocks' sums added in order. If a later kernel adds shares of k, sums go to `partials` instead of the output.
  /// `meanwhile` is called once, when the requested scales have been used.
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
    if (params.gate != qcutlass::Gate::kNone) {
      float gated[kValues / 2];
      multiply_gated(params, values, gated);
      store<kBlocks / 2>(params, gated, channel / 2, token, mine);
      return;
    }
    thread::activate_all(values, params.activation);
    store<kBlocks>(params, values, channel, token, mine);
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
  static_assert(!qcutlass::is_promoted(Mma::kMode) || (RowQuantizer<kChannels>::kBytes <= kTokens * kRowBytes &&
                                                       RowQuantizer<kChannels>::kExchange >= sizeof(Channel) * 32));

  CUTLASS_DEVICE int thread() const { return warp_ * 32 + lane_; }
  CUTLASS_DEVICE int first_channel() const { return warpgroup_ * kChannels % Shape::kM; }
  CUTLASS_DEVICE int first_token() const { return warpgroup_ * arch::kWarpgroupRows % Shape::kN + warp_ * kTokens; }
  CUTLASS_DEVICE uint8_t* buffer(int warp) const { return storage_.buffers[warpgroup_ * 4 + warp]; }
  CUTLASS_DEVICE void synchronize() const { arch::named_barrier_sync<arch::kWarpgroupThreads>(warpgroup_); }

  /// The index of the value of channel 2t + odd of an n8 block, row g or g + 8.
  static CUTLASS_HOST_DEVICE constexpr int index(int block, int half, int odd) { return block * 4 + half * 2 + odd; }

  /// Copies the channels' values, which each thread requested one of, to the buffers that the whole warpgroup reads.
  CUTLASS_DEVICE void share_channels() const {
    reinterpret_cast<Channel*>(buffer(warp_))[lane_] = own_;
    synchronize();
  }

  /// results = function(sum, values of its token, values of its channel)
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

  /// values = activation(gate) * what it multiplies, both rounded: a thread has the channels of both.
  CUTLASS_DEVICE void multiply_gated(Params const& params, float (&sums)[kValues], float (&values)[kValues / 2]) const {
    constexpr int kTurn = thread::kGateTurn / 8 * 4;  // values of a turn
    thread::with_output_type<void>(params.output_type,
                                   [&](auto element) { thread::round_values<decltype(element)>(sums); });
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues / 2; ++i) {
      int const gate = i / kTurn * (2 * kTurn) + i % kTurn;
      values[i] = thread::gate_value(sums[gate], params.activation) * sums[gate + kTurn];
    }
  }

  /// Columns of the output, kColumnBlocks times eight of a warp: of values with a gate half of the channels.
  template <int kColumnBlocks>
  CUTLASS_DEVICE void store(Params const& params, float (&values)[kColumnBlocks * 4], int column, int token,
                            bool const (&mine)[2]) const {
    int const columns = params.channels / (kBlocks / kColumnBlocks);
    switch (params.output_type) {
      case qcutlass::DType::kFloat16: store_rows<half_t>(params, values, column, columns, token, mine); break;
      case qcutlass::DType::kBFloat16: store_rows<bfloat16_t>(params, values, column, columns, token, mine); break;
      case qcutlass::DType::kFloat32:
        if (params.residual != nullptr) add_pairs(params, values, column, columns, token, mine);
        store_pairs(static_cast<float*>(params.output), params.stride, params.tokens, columns, params.vectors, values,
                    column, token, mine);
        break;
      default:
        if constexpr (qcutlass::is_promoted(Mma::kMode) && kColumnBlocks == kBlocks) {  // no gates
          int const other = (warpgroup_ ^ 1) * 4 + warp_;  // has the other channels where kChannels is 64
          RowQuantizer<kChannels>(params, buffer(warp_), storage_.buffers[other], Mma::kWarpgroups + warp_, lane_)
              .run(values, token, column, mine);
        }
    }
  }

  /// Rounds to 16 bits, and stores rows of vectors of 8 columns, the residual added.
  template <class Element, int kCount>
  CUTLASS_DEVICE void store_rows(Params const& params, float const (&values)[kCount], int column, int columns,
                                 int token, bool const (&mine)[2]) const {
    constexpr int kColumnBlocks = kCount / 4;
    uint32_t words[2][kColumnBlocks];
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kColumnBlocks; ++i)
        words[half][i] = thread::pack_pair<Element>(values[index(i, half, 0)], values[index(i, half, 1)]);
    }
    uint8_t* const to = buffer(warp_) + lane_ % 8 * kRowBytes + lane_ / 8 * 16;
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t const(&w)[kColumnBlocks] = words[half];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kColumnBlocks; i += 4)
        cute::SM90_U32x4_STSM_N::copy(w[i], w[i + 1], w[i + 2], w[i + 3],
                                      *reinterpret_cast<cute::uint128_t*>(to + half * 8 * kRowBytes + i * 16));
    }
    __syncwarp();
    constexpr int kLanes = kColumnBlocks, kRows = 32 / kLanes, kSteps = kTokens / kRows;  // of a row; at once
    uint8_t const* const from = buffer(warp_) + lane_ / kLanes * kRowBytes + lane_ % kLanes * 16;
    uint4 rows[kSteps];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSteps; ++i) rows[i] = *reinterpret_cast<uint4 const*>(from + i * kRows * kRowBytes);
    // Keeps `words` alive until here. If `rows` had their registers, its loads would wait for the stores to read them.
    arch::fence_registers(words[0]);
    arch::fence_registers(words[1]);
    column += lane_ % kLanes * 8;
    token += lane_ / kLanes;
    if (params.residual != nullptr) {
      Element const* row = static_cast<Element const*>(params.residual) + token * params.residual_stride + column;
      AlignedArray<Element, 8> residual[kSteps];  // all of them on their way, before the first is added
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i, row += kRows * params.residual_stride)
        residual[i] = thread::load_columns<Element, 8>(row, token + i * kRows < params.tokens ? columns - column : 0,
                                                       params.vectors);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i) add_row(rows[i], residual[i]);
    }
    Element* out = static_cast<Element*>(params.output) + token * params.stride + column;
    int64_t const step = kRows * params.stride;
    if (params.vectors) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i, out += step)
        if (mine[i * kRows / 8] && token + i * kRows < params.tokens && column < columns)
          *reinterpret_cast<uint4*>(out) = rows[i];
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSteps; ++i, out += step)
        if (mine[i * kRows / 8] && token + i * kRows < params.tokens)
          thread::store_words(out, rows[i], columns - column, false);
    }
    __syncwarp();
  }

  template <class Element>
  static CUTLASS_DEVICE void add_row(uint4& words, AlignedArray<Element, 8> const& residual) {
    auto& pairs = reinterpret_cast<uint32_t(&)[4]>(words);
    auto const& others = reinterpret_cast<uint32_t const(&)[4]>(residual);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) pairs[i] = arch::PairMath<Element>::add(pairs[i], others[i]);
  }

  /// The residual of outputs of 32 bits.
  template <int kCount>
  CUTLASS_DEVICE void add_pairs(Params const& params, float (&values)[kCount], int column, int columns, int token,
                                bool const (&mine)[2]) const {
    column += lane_ % 4 * 2;
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const of_token = token + half * 8 + lane_ / 4;
      if (!mine[half] || of_token >= params.tokens) continue;
      float const* const row = static_cast<float const*>(params.residual) + of_token * params.residual_stride;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount / 2; ++i) {
        int const own = column + i / 2 * 8 + i % 2;
        float& value = values[index(i / 2, half, i % 2)];
        if (own < columns) value = thread::add_separately(value, row[own]);
      }
    }
  }

  /// Two columns a store. `vectors`: rows of 8 columns are complete, and aligned.
  template <class Value, int kCount>
  CUTLASS_DEVICE void store_pairs(Value* out, int64_t stride, int tokens, int channels, bool vectors,
                                  Value const (&values)[kCount], int channel, int token, bool const (&mine)[2]) const {
    channel += lane_ % 4 * 2;
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      int const out_token = token + half * 8 + lane_ / 4;
      if (!mine[half] || out_token >= tokens) continue;
      Value* const row = out + out_token * stride;
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kCount / 4; ++block) {
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

  /// Adds the sums of all blocks in the order of their shares, whichever of them does it: the bits of a row do not
  /// depend on where in its tile it lies.
  CUTLASS_DEVICE void add(Sums& sums, int half, uint4 const* slots, int part, int blocks, int rank) const {
    auto const own = [&](int i, int j) -> auto& { return sums[index(2 * i + j / 2, half, j % 2)]; };
    Sum total[kWords][4] = {};
    CUTLASS_PRAGMA_NO_UNROLL
    for (int source = 0; source < blocks; ++source) {
      if (source == rank) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kWords * 4; ++i) total[i / 4][i % 4] += Sum(own(i / 4, i % 4));
        continue;
      }
      uint4 const* slot = slots + slot_of(part, rank, source, blocks);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kWords; ++i) {
        uint4 const words = slot[i * kSlotThreads];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4; ++j) total[i][j] += reinterpret_cast<Sum const*>(&words)[j];
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kWords * 4; ++i) own(i / 4, i % 4) = total[i / 4][i % 4];
  }

  SharedStorage& storage_;
  int const warpgroup_, warp_, lane_;
  Token tokens_[2];  // of rows g and g + 8
  Channel own_;      // of channel thread() of the warpgroup
};

}  // namespace cutlass::epilogue::threadblock
