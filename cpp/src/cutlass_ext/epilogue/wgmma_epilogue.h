// From the transposed sums of warpgroups (channels x tokens) to row-major [token][channel], and their addition over the
// blocks of a cluster that share k.
//
// Sums become values where they are, in threads that have two channels each. Every warpgroup transposes its own 64
// channels, 32 tokens at a time, by stmatrix, through two small buffers of its own beside the ring, which the producer
// already fills for the next tile.
#pragma once

#include "cute/arch/copy_sm90.hpp"
#include "cutlass_ext/arch/cluster.h"
#include "cutlass_ext/arch/named_barrier.h"
#include "cutlass_ext/arch/wgmma.h"
#include "cutlass_ext/epilogue/cluster_shares.h"
#include "cutlass_ext/epilogue/expert_output.h"
#include "cutlass_ext/epilogue/output_op.h"
#include "cutlass_ext/epilogue/scaled_sums.h"

namespace cutlass::epilogue::threadblock {

template <class Mma>
class WgmmaEpilogue {
 public:
  using Shape = typename Mma::Shape;
  using Sum = typename Mma::Accumulator;
  using Sums = typename Mma::FragmentC;
  using Output = typename Mma::Output;
  /// Of 8-bit activations sums are scaled by those of tokens, and the output's type is the launch's.
  static constexpr bool kScalesTokens = sizeof(typename Mma::Element) == 1;
  /// The 16 bits that an output is, where its type is the launch's.
  using Element = std::conditional_t<kScalesTokens, half_t, typename Mma::Element>;
  using Params = typename Output::Params;
  static constexpr int kChannels = arch::kWarpgroupRows;  // of a warpgroup
  static constexpr int kPartTokens = 16, kParts = Shape::kN / kPartTokens;
  using Shares = ClusterShares<kParts>;
  static constexpr int kPassParts = 2, kPassTokens = kPassParts * kPartTokens, kPasses = kParts / kPassParts;
  static_assert(kParts % kPassParts == 0);
  static constexpr int kVector = thread::kVectorChannels, kVectors = kChannels / kVector;  // of a row
  static_assert(kPartTokens * kVectors == arch::kWarpgroupThreads, "one vector a thread and part");
  static constexpr int kRow = kChannels + 8;  // 9 times 16 bytes: words of eight rows lie in other banks

  struct SharedStorage {
    alignas(16) Element rows[Mma::kWarpgroups][2][kPassTokens][kRow];
  };

  CUTLASS_DEVICE WgmmaEpilogue(SharedStorage& storage, int warpgroup, int thread)
      : storage_(storage), warpgroup_(warpgroup), thread_(thread) {}

  /// Requests what the sums of the next tile need: nothing; sums and fragments leave no registers.
  CUTLASS_DEVICE void request(Params const&, int /*channel*/, int /*token*/) {}

  /// Bytes that a block receives when `blocks` of them exchange sums.
  static constexpr int exchange_bytes(int blocks) { return (blocks - 1) * Shares::most_parts(blocks) * kSlotBytes; }

  /// Where `blocks` > 1 blocks of a cluster share k, each finishes some parts of the tile, 16 tokens each: sends the
  /// sums of the others' parts into their memory at `slots`. Before it and after it all threads of the cluster must
  /// meet.
  CUTLASS_DEVICE void send(Sums const& sums, uint4* slots, int blocks, int rank) const {
    CUTLASS_PRAGMA_UNROLL
    for (int part = 0; part < kParts; ++part) {
      int const owner = Shares::owner_of(part, blocks);
      if (owner == rank) continue;
      uint4* slot = slots + slot_of(part, owner, rank, blocks);
      arch::store_to_cluster(slot, owner, &sums[part * 8]);
      arch::store_to_cluster(slot + arch::kWarpgroupThreads, owner, &sums[part * 8 + 4]);
    }
  }

  /// Writes what this block finishes of a tile, which begins at (channel, token), the other blocks' sums added in
  /// order; all of it if its `rank` among them is negative. `partials`: where to instead of the output, if shares of k
  /// are added later. `meanwhile`: called once.
  template <class Meanwhile>
  CUTLASS_DEVICE void run(Params const& given, int channel, int token, Sums& sums, uint4 const* slots, int blocks,
                          int rank, thread::PartialSums<Sum> const& partials, Meanwhile const& meanwhile) {
    meanwhile();
    if constexpr (kScalesTokens) asm volatile("" : "+r"(thread_), "+r"(warpgroup_));  // as opaque() says
    auto const& params = of_this_tile(given);
    channel += warpgroup_ * kChannels;
    if (rank >= 0) {
      CUTLASS_PRAGMA_UNROLL
      for (int part = 0; part < kParts; ++part)
        if (Shares::owner_of(part, blocks) == rank)
          add(reinterpret_cast<Sum(&)[8]>(sums[part * 8]), slots, part, blocks, rank);
    }
    if (partials.data != nullptr) {
      store_sums(partials, params.tokens, sums, channel, token);
      return;
    }
    if constexpr (kScalesTokens)
      scale_tokens(sums, token, [&](int row) { return Output::load_token(params, row).scale; });
    add_bias(params, sums, channel);
    if (params.gate == qcutlass::Gate::kNone) thread::activate_all(sums, params.activation);
    if constexpr (Mma::kExperts) scale_rows(params, sums, token);
    if constexpr (kScalesTokens)
      if (params.output_type == qcutlass::DType::kFloat32) {
        if (params.gate != qcutlass::Gate::kNone) multiply_floats(params, sums);
        store_floats(params, sums, channel, token, [&](int part) { return is_own(part, blocks, rank); });
        return;
      }
    // Neither short tiles nor gates with residuals have code of their own: every copy of the passes is to be compiled.
    bool const is_whole = kPasses > 2 && rank < 0 && params.vectors, adds = kHasResiduals && params.residual != nullptr;
    if (params.gate != qcutlass::Gate::kNone) {
      if (is_whole && !adds)
        store_whole<true, false>(params, sums, channel, token);
      else
        store<true>(params, sums, channel, token, blocks, rank);
    } else if (!is_whole || (adds && !kWholeResiduals)) {
      store<false>(params, sums, channel, token, blocks, rank);
    } else if (adds) {
      store_whole<false, kWholeResiduals>(params, sums, channel, token);
    } else {
      store_whole<false, false>(params, sums, channel, token);
    }
    if (kPasses % 2 != 0) first_ ^= 1;
  }

 private:
  static constexpr int kSlotBytes = Shape::kM * kPartTokens * int(sizeof(Sum));  // sums of a part

  /// Whether residuals may follow. They, and gates, find sums that are rounded, as separate operators do.
  static constexpr bool kHasResiduals = !Mma::kExperts;
  /// Whether whole tiles have code of their own for residuals: not where these would cost the main loop registers.
  static constexpr bool kWholeResiduals = kHasResiduals && !kScalesTokens;
  /// Whether residuals of 16 bits may have any alignment; others are the plan's to refuse.
  static constexpr bool kAnyResiduals = !kScalesTokens || qcutlass::takes_any_residual(Shape::kN);

  /// The launch's parameters, as the end of a tile has them.
  static CUTLASS_DEVICE decltype(auto) of_this_tile(Params const& given) {
    if constexpr (kScalesTokens)
      return thread::opaque(given);
    else
      return (given);
  }

  /// Stores this block's parts, rounded.
  template <bool kGated>
  CUTLASS_DEVICE void store(Params const& params, Sums const& sums, int channel, int token, int blocks,
                            int rank) const {
    CUTLASS_PRAGMA_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      bool mine[kPassParts];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPassParts; ++i) {
        mine[i] = is_own(pass * kPassParts + i, blocks, rank);
        if (mine[i]) transpose(params, sums, pass, i);
      }
      // One barrier is enough, since a buffer is written again only after the next one, in the next tile too.
      arch::named_barrier_sync<arch::kWarpgroupThreads>(warpgroup_);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPassParts; ++i) {
        if (mine[i]) store_rows<kGated>(params, pass, i, channel, token);
      }
    }
  }

  /// Passes whose residual is requested before that of the pass at hand is added. Four warpgroups have no registers for
  /// more than one.
  static constexpr int kPassesAhead = Mma::kWarpgroups == 2 && kPasses > 1 ? 2 : 1;

  /// Stores the whole tile in vectors: what large products do, without a branch from one pass to the next.
  template <bool kGated, bool kResidual>
  CUTLASS_DEVICE void store_whole(Params const& params, Sums const& sums, int channel, int token) const {
    constexpr int kColumns = kGated ? kVector / 2 : kVector;
    using Columns = AlignedArray<Element, kColumns>;
    int const row = thread_ / kVectors, own = thread_ % kVectors * kColumns;
    int const column = channel / (kVector / kColumns) + own, columns = params.channels / (kVector / kColumns);
    int const tokens = column < columns ? params.tokens - token - row : 0;  // from this thread's first one on
    auto* out = static_cast<Element*>(params.output) + (token + row) * params.stride + column;
    Element const* residual = nullptr;
    if (kResidual)
      residual = static_cast<Element const*>(params.residual) + (token + row) * params.residual_stride + column;
    Columns residuals[kParts];
    auto const request = [&](int pass) {
      CUTLASS_PRAGMA_UNROLL
      for (int part = pass * kPassParts; part < (pass + 1) * kPassParts; ++part) {
        // Never undefined: the compiler would keep what the tile before left there, in local memory.
        residuals[part] = part * kPartTokens < tokens ? *reinterpret_cast<Columns const*>(residual) : Columns{};
        residual += kPartTokens * params.residual_stride;
      }
    };
    CUTLASS_PRAGMA_UNROLL
    for (int pass = 0; kResidual && pass < kPassesAhead; ++pass) request(pass);
    CUTLASS_PRAGMA_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPassParts; ++i) transpose(params, sums, pass, i);
      arch::named_barrier_sync<arch::kWarpgroupThreads>(warpgroup_);
      if (kResidual && pass + kPassesAhead < kPasses) request(pass + kPassesAhead);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPassParts; ++i) {
        int const part = pass * kPassParts + i;
        if (part * kPartTokens < tokens) {
          Columns words = finished<kGated>(params, rows(pass)[i * kPartTokens + row], own);
          if constexpr (kResidual) add_residual(params, words, residuals[part]);
          *reinterpret_cast<Columns*>(out) = words;
        }
        out += kPartTokens * params.stride;
      }
    }
  }

  /// A thread's columns of a row of rounded sums: the channels themselves, or what gates make of twice as many.
  template <bool kGated>
  static CUTLASS_DEVICE auto finished(Params const& params, Element const* sums, int column) {
    if constexpr (!kGated) {
      return reinterpret_cast<AlignedArray<Element, kVector> const&>(sums[column]);
    } else {
      AlignedArray<Element, kVector / 2> result;
      with_element(params, [&](auto element) {
        using Columns = AlignedArray<decltype(element), kVector / 2>;
        auto const gates = reinterpret_cast<Columns const&>(sums[thread::gate_channel(column)]);
        auto const ups = reinterpret_cast<Columns const&>(sums[thread::gate_channel(column) + thread::kGateTurn]);
        float values[Columns::kElements];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < int(Columns::kElements); ++i)
          values[i] = thread::gate_value(float(gates[i]), params.activation) * float(ups[i]);
        reinterpret_cast<Columns&>(result) = thread::round_columns<decltype(element)>(values);
      });
      return result;
    }
  }

  /// words += residual, each sum rounded once.
  template <class Words>
  static CUTLASS_DEVICE void add_residual(Params const& params, Words& words, Words const& residual) {
    with_element(params, [&](auto element) {
      using Columns = AlignedArray<decltype(element), int(Words::kElements)>;
      auto& columns = reinterpret_cast<Columns&>(words);
      columns = thread::add_columns(columns, reinterpret_cast<Columns const&>(residual));
    });
  }

  /// Calls function(a value of the 16 bits that an output is).
  template <class Function>
  static CUTLASS_DEVICE void with_element(Params const& params, Function const& function) {
    if constexpr (kScalesTokens)
      if (params.output_type == qcutlass::DType::kBFloat16) return function(bfloat16_t{});
    function(Element{});
  }

  /// The buffer of a pass: always another than that of the pass before, of the tile before too.
  CUTLASS_DEVICE auto& rows(int pass) const {
    return storage_.rows[warpgroup_][kPasses % 2 == 0 ? pass % 2 : (pass + first_) % 2];
  }

  /// Whether this block finishes a part of the tile.
  static CUTLASS_DEVICE bool is_own(int part, int blocks, int rank) {
    return rank < 0 || Shares::owner_of(part, blocks) == rank;
  }

  CUTLASS_DEVICE int lane() const { return thread_ % 32; }
  CUTLASS_DEVICE int warp() const { return thread_ / 32; }
  /// The first of this thread's two channels; the other is 8 further on.
  CUTLASS_DEVICE int own_channel() const { return warp() * 16 + lane() / 4; }

  /// [n8 block][channel g or g + 8][token 2t or 2t + 1]
  CUTLASS_DEVICE void add_bias(Params const& params, Sums& sums, int channel) const {
    if (params.bias_type == qcutlass::DType::kNone) return;
    float bias[2];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      int const own = channel + own_channel() + i * 8;
      int source = own;
      if constexpr (Mma::kExperts) source = params.halves().channel(own);
      bias[i] = own < params.channels ? thread::load_bias(params.bias, params.bias_type, source) : thread::kNoBias;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < int(sizeof(Sums) / sizeof(Sum)); ++i) sums[i] += bias[i / 2 % 2];
  }

  CUTLASS_DEVICE void scale_rows(Params const& params, Sums& sums, int token) const {
    if (params.row_scale == nullptr) return;
    scale_tokens(sums, token, [&](int row) { return row < params.tokens ? params.row_scale[row] : 0.f; });
  }

  template <class ScaleOf>
  CUTLASS_DEVICE void scale_tokens(Sums& sums, int token, ScaleOf const& scale_of) const {
    token += lane() % 4 * 2;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < Shape::kN / 8; ++block) CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      float const scale = scale_of(token + block * 8 + i);
      sums[block * 4 + i] *= scale;
      sums[block * 4 + 2 + i] *= scale;
    }
  }

  static CUTLASS_DEVICE uint32_t pack_pair(Params const& params, float first, float second) {
    uint32_t pair;
    with_element(params, [&](auto element) { pair = thread::pack_pair<decltype(element)>(first, second); });
    return pair;
  }

  /// A warp's 16 channels of a part, rounded: four matrices of 8 channels by 8 tokens, each stored transposed.
  CUTLASS_DEVICE void transpose(Params const& params, Sums const& sums, int pass, int part) const {
    uint32_t words[4];  // [n8 block][channel g or g + 8]
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      int const first = (pass * kPassParts + part) * 8 + i * 2;
      words[i] = pack_pair(params, sums[first], sums[first + 1]);
    }
    int const token = part * kPartTokens + lane() / 16 * 8 + lane() % 8, channel = warp() * 16 + lane() / 8 % 2 * 8;
    cute::SM90_U16x8_STSM_T::copy(words[0], words[1], words[2], words[3],
                                  reinterpret_cast<cute::uint128_t&>(rows(pass)[token][channel]));
  }

  /// Stores a part's rows, of any alignment; their residual is read when it is needed.
  template <bool kGated>
  CUTLASS_DEVICE void store_rows(Params const& params, int pass, int part, int channel, int token) const {
    constexpr int kColumns = kGated ? kVector / 2 : kVector;
    int const row = part * kPartTokens + thread_ / kVectors, own = thread_ % kVectors * kColumns;
    token += pass * kPassTokens + row;
    if (token >= params.tokens) return;
    int const column = channel / (kVector / kColumns) + own, left = params.channels / (kVector / kColumns) - column;
    auto words = finished<kGated>(params, rows(pass)[row], own);
    if (kHasResiduals && params.residual != nullptr) {
      auto const* from = static_cast<Element const*>(params.residual) + token * params.residual_stride + column;
      if constexpr (kAnyResiduals) {
        add_residual(params, words, thread::load_columns<Element, kColumns>(from, left, params.vectors));
      } else {
        if (!params.vectors || left <= 0) return;  // all are vectors, which the compiler need not know
        add_residual(params, words, reinterpret_cast<decltype(words) const&>(*from));
        *reinterpret_cast<decltype(words)*>(static_cast<Element*>(params.output) + token * params.stride + column) =
            words;
        return;
      }
    }
    thread::store_words(static_cast<Element*>(params.output) + token * params.stride + column, words, left,
                        params.vectors);
  }

  /// Gates of outputs of 32 bits: a warp has the channels of a turn, its neighbour those that they multiply, which
  /// come to it through the buffers of the passes. The sums of warps with gates become products.
  CUTLASS_DEVICE void multiply_floats(Params const& params, Sums& sums) {
    constexpr int kPassSums = kPassParts * 8;
    static_assert(thread::kGateTurn == 16 &&
                  kChannels / 32 * kPassSums * 32 * sizeof(float) <= sizeof(storage_.rows[0][0]));
    CUTLASS_PRAGMA_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      float* const words = reinterpret_cast<float*>(rows(pass)) + warp() / 2 * kPassSums * 32 + lane();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPassSums && warp() % 2 != 0; ++i) words[i * 32] = sums[pass * kPassSums + i];
      arch::named_barrier_sync<arch::kWarpgroupThreads>(warpgroup_);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPassSums && warp() % 2 == 0; ++i) {
        float& sum = sums[pass * kPassSums + i];
        sum = thread::gate_value(sum, params.activation) * words[i * 32];
      }
    }
    if (kPasses % 2 != 0) first_ ^= 1;
  }

  /// Outputs of 32 bits, in sectors of 32 bytes, of eight lanes each.
  template <class IsOwn>
  CUTLASS_DEVICE void store_floats(Params const& params, Sums const& sums, int channel, int token,
                                   IsOwn const& is_own) const {
    int column = channel + own_channel(), columns = params.channels;
    if (params.gate != qcutlass::Gate::kNone) {
      if (warp() % 2 != 0) return;
      column = thread::gated_column(column), columns /= 2;
    }
    token += lane() % 4 * 2;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < int(sizeof(Sums) / sizeof(Sum)); ++i) {
      int const own = column + i / 2 % 2 * 8, row = token + i / 4 * 8 + i % 2;
      if (!is_own(i / 8) || row >= params.tokens || own >= columns) continue;
      float value = sums[i];
      if (params.residual != nullptr)
        value = thread::add_separately(value,
                                       static_cast<float const*>(params.residual)[row * params.residual_stride + own]);
      static_cast<float*>(params.output)[row * params.stride + own] = value;
    }
  }

  /// Sectors of 32 bytes, of eight lanes each.
  CUTLASS_DEVICE void store_sums(thread::PartialSums<Sum> const& partials, int tokens, Sums const& sums, int channel,
                                 int token) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < int(sizeof(Sums) / sizeof(Sum)); ++i) {
      int const own = channel - partials.channel + own_channel() + i / 2 % 2 * 8,
                row = token - partials.token + i / 4 * 8 + lane() % 4 * 2 + i % 2;
      if (row < tokens - partials.token && own < partials.stride) partials.data[row * partials.stride + own] = sums[i];
    }
  }

  /// This thread's place for the sums of `part` from block `source` in the memory of block `owner`.
  CUTLASS_DEVICE int slot_of(int part, int owner, int source, int blocks) const {
    return Shares::slot_of(part, owner, source, blocks) * (kSlotBytes / 16) + warpgroup_ * 2 * arch::kWarpgroupThreads +
           thread_;
  }

  /// Adds the sums of all blocks in the order of their shares, whichever of them does it: the bits of a row do not
  /// depend on where in its tile it lies.
  CUTLASS_DEVICE void add(Sum (&sums)[8], uint4 const* slots, int part, int blocks, int rank) const {
    Sum total[8] = {};
    CUTLASS_PRAGMA_NO_UNROLL
    for (int source = 0; source < blocks; ++source) {
      if (source == rank) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 8; ++i) total[i] += sums[i];
        continue;
      }
      uint4 const* slot = slots + slot_of(part, rank, source, blocks);
      uint4 const words[2] = {slot[0], slot[arch::kWarpgroupThreads]};
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; ++i) total[i] += reinterpret_cast<Sum const*>(words)[i];
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) sums[i] = total[i];
  }

  SharedStorage& storage_;
  int warpgroup_, thread_;
  int first_ = 0;  // buffer of a tile's first pass, where tiles have an odd number of them
};

}  // namespace cutlass::epilogue::threadblock
