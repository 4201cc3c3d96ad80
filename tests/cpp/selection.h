// Products and devices for tests of selection.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>

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

inline TacticTraits traits_of(GemmArguments const& a, std::string const& name) {
  for (TacticTraits const& t : tactics(a))
    if (t.name == name) return t;
  ADD_FAILURE() << name << " is not in the list";
  return {};
}

}  // namespace qcutlass::selection
