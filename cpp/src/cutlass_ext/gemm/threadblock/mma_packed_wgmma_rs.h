// The wgmma main loop of weight-only products: asynchronous MMAs of four warps with the dequantised weights as
// register operand A and activations in swizzled shared memory as operand B.
//
//   producer    one thread of a warpgroup of its own keeps a ring of stages full by TMA: all it does is wait for a
//               place to be free and request a few boxes (activations, weights, scales, zeros)
//   operands    where integers are scaled in fp32, the other warps of that warpgroup make the operands of conversions,
//               which are not requested then (operand_producer.h)
//   consumers   the other warpgroups take their strips' codes from the ring, dequantise a batch of k steps into one of
//               two fragment buffers while the MMAs of the other one run, and free a stage when its last batch is done
#pragma once

#include "cutlass_ext/arch/named_barrier.h"
#include "cutlass_ext/epilogue/wgmma_epilogue.h"
#include "cutlass_ext/gemm/threadblock/operand_producer.h"
#include "cutlass_ext/gemm/threadblock/packed_mma.h"
#include "cutlass_ext/gemm/threadblock/ring_consumer.h"

namespace cutlass::gemm::threadblock {

/// Shape: channels x tokens x k of a stage, which is one or more chunks of 128 bytes of a token's row. kWarpgroups
/// share the channels. kBatch: k steps from one wait for MMAs to the next. kTurns: warpgroups issue their batches in
/// turns. kExperts: weights are several matrices, of which select_expert() names one.
template <class Shape_, int kWarpgroups_, int kStages_, int kBatch_, bool kTurns_, class Element_,
          qcutlass::Packing kPacking_, qcutlass::ScaleMode kMode_, bool kExperts_ = false>
class MmaPackedWgmmaRs {
 public:
  using Shape = Shape_;
  using Element = Element_;
  static constexpr int kStages = kStages_;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr qcutlass::ScaleMode kMode = kMode_;
  static constexpr bool kExperts = kExperts_;
  using Traits = PackedMma<Element, kPacking_, kMode>;
  using LayoutA = typename Traits::LayoutA;
  using Accumulator = typename Traits::Accumulator;
  using Scales = typename Traits::Scales;
  using Converter = typename Scales::Converter;
  using Operands = typename Scales::Operands;
  /// The registers that hold a row of scales between its load and the conversion.
  using Fetched = typename Traits::FetchedScales;

  static constexpr int kThreads = (kWarpgroups + 1) * arch::kWarpgroupThreads;
  static_assert(Shape::kM == kWarpgroups * arch::kWarpgroupRows);
  static constexpr int kStepK = Traits::kStepK;
  static constexpr int kSteps = Shape::kK / kStepK;
  static constexpr int kBatches = kSteps / kBatch_;  // of a stage
  static_assert(kSteps % kBatch_ == 0 && kStages * kBatches % 2 == 0, "a batch's fragment buffer is a constant");
  static_assert(!kTurns_ || kWarpgroups == 2);

  static constexpr int kChunkBytes = 128;
  static constexpr int kChunks = Shape::kK * int(sizeof(Element)) / kChunkBytes;
  static constexpr int kChunkK = Shape::kK / kChunks;
  static constexpr int kTiles = Shape::kK / LayoutA::kTileK;  // packed tiles of a strip and stage
  static constexpr int kRows = qcutlass::scale_rows(kMode, Shape::kK);
  static constexpr int kRowSteps = kRows > 0 ? kSteps / kRows : kSteps;  // steps that one row of scales serves
  /// Rows of scales in a TMA box. Native groups have a box for every row, so that consumers need not divide by the size
  /// of groups. In other modes one box has all rows of a stage, from the stage's first group on, and consumers find the
  /// row of their group in it.
  static constexpr int kBoxRows = kMode == qcutlass::ScaleMode::kNative ? 1 : kRows;

  /// Whether consumers find operands of conversions in the ring, as other warps have made them.
  static constexpr bool kMakesOperands = qcutlass::makes_operands(kPacking_, kMode);
  static_assert(!(kMakesOperands && kExperts), "the kernel of experts has no warps that would make them");

  using Wgmma = arch::Wgmma<typename Traits::Weight, Element, typename Traits::Product, Shape::kN, kStepK>;
  using FragmentC = typename Wgmma::Sums;
  using Output =
      std::conditional_t<kExperts, epilogue::thread::ExpertOutput<Element>, epilogue::thread::BiasActivation<Element>>;
  using Epilogue = epilogue::threadblock::WgmmaEpilogue<MmaPackedWgmmaRs>;

  /// Scales and zeros as the producing thread requests them.
  struct ScaleMaps {
    CUtensorMap scales;  // [groups][channels]
    CUtensorMap zeros;   // likewise
    qcutlass::DType scale_type, zero_type;
    int scale_row, zero_row;  // bytes of a row of scales or zeros in the ring
  };
  struct Arguments : Traits::GlobalScale, std::conditional_t<kMakesOperands, OperandMatrices<kMode>, ScaleMaps> {
    TokenBoxes<Shape::kN> activations;  // [tokens][k]
    CUtensorMap weights;                // [tiles_n][tiles_k][128 words]
    uint64_t weight_policy;             // of the L2 cache
    int weight_bytes;                   // of a stage, with scales and zeros where they are requested
    GroupSize group_size;
    int tiles_n;  // of an expert
    /// Maps of experts have five dimensions: weights [experts][tiles_n / 2][2 halves][tiles_k][128 words], scales
    /// [experts][groups][channels / 32][2 halves][16]. Without halves, whose dimension is 1, weights are one matrix
    /// [experts * tiles_n], so that a box at an expert's end reads on, not zeros, and scales [groups][1][1][channels].
    bool has_halves;
  };
  /// Blocks that fetch each other's weights: the smaller operand here.
  static CUTLASS_DEVICE int sharers(Arguments const&) { return 1; }

  /// Rings, one after the other; those of scales may be empty.
  struct alignas(128) SharedStorage {
    static constexpr int kChunks = MmaPackedWgmmaRs::kChunks;
    static constexpr int kTokenBytes = Shape::kN * kChunkBytes;  // of a chunk
    static constexpr int kStripBytes = kTiles * LayoutA::kTileBytes;
    static constexpr int kScaleBytes = kRows * Shape::kM * qcutlass::scale_bytes(kMode);
    static constexpr int kZeroBytes = kRows * Shape::kM * qcutlass::zero_bytes(kMode);
    static constexpr int kWeights = kStages * kChunks * kTokenBytes;
    static constexpr int kScales = kWeights + kStages * Shape::kM / 16 * kStripBytes;
    static constexpr int kZeros = kScales + kStages * kScaleBytes;
    static constexpr int kBytes = kZeros + kStages * kZeroBytes;
    static_assert(kTokenBytes % 1024 == 0, "what the swizzle's pattern repeats after");
    uint8_t rings[kBytes];

    CUTLASS_DEVICE uint8_t* activations(int place, int chunk) {
      return rings + (place * kChunks + chunk) * kTokenBytes;
    }
    CUTLASS_DEVICE uint8_t* weights(int place, int strip) {
      return rings + kWeights + (place * (Shape::kM / 16) + strip) * kStripBytes;
    }
    CUTLASS_DEVICE uint8_t* scales(int place) { return rings + kScales + place * kScaleBytes; }
    CUTLASS_DEVICE uint8_t* zeros(int place) { return rings + kZeros + place * kZeroBytes; }
    /// The operands of a strip for 16 columns, one for each of lanes 0, 4, 8 ... 28: two scales and two zeros. They use
    /// the rings of scales and of zeros.
    CUTLASS_DEVICE uint4* operands(int place, int row, int strip) {
      int const index = (place * kRows + row) * (Shape::kM / 16) + strip;
      return reinterpret_cast<uint4*>(rings + kScales) + index * 8;
    }
  };
  using Barriers = RingBarriers<kStages>;
  using OperandProducer =
      threadblock::OperandProducer<SharedStorage, kStages, Shape::kK, Shape::kM, kRows, kMode, LayoutA::kBits>;
  /// Warps that free a place of the ring.
  static CUTLASS_DEVICE int freeing_warps(Arguments const&) { return kWarpgroups * 4; }

  /// The producing thread.
  class Producer : public RingProducer<Producer, SharedStorage, kStages, Shape::kK, Arguments> {
    using Base = RingProducer<Producer, SharedStorage, kStages, Shape::kK, Arguments>;
    using Base::args_, Base::barriers_, Base::storage_, Base::barrier, Base::activation_bytes;
    friend Base;

   public:
    using Base::Base;

    /// Whose weights are requested from now on.
    CUTLASS_DEVICE void select_expert(int expert) { expert_ = expert; }

   private:
    CUTLASS_DEVICE void request_weights(int place, int channel, int k) {
      barriers_.full[place].arrive_and_expect_tx(args_.weight_bytes + activation_bytes());
      int const tile_k = k / LayoutA::kTileK;
      if constexpr (kExperts) {
        int const strip = args_.has_halves ? channel / 32 : channel / 16 + expert_ * args_.tiles_n;
        cute::SM90_TMA_LOAD_5D::copy(&args_.weights, barrier(place), args_.weight_policy, storage_.weights(place, 0), 0,
                                     tile_k, 0, strip, args_.has_halves ? expert_ : 0);
      } else {
        cute::SM90_TMA_LOAD_3D::copy(&args_.weights, barrier(place), args_.weight_policy, storage_.weights(place, 0), 0,
                                     tile_k, channel / 16);
      }
      if constexpr (kRows > 0 && !kMakesOperands) {
        CUTLASS_PRAGMA_UNROLL
        for (int box = 0; box < kRows / kBoxRows; ++box) {
          int const group = args_.group_size.group(k + box * kBoxRows * kRowSteps * kStepK);
          load_rows(args_.scales, place, storage_.scales(place) + box * args_.scale_row, channel, group);
          if (args_.zero_type != qcutlass::DType::kNone)
            load_rows(args_.zeros, place, storage_.zeros(place) + box * args_.zero_row, channel, group);
        }
      }
    }

    /// The maps of experts have a dimension of experts. So rows beyond an expert's last group are zeros, and not scales
    /// of the next expert, which could turn k beyond the end into NaN.
    CUTLASS_DEVICE void load_rows(CUtensorMap const& map, int place, uint8_t* to, int channel, int group) {
      if constexpr (kExperts)
        cute::SM90_TMA_LOAD_5D::copy(&map, barrier(place), args_.weight_policy, to, args_.has_halves ? 0 : channel, 0,
                                     args_.has_halves ? channel / 32 : 0, group, expert_);
      else
        cute::SM90_TMA_LOAD_2D::copy(&map, barrier(place), args_.weight_policy, to, channel, group);
    }

    int expert_ = 0;
  };

  /// A consuming warpgroup.
  class Consumer : public RingConsumer<Consumer, kStages> {
    using Base = RingConsumer<Consumer, kStages>;
    using Base::await, Base::barriers_;
    friend Base;

   public:
    CUTLASS_DEVICE Consumer(SharedStorage& storage, Barriers& barriers, Arguments const& args, int warpgroup, int warp,
                            int lane)
        : Base(barriers),
          storage_(storage),
          args_(args),
          warpgroup_(warpgroup),
          strip_(warpgroup * 4 + warp),
          lane_(lane),
          pairs_of_rows_(args.group_size.is_multiple_of(2 * kStepK)) {
      if (kTurns_ && warpgroup == 1) arch::named_barrier_arrive<kTurnThreads>(kTurnBarrier);  // the other one begins
      if constexpr (!Traits::kHasSmallNumbers && !kMakesOperands) {
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < kAhead * kBatchRows; ++r) fetched_[r / kBatchRows][r % kBatchRows] = Scales::symmetric();
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2 * kBatch * 4; ++i) fragments_[i / 4 / kBatch][i / 4 % kBatch][i % 4] = 0;
    }

    /// Whose weights the next product has.
    CUTLASS_DEVICE void select_expert(int expert) { expert_ = expert; }

    /// Requests what the next product needs beside its stages: nothing.
    CUTLASS_DEVICE void begin(int /*channel*/, int /*token*/, int /*first_k*/, int /*stages*/) {}

    /// The sums over `stages` stages from k = first_k on, at least one.
    CUTLASS_DEVICE void operator()(FragmentC& sums, int first_k, int stages) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Wgmma::kSums; ++i) sums[i] = 0;
      k_ = first_k;
      if constexpr (Traits::kHasSmallNumbers) {
        Scales::with_type(args_.scale_type, [&](auto scales) {
          constexpr bool kPairs = kSharesRows && std::is_same_v<decltype(scales), typename Scales::Types::Powers>;
          if (kPairs && pairs_of_rows_)
            accumulate_all(sums, stages, SmallNumbers<decltype(scales), kPairs>());
          else
            accumulate_all(sums, stages, SmallNumbers<decltype(scales), false>());
        });
        Scales::finish(sums, args_.scale_type);
      } else if constexpr (kMakesOperands) {
        accumulate_all(sums, stages, MadeOperands());
      } else {
        accumulate_all(sums, stages, OwnScales());
      }
      if constexpr (kExperts)
        args_.of_expert(expert_).apply(sums);
      else
        args_.apply(sums);
    }

   private:
    static constexpr int kBatch = kBatch_;
    static constexpr int kTurnBarrier = kWarpgroups,
                         kTurnThreads = 2 * arch::kWarpgroupThreads;  // after the epilogue's
    static constexpr int kBatchTiles = kBatch > LayoutA::kSteps ? kBatch / LayoutA::kSteps : 1;
    static constexpr int kCodeSteps = kBatchTiles * LayoutA::kSteps;  // whose codes are in registers
    static constexpr int kBatchRows = kBatch > kRowSteps ? kBatch / kRowSteps : 1;
    static constexpr bool kAnyType = qcutlass::takes_any_type(kMode);
    /// Whether each lane finds the row of the box that it loads, so that a batch's rows are found at once. This is
    /// faster if conversions are the limit. If a batch is a whole stage MMAs are the limit; then the uniform datapath
    /// finds the rows.
    static constexpr bool kLanesFindRows = kBoxRows > 1 && kBatchRows > 1 && kBatches > 1 && !kMakesOperands;
    /// Whether two rows are read as one if no group ends between them: for scales whose load takes many instructions.
    static constexpr bool kSharesRows =
        kLanesFindRows && kBatchRows % 2 == 0 && (kAnyType || qcutlass::has_float_codes(kPacking_));
    /// How many batches before its MMAs a batch's codes and scales are loaded from shared memory: 2 if no two batches
    /// share codes or scales, and if a stage has several batches, so that loading ahead holds back no other stage.
    static constexpr int kAhead = kBatches > 1 && kBatch % kCodeSteps == 0 && kBatch % kRowSteps == 0 ? 2 : 1;

    /// Tags of the loops, by how they get the operands of conversions. OwnScales: loaded scales are the operands.
    /// MadeOperands: other warps have made them. SmallNumbers: scales of one type, with a loop for each type; with
    /// kPairs (MXFP4) no group ends between two rows.
    struct OwnScales {};
    struct MadeOperands {};
    template <class Type_, bool kPairs_>
    struct SmallNumbers {
      using Type = Type_;
      static constexpr int kShare = kPairs_ ? 2 : 1, kCount = kBatchRows / kShare;  // rows that are fetched
    };

    template <class Tag>
    CUTLASS_DEVICE void accumulate_all(FragmentC& sums, int stages, Tag tag) {
      find_rows(0);
      fetch(0, 0, 0, tag);
      if (kAhead == 2 && stages > 1 / kBatches) fetch(1 / kBatches, 1 % kBatches, 1, tag);
      if constexpr (kMakesOperands) load_operands(0, 0);
      prepare(0, 0, tag);
      this->accumulate(sums, stages, tag);
    }

    template <int kPlace, class Tag>
    CUTLASS_DEVICE bool stage(FragmentC& sums, int& left, Tag tag) {
      CUTLASS_PRAGMA_UNROLL
      for (int batch = 0; batch < kBatches; ++batch) {
        int const buffer = (kPlace * kBatches + batch) % 2;
        multiply(sums, buffer, kPlace, batch);
        if (left > (batch + kAhead) / kBatches)
          fetch((kPlace + (batch + kAhead) / kBatches) % kStages, (batch + kAhead) % kBatches, (buffer + kAhead) % 2,
                tag);
        if constexpr (kMakesOperands)
          if (left > (batch + 1) / kBatches)
            load_operands((kPlace + (batch + 1) / kBatches) % kStages, (batch + 1) % kBatches);
        cute::warpgroup_wait<1>();  // the batch before this one is done: its fragments are free
        if (batch == 0) this->template release_before<kPlace>();
        if (left > (batch + 1) / kBatches) prepare((batch + 1) % kBatches, buffer ^ 1, tag);
      }
      return --left > 0;
    }

    CUTLASS_DEVICE void release(int place) {
      if constexpr (kMakesOperands) __syncwarp();  // all lanes have read what other warps store over
      if (lane_ == 0) barriers_.empty[place].arrive();
    }

    /// Issues the MMAs of a batch. In turns, one warpgroup dequantises while the other's MMAs run; left to themselves,
    /// both tend to do the same at the same time. It pays where the two take about as long.
    CUTLASS_DEVICE void multiply(FragmentC& sums, int buffer, int place, int batch) {
      if constexpr (kTurns_) arch::named_barrier_sync<kTurnThreads>(kTurnBarrier + warpgroup_);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) arch::fence_registers(fragments_[buffer][i]);
      arch::fence_registers(sums);
      cute::warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        int const byte = (batch * kBatch + i) * 32;  // of a token's k in this stage: every step has 32 bytes
        int const chunk = place * kChunks + byte / kChunkBytes;
        uint64_t const tokens =
            arch::swizzled_operand<kChunkBytes>(chunk * Shape::kN * kChunkBytes + byte % kChunkBytes);
        Wgmma::issue(sums, fragments_[buffer][i], tokens);
      }
      cute::warpgroup_commit_batch();
      if constexpr (kTurns_) arch::named_barrier_arrive<kTurnThreads>(kTurnBarrier + (warpgroup_ ^ 1));
    }

    /// Shared memory -> registers of what a batch is converted from; scales where a new row of them begins.
    template <class Tag>
    CUTLASS_DEVICE void fetch(int place, int batch, int buffer, Tag tag) {
      if (batch == 0) await(place);
      int const step = batch * kBatch;
      if (step % LayoutA::kSteps == 0) {
        CUTLASS_PRAGMA_UNROLL
        for (int t = 0; t < kBatchTiles; ++t)
          load_codes(codes_[buffer % kAhead] + 4 * t, place, step / LayoutA::kSteps + t);
      }
      if constexpr (kRows > 0 && !kMakesOperands)
        if (step % kRowSteps == 0) load_scales(fetched_[buffer % kAhead], place, step, tag);
      if (batch == kBatches - 1) k_ += Shape::kK;
      find_rows((batch + 1) % kBatches);
    }

    /// Finds the row of the stage's box for operand lane / 8 of the batch that is fetched next: a batch ahead, for the
    /// division takes its time.
    CUTLASS_DEVICE void find_rows(int batch) {
      if constexpr (kLanesFindRows) row_ = box_row(batch * kBatch + fast_min(lane_ / 8, kBatchRows - 1) * kRowSteps);
    }

    /// Row of the stage's box that serves a step.
    CUTLASS_DEVICE int box_row(int step) const {
      return args_.group_size.group(k_ + step * kStepK) - args_.group_size.group(k_);
    }

    /// A lane's codes of a tile: one 128-bit load.
    CUTLASS_DEVICE void load_codes(uint32_t* codes, int place, int tile) const {
      uint4 const v =
          *reinterpret_cast<uint4 const*>(storage_.weights(place, strip_) + tile * LayoutA::kTileBytes + lane_ * 16);
      codes[0] = v.x, codes[1] = v.y, codes[2] = v.z, codes[3] = v.w;
    }

    /// Loads the operands that other warps have made for a batch.
    CUTLASS_DEVICE void load_operands(int place, int batch) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatchRows; ++i) {
        uint4 const v = storage_.operands(place, batch * kBatchRows + i, strip_)[operand_slot(strip_, lane_ / 4)];
        fetched_[0][i] = {{__uint_as_float(v.x), __uint_as_float(v.y)}, {__uint_as_float(v.z), __uint_as_float(v.w)}};
      }
    }

    /// Loads the scales of a batch that begins with `step`.
    CUTLASS_DEVICE void load_scales(Fetched (&scales)[kBatchRows], int place, int step, OwnScales) {
      int const scale_row = kAnyType ? args_.scale_row : Shape::kM * 2,
                zero_row = kAnyType ? args_.zero_row : Shape::kM;
      auto const at = [&](int row) {
        return warp::GroupRow{storage_.scales(place) + row * scale_row, storage_.zeros(place) + row * zero_row,
                              strip_ * 16, nullptr, nullptr};
      };
      if constexpr (kLanesFindRows) {
        auto const row_of = [&](int i) { return at(found_row(i)); };
        if constexpr (kSharesRows) {
          if (pairs_of_rows_) {
            Operands firsts[kBatchRows / 2];
            auto const first_of = [&](int i) { return row_of(2 * i); };
            Scales::load(firsts, at(row_), first_of, lane_, args_.scale_type, args_.zero_type);
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kBatchRows; ++i) scales[i] = firsts[i / 2];
            return;
          }
        }
        Scales::load(scales, at(row_), row_of, lane_, args_.scale_type, args_.zero_type);
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kBatchRows; ++i) {
          warp::GroupRow const row = at(row_of_step(step, i));
          auto const row_of = [&](int) { return row; };
          Scales::load(reinterpret_cast<Operands(&)[1]>(scales[i]), row, row_of, lane_, args_.scale_type,
                       args_.zero_type);
        }
      }
    }
    template <class Type, bool kPairs>
    CUTLASS_DEVICE void load_scales(Fetched (&scales)[kBatchRows], int place, int step,
                                    SmallNumbers<Type, kPairs> tag) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < tag.kCount; ++i) {
        int const row = kLanesFindRows ? found_row(tag.kShare * i) : row_of_step(step, i);
        uint8_t const* const p = storage_.scales(place) + row * Shape::kM * int(sizeof(typename Type::Stored));
        scales[i] = Scales::template load<Type>(warp::GroupRow{p, nullptr, strip_ * 16, nullptr, nullptr}, lane_);
      }
    }

    /// Row i of the batch that is fetched, which a lane has found, or which begins with `step`.
    CUTLASS_DEVICE int found_row(int i) const { return __shfl_sync(~0u, row_, i * 8); }
    CUTLASS_DEVICE int row_of_step(int step, int i) const {
      int const own = step + i * kRowSteps;
      return kBoxRows > 1 ? box_row(own) : own / kRowSteps;
    }

    /// Fills a fragment buffer, whose last MMAs are done.
    CUTLASS_DEVICE void prepare(int batch, int buffer, OwnScales) { convert(batch, buffer, fetched_[buffer % kAhead]); }
    CUTLASS_DEVICE void prepare(int batch, int buffer, MadeOperands) { convert(batch, buffer, fetched_[0]); }
    template <class Type, bool kPairs>
    CUTLASS_DEVICE void prepare(int batch, int buffer, SmallNumbers<Type, kPairs> tag) {
      Operands operands[tag.kCount];
      auto const& words = reinterpret_cast<Fetched const(&)[tag.kCount]>(fetched_[buffer % kAhead]);
      bool const has_rests = Scales::template make_operands<Type>(operands, words);
      convert<tag.kShare>(batch, buffer, operands);
      if (!has_rests) return;
      for_each_register([&](int i, auto r) {
        uint32_t& weights = fragments_[buffer][i][r];
        weights = Converter::template times_rest<r>(weights, operands[i / kRowSteps / tag.kShare]);
      });
    }

    template <int kShare = 1>
    CUTLASS_DEVICE void convert(int batch, int buffer, Operands const (&operands)[kBatchRows / kShare]) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) arch::fence_registers(fragments_[buffer][i]);  // keeps old ones alive until here
      for_each_register([&](int i, auto r) {
        uint32_t const* words = codes_[buffer % kAhead] + (batch * kBatch + i) % kCodeSteps * LayoutA::kWords;
        fragments_[buffer][i][r] = Converter::template convert<r>(words, operands[i / kRowSteps / kShare]);
      });
    }

    /// Calls visit(i, r) for register r, a constant, of each fragment i of a batch.
    template <class Visit>
    static CUTLASS_DEVICE void for_each_register(Visit const& visit) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        visit(i, std::integral_constant<int, 0>());
        visit(i, std::integral_constant<int, 1>());
        visit(i, std::integral_constant<int, 2>());
        visit(i, std::integral_constant<int, 3>());
      }
    }

    SharedStorage& storage_;
    Arguments const& args_;
    int const warpgroup_, strip_, lane_;
    bool const pairs_of_rows_;
    int k_;    // of the stage whose codes come next
    int row_;  // of scales: see find_rows()
    uint32_t fragments_[2][kBatch][4];
    uint32_t codes_[kAhead][kBatchTiles * 4];
    Fetched fetched_[kAhead][kBatchRows];
    int expert_ = 0;
  };
};

}  // namespace cutlass::gemm::threadblock
