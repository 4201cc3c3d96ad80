// Stores the transposed sums of warpgroups (channels x tokens) row-major, [token][channel], and adds the sums of blocks
// of a cluster that share k.
//
// Scale, bias and activation are applied to the sums in their registers; a thread has two channels. Then every
// warpgroup transposes its own 64 channels by stmatrix, 32 tokens at a time. It uses two small buffers of its own,
// since the producer already fills the ring for the next tile.
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
  /// A 16-bit type for the words of an output whose type (float16 or bfloat16) is known at run time.
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

  /// Would request what the epilogue of the next tile needs; sums and fragments leave no registers for that.
  CUTLASS_DEVICE void request(Params const&, int /*channel*/, int /*token*/) {}

  /// Bytes that a block receives when `blocks` of them exchange sums, its own included.
  static constexpr int exchange_bytes(int blocks) { return blocks * Shares::most_parts(blocks) * kSlotBytes; }

  /// For `blocks` > 1 blocks of a cluster that share k. Each block finishes some parts of the tile, of 16 tokens each.
  /// This sends the sums of every part to the block that finishes it, into its memory at `slots`. All threads of the
  /// cluster must meet before and after. The exchange runs once a launch, with instructions that are not in the
  /// instruction cache yet, so its code is short.
  CUTLASS_DEVICE void send(Sums const& sums, uint4* slots, int blocks, int rank) const {
    uint4* const own = slots + slot(rank, blocks);
    int owner = 0, index = 0;  // among the owner's parts
    CUTLASS_PRAGMA_UNROLL
    for (int part = 0; part < kParts; ++part) {
      uint32_t const address = arch::cluster_address(own + index * kSlotWords, owner);
      arch::store_to_cluster(address, &sums[part * kPartSums]);
      arch::store_to_cluster(address + arch::kWarpgroupThreads * 16, &sums[part * kPartSums + 4]);
      int const next = Shares::owner_of(part + 1, blocks);
      index = next == owner ? index + 1 : 0;
      owner = next;
    }
  }

  /// Writes the tile that begins at (channel, token). If `rank` is not negative, the block is one of `blocks` that
  /// share the tile, and writes the parts that it finishes, with all blocks' sums added in order. If a later kernel
  /// adds shares of k, sums go to `partials` instead of the output. `meanwhile` is called once.
  template <class Meanwhile>
  CUTLASS_DEVICE void run(Params const& given, int channel, int token, Sums& sums, uint4 const* slots, int blocks,
                          int rank, thread::PartialSums<Sum> const& partials, Meanwhile const& meanwhile) {
    meanwhile();
    if constexpr (kScalesTokens) asm volatile("" : "+r"(thread_), "+r"(warpgroup_));  // as opaque() says
    auto const& params = of_this_tile(given);
    channel += warpgroup_ * kChannels;
    if (rank >= 0) return run_parts(params, channel, token, slots, blocks, rank);
    if (partials.data != nullptr) {
      store_sums(partials, params.tokens, sums, channel, token);
      return;
    }
    if constexpr (kScalesTokens)
      scale_tokens(sums, token, [&](int row) { return Output::load_token(params, row).scale; });
    if (params.bias_type != qcutlass::DType::kNone) Bias(*this, params, channel).add_to(sums);
    if (params.gate == qcutlass::Gate::kNone) thread::activate_all(sums, params.activation);
    if constexpr (Mma::kExperts) scale_rows(params, sums, token);
    if constexpr (kScalesTokens)
      if (params.output_type == qcutlass::DType::kFloat32) {
        if (params.gate != qcutlass::Gate::kNone) multiply_floats(params, sums);
        store_floats(params, sums, channel, token);
        return;
      }
    // Short tiles, and gates with residuals, have no code of their own: every copy of the passes takes time to compile.
    bool const is_whole = kPasses > 2 && params.vectors, adds = kHasResiduals && params.residual != nullptr;
    if (params.gate != qcutlass::Gate::kNone) {
      if (is_whole && !adds)
        store_whole<true, false>(params, sums, channel, token);
      else
        store<true>(params, sums, channel, token);
    } else if (!is_whole || (adds && !kWholeResiduals)) {
      store<false>(params, sums, channel, token);
    } else if (adds) {
      store_whole<false, kWholeResiduals>(params, sums, channel, token);
    } else {
      store_whole<false, false>(params, sums, channel, token);
    }
    if (kPasses % 2 != 0) first_ ^= 1;
  }

 private:
  static constexpr int kSlotBytes = Shape::kM * kPartTokens * int(sizeof(Sum)), kSlotWords = kSlotBytes / 16;  // a part
  static constexpr int kPartSums = 8;  // of a thread

  /// Whether there may be residuals. Sums are rounded before residuals and gates, as separate operators do it.
  static constexpr bool kHasResiduals = !Mma::kExperts;
  /// Whether whole tiles have code of their own for residuals: not if it would take registers from the main loop.
  static constexpr bool kWholeResiduals = kHasResiduals && !kScalesTokens;
  /// Whether residuals of 16 bits may have any alignment. If not, selection does not take this tile for unaligned ones.
  static constexpr bool kAnyResiduals = !kScalesTokens || qcutlass::takes_any_residual(Shape::kN);

  /// The launch's parameters; see opaque() for why they may be hidden from the compiler.
  static CUTLASS_DEVICE decltype(auto) of_this_tile(Params const& given) {
    if constexpr (kScalesTokens)
      return thread::opaque(given);
    else
      return (given);
  }

  /// Finishes this block's parts of a tile that blocks share.
  CUTLASS_DEVICE void run_parts(Params const& params, int channel, int token, uint4 const* slots, int blocks,
                                int rank) {
    slots += slot(0, blocks);
    Bias const bias(*this, params, channel);
    bool const gated = params.gate != qcutlass::Gate::kNone;
    int const first = Shares::first_part(rank, blocks);
    token += first * kPartTokens;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int part = first; part < kParts && Shares::owner_of(part, blocks) == rank; ++part) {
      Sum sums[kPartSums];
      add_shares(sums, slots, blocks);
      if constexpr (kScalesTokens)
        scale_tokens(sums, token, [&](int row) { return Output::load_token(params, row).scale; });
      bias.add_to(sums);
      if (!gated) thread::activate_all(sums, params.activation);
      auto* const to = storage_.rows[warpgroup_][part % 2];  // where the part before is not
      if (kScalesTokens && params.output_type == qcutlass::DType::kFloat32) {
        if (gated) multiply_gates(params, sums, to);
        store_floats(params, sums, channel, token);
      } else {
        transpose(params, sums, to);
        arch::named_barrier_sync<arch::kWarpgroupThreads>(warpgroup_);
        if (gated)
          store_rows<true>(params, to, channel, token);
        else
          store_rows<false>(params, to, channel, token);
      }
      slots += kSlotWords;
      token += kPartTokens;
    }
  }

  /// Stores all parts, rounded.
  template <bool kGated>
  CUTLASS_DEVICE void store(Params const& params, Sums const& sums, int channel, int token) const {
    CUTLASS_PRAGMA_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPassParts; ++i) transpose(params, part_of(sums, pass, i), rows(pass) + i * kPartTokens);
      // One barrier is enough, since a buffer is written again only after the next one, in the next tile too.
      arch::named_barrier_sync<arch::kWarpgroupThreads>(warpgroup_);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPassParts; ++i)
        store_rows<kGated>(params, rows(pass) + i * kPartTokens, channel,
                           token + (pass * kPassParts + i) * kPartTokens);
    }
  }

  /// How many passes ahead residuals are requested. Four warpgroups have no registers for more than one.
  static constexpr int kPassesAhead = Mma::kWarpgroups == 2 && kPasses > 1 ? 2 : 1;

  /// Stores a whole tile in vectors, without a branch between passes. Most tiles of large products are stored so.
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
      for (int i = 0; i < kPassParts; ++i) transpose(params, part_of(sums, pass, i), rows(pass) + i * kPartTokens);
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

  /// A thread's output columns, from a row of rounded sums: the channels themselves, or, with a gate, the products of
  /// twice as many channels.
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

  /// Calls function(element) with a value of the output's 16-bit type.
  template <class Function>
  static CUTLASS_DEVICE void with_element(Params const& params, Function const& function) {
    if constexpr (kScalesTokens)
      if (params.output_type == qcutlass::DType::kBFloat16) return function(bfloat16_t{});
    function(Element{});
  }

  /// The buffer of a pass: always another than that of the pass before, of the tile before too.
  CUTLASS_DEVICE Element (*rows(int pass) const)[kRow] {
    return storage_.rows[warpgroup_][kPasses % 2 == 0 ? pass % 2 : (pass + first_) % 2];
  }

  /// A thread's sums of a part of a pass.
  static CUTLASS_DEVICE Sum const (&part_of(Sums const& sums, int pass, int part))[kPartSums] {
    return reinterpret_cast<Sum const(&)[kPartSums]>(sums[(pass * kPassParts + part) * kPartSums]);
  }

  CUTLASS_DEVICE int lane() const { return thread_ % 32; }
  CUTLASS_DEVICE int warp() const { return thread_ / 32; }
  /// The first of this thread's two channels; the other is 8 further on.
  CUTLASS_DEVICE int own_channel() const { return warp() * 16 + lane() / 4; }

  /// That of a thread's two channels, for sums [n8 block][channel g or g + 8][token 2t or 2t + 1].
  struct Bias {
    float of[2] = {thread::kNoBias, thread::kNoBias};

    CUTLASS_DEVICE Bias(WgmmaEpilogue const& epilogue, Params const& params, int channel) {
      if (params.bias_type == qcutlass::DType::kNone) return;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        int const own = channel + epilogue.own_channel() + i * 8;
        int source = own;
        if constexpr (Mma::kExperts) source = params.halves().channel(own);
        if (own < params.channels) of[i] = thread::load_bias(params.bias, params.bias_type, source);
      }
    }
    /// Never fused with what scales the sums: the compiler would fuse those of some tokens and not of others.
    template <int kCount>
    CUTLASS_DEVICE void add_to(Sum (&sums)[kCount]) const {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) sums[i] = thread::add_separately(sums[i], of[i / 2 % 2]);
    }
  };

  CUTLASS_DEVICE void scale_rows(Params const& params, Sums& sums, int token) const {
    if (params.row_scale == nullptr) return;
    scale_tokens(sums, token, [&](int row) { return row < params.tokens ? params.row_scale[row] : 0.f; });
  }

  template <int kCount, class ScaleOf>
  CUTLASS_DEVICE void scale_tokens(Sum (&sums)[kCount], int token, ScaleOf const& scale_of) const {
    token += lane() % 4 * 2;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kCount / 4; ++block) CUTLASS_PRAGMA_UNROLL
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
  CUTLASS_DEVICE void transpose(Params const& params, Sum const (&sums)[kPartSums], Element (*to)[kRow]) const {
    uint32_t words[4];  // [n8 block][channel g or g + 8]
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) words[i] = pack_pair(params, sums[i * 2], sums[i * 2 + 1]);
    int const token = lane() / 16 * 8 + lane() % 8, channel = warp() * 16 + lane() / 8 % 2 * 8;
    cute::SM90_U16x8_STSM_T::copy(words[0], words[1], words[2], words[3],
                                  reinterpret_cast<cute::uint128_t&>(to[token][channel]));
  }

  /// Stores a part's rows, of any alignment; their residual is read when it is needed.
  template <bool kGated>
  CUTLASS_DEVICE void store_rows(Params const& params, Element const (*rows)[kRow], int channel, int token) const {
    constexpr int kColumns = kGated ? kVector / 2 : kVector;
    int const row = thread_ / kVectors, own = thread_ % kVectors * kColumns;
    token += row;
    if (token >= params.tokens) return;
    int const column = channel / (kVector / kColumns) + own, left = params.channels / (kVector / kColumns) - column;
    auto words = finished<kGated>(params, rows[row], own);
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
  /// come to it through a buffer of the passes. The sums of warps with gates become products.
  template <int kCount>
  CUTLASS_DEVICE void multiply_gates(Params const& params, float (&sums)[kCount], Element (*buffer)[kRow]) const {
    static_assert(thread::kGateTurn == 16 &&
                  kChannels / 32 * kCount * 32 * sizeof(float) <= sizeof(storage_.rows[0][0]));
    float* const words = reinterpret_cast<float*>(buffer) + warp() / 2 * kCount * 32 + lane();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount && warp() % 2 != 0; ++i) words[i * 32] = sums[i];
    arch::named_barrier_sync<arch::kWarpgroupThreads>(warpgroup_);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount && warp() % 2 == 0; ++i)
      sums[i] = thread::gate_value(sums[i], params.activation) * words[i * 32];
  }
  CUTLASS_DEVICE void multiply_floats(Params const& params, Sums& sums) {
    constexpr int kPassSums = kPassParts * kPartSums;
    CUTLASS_PRAGMA_UNROLL
    for (int pass = 0; pass < kPasses; ++pass)
      multiply_gates(params, reinterpret_cast<float(&)[kPassSums]>(sums[pass * kPassSums]), rows(pass));
    if (kPasses % 2 != 0) first_ ^= 1;
  }

  /// Outputs of 32 bits, in sectors of 32 bytes, of eight lanes each.
  template <int kCount>
  CUTLASS_DEVICE void store_floats(Params const& params, Sum const (&sums)[kCount], int channel, int token) const {
    int column = channel + own_channel(), columns = params.channels;
    if (params.gate != qcutlass::Gate::kNone) {
      if (warp() % 2 != 0) return;
      column = thread::gated_column(column), columns /= 2;
    }
    token += lane() % 4 * 2;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      int const own = column + i / 2 % 2 * 8, row = token + i / 4 * 8 + i % 2;
      if (row >= params.tokens || own >= columns) continue;
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

  /// This thread's place for the first part that block `source` sends.
  CUTLASS_DEVICE int slot(int source, int blocks) const {
    return source * Shares::most_parts(blocks) * kSlotWords + warpgroup_ * 2 * arch::kWarpgroupThreads + thread_;
  }

  /// The sums of a part, of all blocks in the order of their shares, whichever of them adds: the bits of a row do not
  /// depend on where in its tile it lies.
  CUTLASS_DEVICE void add_shares(Sum (&sums)[kPartSums], uint4 const* slots, int blocks) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kPartSums; ++i) sums[i] = 0;
    int const step = Shares::most_parts(blocks) * kSlotWords;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int source = 0; source < blocks; ++source, slots += step) {
      uint4 const words[2] = {slots[0], slots[arch::kWarpgroupThreads]};
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPartSums; ++i) sums[i] += reinterpret_cast<Sum const*>(words)[i];
    }
  }

  SharedStorage& storage_;
  int warpgroup_, thread_;
  int first_ = 0;  // buffer of a tile's first pass, where tiles have an odd number of them
};

}  // namespace cutlass::epilogue::threadblock
