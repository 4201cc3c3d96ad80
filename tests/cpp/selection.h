// Products and devices for tests of selection.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "qcutlass/error.h"
#include "qcutlass/gemm.h"

namespace qcutlass::selection {

// Compute capability, SMs, opt-in shared memory: A100, RTX 3090, RTX 4090, H200 without and with code for sm_90a.
inline constexpr DeviceTraits kA100{80, 108, 163 * 1024}, kRtx3090{86, 82, 99 * 1024}, kRtx4090{89, 128, 99 * 1024},
    kH200{90, 132, 227 * 1024}, kH200Wgmma{90, 132, 227 * 1024, 90, true};
inline constexpr DeviceTraits kDevices[] = {kA100, kRtx3090, kRtx4090, kH200, kH200Wgmma};

using Shape = std::pair<int64_t, int64_t>;  // n, k
inline constexpr Shape kShapes[] = {{4096, 4096}, {28672, 4096}, {4096, 14336},
                                    {8192, 8192}, {6144, 4096},  {10240, 8192}};
inline constexpr int64_t kTokens[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};

/// Without scales of weights: one group a channel.
inline GemmArguments unscaled_problem(int64_t m, int64_t n, int64_t k, DType type, Packing packing) {
  GemmArguments a;
  a.m = m;
  a.a_type = type;
  a.a_stride = k;
  a.out_stride = n;
  a.weights.packing = packing;
  a.weights.n = n;
  a.weights.k = k;
  a.weights.group_size = k;
  return a;
}

inline GemmArguments weight_only_problem(int64_t m, int64_t n, int64_t k, int64_t group_size = 128,
                                         DType type = DType::kFloat16, Packing packing = Packing::kW4A16) {
  GemmArguments a = unscaled_problem(m, n, k, type, packing);
  a.weights.group_size = group_size;
  a.weights.scale_type = type;
  a.weights.scale_stride = n;
  return a;
}

inline GemmArguments eight_bits_problem(int64_t m, int64_t n, int64_t k, DType type, int64_t block = 0) {
  GemmArguments a = unscaled_problem(m, n, k, type, Packing::kW8A8);
  a.out_type = DType::kBFloat16;
  a.blocks.size = block;
  return a;
}

/// A product of every kind that adds in floating point.
inline std::vector<GemmArguments> products_of_every_kind(int64_t m, int64_t n, int64_t k) {
  std::vector<GemmArguments> result;
  for (Packing packing : {Packing::kW4A16, Packing::kW8A16})
    for (int64_t group : {int64_t{16}, int64_t{128}, k})
      for (DType zero : {DType::kNone, DType::kFloat32}) {
        result.push_back(weight_only_problem(m, n, k, group, DType::kBFloat16, packing));
        result.back().weights.zero_type = zero;
        result.back().weights.zero_stride = n;
      }
  for (Packing packing : {Packing::kE2M1A16, Packing::kE4M3A16})
    result.push_back(weight_only_problem(m, n, k, 32, DType::kFloat16, packing));
  result.push_back(weight_only_problem(m, n, k, 32));
  result.back().weights.minimum_type = DType::kFloat16;
  result.push_back(weight_only_problem(m, n, k));
  result.back().experts.count = 8, result.back().experts.a_rows = m;
  result.push_back(weight_only_problem(m, n, k));
  result.back().activation = Activation::kGeluTanh;
  result.push_back(eight_bits_problem(m, n, k, DType::kFloat8E4M3));
  for (int64_t block : {32, 64, 128}) result.push_back(eight_bits_problem(m, n, k, DType::kInt8, block));
  return result;
}

inline bool has_instructions(GemmArguments const& a, DeviceTraits const& device) {
  return !is_float8(a.a_type) || device.compute_capability >= 89;
}

/// The candidates of which so many blocks share k; none where nothing may be shared so.
inline std::vector<Candidate> candidates_by(GemmArguments const& a, DeviceTraits const& device, int blocks) {
  try {
    return candidates(a, device, {}, blocks);
  } catch (Unsupported const&) {
    return {};
  }
}

/// The time of a configuration: its tile, the blocks that share K, microseconds.
struct Time {
  char const* tile;
  int split_k;
  double us;
};

/// What one run measured of a product of m tokens and n x k weights, the fastest first.
struct Measured {
  int64_t n, k, m;
  std::vector<Time> times;
};

/// Expects that the chosen configuration is among the timed ones, and takes at most `most` times as long as the best.
inline void expect_among_the_best(GemmArguments const& product, std::vector<Time> const& times, double most = 1.05) {
  Plan const plan = select(product, kH200Wgmma);
  double us = 0;
  for (Time const& time : times)
    if (plan.split_k == time.split_k && plan.tactic.find("_" + std::string(time.tile) + "_") != std::string::npos)
      us = time.us;
  std::string const what = plan.tactic + " split " + std::to_string(plan.split_k) + " for " +
                           std::to_string(product.m) + " rows by " + std::to_string(product.weights.n) + " x " +
                           std::to_string(product.weights.k);
  EXPECT_GT(us, 0) << what;
  EXPECT_LE(us, most * times[0].us) << what;
}

/// The same of several products: `problem(m, n, k)` makes them.
template <class Problem>
void expect_choices_among_the_best(Problem const& problem, std::vector<Measured> const& rows, double most = 1.05) {
  for (Measured const& row : rows) expect_among_the_best(problem(row.m, row.n, row.k), row.times, most);
}

inline TacticTraits traits_of(GemmArguments const& a, std::string const& name) {
  for (TacticTraits const& t : tactics(a))
    if (t.name == name) return t;
  ADD_FAILURE() << name << " is not in the list";
  return {};
}

}  // namespace qcutlass::selection
