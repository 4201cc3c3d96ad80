"""Faults in products of experts' rows by mma.sync, and in the kernels beside products."""

from __future__ import annotations

from tests.python.device_mutants.mutant import Mutant, tests

KERNEL = "cutlass_ext/gemm/kernel"

MINIMUMS = "w4a16_minimum"
OF_MINIMUMS = (tests("test_grouped.py", "test_both_oracles_of_codes[minimums-cuda]"),)
OF_TWO_LEVELS = (tests("test_grouped.py", "test_both_oracles_of_codes[two levels-cuda]"),)
INTEGERS = "w4a16_f16_native_fine"

EXPERTS = (
    Mutant(
        "ups for gates, and gates for ups",
        "grouped mma.sync",
        "cutlass_ext/layout/gate_halves.h",
        "(index & 1) * half",
        "(~index & 1) * half",
        INTEGERS,
        (tests("test_grouped_gates.py", "test_gates_give_the_bits_of_separate_steps[native-w4 float16-cuda]"),),
    ),
    Mutant(
        "scales of the first expert for all of them",
        "grouped mma.sync",
        f"{KERNEL}/grouped_gemm.h",
        "    args.scales.data += tile.expert * params.scale_bytes;\n",
        "",
        MINIMUMS,
        OF_MINIMUMS,
    ),
    Mutant(
        "sums of experts that are not finite stay",
        "grouped mma.sync",
        f"{KERNEL}/grouped_gemm.h",
        "if (Mma::any_odd(",
        "if (false && Mma::any_odd(",
        MINIMUMS,
        (tests("test_grouped_infinities.py", "test_rows_that_are_not_finite["),),
    ),
    Mutant(
        "super-blocks of the first expert for all of them",
        "grouped mma.sync",
        f"{KERNEL}/grouped_gemm.h",
        "    args.supers.select(tile.expert);\n",
        "",
        MINIMUMS,
        OF_TWO_LEVELS,
    ),
    Mutant(
        "the first super-block for all",
        "grouped mma.sync, multistage",
        "cutlass_ext/gemm/threadblock/scale_loader.h",
        "group = supers_.size.group(row_k);",
        "group = 0;",
        MINIMUMS,
        OF_TWO_LEVELS,
    ),
    Mutant(
        "weights of the expert before",
        "grouped mma.sync",
        f"{KERNEL}/expert_tiles.h",
        "? -1 : span - 1;",
        "? -1 : span - 2;",
        MINIMUMS,
        OF_MINIMUMS,
    ),
    Mutant(
        "activations of the first rows for every tile",
        "grouped mma.sync",
        "cutlass_ext/gemm/threadblock/stream_loaders.h",
        "args.source(token + row)",
        "args.source(row)",
        MINIMUMS,
        OF_MINIMUMS,
    ),
    Mutant(
        "rows of nobody stay as they were",
        "grouped mma.sync",
        f"{KERNEL}/grouped_gemm.h",
        "if (found) clear(output_params, channel, tile.begin, thread);",
        "",
        INTEGERS,
        (tests("test_grouped.py", "test_nothing_else_is_written[cuda]"),),
    ),
    Mutant(
        "indices of rows are not clamped",
        "grouped mma.sync",
        "cutlass_ext/gemm/threadblock/row_source.h",
        "return fast_max(0, fast_min(row, count - 1));",
        "return row;",
        INTEGERS,
        (tests("test_grouped.py", "test_wrong_indices_touch_no_other_memory"),),
    ),
    Mutant(
        "offsets are read before the kernel before has ended",
        "grouped mma.sync",
        f"{KERNEL}/grouped_gemm.h",
        "if (!params.prefetch) arch::wait_for_prior_grids();  // the offsets are data",
        "",
        INTEGERS,
        (tests("test_moe.py", "test_a_captured_block_reads_what_is_in_memory_then"),),
    ),
)

STEPS_OF_MIXTURES = (
    Mutant(
        "places do not count the block before",
        "moe, route",
        "cuda/moe/route.cu",
        "if (other < block) start[expert + i] += counts[i];",
        "if (other + 1 < block) start[expert + i] += counts[i];",
        "route",
        (tests("test_moe_steps.py", "test_routing_of_many_is_exact[", "-cuda]"),),
    ),
    Mutant(
        "rows name another token",
        "moe, route",
        "cuda/moe/route.cu",
        "unsigned(slot) / unsigned(task.slots)",
        "unsigned(slot) % unsigned(task.tokens)",
        "route",
        (tests("test_moe_steps.py", "test_routing_is_exact[33-3-7", "-cuda]"),),
    ),
    Mutant(
        "slots are added up from the last to the first",
        "moe, rows",
        "cuda/moe/rows.cu",
        "order[first + s] : -1;",
        "order[task.slots - 1 - first - s] : -1;",
        "rows",
        (tests("test_moe_steps.py", "test_sums_are_exact[40-8-2048-cuda]"),),
    ),
    Mutant(
        "the lower limit is ignored",
        "moe, rows",
        "cuda/moe/rows.cu",
        "up < -task.limit ? -task.limit : up;",
        "up;",
        "rows",
        (tests("test_moe_steps.py", "test_gates_are_within_their_bound[shape2-", "-cuda]"),),
    ),
)

OF_EIGHT_BITS = (tests("test_epilogues_cuda.py", "test_bits_of_eight_bits[", "int8-silu_mul]"),)
OF_SIXTEEN = "test_epilogues_cuda.py", "test_bits_are_those_of_separate_operators[int4-"
WGMMA_EPILOGUE = "cutlass_ext/epilogue/wgmma_epilogue.h"

GATES = (
    Mutant(
        "up is activated, and gates multiply it",
        "epilogue of mma.sync",
        "cutlass_ext/epilogue/bias_activation.h",
        "if (channel % (2 * kGateTurn) >= kGateTurn) return false;",
        "if (channel % (2 * kGateTurn) < kGateTurn) return false;",
        "w8a8_s8_none",
        OF_EIGHT_BITS,
    ),
    Mutant(
        "sums are not rounded before a gate",
        "epilogue of mma.sync",
        "cutlass_ext/epilogue/bias_activation.h",
        "  round_channels<Element>(out, values);\n  unsigned const lanes",
        "  unsigned const lanes",
        "w8a8_s8_none",
        OF_EIGHT_BITS,
    ),
    Mutant(
        "gates multiply channels of another turn",
        "epilogue of wgmma",
        WGMMA_EPILOGUE,
        "sums[thread::gate_channel(column) + thread::kGateTurn]",
        "sums[thread::gate_channel(column ^ 16) + thread::kGateTurn]",
        "w4a16_f16_native_fine_sm90a",
        (tests(*OF_SIXTEEN, "-silu_mul]"),),
    ),
    Mutant(
        "residuals of the row before",
        "epilogue of wgmma",
        WGMMA_EPILOGUE,
        "static_cast<Element const*>(params.residual) + token * params.residual_stride + column;",
        "static_cast<Element const*>(params.residual) + (token & ~1) * params.residual_stride + column;",
        "w4a16_f16_native_fine_sm90a",
        (tests(*OF_SIXTEEN, "-None]"),),
    ),
    Mutant(
        "residuals of whole tiles of the 16 tokens before or after",
        "epilogue of wgmma",
        WGMMA_EPILOGUE,
        "add_residual(params, words, residuals[part]);",
        "add_residual(params, words, residuals[part ^ 1]);",
        "w4a16_f16_native_fine_sm90a",
        (tests(*OF_SIXTEEN, "-None]"),),
    ),
    Mutant(
        "the last token of a whole tile is one too many",
        "epilogue of wgmma",
        WGMMA_EPILOGUE,
        "params.tokens - token - row : 0;",
        "params.tokens - token - row + 1 : 0;",
        "w4a16_f16_native_fine_sm90a",
        (tests("test_epilogues_cuda.py", "test_aligned_rows_are_written_alone[None]"),),
    ),
    Mutant(
        "turns of gates have eight channels",
        "epilogue of wgmma with 8-bit operands",
        "cutlass_ext/epilogue/row_epilogue.h",
        "constexpr int kTurn = thread::kGateTurn / 8 * 4;",
        "constexpr int kTurn = thread::kGateTurn / 16 * 4;",
        "w8a8_sm90a",
        OF_EIGHT_BITS,
    ),
    Mutant(
        "gates of 32 bits multiply the channel eight further on",
        "epilogue of wgmma",
        WGMMA_EPILOGUE,
        "params.activation) * words[i * 32];",
        "params.activation) * words[(i ^ 8) * 32];",
        "w4a8_sm90a",
        (tests("test_epilogues_cuda.py", "test_bits_of_four_by_eight_bits[128-", "int8-silu_mul]"),),
    ),
    Mutant(
        "outputs in blocks have no residual",
        "epilogue of mma.sync",
        "cutlass_ext/epilogue/blockwise_output.h",
        "      finish_channels<void>(params_, token, channel_, sum);",
        "      Params p = params_;\n      p.residual = nullptr, finish_channels<void>(p, token, channel_, sum);",
        "w8a8_s8_blocks",
        (tests("test_epilogues_cuda.py", "test_bits_of_blocks[", "int8-128-None]"),),
    ),
)

NORMS = (
    Mutant(
        "no barrier between the parts of a sum and their sum",
        "norm",
        "cuda/decoder.cu",
        "  __syncthreads();\n  value = parts[threadIdx.x % kParts];",
        "  value = parts[threadIdx.x % kParts];",
        "decoder",
        (tests("test_decoder_operators.py", "test_norms_are_within_their_bound[", "-cuda]"),),
    ),
    Mutant(
        "the mean is over a column less",
        "norm",
        "cuda/decoder.cu",
        "/ float(columns) + task.eps",
        "/ float(columns - 1) + task.eps",
        "decoder",
        (tests("test_decoder_operators.py", "test_norms_are_within_their_bound[shape0-", "-cuda]"),),
    ),
    Mutant(
        "codes are those of a norm before it is rounded",
        "norm",
        "cuda/decoder.cu",
        "if (kKeeps) x[i] = float(Element(out[i]));",
        "if (kKeeps) x[i] = out[i];",
        "decoder",
        (tests("test_quantized_norms.py", "test_bits_are_those_of_both_in_turn[shape0-", "-cuda]"),),
    ),
    Mutant(
        "ranges of long rows are those of what registers hold",
        "norm",
        "cuda/decoder.cu",
        "      include(x);\n",
        "",
        "decoder",
        (tests("test_quantized_norms.py", "test_bits_are_those_of_both_in_turn[shape8-", "-cuda]"),),
    ),
)

LARGE = ("test_quantizers_cuda.py", "test_agrees_with_the_cpu_on_large_matrices[")
QUANTISERS = (
    Mutant(
        "codes are rounded towards zero",
        "quantiser",
        "cuda/quantize/arithmetic.cuh",
        "__fadd_rn(near, kIntegerFloat)",
        "__fadd_rz(near, kIntegerFloat)",
        "quantize_f32",
        (tests(*LARGE, "default-dtype2]"),),
    ),
    Mutant(
        "zero points are one too large",
        "quantiser",
        "cuda/quantize/arithmetic.cuh",
        "__float2int_rn(__fdiv_rn(low, scale)) - 128",
        "__float2int_rn(__fdiv_rn(low, scale)) - 127",
        "quantize_f32",
        (tests(*LARGE, "[asymmetric=True-dtype2]"),),
    ),
    Mutant(
        "the last warp's extremes are left out",
        "quantiser",
        "cuda/quantize/kernels.cuh",
        "range = lane < kWarps ? of_warps[lane] : Range{};",
        "range = lane < kWarps - 1 ? of_warps[lane] : Range{};",
        "quantize_f32",
        (tests(*LARGE, "default-dtype2]"),),
    ),
    Mutant(
        "the extremes of neighbouring threads are not compared",
        "quantiser of blocks",
        "cuda/quantize/block_kernels.cuh",
        "for (int step = kThreads / 2; step > 0; step /= 2)",
        "for (int step = kThreads / 2; step > 1; step /= 2)",
        "quantize_f32",
        (tests("test_blockwise_cuda.py", "test_quantisers_agree_with_the_cpu_on_large_matrices[128-"),),
    ),
)

DEQUANTISERS = (
    Mutant(
        "the global scale is dropped",
        "dequantise",
        "cuda/dequantize.cu",
        "        if (w.global_scale != nullptr) result.scale[channel] = "
        "__fmul_rn(result.scale[channel], __ldg(w.global_scale));\n",
        "",
        "dequantize",
        (tests("test_float_codes.py", "test_every_tactic[dtype0-e2m1-16-"),),
    ),
    Mutant(
        "signs of e2m1 codes are lost",
        "dequantise",
        "cuda/dequantize.cu",
        "(code & 8) << 28",
        "(code & 0) << 28",
        "dequantize",
        (tests("test_float_codes.py", "test_every_tactic[dtype0-e2m1-64-"),),
    ),
    Mutant(
        "channels g and g + 8 swapped",
        "dequantise",
        "cuda/dequantize.cu",
        "{strip * layout::kTileN + g, strip * layout::kTileN + g + 8};",
        "{strip * layout::kTileN + g + 8, strip * layout::kTileN + g};",
        "dequantize",
        (tests("test_gemm_cuda.py", "test_dequantising_equals_the_cpu[4-out_dtype0]"),),
    ),
)
