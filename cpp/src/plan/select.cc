// Problem -> configuration: a pure function over the table of tactics.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <initializer_list>

#include "plan/cost_model.h"
#include "plan/dense.h"
#include "plan/fit.h"
#include "plan/gpu_class.h"
#include "plan/shared_tiles.h"
#include "plan/sum_order.h"
#include "plan/workspace.h"
#include "qcutlass/error.h"

namespace qcutlass {
namespace {

/// The numbers of blocks that may share k, for mma.sync. A cluster lies in one group of SMs (GPC); sizes between powers
/// of two fit these groups badly.
constexpr std::initializer_list<int> kSplits = {1, 2, 4, 8, 16};
/// The same for wgmma. With one block an SM powers of two often leave many SMs idle; 3, 5 and 6 fill more of them.
constexpr std::initializer_list<int> kWgmmaSplits = {1, 2, 3, 4, 5, 6, 8};

/// `<packing>_<activation type>_[<scale mode>_]sm<80, 89, 90a>_[stream_]n<channels>m<tokens>k<k>[w<warps>]_s<stages>`,
/// with the k of a stage. Scale mode none is left out; only the streaming loop has `stream_` and `w`.
std::string tactic_name(Kind const& kind, Tactic const& t) {
  bool const stream = t.mainloop == Mainloop::kStream;
  return kind.prefix() +
         (kind.mode == ScaleMode::kNone ? "" : kScaleModeNames[static_cast<int>(kind.mode)] + std::string("_")) + "sm" +
         (is_wgmma(t.mainloop) ? "90a" : std::to_string(kind.capability())) + (stream ? "_stream_n" : "_n") +
         std::to_string(t.channels) + "m" + std::to_string(t.tokens) + "k" + std::to_string(t.stage_k(kind.packing)) +
         (stream ? "w" + std::to_string(t.warps) : "") + "_s" + std::to_string(stages_of(t, kind));
}

/// Clusters and early starts are compiled into code for sm_90 and newer, whatever the GPU. Where an SM holds one block,
/// clusters may not all run at once although there are SMs for their blocks: partial sums then go through memory.
bool uses_cluster(Problem const& problem, DeviceTraits const& device, Tactic const& t, int split_k) {
  if (split_k == 1 || device.code_capability < 90) return false;
  if (!is_wgmma(t.mainloop)) return split_k <= kMaxCluster;
  if (!may_cluster(t, problem.kind, split_k)) return false;
  if (problem.one_order) return true;  // one kernel adds and finishes sums, whatever m is
  int const resident = resident_clusters(device.sm_count, split_k);
  SharedTiles const tiles(problem, device, t, split_k);
  if (tiles.only_last())  // all SMs must be in clusters, for the sake of the tiles that are not shared
    return resident * split_k == device.sm_count && tiles.fits_clusters(device.sm_count, split_k);
  return tiles.tiles <= device.sm_count && (tiles.tiles <= resident || tiles.tiles * split_k > device.sm_count);
}

/// Sharing k pays where tiles leave SMs idle: all of them or, where blocks persist, those of the last wave.
bool split_pays(Problem const& problem, DeviceTraits const& device, Tactic const& t, int split_k) {
  if (split_k == 1) return true;
  int64_t const count = tiles(problem, t), shared = SharedTiles(problem, device, t, split_k).shared;
  if (shared < count) return shared > 0 && shared * split_k <= device.sm_count;
  return count <= device.sm_count && count * split_k <= int64_t(device.sm_count) * resident_blocks(problem, device, t);
}

/// Whether blocks of the next launch, if they start early, could pile up on some SMs while others idle. This is taken
/// to be so if launch bounds allow several blocks an SM, and all blocks of this launch run at once. Measured: early
/// starts cost such launches up to half, and save 1 to 2 us in all others. Streaming launches leave no room for that
/// (spread_shared_memory); those of experts, of whose tiles an SM has room for three at most, start early nevertheless.
bool piles_up(Problem const& problem, DeviceTraits const& device, Tactic const& t, int split_k) {
  int64_t const blocks = tiles(problem, t) * split_k;
  return t.mainloop != Mainloop::kStream && t.min_blocks > 1 && blocks <= int64_t(device.sm_count) * t.min_blocks;
}

Candidate candidate(Problem const& problem, DeviceTraits const& device, int row, int wanted_split) {
  Tactic const& t = kTactics[row];
  int const split_k = SharedTiles(problem, device, t, wanted_split).shared > 0 ? wanted_split : 1;
  SharedTiles const shared(problem, device, t, split_k);
  bool const cluster = uses_cluster(problem, device, t, split_k);
  Candidate result;
  result.plan.tactic = tactic_name(problem.kind, t);
  result.plan.row = row;
  result.plan.split_k = split_k;
  result.plan.cluster = cluster;
  result.plan.early = device.code_capability >= 90 && !piles_up(problem, device, t, split_k);
  result.plan.shared_channel = shared.first_channel;
  result.plan.shared_token = shared.first_token;
  result.plan.workspace_bytes = Workspace(problem, result.plan).bytes;
  result.plan.rounds_weights = rounds_weights(t, problem.kind);
  result.cost = predict(problem, device, t, split_k, cluster);
  return result;
}

/// Row of kTactics that has the name.
int tactic_row(Problem const& problem, std::string const& name) {
  Kind const& kind = problem.kind;
  for (int i = 0; i < kTacticCount; ++i)
    if (has_kernel(problem, kTactics[i]) && tactic_name(kind, kTactics[i]) == name) return i;
  int first = 0;
  while (!has_kernel(problem, kTactics[first])) ++first;
  throw InvalidArgument("tactic: '" + name + "' is not a configuration for this problem, which has e.g. '" +
                        tactic_name(kind, kTactics[first]) + "'; qcutlass.tactics() lists them");
}

[[noreturn]] void throw_nothing_fits(DeviceTraits const& device, std::string const& tactic, int split_k) {
  throw Unsupported(
      "no kernel configuration" + (tactic.empty() ? "" : " '" + tactic + "'") +
      (split_k > 0 ? " with split_k = " + std::to_string(split_k) : "") +
      " fits this problem on a GPU of compute capability " + std::to_string(device.compute_capability / 10) + "." +
      std::to_string(device.compute_capability % 10) + ", " + std::to_string(device.shared_memory_per_block) +
      " bytes of shared memory a block; leave tactic and split_k out, or take one that qcutlass.explain() lists");
}

/// The numbers of rows that the order of sums of a batch-invariant product is chosen for: one token's step, a batch's,
/// and prompts.
constexpr std::initializer_list<int> kRowsOfOrders = {1, 16, 128, 2048};

/// Whether a tactic serves products like this one of any number of rows. More rows take more shared memory, up to a
/// tile's.
bool serves_any_rows(Problem problem, DeviceTraits const& device, Tactic const& t) {
  if (!problem.grouped) problem.m = std::max<int64_t>(problem.m, t.tokens);
  return resident_blocks(problem, device, t) > 0 && fits_output(problem, t);
}

/// Whether a batch-invariant product may share k by so many blocks: those of wgmma do in clusters alone.
bool shares_in_one_kernel(Problem const& problem, Tactic const& t, int split_k) {
  return !is_wgmma(t.mainloop) || may_cluster(t, problem.kind, split_k);
}

/// The order of sums that a batch-invariant product has on a GPU, whatever its number of rows is. For each order take
/// the best tactic's predicted time at each of kRowsOfOrders; the order with the least product of these times wins.
/// `rows`: the rows of kTactics to choose among. `split_k`: 0, or the only split. Tiles of wgmma share k in clusters
/// alone, whatever m is.
SumOrder best_order(Problem problem, DeviceTraits const& device, std::vector<int> const& rows, int split_k) {
  struct Choice {
    SumOrder order;
    std::vector<double> times;
  };
  std::vector<Choice> choices;
  for (int row : rows) {
    Tactic const& t = kTactics[row];
    bool const wgmma = is_wgmma(t.mainloop);
    std::vector<int> const splits =
        split_k > 0 ? std::vector<int>{split_k} : std::vector<int>(wgmma ? kWgmmaSplits : kSplits);
    for (int split : splits) {
      if (!splittable(problem, t, split) || !shares_in_one_kernel(problem, t, split)) continue;
      SumOrder const order = sum_order(problem.kind, problem.activation, row, split);
      auto found = std::find_if(choices.begin(), choices.end(), [&](Choice const& c) { return c.order == order; });
      if (found == choices.end())
        found = choices.insert(found, {order, std::vector<double>(kRowsOfOrders.size(), HUGE_VAL)});
      auto time = found->times.begin();
      for (int m : kRowsOfOrders) {
        problem.m = m;
        double const total = predict(problem, device, t, split, uses_cluster(problem, device, t, split)).total;
        *time = std::min(*time, total), ++time;
      }
    }
  }
  if (choices.empty()) return {};  // of no tactic
  auto const product = [](Choice const& choice) {
    double result = 1;
    for (double time : choice.times) result *= time;
    return result;
  };
  return std::min_element(choices.begin(), choices.end(),
                          [&](Choice const& a, Choice const& b) { return product(a) < product(b); })
      ->order;
}

/// Whether a row of kTactics is to be chosen from: `only` that one, where it is not negative.
bool is_offered(Problem const& problem, DeviceTraits const& device, int row, int only) {
  return only >= 0 ? row == only : !device.wgmma || !is_named_only(kTactics[row], problem.kind);
}

/// The candidates of a batch-invariant product: those of its order of sums, of tactic `only` where it is not negative.
std::vector<Candidate> of_one_order(Problem const& problem, DeviceTraits const& device, int only, int split_k) {
  std::vector<int> rows;
  for (int row = 0; row < kTacticCount; ++row)
    if (is_offered(problem, device, row, only) && serves_any_rows(problem, device, kTactics[row])) rows.push_back(row);
  SumOrder const order = best_order(problem, device, rows, split_k);
  std::vector<Candidate> result;
  for (int row : rows)
    if (splittable(problem, kTactics[row], order.split_k) && fits_grid(problem, kTactics[row]) &&
        shares_in_one_kernel(problem, kTactics[row], order.split_k) &&
        sum_order(problem.kind, problem.activation, row, order.split_k) == order)
      result.push_back(candidate(problem, device, row, order.split_k));
  return result;
}

}  // namespace

std::vector<TacticTraits> tactics(GemmArguments const& arguments) {
  Problem const problem = make_problem(arguments);
  Kind const& kind = problem.kind;
  std::vector<TacticTraits> result;
  for (Tactic const& t : kTactics)
    if (has_kernel(problem, t))
      result.push_back({tactic_name(kind, t), t.channels, t.tokens, t.stage_k(kind.packing), t.warps,
                        stages_of(t, kind), shared_memory_bytes(t, kind, tile_rows(problem, t), problem.grouped),
                        t.max_registers(), is_wgmma(t.mainloop), is_superseded(t, kind, problem.grouped)});
  return result;
}

std::string dense_tactic(GemmArguments const& arguments) { return dense::tactic(make_problem(arguments)); }

std::vector<Candidate> candidates(GemmArguments const& arguments, DeviceTraits const& device, std::string const& tactic,
                                  int split_k, bool dense) {
  Problem const problem = make_problem(arguments);
  if (problem.kind.is_float8() && device.code_capability < problem.kind.capability())
    throw Unsupported(
        "a: products of float8 need a GPU of compute capability 8.9 or newer and code built for it; this one has " +
        std::to_string(device.compute_capability / 10) + "." + std::to_string(device.compute_capability % 10) +
        ", and runs code for " + std::to_string(device.code_capability / 10) + "." +
        std::to_string(device.code_capability % 10) + ". Use int8 activations, or CPU tensors");
  bool const dense_forced = !problem.grouped && tactic == dense::tactic(problem);
  bool const one_order = problem.one_order;
  if (dense_forced && one_order)
    throw Unsupported("tactic: '" + tactic +
                      "' adds in an order of the vendor's library, which may depend on the number of rows; a "
                      "batch-invariant product takes another tactic, or none");
  if (dense_forced && !dense)
    throw Unsupported("tactic: '" + tactic +
                      "' is a dense product by the vendor's library, which is not offered here; leave tactic empty, or "
                      "name one of qcutlass.tactics()");
  int const only = tactic.empty() || dense_forced ? -1 : tactic_row(problem, tactic);
  if (only >= 0 && device.wgmma && is_superseded(kTactics[only], problem.kind, problem.grouped))
    throw Unsupported("tactic: '" + tactic +
                      "' is not there on GPUs of compute capability 9.0, whose kernels of wgmma take its place; "
                      "qcutlass.explain() lists those that are");
  std::vector<Candidate> result;
  if (one_order) result = of_one_order(problem, device, only, split_k);
  for (int i = 0; i < kTacticCount && !dense_forced && !one_order; ++i) {
    Tactic const& t = kTactics[i];
    if (!is_offered(problem, device, i, only) || resident_blocks(problem, device, t) == 0 || !fits_grid(problem, t) ||
        !fits_output(problem, t))
      continue;
    if (split_k > 0) {
      if (splittable(problem, t, split_k)) result.push_back(candidate(problem, device, i, split_k));
      continue;
    }
    for (int split : is_wgmma(t.mainloop) ? kWgmmaSplits : kSplits)
      if (splittable(problem, t, split) && split_pays(problem, device, t, split))
        result.push_back(candidate(problem, device, i, split));
  }
  bool const dense_wanted =
      dense_forced || (dense && tactic.empty() && !problem.grouped && problem.m >= dense::kMinRows);
  if (dense_wanted && !one_order && split_k <= 1 && dense::fits(problem))
    result.push_back(dense::candidate(problem, device));
  if (result.empty()) throw_nothing_fits(device, tactic, split_k);
  std::stable_sort(result.begin(), result.end(),
                   [](Candidate const& a, Candidate const& b) { return a.cost.total < b.cost.total; });
  return result;
}

Plan select(GemmArguments const& arguments, DeviceTraits const& device, std::string const& tactic, int split_k,
            bool dense) {
  return candidates(arguments, device, tactic, split_k, dense).front().plan;
}

std::string kernel_set_hash(std::vector<std::string> const& build) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  auto const add = [&hash](std::string const& text) {
    for (char c : text + '\n') hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  };
  for (std::string const& fact : build) add(fact);
  add("layout " + std::to_string(layout::kVersion));
  for (Tactic const& t : kTactics)
    for (int64_t field :
         {int64_t(t.mainloop), int64_t{t.channels}, int64_t{t.tokens}, int64_t{t.warp_channels}, int64_t{t.warp_tokens},
          int64_t{t.slices}, int64_t{t.stages}, int64_t{t.min_blocks}, int64_t(t.products), int64_t(t.experts)})
      add(std::to_string(field));
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(hash));
  return digits;
}

}  // namespace qcutlass
