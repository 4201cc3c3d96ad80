// The stream main loop, for few tokens: the weights pass through at the speed of memory and everything else keeps out
// of their way. Differences from MmaPackedMultistage:
//   - k is dealt out to the block's slices in turns of 128; the warps of a slice share a cp.async ring of their own and
//     never wait for another slice before the epilogue. With one warp a slice the loop has no block-wide barrier;
//   - where a group of scales spans at least 64 k, sums of (code - zero) * activation, exact products, are scaled in
//     fp32, once a group: cheaper than scaling the weights as long as there are few tokens, and nothing is rounded;
//   - the ring holds the rows of activations that exist, not the tile's.
#pragma once

#include "cutlass/arch/memory_sm75.h"
#include "cutlass/arch/memory_sm80.h"
#include "cutlass_ext/arch/grid_dependency.h"
#include "cutlass_ext/arch/named_barrier.h"
#include "cutlass_ext/gemm/threadblock/packed_mma.h"
#include "cutlass_ext/gemm/warp/block_promotion.h"

namespace cutlass::gemm::threadblock {

/// Shape: channels x tokens x (slices * 128). WarpShape: channels x tokens x 128.
template <class Shape_, class WarpShape_, int Stages_, class Element_, qcutlass::Packing kPacking_,
          qcutlass::ScaleMode kMode_>
class MmaPackedStream {
 public:
  using Shape = Shape_;
  using WarpShape = WarpShape_;
  using Element = Element_;
  static constexpr int kStages = Stages_;
  static constexpr qcutlass::ScaleMode kMode = kMode_;
  using Traits = PackedMma<Element, kPacking_, kMode>;
  using Arguments = typename Traits::Arguments;
  using Accumulator = typename Traits::Accumulator;

  static constexpr int kWarpsM = Shape::kM / WarpShape::kM;
  static constexpr int kWarpsN = Shape::kN / WarpShape::kN;
  static constexpr int kSlices = Shape::kK / WarpShape::kK;
  static constexpr int kSetThreads = 32 * kWarpsM * kWarpsN;  // the warps of a slice
  static constexpr int kThreads = kSetThreads * kSlices;
  static constexpr int kStrips = WarpShape::kM / 16;  // per warp
  static constexpr int kColumns = WarpShape::kN / 8;  // n8 blocks per warp
  static constexpr int kStageK = qcutlass::kStreamK;
  static constexpr int kStepK = Traits::kStepK;
  static constexpr int kSteps = kStageK / kStepK;
  static_assert(WarpShape::kK == kStageK);
  static_assert(kSetThreads == 32 || kSlices <= arch::kNamedBarriers);

  using LayoutA = typename Traits::LayoutA;
  static constexpr int kTiles = kStageK / LayoutA::kTileK;  // packed tiles of a strip and stage
  static constexpr int kStripBytes = kTiles * LayoutA::kTileBytes;
  static constexpr int kBlockStrips = Shape::kM / 16;

  using Scales = typename Traits::Scales;
  using Converter = typename Scales::Converter;
  using Operands = typename Scales::Operands;
  /// Scale the sums instead of the weights. Where groups may be as short as 16 it does not pay, and real-valued zeros
  /// would have to be multiplied out of the sums, which cancels digits.
  static constexpr bool kScaleSums = kMode == qcutlass::ScaleMode::kNative;
  static constexpr int kRows = qcutlass::scale_rows(kMode, kStageK);
  static constexpr int kRowSteps = kRows > 0 ? kSteps / kRows : kSteps;  // steps that one row of scales serves
  static constexpr int kScaleRowBytes = Shape::kM * qcutlass::scale_bytes(kMode);
  static constexpr int kZeroRowBytes = Shape::kM * qcutlass::zero_bytes(kMode);

  /// Blockwise int8: sums of blocks of k are scaled into the accumulators.
  static constexpr bool kBlockwise = qcutlass::is_promoted(kMode);
  static constexpr int kPromotedSteps = qcutlass::promoted_k(kMode) / kStepK;
  using BlockScales = BlockScaleLoaderOf<Shape::kM, Shape::kN, kStageK, kMode, kSetThreads>;

  using ArchMma = typename Traits::ArchMma;
  using Products = typename ArchMma::FragmentC;  // sums of the instruction
  using Sums = Array<Accumulator, 4>;
  using FragmentC = Array<Accumulator, kStrips * kColumns * 4>;  // [column][strip], as CUTLASS orders accumulators
  /// Strips whose MMAs take turns: one strip's, with few tokens, would wait for their own results.
  static constexpr int kTogether = kColumns == 1 ? (kStrips % 3 == 0 ? 3 : 2) : kColumns == 2 ? 2 : 1;

  /// One place of a slice's ring. The rows of activations come last: their number is the problem's.
  struct Place {
    static constexpr int kWeights = 0;
    static constexpr int kScales = kWeights + kBlockStrips * kStripBytes;
    static constexpr int kZeros = kScales + kRows * kScaleRowBytes;
    static constexpr int kBlocks = kZeros + kRows * kZeroRowBytes;
    static constexpr int kTokens = kBlocks + BlockScales::kStageBytes;
    static constexpr int kTokenBytes = kStageK * int(sizeof(Element));
  };

  struct alignas(16) SharedStorage {
    uint8_t ring[kSlices * kStages * (Place::kTokens + Shape::kN * Place::kTokenBytes)];
  };

  /// The block's tile starts at (channel, token), its share of k is [first_k, end_k); first_k is a multiple of
  /// Shape::kK, and so is end_k unless it is the end of the matrix.
  CUTLASS_DEVICE
  MmaPackedStream(SharedStorage& storage, Arguments const& args, int channel, int token, int first_k, int end_k,
                  int warp, int lane)
      : args_(args),
        lane_(lane),
        thread_(threadIdx.x % kSetThreads),
        slice_(warp / (kWarpsM * kWarpsN)),
        first_channel_(warp / kWarpsN % kWarpsM * WarpShape::kM + lane / 4),
        lane_byte_(LayoutA::lane_byte(lane)),
        first_token_(warp % kWarpsN * WarpShape::kN),
        tokens_(fast_min(args.tokens - token, Shape::kN)),
        place_bytes_(Place::kTokens + fast_min(args.tokens, Shape::kN) * Place::kTokenBytes),
        ring_(storage.ring + slice_ * kStages * place_bytes_),
        end_k_(end_k),
        whole_groups_(args.group_size.divisor.divisor * GroupSize::kUnit % kStageK == 0) {
    int const k = first_k + slice_ * kStageK;
    weights_k_ = read_k_ = k;
    tokens_k_ = k + column();
    stages_ = k < end_k ? (end_k - k + Shape::kK - 1) / Shape::kK : 0;
    weights_ = args.weights + (int64_t(channel / 16) * args.tiles_k + k / LayoutA::kTileK) * LayoutA::kTileBytes +
               thread_ % kChunksAStrip * 16;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kStripCopies; ++i)  // strips beyond the last are copies of it, whose channels are not stored
      strip_[i] = fast_min(thread_ / kChunksAStrip + i * kStripStep, args.tiles_n - 1 - channel / 16) * args.tiles_k *
                  (LayoutA::kTileBytes / 16);
    activations_ = args.activations + int64_t(token + thread_ / kChunksAToken) * args.activation_stride + tokens_k_;
    scales_ = ScaleCopy(args.scales, channel, thread_);
    zeros_ = ZeroCopy(args.zeros, channel, thread_);
    blocks_ = BlockScales(args.blocks, channel, args.channels, token, args.tokens, thread_);
    blocks_k_ = k;
    // Tokens beyond the last read the last one's row; their sums are not stored.
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kColumns; ++n) {
      int const row = fast_min(first_token_ + n * 8 + lane % 8, tokens_ - 1);
      token_offset_[n] = row * Place::kTokenBytes + swizzled(row, lane / 8) * 16;
    }
    if constexpr (kScaleSums) {
      constexpr uint32_t kZero = qcutlass::symmetric_zero(LayoutA::kBits);
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < kStrips; ++m) offsets_[m] = Converter::make(0, 0, kZero, kZero);
    }
  }

  /// Requests the weights, scales and zeros of the first stages, which may be done before the wait for the kernel
  /// before this one.
  CUTLASS_DEVICE void prefetch_weights() {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int s = 0; s < fast_min(kStages - 1, stages_); ++s) copy_weights(ring_ + s * place_bytes_);
  }

  /// Accumulates the block's share of k, the first stages' weights being on their way. Shared memory is free for other
  /// uses when it returns.
  CUTLASS_DEVICE void operator()(FragmentC& accumulators) {
    CUTLASS_PRAGMA_NO_UNROLL
    for (int s = 0; s < kStages - 1; ++s) {
      if (s < stages_) copy_activations(ring_ + s * place_bytes_);
      arch::cp_async_fence();
    }
    accumulators.clear();
    uint8_t *read = ring_, *write = ring_ + (kStages - 1) * place_bytes_;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int left = stages_; left > 0; --left) {
      arch::cp_async_wait<kStages - 2>();
      synchronize_slice();
      if (left >= kStages) {
        copy_weights(write);
        copy_activations(write);
      } else {
        arch::allow_next_grid();  // nothing left to load: the next kernel's weights may come
      }
      arch::cp_async_fence();
      accumulate(accumulators, read);
      read_k_ += Shape::kK;
      write = read;  // the place that is free now
      read = read == ring_ + (kStages - 1) * place_bytes_ ? ring_ : read + place_bytes_;
    }
    arch::cp_async_wait<0>();
    __syncthreads();
  }

 private:
  static constexpr int kChunksAStrip = kStripBytes / 16;
  static constexpr int kWeightCopies = kBlockStrips * kChunksAStrip / kSetThreads;
  static_assert(kBlockStrips * kChunksAStrip % kSetThreads == 0);
  static_assert(kSetThreads % kChunksAStrip == 0 || kChunksAStrip % kSetThreads == 0);
  static constexpr int kChunksATile = LayoutA::kTileBytes / 16;
  static constexpr int kCopiesAStrip = kChunksAStrip > kSetThreads ? kChunksAStrip / kSetThreads : 1;
  static constexpr int kStripStep = kSetThreads > kChunksAStrip ? kSetThreads / kChunksAStrip : 1;
  static constexpr int kStripCopies = kWeightCopies / kCopiesAStrip;  // strips that a thread copies from
  static constexpr int kChunksAToken = Place::kTokenBytes / 16;
  static constexpr int kTokensACopy = kSetThreads / kChunksAToken;
  static constexpr int kTokenCopies = (Shape::kN + kTokensACopy - 1) / kTokensACopy;

  /// Where row `row` keeps its chunk `chunk` of 16 bytes: ldmatrix reads one chunk of 8 rows, which lie 128 or 256
  /// bytes apart.
  static CUTLASS_DEVICE int swizzled(int row, int chunk) { return chunk ^ row % 8; }
  CUTLASS_DEVICE int column() const { return thread_ % kChunksAToken * (16 / int(sizeof(Element))); }

  CUTLASS_DEVICE void synchronize_slice() const {
    if constexpr (kSetThreads == 32)
      __syncwarp();
    else
      arch::named_barrier_sync<kSetThreads>(slice_);
  }

  /// This thread's part in copying the groups' rows of a stage.
  template <int kRowBytes>
  struct RowCopy {
    static constexpr int kChunks = kRowBytes / 16, kCopies = (kRows * kChunks + kSetThreads - 1) / kSetThreads;
    uint8_t const* from[kCopies];  // in the first group's row
    int row[kCopies];              // negative: nothing to copy

    RowCopy() = default;
    CUTLASS_DEVICE RowCopy(GroupMatrix const& matrix, int channel, int thread) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCopies; ++i) {
        int const chunk = thread + i * kSetThreads, byte = chunk % kChunks * 16;
        int const first_byte = channel * matrix.element_bytes + byte;
        bool const exists = (chunk < kRows * kChunks) & (byte < Shape::kM * matrix.element_bytes) &
                            (first_byte < matrix.row_bytes);  // no branches
        from[i] = matrix.data + first_byte;
        row[i] = exists ? chunk / kChunks : -1;
      }
    }

    /// For the stage at k; rows beyond the end of k are copies of the last.
    CUTLASS_DEVICE void run(uint8_t* to, Arguments const& args, GroupMatrix const& matrix, int k, int thread) const {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCopies; ++i) {
        unsigned const group = args.group_size.group(fast_min(k + row[i] * (kStageK / kRows), args.k - 1));
        if (row[i] >= 0)
          arch::cp_async<16, arch::CacheOperation::Global>(to + (thread + i * kSetThreads) * 16,
                                                           from[i] + uint64_t(group) * uint32_t(matrix.stride));
      }
    }
  };

  struct NoCopy {
    NoCopy() = default;
    CUTLASS_DEVICE NoCopy(GroupMatrix const&, int, int) {}
    CUTLASS_DEVICE void run(uint8_t*, Arguments const&, GroupMatrix const&, int, int) const {}
  };
  using ScaleCopy = std::conditional_t<kRows == 0, NoCopy, RowCopy<kScaleRowBytes>>;
  using ZeroCopy = std::conditional_t<kRows == 0, NoCopy, RowCopy<kZeroRowBytes>>;

  /// Requests the next stage's weights, scales and zeros; tiles beyond the end of k are zeros.
  CUTLASS_DEVICE void copy_weights(uint8_t* place) {
    int const left = end_k_ - weights_k_;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kWeightCopies; ++i) {
      int const chunk = i % kCopiesAStrip * kSetThreads;  // of the strip, from this thread's first
      int const tile_k = (thread_ % kChunksAStrip / kChunksATile + chunk / kChunksATile) * LayoutA::kTileK;
      arch::cp_async_zfill<16, arch::CacheOperation::Global>(
          place + Place::kWeights + (thread_ + i * kSetThreads) * 16,
          weights_ + int64_t(strip_[i / kCopiesAStrip]) * 16 + chunk * 16, tile_k < left);
    }
    scales_.run(place + Place::kScales, args_, args_.scales, weights_k_, thread_);
    if (args_.zeros.data != nullptr) zeros_.run(place + Place::kZeros, args_, args_.zeros, weights_k_, thread_);
    weights_k_ += Shape::kK;
    weights_ += Shape::kK / LayoutA::kTileK * LayoutA::kTileBytes;
  }

  /// Requests the next stage's activations and block scales.
  CUTLASS_DEVICE void copy_activations(uint8_t* place) {
    blocks_.copy(place + Place::kBlocks, blocks_k_);
    blocks_k_ += Shape::kK;
    copy_token(place, 0);
    if (tokens_ > kTokensACopy) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 1; i < kTokenCopies; ++i) copy_token(place, i);
    }
    tokens_k_ += Shape::kK;
    activations_ += Shape::kK;
  }

  CUTLASS_DEVICE void copy_token(uint8_t* place, int i) const {
    int const row = thread_ / kChunksAToken + i * kTokensACopy;
    if (row < tokens_)
      arch::cp_async_zfill<16, arch::CacheOperation::Global>(
          place + Place::kTokens + row * Place::kTokenBytes + swizzled(row, thread_ % kChunksAToken) * 16,
          activations_ + int64_t(i * kTokensACopy) * args_.activation_stride, tokens_k_ < args_.k);
  }

  /// The products of a stage, strip by strip.
  CUTLASS_DEVICE void accumulate(FragmentC& accumulators, uint8_t const* place) {
    uint32_t b[kColumns][kSteps][2];
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kColumns; ++n) {
      CUTLASS_PRAGMA_UNROLL
      for (int s = 0; s < kSteps; s += 2) {  // ldmatrix: the 4 chunks of two steps; the swizzle flips their bit 2
        Array<unsigned, 4> fragment;
        int const offset = s % 4 == 0 ? token_offset_[n] : token_offset_[n] ^ 64;
        arch::ldsm<layout::RowMajor, 4>(fragment, place + Place::kTokens + s / 4 * 128 + offset);
        b[n][s][0] = fragment[0], b[n][s][1] = fragment[1];
        b[n][s + 1][0] = fragment[2], b[n][s + 1][1] = fragment[3];
      }
    }
    if (kScaleSums && args_.zeros.data != nullptr) {
      CUTLASS_PRAGMA_UNROLL
      for (int m = 0; m < kStrips; ++m) offsets_[m] = operands(place, 0, first_channel_ + m * 16);
    }
    unsigned const starts = group_starts();
    Sums* const sums = reinterpret_cast<Sums*>(&accumulators);
    CUTLASS_PRAGMA_UNROLL
    for (int m = 0; m < kStrips; m += kTogether) {
      constexpr int kRest = (kStrips - 1) % kTogether + 1;
      if constexpr (kBlockwise) {
        m + kTogether <= kStrips ? accumulate_blocks<kTogether>(sums + m, place, m, b)
                                 : accumulate_blocks<kRest>(sums + m, place, m, b);
      } else {
        m + kTogether <= kStrips ? accumulate_strips<kTogether>(sums + m, place, m, b, starts)
                                 : accumulate_strips<kRest>(sums + m, place, m, b, starts);
      }
    }
  }

  using Codes = uint32_t[kSteps * LayoutA::kWords];

  /// The first byte of the lane's codes in a packed tile; simple ones need no register.
  CUTLASS_DEVICE int code_byte() const { return LayoutA::kConverts ? lane_ * 16 : lane_byte_; }

  /// The lane's codes of packed tile `tile` of `kCount` strips from the warp's strip m on.
  template <int kCount>
  CUTLASS_DEVICE void load_codes(Codes (&codes)[kCount], uint8_t const* place, int m, int tile) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i)
      Traits::load_codes(codes[i] + tile * 4, place + Place::kWeights + (first_channel_ / 16 + m + i) * kStripBytes +
                                                  tile * LayoutA::kTileBytes + code_byte());
  }

  /// `kCount` strips of a blockwise product from the warp's strip m on.
  template <int kCount>
  CUTLASS_DEVICE void accumulate_blocks(Sums* sums, uint8_t const* place, int m,
                                        uint32_t const (&b)[kColumns][kSteps][2]) const {
    Codes codes[kCount];
    Products block[kCount][kColumns];
    Products const start = warp::BlockPromotion::start();
    float const* scales = reinterpret_cast<float const*>(place + Place::kBlocks);
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < kSteps; ++s) {
      load_codes(codes, place, m, s);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int n = 0; n < kColumns; ++n)
          mma(block[i][n], codes[i] + s * LayoutA::kWords, b[n][s], s % kPromotedSteps == 0 ? start : block[i][n]);
      }
      if ((s + 1) % kPromotedSteps != 0) continue;
      CUTLASS_PRAGMA_UNROLL
      for (int n = 0; n < kColumns; ++n) {
        float2 const tokens = *reinterpret_cast<float2 const*>(scales + first_token_ + n * 8 + lane_ % 4 * 2);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kCount; ++i) {
          float const strip = scales[Shape::kN + first_channel_ / 16 + m + i];
          warp::BlockPromotion::add(sums[i + n * kStrips], block[i][n], {tokens.x * strip, tokens.y * strip});
        }
      }
      scales += BlockScales::kRowBytes / 4;
    }
  }

  /// `kCount` strips from the warp's strip m on.
  template <int kCount>
  CUTLASS_DEVICE void accumulate_strips(Sums* sums, uint8_t const* place, int m,
                                        uint32_t const (&b)[kColumns][kSteps][2], unsigned starts) {
    Codes codes[kCount];
    if constexpr (LayoutA::kConverts) {  // plain loads, whose place the compiler chooses; ldmatrix stays where it is
      CUTLASS_PRAGMA_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) load_codes(codes, place, m, tile);
    }
    Operands op[kCount];
    Sums group[kCount][kColumns];
    int const channel = first_channel_ + m * 16;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if constexpr (!kScaleSums) op[i] = operands(place, 0, channel + i * 16);
      if constexpr (kScaleSums) op[i] = offsets_[m + i];
      clear(group[i]);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < kSteps; ++s) {
      if constexpr (!LayoutA::kConverts) load_codes(codes, place, m, s);
      if (s > 0 && s % kRowSteps == 0 && (starts >> s & 1)) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kCount; ++i) {
          if constexpr (kScaleSums) {
            add_scaled(sums + i, group[i], place, s / kRowSteps - 1, channel + i * 16);
            clear(group[i]);
          }
          if (!kScaleSums || args_.zeros.data != nullptr) op[i] = operands(place, s / kRowSteps, channel + i * 16);
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        uint32_t a[4];
        dequantize(a, codes[i] + s * LayoutA::kWords, op[i]);
        CUTLASS_PRAGMA_UNROLL
        for (int n = 0; n < kColumns; ++n) {
          Sums& sum = kScaleSums ? group[i][n] : sums[i + n * kStrips];
          mma(sum, a, b[n][s], sum);
        }
      }
    }
    if constexpr (kScaleSums) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) add_scaled(sums + i, group[i], place, kRows - 1, channel + i * 16);
    }
  }

  /// Bit s: step s of the stage being accumulated is the first of a group, though it is not the stage's first step.
  CUTLASS_DEVICE unsigned group_starts() const {
    unsigned starts = 0;
    if (kRows > 0 && !whole_groups_) {
      CUTLASS_PRAGMA_UNROLL
      for (int s = kRowSteps; s < kSteps; s += kRowSteps) {
        int const k = read_k_ + s * kStepK;
        if (args_.group_size.group(k) != args_.group_size.group(k - kStepK)) starts |= 1u << s;
      }
    }
    return starts;
  }

  CUTLASS_DEVICE Operands operands(uint8_t const* place, int row, int channel) const {
    if constexpr (kRows == 0)
      return Scales::symmetric();
    else
      return Scales::load(place + Place::kScales + row * kScaleRowBytes, place + Place::kZeros + row * kZeroRowBytes,
                          channel, args_.scales.type, kScaleSums ? qcutlass::DType::kUInt8 : args_.zeros.type);
  }

  /// A step's A fragment: the weights, or code - zero where the sums are scaled.
  static CUTLASS_DEVICE void dequantize(uint32_t (&a)[4], uint32_t const* words, Operands const& op) {
    if constexpr (kScaleSums) {
      a[0] = Converter::template difference<0>(words, op), a[1] = Converter::template difference<1>(words, op);
      a[2] = Converter::template difference<2>(words, op), a[3] = Converter::template difference<3>(words, op);
    } else {
      a[0] = Converter::template convert<0>(words, op), a[1] = Converter::template convert<1>(words, op);
      a[2] = Converter::template convert<2>(words, op), a[3] = Converter::template convert<3>(words, op);
    }
  }

  static CUTLASS_DEVICE void clear(Sums (&group)[kColumns]) {
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kColumns; ++n) group[n].clear();
  }

  /// sums += scale * group; elements 0 and 1 of a fragment belong to row g, 2 and 3 to row g + 8.
  static CUTLASS_DEVICE void add_scaled(Sums* sums, Sums const (&group)[kColumns], uint8_t const* place, int row,
                                        int channel) {
    Element const* scales = reinterpret_cast<Element const*>(place + Place::kScales + row * kScaleRowBytes) + channel;
    float const scale[2] = {float(scales[0]), float(scales[8])};
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kColumns; ++n) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) sums[n * kStrips][i] += scale[i / 2] * group[n][i];
    }
  }

  /// d = a * b + c.
  static CUTLASS_DEVICE void mma(Products& d, uint32_t const* a, uint32_t const (&b)[2], Products const& c) {
    ArchMma{}(d, *reinterpret_cast<typename ArchMma::FragmentA const*>(a),
              reinterpret_cast<typename ArchMma::FragmentB const&>(b), c);
  }

  Arguments const& args_;
  int const lane_, thread_, slice_;
  int const first_channel_;  // of this lane, within the block's tile
  int const lane_byte_;      // of what it names to ldmatrix, in a packed tile
  int const first_token_;    // of its warp
  int const tokens_;         // of the tile that exist
  int const place_bytes_;
  uint8_t* const ring_;
  int const end_k_;
  bool const whole_groups_;            // no group ends within a stage
  int stages_;                         // of this slice
  int weights_k_, tokens_k_, read_k_;  // of the next stage to load (tokens: of this thread's chunk), to accumulate
  int strip_[kStripCopies];            // chunks from the block's first strip
  uint8_t const* weights_;
  Element const* activations_;
  ScaleCopy scales_;
  ZeroCopy zeros_;
  BlockScales blocks_;
  int blocks_k_;  // of the next stage whose block scales are to be loaded
  int token_offset_[kColumns];
  Operands offsets_[kScaleSums ? kStrips : 1];  // zeros of the strips
};

}  // namespace cutlass::gemm::threadblock
