// Products of packed codes on the CPU with int8 activations, quantised here or by the caller: dot products of bytes.
//
//   sum = sum_r (sum_{k in run r} (code[n, k] - zero[g, n]) * a_q[m, k]) * a_scale[m, r] * w_scale[g, n]
//
// or, with minimums in place of zeros,
//
//   sum = sum_r (sum_k code[n, k] * a_q[m, k] * w_scale[g, n] - minimum[g, n] * sum_k a_q[m, k]) * a_scale[m, r]
//
// For activations that are quantised here, a run is a block of them (quantized_rows.h), or a step if a block may belong
// to two groups g. For activations that the caller has quantised, whose scale multiplies the finished sum, a run is as
// many columns of a group as possible. The inner sum is an exact integer if zeros are integers; the rest is fp32.
#pragma once

#include <cstdint>

#include "host/byte_dot.h"
#include "host/strips.h"
#include "qcutlass/gemm.h"

namespace qcutlass::host {

/// Throws Unsupported for groups that are neither one a channel nor whole steps of 16 columns.
void check_int8_activations(WeightArguments const& weights);

/// The product of checked arguments. `activations`: [m][k], scaled and permuted.
void gemm_int8_activations(GemmArguments const& arguments, float const* activations, int threads,
                           StorePart store = store_part, ByteKernels kernels = byte_kernels().back());

/// Whether no group of weights ends within a step of the packed layout.
bool has_whole_steps(WeightArguments const& weights);

/// The product of checked arguments with int8 activations, for groups of whole steps.
void gemm_int8_rows(GemmArguments const& arguments, int threads, StorePart store = store_part,
                    ByteKernels kernels = byte_kernels().back());

}  // namespace qcutlass::host
