// Selection without a GPU: a pure function over a table, for every scheme, shape and class of device.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "plan/architectures.h"
#include "plan/dense.h"
#include "plan/footprint.h"
#include "plan/workspace.h"
#include "qcutlass/error.h"
#include "qcutlass/gemm.h"
#include "selection.h"

namespace qcutlass {
namespace {

using namespace selection;
std::vector<GemmArguments> schemes(int64_t m, int64_t n, int64_t k) {
  std::vector<GemmArguments> result;
  for (DType type : {DType::kFloat16, DType::kBFloat16})
    for (Packing packing : {Packing::kW4A16, Packing::kW8A16})
      for (int64_t group : {int64_t{16}, int64_t{48}, int64_t{64}, int64_t{128}, k})
        for (DType zero : {DType::kNone, DType::kUInt8, DType::kInt32, DType::kFloat32}) {
          result.push_back(weight_only_problem(m, n, k, group, type, packing));
          result.back().weights.zero_type = zero;
          result.back().weights.zero_stride = n;
        }
  return result;
}

TEST(Select, FitsTheDevice) {
  for (DeviceTraits const& device : kDevices)
    for (auto [n, k] : {std::pair<int64_t, int64_t>{4096, 4096}, {28672, 4096}, {576, 1536}, {1, 1}, {97, 1000}})
      for (int64_t m : {1, 8, 17, 64, 200, 4096})
        for (GemmArguments const& a : schemes(m, n, k)) {
          Plan const plan = select(a, device);
          TacticTraits const t = traits_of(a, plan.tactic);
          EXPECT_LE(t.shared_memory, device.shared_memory_per_block) << plan.tactic;
          EXPECT_GE(plan.split_k, 1);
          EXPECT_LE(plan.split_k, layout::ceil_div(k, t.k)) << "a share without k: " << plan.tactic;
          EXPECT_TRUE(!plan.cluster || (device.compute_capability >= 90 && plan.split_k > 1));
          EXPECT_EQ(plan.workspace_bytes, Workspace(make_problem(a), plan).bytes);
        }
}

TEST(Select, FollowsTheNumberOfTokens) {
  for (DeviceTraits const& device : kDevices) {
    auto const tokens = [&](int64_t m) {
      GemmArguments const a = weight_only_problem(m, 8192, 8192);
      return traits_of(a, select(a, device).tactic).tokens;
    };
    EXPECT_LE(tokens(1), 16);
    EXPECT_LE(tokens(16), 32);
    EXPECT_GE(tokens(64), 32);
    EXPECT_GE(tokens(4096), 64);
  }
}

TEST(Select, SharesKWhereChannelsAreFew) {
  EXPECT_GT(select(weight_only_problem(1, 192, 32768), kA100).split_k, 1);  // by a second kernel
  EXPECT_TRUE(select(weight_only_problem(1, 192, 8192), kH200).cluster);
  EXPECT_EQ(select(weight_only_problem(4096, 28672, 4096), kH200).split_k, 1);
}

TEST(Select, SharesKOnlyWhereTilesLeaveSmsIdle) {
  for (DeviceTraits const& device : kDevices)
    for (auto [n, k] : kShapes)
      for (int64_t m : kTokens) {
        GemmArguments const a = weight_only_problem(m, n, k);
        for (Candidate const& c : candidates(a, device)) {
          TacticTraits const t = traits_of(a, c.plan.tactic);
          auto const tiles = [&t](int64_t channels, int64_t tokens) {
            return layout::ceil_div(channels, t.channels) * layout::ceil_div(tokens, t.tokens);
          };
          int64_t const shared = tiles(n - c.plan.shared_channel, m - c.plan.shared_token);
          EXPECT_TRUE(shared == tiles(n, m) || (t.wgmma && tiles(n, m) > device.sm_count)) << c.plan.tactic;
          bool const last = shared < tiles(n, m);
          EXPECT_TRUE(c.plan.split_k == 1 || (shared > 0 && shared * (last ? c.plan.split_k : 1) <= device.sm_count))
              << c.plan.tactic << " split " << c.plan.split_k;
        }
      }
}

TEST(Select, IsRepeatable) {
  GemmArguments const a = weight_only_problem(300, 6144, 4096);
  std::vector<Candidate> const first = candidates(a, kH200, {}, 0, true), second = candidates(a, kH200, {}, 0, true);
  ASSERT_EQ(first.size(), second.size());
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(first[i].plan.tactic, second[i].plan.tactic);
    EXPECT_EQ(first[i].plan.split_k, second[i].plan.split_k);
    EXPECT_EQ(first[i].plan.slice, second[i].plan.slice);
    EXPECT_EQ(first[i].cost.total, second[i].cost.total);
  }
}

TEST(Select, TakesTheFirstCandidate) {
  for (int64_t m : kTokens)
    for (bool dense : {false, true}) {
      GemmArguments const a = weight_only_problem(m, 4096, 4096);
      std::vector<Candidate> const all = candidates(a, kH200, {}, 0, dense);
      Plan const plan = select(a, kH200, {}, 0, dense);
      EXPECT_EQ(plan.tactic, all[0].plan.tactic);
      EXPECT_EQ(plan.split_k, all[0].plan.split_k);
      std::set<std::pair<std::string, int>> seen;
      for (size_t i = 0; i < all.size(); ++i) {
        Cost const& c = all[i].cost;
        EXPECT_TRUE(i == 0 || all[i - 1].cost.total <= c.total);
        EXPECT_TRUE(c.load > 0 && c.compute > 0 && c.fixed > 0);
        EXPECT_GE(c.total, std::max(c.load, c.compute) + c.fixed);
        EXPECT_LE(c.total, (c.load + c.compute + c.fixed) * (1 + 1e-12));
        EXPECT_TRUE(seen.insert({all[i].plan.tactic, all[i].plan.split_k}).second) << "listed twice";
      }
    }
}

TEST(Select, MoreWorkTakesNoLess) {
  for (DeviceTraits const& device : kDevices)
    for (auto [n, k] : kShapes) {
      double last = 0;
      for (int64_t m : kTokens) {
        double const total = candidates(weight_only_problem(m, n, k), device, {}, 0, true)[0].cost.total;
        EXPECT_GE(total, last) << m << " tokens, " << n << " x " << k;
        EXPECT_LE(total, candidates(weight_only_problem(m, 2 * n, k), device, {}, 0, true)[0].cost.total) << m;
        EXPECT_LE(total, candidates(weight_only_problem(m, n, 2 * k), device, {}, 0, true)[0].cost.total) << m;
        last = total;
      }
    }
}

TEST(Select, TakesAForcedTactic) {
  GemmArguments const a = weight_only_problem(33, 6144, 4096);
  for (TacticTraits const& t : tactics(a)) {
    if (t.shared_memory > kH200Wgmma.shared_memory_per_block) {
      EXPECT_THROW(select(a, kH200Wgmma, t.name), Unsupported);
      continue;
    }
    if (t.superseded) EXPECT_THROW(select(a, kH200Wgmma, t.name), Unsupported) << "wgmma takes its place";
    DeviceTraits const& gpu = t.superseded ? kH200 : kH200Wgmma;
    EXPECT_EQ(select(a, gpu, t.name).tactic, t.name);
    int const split = static_cast<int>(std::min<int64_t>(3, layout::ceil_div(4096, t.k)));
    Plan const plan = select(a, gpu, t.name, split);
    EXPECT_EQ(plan.split_k, split);
    EXPECT_EQ(plan.workspace_bytes, 0u) << "clusters add their sums without memory";
    EXPECT_THROW(select(a, gpu, t.name, 4096 / 64 + 1), Unsupported) << "more shares than stages";
    if (t.wgmma) {
      EXPECT_THROW(select(a, kH200, t.name), Unsupported) << "not built";
    } else if (t.shared_memory <= kA100.shared_memory_per_block && split > 1) {
      EXPECT_EQ(select(a, kA100, t.name, split).workspace_bytes, size_t(split) * 33 * 6144 * 4);
    }
  }
}

TEST(Select, NamesAreUnique) {
  std::set<std::string> names;
  for (GemmArguments const& a : schemes(1, 4096, 4096)) {
    std::set<std::string> own;
    for (TacticTraits const& t : tactics(a)) EXPECT_TRUE(own.insert(t.name).second) << t.name;
    names.insert(own.begin(), own.end());
  }
  int64_t serving = 0;
  for (Packing packing : {Packing::kW4A16, Packing::kW8A16})
    for (ScaleMode mode : {ScaleMode::kNative, ScaleMode::kFine, ScaleMode::kFloat})
      serving += std::count_if(std::begin(kTactics), std::end(kTactics), [packing, mode](Tactic const& t) {
        return t.serves(Kind{DType::kFloat16, packing, mode});
      });
  EXPECT_EQ(names.size(), size_t(2 * serving)) << "2 activation types";
}

TEST(Select, StreamsRealZerosOfFewTokensWithLittleSharedMemory) {
  for (DeviceTraits device : {kA100, kRtx4090})
    for (int64_t m : {1, 2, 8}) {
      GemmArguments a = weight_only_problem(m, 4096, 4096, 32);
      a.weights.zero_type = DType::kFloat16;
      std::vector<Candidate> const all = candidates(a, device);
      EXPECT_TRUE(std::any_of(all.begin(), all.end(),
                              [](Candidate const& c) { return c.plan.tactic.find("stream") != std::string::npos; }))
          << m << " tokens, " << device.shared_memory_per_block << " bytes";
    }
}

TEST(Select, PicksTheScaleMode) {
  GemmArguments a = weight_only_problem(1, 64, 4096, 128);
  EXPECT_EQ(make_problem(a).kind.mode, ScaleMode::kNative);
  a.weights.group_size = 4096;
  EXPECT_EQ(make_problem(a).kind.mode, ScaleMode::kNative);
  a.weights.group_size = 96;
  EXPECT_EQ(make_problem(a).kind.mode, ScaleMode::kFine);
  a.weights.zero_type = DType::kFloat16;
  EXPECT_EQ(make_problem(a).kind.mode, ScaleMode::kFloat);
  a.weights.zero_type = DType::kUInt8;
  a.weights.scale_type = DType::kFloat32;
  EXPECT_EQ(make_problem(a).kind.mode, ScaleMode::kFloat);
}

TEST(Select, RefusesWhatIsNotBuilt) {
  EXPECT_THROW(select(weight_only_problem(1, 64, 64, 24), kH200), Unsupported);
  EXPECT_NO_THROW(select(weight_only_problem(1, 64, 24, 24), kH200)) << "one group: any size";
  EXPECT_THROW(select(weight_only_problem(1, 64, 64, 64, DType::kFloat32), kH200), Unsupported);
  EXPECT_THROW(select(weight_only_problem(1, 64, int64_t{1} << 28), kH200), Unsupported);
  EXPECT_THROW(select(weight_only_problem(1, 64, 64), kH200, "no_such_tactic"), InvalidArgument);
  EXPECT_THROW(select(weight_only_problem(1, 64, 64), kH200, {}, 9), Unsupported) << "more shares than stages";
  EXPECT_THROW(select(weight_only_problem(1, 64, 64), DeviceTraits{75, 40, 16 * 1024}), Unsupported) << "nothing fits";
}

TEST(Select, EveryTacticStatesItsNeeds) {
  for (GemmArguments const& a : schemes(1, 4096, 4096)) {
    bool small = false;
    for (TacticTraits const& t : tactics(a)) {
      EXPECT_GT(t.shared_memory, 0);
      EXPECT_LE(t.max_registers * t.warps * 32, 65536) << t.name;
      bool const smallest = a.weights.packing == Packing::kW4A16 && make_problem(a).kind.mode == ScaleMode::kNative;
      EXPECT_TRUE(!smallest || t.shared_memory <= kH200.shared_memory_per_block) << t.name << " fits no scheme";
      small |= t.shared_memory <= kRtx3090.shared_memory_per_block;
    }
    EXPECT_TRUE(small) << "nothing for GPUs with little shared memory";
  }
}

TEST(Dense, IsChosenFromSomeNumberOfTokensUp) {
  for (auto [n, k] : kShapes) {
    bool chosen = false;
    for (int64_t m : kTokens) {
      GemmArguments const a = weight_only_problem(m, n, k);
      Plan const plan = select(a, kH200, {}, 0, true);
      EXPECT_TRUE(plan.dense || !chosen) << m << " tokens, " << n << " x " << k;
      EXPECT_EQ(plan.dense, plan.tactic == "w4a16_f16_dequantize_dense");
      EXPECT_FALSE(plan.dense && m < dense::kMinRows);
      EXPECT_FALSE(select(a, kH200).dense) << "the caller did not offer to run it";
      chosen = plan.dense;
    }
    EXPECT_TRUE(chosen) << n << " x " << k;
  }
}

/// Where two launches take longer than the product: on an H100 5.0 us for 128 rows by 960 x 72, 2.4 by a kernel for 96.
TEST(Dense, IsNotChosenForSmallLayers) {
  for (auto [n, k] : {std::pair{960, 72}, {288, 576}, {640, 1664}, {576, 3008}}) {
    for (int64_t m : {128, 256, 512, 1024}) {
      for (DType bias : {DType::kNone, DType::kFloat16}) {
        GemmArguments a = weight_only_problem(m, n, k);
        a.bias_type = bias;
        a.bias = bias == DType::kNone ? nullptr : &a;  // is never read
        EXPECT_FALSE(select(a, kH200Wgmma, {}, 0, true).dense) << m << " tokens, " << n << " x " << k;
      }
    }
  }
}

TEST(Dense, IsNotChosenForMxfp4) {
  for (auto [n, k] : {std::pair{1024, 4096}, {2048, 2048}, {4096, 4096}, {28672, 4096}}) {
    for (int64_t m : {128, 256, 512, 1024, 4096}) {
      GemmArguments a = weight_only_problem(m, n, k, 32, DType::kFloat16, Packing::kE2M1A16);
      a.weights.scale_type = DType::kFloat8E8M0;
      EXPECT_FALSE(select(a, kH200Wgmma, {}, 0, true).dense) << m << " tokens, " << n << " x " << k;
    }
  }
}

TEST(Dense, IsNotChosenForRealZerosAndMinimumsOf1024Tokens) {
  for (auto [n, k] : {std::pair{4096, 4096}, {28672, 4096}, {4096, 14336}, {8192, 8192}}) {
    for (bool minimums : {false, true}) {
      GemmArguments a = weight_only_problem(1024, n, k, 32);
      (minimums ? a.weights.minimum_type : a.weights.zero_type) = DType::kFloat16;
      EXPECT_FALSE(select(a, kH200Wgmma, {}, 0, true).dense) << n << " x " << k;
    }
  }
}

TEST(Dense, IsOfferedOnceFrom128TokensUp) {
  for (int64_t m : kTokens) {
    std::vector<Candidate> const all = candidates(weight_only_problem(m, 4096, 4096), kH200, {}, 0, true);
    auto const count =
        std::count_if(all.begin(), all.end(), [](Candidate const& candidate) { return candidate.plan.dense; });
    EXPECT_EQ(count, m >= dense::kMinRows ? 1 : 0) << m;
  }
}

TEST(Dense, SlicesAreBounded) {
  for (DeviceTraits const& device : kDevices)
    for (auto [n, k] :
         {Shape{4096, 4096}, {28672, 4096}, {57344, 8192}, {1, 1}, {97, 1000}, {129, 262144}, {152064, 64}})
      for (int64_t m : {1, 128, 1000, 16384})
        for (Activation activation : {Activation::kNone, Activation::kSilu}) {
          GemmArguments a = weight_only_problem(m, n, k);
          a.activation = activation;
          Plan const plan = select(a, device, dense_tactic(a), 0, true);
          EXPECT_TRUE(plan.dense);
          EXPECT_EQ(plan.split_k, 1);
          EXPECT_GT(plan.slice, 0);
          EXPECT_TRUE(plan.slice == n || (plan.slice < n && plan.slice % dense::kSliceRows == 0)) << plan.slice;
          int64_t const weights = plan.slice * k * 2;
          int64_t const sums = activation == Activation::kNone ? 0 : m * round_up(plan.slice, 8) * 4;
          EXPECT_LE(weights, int64_t(64) << 20);
          EXPECT_LE(sums, int64_t(64) << 20);
          EXPECT_GE(plan.workspace_bytes, size_t(weights + sums));
          EXPECT_LT(plan.workspace_bytes, size_t(weights + sums + 512)) << "and nothing else";
        }
}

TEST(Dense, SizesItsWorkspace) {
  GemmArguments a = weight_only_problem(1000, 4096, 4096);
  auto const bytes = [&] { return select(a, kH200, dense_tactic(a), 0, true).workspace_bytes; };
  size_t const plain = bytes();
  int32_t perm = 0;
  a.perm = &perm;
  EXPECT_EQ(bytes(), plain + size_t{1000} * 4096 * 2);
  a.perm = nullptr;
  a.bias_type = DType::kFloat16;
  EXPECT_EQ(bytes(), plain + size_t{1000} * 4096 * 4);
}

TEST(Dense, IsRefusedWhereItDoesNotFit) {
  GemmArguments const a = weight_only_problem(128, 4096, 4096);
  EXPECT_THROW(select(a, kH200, dense_tactic(a)), Unsupported) << "the caller did not offer to run it";
  EXPECT_THROW(select(a, kH200, dense_tactic(a), 2, true), Unsupported) << "k is not shared";
  EXPECT_THROW(select(weight_only_problem(128, 256, (1 << 18) + 1), kH200, dense_tactic(a), 0, true), Unsupported)
      << "128 rows are more than the workspace holds";
  EXPECT_THROW(select(weight_only_problem(128, 256, 64, 64, DType::kBFloat16), kH200, dense_tactic(a), 0, true),
               InvalidArgument)
      << "the name of another type's tactic";
}

TEST(KernelSetHash, TellsBuildsApart) {
  std::string const hash = kernel_set_hash({"80-real", "90-real"});
  EXPECT_EQ(hash.size(), 16u);
  EXPECT_EQ(hash.find_first_not_of("0123456789abcdef"), std::string::npos);
  EXPECT_EQ(hash, kernel_set_hash({"80-real", "90-real"}));
  EXPECT_NE(hash, kernel_set_hash({"80-real"}));
  EXPECT_NE(hash, kernel_set_hash({"80-rea", "l90-real"}));
}

TEST(Workspace, CopiesOnlyWhatIsMisaligned) {
  GemmArguments a = weight_only_problem(3, 4096, 4096);
  EXPECT_EQ(Workspace(make_problem(a), Plan{}).bytes, 0u);
  a.a_stride = 4100;
  EXPECT_TRUE(make_problem(a).activations.copied);
  EXPECT_FALSE(make_problem(a).weights.copied_scales);
  GemmArguments const odd = weight_only_problem(3, 4097, 4096);
  EXPECT_TRUE(make_problem(odd).weights.copied_scales);
  EXPECT_EQ(Workspace(make_problem(odd), Plan{}).scale_stride % 8, 0);
  int32_t perm = 0;
  a = weight_only_problem(3, 4096, 4096);
  a.perm = &perm;
  EXPECT_TRUE(make_problem(a).activations.copied);
}

TEST(Workspace, CopiesScalesWhoseRowsLieFarApart) {
  GemmArguments far = weight_only_problem(3, 4096, 4096);
  far.weights.scale_stride = int64_t(1) << 31;
  EXPECT_TRUE(make_problem(far).weights.copied_scales);
  far.weights.group_size = far.weights.k;  // one row
  EXPECT_FALSE(make_problem(far).weights.copied_scales);
}

TEST(Select, OffersOnlyWhatIsCompiled) {
  DeviceTraits huge = kH200;
  huge.shared_memory_per_block *= 4;
  int left_out = 0;
  for (DType zeros : {DType::kNone, DType::kFloat32})
    for (Packing packing : {Packing::kW4A16, Packing::kW8A16}) {
      GemmArguments a = weight_only_problem(1, 4096, 4096);
      a.weights.packing = packing;
      a.weights.zero_type = zeros;
      for (Candidate const& c : candidates(a, huge))
        EXPECT_TRUE(is_compiled(kTactics[c.plan.row], make_problem(a).kind)) << c.plan.tactic;
      for (Tactic const& t : kTactics) left_out += !is_compiled(t, make_problem(a).kind);
    }
  EXPECT_GT(left_out, 0);
}

TEST(Select, StaysWithinTheGrid) {
  GemmArguments tall = weight_only_problem(int64_t(1) << 25, 16, 64);
  for (Candidate const& c : candidates(tall, kH200)) {
    Tactic const& t = kTactics[c.plan.row];
    EXPECT_LE(layout::ceil_div(layout::ceil_div(tall.m, t.tokens), 8), 65535) << c.plan.tactic;
  }
  tall.m = int64_t(1) << 27;
  EXPECT_THROW(select(tall, kH200), Unsupported);
}

TEST(Select, StreamingLaunchesHaveRoomForTheirShareAndNoMore) {
  for (int memory : {99 * 1024, 163 * 1024, 227 * 1024}) {  // sm_120, sm_80, sm_90
    auto const room = [&](int bytes) { return (memory + kReservedSharedMemory) / (bytes + kReservedSharedMemory); };
    int const most = spread_shared_memory(1, memory);
    EXPECT_LE(most, memory / 2);
    for (int64_t share : {1, 2, 3, 4}) {
      int const bytes = spread_shared_memory(share, memory);
      EXPECT_EQ(room(bytes), share < 2 ? 2 : share) << memory;
      EXPECT_LE(bytes, most) << "the limit of the kernel is that of one block";
    }
    EXPECT_EQ(spread_shared_memory(int64_t(1) << 40, memory), 0);
  }
}

TEST(Select, StreamsStartEarlyAndOthersWhereBlocksCannotPileUp) {
  int streams = 0, late = 0;
  for (int64_t m : {1, 4, 16, 64})
    for (auto const& [n, k] : {Shape{6720, 1472}, Shape{14336, 8192}, Shape{64, 512}}) {
      GemmArguments experts = weight_only_problem(m, n, k);
      experts.experts.count = 8, experts.experts.a_rows = m;
      for (GemmArguments const& product : {weight_only_problem(m, n, k), experts})
        for (Candidate const& c : candidates(product, kH200)) {
          bool const stream = kTactics[c.plan.row].mainloop == Mainloop::kStream;
          EXPECT_TRUE(c.plan.early || !stream) << c.plan.tactic;
          streams += stream, late += !c.plan.early;
        }
    }
  EXPECT_GT(streams, 0);
  EXPECT_GT(late, 0) << "tiles of kMultistage, of which an SM has room for several";
}

TEST(Select, LeavesWhatIsCompiledForWgmmaToItsCode) {
  DeviceTraits old_code = kH200;
  old_code.code_capability = 80;  // PTX of an older architecture
  for (int64_t m : {1, 16, 300})
    for (Candidate const& c : candidates(weight_only_problem(m, 192, 8192), old_code)) {
      EXPECT_FALSE(c.plan.cluster) << c.plan.tactic;
      EXPECT_FALSE(c.plan.early) << c.plan.tactic;
    }
}

TEST(Architectures, ServeWgmmaOnOneCapability) {
  EXPECT_TRUE(serves_wgmma({"80-real", "90-real", "90a-real", "90-virtual"}, 90));
  EXPECT_TRUE(serves_wgmma({"90a"}, 90));
  EXPECT_FALSE(serves_wgmma({"80-real", "90-real", "90-virtual"}, 90));
  EXPECT_FALSE(serves_wgmma({"90a-virtual"}, 90)) << "none is built of that";
  for (int capability : {80, 89, 100, 120}) EXPECT_FALSE(serves_wgmma({"90a-real"}, capability)) << capability;
}

TEST(Architectures, ServeTheirGpus) {
  std::vector<std::string> const built = split_architectures("80-real,90-real,90-virtual");
  EXPECT_EQ(built.size(), 3u);
  for (int capability : {80, 86, 89, 90, 100, 120}) EXPECT_GT(serving_architecture(built, capability), 0) << capability;
  EXPECT_EQ(serving_architecture(built, 89), 80);
  EXPECT_EQ(serving_architecture(built, 90), 90);
  EXPECT_EQ(serving_architecture(built, 100), 90);
  EXPECT_EQ(serving_architecture(built, 75), 0);
  EXPECT_EQ(serving_architecture({"90-real"}, 80), 0);
  EXPECT_EQ(serving_architecture({"90-real"}, 100), 0);
  EXPECT_EQ(serving_architecture({"86"}, 89), 86);
  EXPECT_EQ(serving_architecture({"80-real", "86-real", "80-virtual"}, 89), 86);
  EXPECT_EQ(serving_architecture({"80-real", "80-virtual"}, 90), 80);
  EXPECT_EQ(serving_architecture({"89-real"}, 86), 0);
}

}  // namespace
}  // namespace qcutlass
