"""Faults in the loops of wgmma, their rings, shares of k and epilogues."""

from __future__ import annotations

from tests.python.device_mutants.mutant import Mutant, tactic, tests

THREADBLOCK = "cutlass_ext/gemm/threadblock"
EPILOGUE = "cutlass_ext/epilogue"

EIGHT_BITS = "w8a8_sm90a"
RINGS = (tests("test_w8a8_cuda.py", "test_rings_go_round_and_blocks_take_more_tiles[dtype0-3]"),)
PAIRS = (tests("test_w8a8_cuda.py", "test_rings_go_round_and_blocks_take_more_tiles[dtype0-4]"),)
IN_BLOCKS = (tactic("blockwise-blocks of 128", "sm90a_n128m128k128_s6"),)
CLUSTERS = (tests("test_last_wave_cuda.py", "[int8-all in pairs-2]"),)
CONVERTING_CLUSTERS = (tests("test_last_wave_cuda.py", "[w4a16 bf16, zeros-all in pairs-2]"),)
THROUGH_MEMORY = (tests("test_last_wave_cuda.py", "[int8-all in pairs-8]"),)

# Both modes of scales, and groups that are not whole stages: every tactic of experts' rows.
GROUPED = "w4a16_bf16_native_fine_sm90a"
EXPERTS = (tests("test_grouped.py", "test_both_oracles[", "w4 bfloat16-cuda]"),)
GATED_EXPERTS = (tests("test_grouped_gates.py", "test_gates_give_the_bits_of_separate_steps[native-w4 bfloat16-cuda]"),)
FLOATS = "e2m1a16_f16_sm90a"
FLOAT_EXPERTS = (tests("test_grouped.py", "test_both_oracles_of_codes[NVFP4-cuda]"),)

RINGS_OF_WGMMA = (
    Mutant(
        "consumers wait for the first phase of a place again and again",
        "wgmma, ring",
        f"{THREADBLOCK}/ring_consumer.h",
        "    phases_ ^= 1u << place;\n",
        "",
        EIGHT_BITS,
        RINGS,
        traps=True,
    ),
    Mutant(
        "the producer fills places before they are given back",
        "wgmma, ring",
        f"{THREADBLOCK}/ring_producer.h",
        "        barriers_.empty[place].wait(~phases_ >> place & 1);\n",
        "",
        EIGHT_BITS,
        RINGS,
        traps=True,
    ),
)

FOUR_BITS = "w4a8_sm90a"
BY_FLOAT8 = (tactic("gemm_w4a8-fp8, groups of multiples of 32", "sm90a_n128m128k128_s6"),)
BY_INT8 = (tactic("gemm_w4a8-int8, groups of multiples of 128", "sm90a_n128m128k128_s8"),)

WGMMA_GROUPS = (
    Mutant(
        "differences are one off",
        "wgmma, 4 by 8 bits",
        "cutlass_ext/arch/byte_difference.h",
        "byte_distances(d, kOffset)",
        "byte_distances(d, kOffset - 0x01010101)",
        FOUR_BITS,
        BY_FLOAT8,
    ),
    Mutant(
        "the zero of row g for row g + 8",
        "wgmma, 4 by 8 bits",
        "cutlass_ext/arch/byte_difference.h",
        "high = upper + (0x80808080 - zeros[1])",
        "high = upper + (0x80808080 - zeros[0])",
        FOUR_BITS,
        BY_INT8,
    ),
    Mutant(
        "the scale of the first group of a stage for all of them",
        "wgmma, 4 by 8 bits",
        f"{THREADBLOCK}/mma_packed_wgmma_groups.h",
        "scales_[kPlace % 2][row]);",
        "scales_[kPlace % 2][0]);",
        FOUR_BITS,
        BY_FLOAT8,
    ),
    Mutant(
        "sums of half of the tokens are added to the others'",
        "wgmma, 4 by 8 bits",
        f"{THREADBLOCK}/mma_packed_wgmma_groups.h",
        "promote(sums + half * kHalfSums,",
        "promote(sums + (half ^ 1) * kHalfSums,",
        FOUR_BITS,
        BY_FLOAT8,
    ),
    Mutant(
        "the codes of a lane are its own",
        "wgmma, 4 by 8 bits",
        f"{THREADBLOCK}/mma_packed_wgmma_groups.h",
        "codes_byte_(LayoutA::codes_byte(lane))",
        "codes_byte_(LayoutA::lane_byte(lane))",
        FOUR_BITS,
        BY_INT8,
    ),
)

WGMMA_SS = (
    Mutant(
        "sums of a stage go on from stale ones",
        "wgmma_ss",
        "cutlass_ext/arch/wgmma.h",
        "uint64_t a, uint64_t b, bool first) {\n    issue(sums, a, b, first ? ScaleOut::Zero : ScaleOut::One",
        "uint64_t a, uint64_t b, bool first) {\n    issue(sums, a, b, ScaleOut::One",
        EIGHT_BITS,
        IN_BLOCKS,
    ),
    Mutant(
        "the scale of row g for row g + 8",
        "wgmma_ss",
        f"{THREADBLOCK}/mma_packed_wgmma_ss.h",
        "+ 1] = __shfl_sync(~0u, scale_[0], 1, 4)",
        "+ 1] = __shfl_sync(~0u, scale_[0], 0, 4)",
        EIGHT_BITS,
        IN_BLOCKS,
    ),
    Mutant(
        "the gate's scales for up",
        "wgmma_ss",
        f"{THREADBLOCK}/mma_packed_wgmma_ss.h",
        "(kTurns ? i / 8 % 2 * 2 : 0)",
        "0",
        EIGHT_BITS,
        (tests("test_blockwise_gates.py", "test_every_tactic_against_both_oracles[torch.int8-128-", "-cuda]"),),
    ),
    Mutant(
        "both blocks of a pair fill the same half of the weights",
        "wgmma_ss",
        f"{THREADBLOCK}/mma_packed_wgmma_ss.h",
        "to + first * SharedStorage::kTileRow, 0, channel / 16, tile + first);",
        "to, 0, channel / 16, tile + first);",
        EIGHT_BITS,
        PAIRS,
    ),
    Mutant(
        "the zero point's part is added",
        "wgmma_ss, epilogue",
        f"{EPILOGUE}/scaled_sums.h",
        "int64_t(sum) - int64_t(token.azp) * channel.codes",
        "int64_t(sum) + int64_t(token.azp) * channel.codes",
        EIGHT_BITS,
        (tactic("gemm_w8a8-int8", "sm90a_n128m128k128_s6"),),
    ),
)

WGMMA_RS = (
    Mutant(
        "the first super-block for all",
        "wgmma_rs, operands",
        f"{THREADBLOCK}/operand_producer.h",
        "from_.supers.size.group(k);",
        "0;",
        "w4a16_minimum_sm90a",
        (tactic("gemm with minimums-float16 w4 two levels", "sm90a_n128m128k128_s4"),),
    ),
    Mutant(
        "the upper half of a strip has the lower one's scales",
        "wgmma_rs, operands",
        f"{THREADBLOCK}/operand_producer.h",
        "(channel + 8) * m.element_bytes",
        "channel * m.element_bytes",
        "w4a16_minimum_sm90a",
        (tactic("gemm with minimums-float16 w4 two levels", "sm90a_n128m128k128_s4"),),
    ),
    Mutant(
        "a warp's next row is requested where another's is",
        "wgmma_rs, operands",
        f"{THREADBLOCK}/operand_producer.h",
        "k + kOperandWarps * kWarpRows",
        "k + kWarpRows",
        "w4a16_minimum_sm90a",
        (tests("test_cuda_cases.py", "test_layers[gemm with minimums-cuda-64-4096-4096]"),),
    ),
    Mutant(
        "operands are not waited for",
        "wgmma_rs, operands",
        "cutlass_ext/gemm/kernel/packed_gemm_wgmma.h",
        "return 1 + Mma::OperandProducer::kArrivals;",
        "return 1;",
        "w4a16_minimum_sm90a",
        (tactic("gemm with minimums-float16 w4 two levels", "sm90a_n128m128k128_s4"),),
        traps=True,
    ),
    Mutant(
        "scales of a stage's first row for all of its rows",
        "wgmma_rs",
        f"{THREADBLOCK}/mma_packed_wgmma_rs.h",
        "return kBoxRows > 1 ? box_row(own) : own / kRowSteps;",
        "return own & 0;",
        GROUPED,
        EXPERTS,
    ),
    Mutant(
        "scales of rows g and g + 8 swapped",
        "wgmma_rs",
        "cutlass_ext/gemm/warp/group_scales.h",
        "(own.channel + lane % 2 * 8) * 2",
        "(own.channel + (lane + 1) % 2 * 8) * 2",
        GROUPED,
        EXPERTS,
    ),
    Mutant(
        "the last step of k of a batch is dropped",
        "wgmma_rs",
        f"{THREADBLOCK}/mma_packed_wgmma_rs.h",
        "      for (int i = 0; i < kBatch; ++i) {\n        int const byte",
        "      for (int i = 0; i < kBatch - 1; ++i) {\n        int const byte",
        GROUPED,
        EXPERTS,
    ),
    Mutant(
        "weights of the first expert for all of them",
        "wgmma_rs, experts",
        f"{THREADBLOCK}/mma_packed_wgmma_rs.h",
        "channel / 16 + expert_ * args_.tiles_n;",
        "channel / 16;",
        GROUPED,
        EXPERTS,
    ),
    Mutant(
        "scales of gates from twice their channels on",
        "wgmma_rs, experts",
        f"{THREADBLOCK}/mma_packed_wgmma_rs.h",
        "args_.has_halves ? channel / 32 : 0, group, expert_);",
        "args_.has_halves ? channel / 16 : 0, group, expert_);",
        GROUPED,
        GATED_EXPERTS,
    ),
    Mutant(
        "the bias of gates and ups as if they took turns",
        "wgmma_rs, epilogue",
        f"{EPILOGUE}/wgmma_epilogue.h",
        "source = params.halves().channel(own);",
        "source = own;",
        GROUPED,
        GATED_EXPERTS,
    ),
    Mutant(
        "a block leaves out every second of its tiles of experts' rows",
        "wgmma_rs, experts",
        "cutlass_ext/gemm/kernel/expert_schedule.h",
        "next += gridDim.x)",
        "next += 2 * gridDim.x)",
        GROUPED,
        (tests("test_grouped.py", "test_blocks_take_tile_after_tile[w4 bfloat16]"),),
    ),
    Mutant(
        "a tile is told before it is found",
        "wgmma_rs, experts",
        "cutlass_ext/gemm/kernel/expert_schedule.h",
        "        storage.works[place.index] = work;\n        storage.full[place.index].arrive();\n",
        "        storage.full[place.index].arrive();\n        __nanosleep(5000);\n"
        "        storage.works[place.index] = work;\n",
        GROUPED,
        (tests("test_grouped.py", "test_blocks_take_tile_after_tile[w4 bfloat16]"),),
    ),
    Mutant(
        "the bias of channel g + 8 for token 2t + 1",
        "wgmma_rs, epilogue",
        f"{EPILOGUE}/wgmma_epilogue.h",
        "thread::add_separately(sums[i], of[i / 2 % 2]);",
        "thread::add_separately(sums[i], of[i % 2]);",
        GROUPED,
        EXPERTS,
    ),
    Mutant(
        "channels g + 8 without the scale of their row",
        "wgmma_rs, epilogue",
        f"{EPILOGUE}/wgmma_epilogue.h",
        "      sums[block * 4 + 2 + i] *= scale;\n",
        "",
        GROUPED,
        EXPERTS,
    ),
    Mutant(
        "the sign of every second e2m1 code is lost",
        "wgmma_rs, conversion",
        "cutlass_ext/arch/dequantize_float.h",
        "0x70707070), 0x8e008e00);",
        "0x70707070), 0x0e008e00);",
        FLOATS,
        FLOAT_EXPERTS,
    ),
    Mutant(
        "the rests of large scales are dropped",
        "wgmma_rs, conversion",
        f"{THREADBLOCK}/mma_packed_wgmma_rs.h",
        "      if (!has_rests) return;\n",
        "      return;\n",
        FLOATS,
        (tests("test_float_codes.py", "test_scales_of_any_size[dtype0-floats"),),
    ),
    Mutant(
        "no power of two has a rest",
        "wgmma_rs, conversion",
        "cutlass_ext/gemm/warp/float_code_scales.h",
        "kLarge = 0x80 * kBoth",
        "kLarge = 0x100 * kBoth",
        FLOATS,
        (tests("test_float_codes.py", "test_scales_of_any_size[dtype0-powers"),),
    ),
    Mutant(
        "sums of e4m3 scales stay in their unit",
        "wgmma_rs",
        "cutlass_ext/gemm/warp/float_code_scales.h",
        "kSumUnit = 512;",
        "kSumUnit = 256;",
        FLOATS,
        FLOAT_EXPERTS,
    ),
    Mutant(
        "the global scale is dropped",
        "wgmma_rs",
        "cutlass_ext/gemm/warp/float_code_scales.h",
        "  CUTLASS_DEVICE void apply(float (&sums)[kCount]) const {\n"
        "    if (global_scale != nullptr) multiply<kCount>(sums);\n",
        "  CUTLASS_DEVICE void apply(float (&)[kCount]) const {\n",
        FLOATS,
        FLOAT_EXPERTS,
    ),
)

SHARES_OF_K = (
    Mutant(
        "the first share is left out",
        "wgmma, clusters",
        f"{EPILOGUE}/row_epilogue.h",
        "int source = 0;",
        "int source = 1;",
        EIGHT_BITS,
        CLUSTERS,
    ),
    Mutant(
        "every part of a block has the sums of its first one",
        "wgmma_rs, clusters",
        f"{EPILOGUE}/wgmma_epilogue.h",
        "slots += kSlotWords;",
        "slots += 0 * kSlotWords;",
        GROUPED,
        CONVERTING_CLUSTERS,
    ),
    Mutant(
        "the second half of a part's sums is not sent",
        "wgmma_rs, clusters",
        f"{EPILOGUE}/wgmma_epilogue.h",
        "      arch::store_to_cluster(address + arch::kWarpgroupThreads * 16, &sums[part * kPartSums + 4]);\n",
        "",
        GROUPED,
        CONVERTING_CLUSTERS,
    ),
    Mutant(
        "shares begin where those before them have not ended",
        "wgmma, shares of k",
        "cutlass_ext/gemm/kernel/packed_gemm_wgmma.h",
        "first_k = (share * params.stages_a_share + fast_min(share, params.stages_left)) * Shape::kK;",
        "first_k = share * params.stages_a_share * Shape::kK;",
        EIGHT_BITS,
        CLUSTERS,
    ),
    Mutant(
        "every share leaves its sums in the first place, the others stay stale",
        "wgmma, shares through memory",
        f"{EPILOGUE}/output_op.h",
        "data + int64_t(share) * (tokens - token) * stride",
        "data + int64_t(0 * share) * (tokens - token) * stride",
        EIGHT_BITS,
        THROUGH_MEMORY,
    ),
    Mutant(
        "the first of four shares is added four times",
        "sum of shares",
        "cuda/copy_rows.cuh",
        "(from + (first + s) * share)[i]",
        "(from + first * share)[i]",
        "launch",
        THROUGH_MEMORY,
    ),
    Mutant(
        "shares are read before the kernel before has ended",
        "sum of shares",
        "cuda/copy_rows.cuh",
        "  cutlass::arch::wait_for_prior_grids();\n",
        "",
        "launch",
        (*THROUGH_MEMORY, tests("test_repetitions_cuda.py", "[int8-memory]")),
    ),
)
