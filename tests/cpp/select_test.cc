// Selection without a GPU: a pure function over a table, for every scheme, shape and class of device.
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "gemm/architectures.h"
#include "gemm/cost_model.h"
#include "gemm/workspace.h"
#include "qcutlass/error.h"
#include "qcutlass/gemm.h"

namespace qcutlass {
namespace {

// Compute capability, SMs, opt-in shared memory: A100, RTX 3090, RTX 4090, H200.
constexpr DeviceTraits kA100{80, 108, 163 * 1024}, kRtx3090{86, 82, 99 * 1024}, kRtx4090{89, 128, 99 * 1024},
    kH200{90, 132, 227 * 1024};
constexpr DeviceTraits kDevices[] = {kA100, kRtx3090, kRtx4090, kH200};

GemmArguments problem(int64_t m, int64_t n, int64_t k, int64_t group_size = 128, DType type = DType::kFloat16,
                      Packing packing = Packing::kW4A16) {
  GemmArguments a;
  a.m = m;
  a.a_type = type;
  a.a_stride = k;
  a.out_stride = n;
  a.weights.packing = packing;
  a.weights.n = n;
  a.weights.k = k;
  a.weights.group_size = group_size;
  a.weights.scale_type = type;
  a.weights.scale_stride = n;
  return a;
}

std::vector<GemmArguments> schemes(int64_t m, int64_t n, int64_t k) {
  std::vector<GemmArguments> result;
  for (DType type : {DType::kFloat16, DType::kBFloat16})
    for (Packing packing : {Packing::kW4A16, Packing::kW8A16})
      for (int64_t group : {int64_t{16}, int64_t{48}, int64_t{64}, int64_t{128}, k})
        for (DType zero : {DType::kNone, DType::kUInt8, DType::kInt32, DType::kFloat32}) {
          result.push_back(problem(m, n, k, group, type, packing));
          result.back().weights.zero_type = zero;
          result.back().weights.zero_stride = n;
        }
  return result;
}

TacticTraits traits_of(GemmArguments const& a, std::string const& name) {
  for (TacticTraits const& t : tactics(a))
    if (t.name == name) return t;
  ADD_FAILURE() << name << " is not in the list";
  return {};
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
          EXPECT_EQ(plan.workspace_bytes, Workspace(a, plan.split_k, plan.cluster).bytes);
        }
}

TEST(Select, FollowsTheNumberOfTokens) {
  for (DeviceTraits const& device : kDevices) {
    auto const tokens = [&](int64_t m) {
      GemmArguments const a = problem(m, 8192, 8192);
      return traits_of(a, select(a, device).tactic).tokens;
    };
    EXPECT_LE(tokens(1), 16);
    EXPECT_LE(tokens(16), 32);
    EXPECT_GE(tokens(64), 32);
    EXPECT_GE(tokens(4096), 64);
  }
}

TEST(Select, SharesKWhereChannelsAreFew) {
  EXPECT_GT(select(problem(1, 192, 8192), kA100).split_k, 1);
  EXPECT_TRUE(select(problem(1, 192, 8192), kH200).cluster);
  EXPECT_EQ(select(problem(4096, 28672, 4096), kH200).split_k, 1);
}

TEST(Select, IsRepeatable) {
  GemmArguments const a = problem(33, 6144, 4096);
  Plan const first = select(a, kH200), second = select(a, kH200);
  EXPECT_EQ(first.tactic, second.tactic);
  EXPECT_EQ(first.split_k, second.split_k);
}

TEST(Select, TakesAForcedTactic) {
  GemmArguments const a = problem(33, 6144, 4096);
  for (TacticTraits const& t : tactics(a)) {
    if (t.shared_memory > kH200.shared_memory_per_block) continue;
    EXPECT_EQ(select(a, kH200, t.name).tactic, t.name);
    EXPECT_EQ(select(a, kH200, t.name, 3).split_k, 3);
    EXPECT_FALSE(select(a, kH200, t.name, 3).workspace_bytes);
    EXPECT_EQ(select(a, kA100, tactics(a)[0].name, 3).workspace_bytes, size_t{3} * 33 * 6144 * 4);
  }
}

TEST(Select, NamesAreUnique) {
  std::set<std::string> names;
  for (GemmArguments const& a : schemes(1, 4096, 4096)) {
    std::set<std::string> own;
    for (TacticTraits const& t : tactics(a)) EXPECT_TRUE(own.insert(t.name).second) << t.name;
    names.insert(own.begin(), own.end());
  }
  EXPECT_EQ(names.size(), size_t{12} * kTacticCount) << "2 activation types, 2 packings, 3 scale modes";
}

TEST(Select, PicksTheScaleMode) {
  GemmArguments a = problem(1, 64, 4096, 128);
  EXPECT_EQ(scale_mode(a), ScaleMode::kNative);
  a.weights.group_size = 4096;
  EXPECT_EQ(scale_mode(a), ScaleMode::kNative);
  a.weights.group_size = 96;
  EXPECT_EQ(scale_mode(a), ScaleMode::kFine);
  a.weights.zero_type = DType::kFloat16;
  EXPECT_EQ(scale_mode(a), ScaleMode::kFloat);
  a.weights.zero_type = DType::kUInt8;
  a.weights.scale_type = DType::kFloat32;
  EXPECT_EQ(scale_mode(a), ScaleMode::kFloat);
}

TEST(Select, RefusesWhatIsNotBuilt) {
  EXPECT_THROW(select(problem(1, 64, 64, 24), kH200), Unsupported);
  EXPECT_NO_THROW(select(problem(1, 64, 24, 24), kH200)) << "one group: any size";
  EXPECT_THROW(select(problem(1, 64, 64, 64, DType::kFloat32), kH200), Unsupported);
  EXPECT_THROW(select(problem(1, 64, int64_t{1} << 28), kH200), Unsupported);
  EXPECT_THROW(select(problem(1, 64, 64), kH200, "no_such_tactic"), InvalidArgument);
  EXPECT_THROW(select(problem(1, 64, 64), kH200, {}, 9), Unsupported) << "more shares than stages";
  EXPECT_THROW(select(problem(1, 64, 64), DeviceTraits{75, 40, 16 * 1024}), Unsupported) << "nothing fits";
}

TEST(Select, EveryTacticStatesItsNeeds) {
  for (GemmArguments const& a : schemes(1, 4096, 4096))
    for (TacticTraits const& t : tactics(a)) {
      EXPECT_GT(t.shared_memory, 0);
      EXPECT_LE(t.shared_memory, kH200.shared_memory_per_block) << t.name;
      EXPECT_LE(t.max_registers * t.warps * 32, 65536) << t.name;
    }
}

TEST(Workspace, CopiesOnlyWhatIsMisaligned) {
  GemmArguments a = problem(3, 4096, 4096);
  EXPECT_EQ(Workspace(a, 1, false).bytes, 0u);
  a.a_stride = 4100;
  EXPECT_TRUE(Workspace(a, 1, false).copy_activations);
  EXPECT_FALSE(Workspace(a, 1, false).copy_scales);
  GemmArguments const odd = problem(3, 4097, 4096);
  EXPECT_TRUE(Workspace(odd, 1, false).copy_scales);
  EXPECT_EQ(Workspace(odd, 1, false).scale_stride % 8, 0);
  int32_t perm = 0;
  a = problem(3, 4096, 4096);
  a.perm = &perm;
  EXPECT_TRUE(Workspace(a, 1, false).copy_activations);
}

TEST(Architectures, ServeTheirGpus) {
  std::vector<std::string> const built = split_architectures("80-real,90-real,90-virtual");
  EXPECT_EQ(built.size(), 3u);
  for (int capability : {80, 86, 89, 90, 100, 120}) EXPECT_TRUE(architecture_serves(built, capability)) << capability;
  EXPECT_FALSE(architecture_serves(built, 75));
  EXPECT_FALSE(architecture_serves({"90-real"}, 80));
  EXPECT_FALSE(architecture_serves({"90-real"}, 100));
  EXPECT_TRUE(architecture_serves({"86"}, 89));
  EXPECT_FALSE(architecture_serves({"89-real"}, 86));
}

}  // namespace
}  // namespace qcutlass
