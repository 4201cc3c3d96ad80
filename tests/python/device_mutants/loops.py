"""Faults in the loops of mma.sync: streaming, multistage, blockwise, and their epilogue."""

from __future__ import annotations

from tests.python.device_mutants.mutant import Mutant, tactic, tests

THREADBLOCK = "cutlass_ext/gemm/threadblock"
EPILOGUE = "cutlass_ext/epilogue"

# Codes with minimums have few kernels, which compile soon, and rows of scales for every 16 columns.
FEW = "w4a16_minimum"
FEW_STREAM = (tactic("gemm with minimums-float16 w4", "stream_n64m16k512w4_s3"),)
LEVELS_STREAM = (tactic("gemm with minimums-float16 w4 two levels", "stream_n64m16k512w4_s3"),)
FEW_TOKENS = (tactic("gemm with minimums-float16 w4", "stream_n32m8k1024w8_s3"),)
NOT_FINITE = (tests("test_super_blocks.py", "test_sums_of_codes_that_overflow["),)
FINE = "w4a16_bf16_native_fine"
FINE_STREAM = (tactic("gemm-bfloat16 w4 groups of 16 and more", "stream_n64m16k512w4_s3"),)
FLOAT_CODES = (tests("test_float_codes.py", "test_every_tactic[dtype0-e2m1-"),)
MULTISTAGE_UNIT = "w4a16_bf16_float"
MULTISTAGE_TESTS = (tactic("gemm-bfloat16 w4 mixed types", "sm80_n64m16k128_s3"),)

STREAM = (
    Mutant(
        "scales of a stage's first row for all of its rows",
        "stream",
        f"{THREADBLOCK}/mma_packed_stream.h",
        "load_operands(op, place, s / kRowSteps, m);",
        "load_operands(op, place, 0, m);",
        FINE,
        FINE_STREAM,
    ),
    Mutant(
        "what the sums of a stage's first group are scaled by, for all of its groups",
        "stream",
        f"{THREADBLOCK}/mma_packed_stream.h",
        "words[i] = load_words(place, s, m + i);",
        "words[i] = load_words(place, 0, m + i);",
        "e2m1a16",
        FLOAT_CODES,
    ),
    Mutant(
        "sums of a group's first step twice",
        "stream",
        f"{THREADBLOCK}/mma_packed_stream.h",
        "step == s ? zero : group[i][n]);",
        "step == s ? zero : group[i][n]), step == s + 1 ? mma(group[i][n], a, b[n][s], group[i][n]) : void();",
        "e2m1a16",
        FLOAT_CODES,
    ),
    Mutant(
        "groups of 16 columns scaled by pairs",
        "stream",
        f"{THREADBLOCK}/mma_packed_stream.h",
        "pairs_of_steps_(args.group_size.is_multiple_of(2 * kStepK))",
        "pairs_of_steps_(true)",
        "e2m1a16",
        FLOAT_CODES,
    ),
    Mutant(
        "the first super-block for all",
        "stream",
        f"{THREADBLOCK}/stream_loaders.h",
        "group = args_.supers.size.group(k), stride",
        "group = 0, stride",
        FEW,
        LEVELS_STREAM,
    ),
    Mutant(
        "minimums by the activations of a group's first step alone",
        "stream",
        f"{THREADBLOCK}/mma_packed_stream.h",
        "multiply_group<kGroupSteps>(tokens, b, s,",
        "multiply_group<1>(tokens, b, s,",
        FEW,
        FEW_TOKENS,
    ),
    Mutant(
        "minimums are added to sums",
        "stream",
        "cutlass_ext/gemm/warp/minimum_sums.h",
        "fmaf(-by.minimum",
        "fmaf(by.minimum",
        FEW,
        FEW_TOKENS,
    ),
    Mutant(
        "sums that are not finite stay",
        "stream",
        "cutlass_ext/gemm/kernel/packed_gemm.h",
        "if (Mma::any_odd(",
        "if (false && Mma::any_odd(",
        FEW,
        NOT_FINITE,
    ),
    Mutant(
        "zeros of the next stage",
        "stream",
        f"{THREADBLOCK}/stream_loaders.h",
        "copy(stage + kZeros, zeros_, args_.zeros, supers, k);",
        "copy(stage + kZeros, zeros_, args_.zeros, supers, k + kStageK);",
        FEW,
        FEW_STREAM,
    ),
    Mutant(
        "no wait for the copies of the stage that is read",
        "stream",
        f"{THREADBLOCK}/stream_ring.h",
        "arch::cp_async_wait<kStages - 2>();",
        "arch::cp_async_wait<kStages - 1>();",
        FEW,
        FEW_STREAM,
    ),
    Mutant(
        "the last token tile has a row less",
        "stream",
        f"{THREADBLOCK}/stream_fragments.h",
        "fast_min(first_token_ + n * 8 + lane % 8, tokens - 1)",
        "fast_min(first_token_ + n * 8 + lane % 8, tokens - 2)",
        FEW,
        FEW_STREAM,
    ),
    Mutant(
        "the last step of k of each stage is dropped",
        "stream",
        f"{THREADBLOCK}/mma_packed_stream.h",
        "    for (int s = 0; s < kSteps; ++s) {\n"
        "      if constexpr (!LayoutA::kConverts) fragments_.load_codes(codes, place, m, s);",
        "    for (int s = 0; s < kSteps - 1; ++s) {\n"
        "      if constexpr (!LayoutA::kConverts) fragments_.load_codes(codes, place, m, s);",
        FINE,
        FINE_STREAM,
    ),
    Mutant(
        "scales of rows g and g + 8 swapped",
        "stream",
        f"{THREADBLOCK}/stream_fragments.h",
        "return {float(scales[0]), float(scales[8])};",
        "return {float(scales[8]), float(scales[0])};",
        "e4m3a16",
        (tests("test_float_codes.py", "test_every_tactic[dtype0-e4m3-64-"),),
    ),
    Mutant(
        "zeros ignored",
        "stream",
        f"{THREADBLOCK}/mma_packed_stream.h",
        "if (args_.zeros.data != nullptr) load_operands(offsets_, place, 0, 0);",
        ";",
        "w4a16_bf16_native_fine",
        (tactic("gemm-bfloat16 w4 groups of 64", "stream_n64m16k512w4_s3"),),
    ),
    Mutant(
        "activations are read before the kernel before has ended",
        "stream",
        "cutlass_ext/gemm/kernel/packed_gemm.h",
        "    if (params.prefetch) arch::wait_for_prior_grids();\n",
        "",
        "w4a16_f16_native_fine",
        (tests("test_decoder_operators.py", "test_products_behind_a_norm_read_what_it_wrote"),),
    ),
)

MULTISTAGE = (
    Mutant(
        "no wait for the copies of the stage that is read",
        "multistage",
        f"{THREADBLOCK}/multistage_ring.h",
        "arch::cp_async_wait<kStages - 2>();",
        "arch::cp_async_wait<kStages - 1>();",
        MULTISTAGE_UNIT,
        MULTISTAGE_TESTS,
    ),
    Mutant(
        "a place is filled again while it is read",
        "multistage",
        f"{THREADBLOCK}/multistage_ring.h",
        "int const free = (place + kStages - 1) % kStages;",
        "int const free = place;",
        MULTISTAGE_UNIT,
        MULTISTAGE_TESTS,
    ),
    Mutant(
        "scales of a slice's first row for all of its rows",
        "multistage",
        f"{THREADBLOCK}/mma_packed_multistage.h",
        "(this->slice_ * kSliceRows + row) * Ring::GroupLoader::kRowBytes",
        "(this->slice_ * kSliceRows) * Ring::GroupLoader::kRowBytes",
        MULTISTAGE_UNIT,
        MULTISTAGE_TESTS,
    ),
    Mutant(
        "the last columns of k are dropped",
        "multistage",
        f"{THREADBLOCK}/activation_loader.h",
        "left_ > ahead * kStageK + slice * kRowK;",
        "left_ > ahead * kStageK + slice * kRowK + kChunkK;",
        MULTISTAGE_UNIT,
        MULTISTAGE_TESTS,
    ),
    Mutant(
        "the last token of a small tile is left out",
        "multistage",
        f"{THREADBLOCK}/activation_loader.h",
        "exists_[i] = kRepeatRows || row < rows;",
        "exists_[i] = kRepeatRows || row + 1 < rows;",
        MULTISTAGE_UNIT,
        MULTISTAGE_TESTS,
    ),
)

BLOCKWISE = (
    Mutant(
        "the scale of the neighbouring token",
        "blockwise",
        "cutlass_ext/gemm/warp/block_promotion.h",
        "(i % 2 == 0 ? scale.x : scale.y)",
        "scale.x",
        "w8a8_s8_blocks",
        (tactic("blockwise-blocks of 32", "n128m64k128_s3"),),
    ),
    Mutant(
        "scales of a slice's first block for all of its blocks",
        "blockwise",
        f"{THREADBLOCK}/mma_packed_blockwise.h",
        "int const row = this->slice_ * kPromotions + promotion;",
        "int const row = this->slice_ * kPromotions;",
        "w8a8_s8_blocks",
        (tactic("blockwise-blocks of 32", "sm80_n64m64k128_s3"),),
    ),
    Mutant(
        "scales of a stage's first block for all of its blocks",
        "stream, blockwise",
        f"{THREADBLOCK}/mma_packed_stream.h",
        "      scales += Ring::BlockLoader::kRowBytes / 4;\n",
        "",
        "w8a8_s8_blocks",
        (tactic("blockwise-blocks of 32", "stream_n64m16k512w4_s3"),),
    ),
    Mutant(
        "the gate's scales for up",
        "stream and blockwise",
        f"{THREADBLOCK}/block_scale_loader.h",
        " + channel / 16 % 2 * up_offset;",
        ";",
        "w8a8_s8_blocks",
        (tests("test_blockwise_gates.py", "test_every_tactic_against_both_oracles[torch.int8-32-", "-cuda]"),),
    ),
    Mutant(
        "turns of 32 channels have scales of their own",
        "stream and blockwise",
        f"{THREADBLOCK}/block_scale_loader.h",
        "channel / 16 % 2 * up_offset;",
        "channel / 32 % 2 * up_offset;",
        "w8a8_s8_blocks",
        (tests("test_blockwise_gates.py", "test_every_tactic_against_both_oracles[torch.int8-64-", "-cuda]"),),
    ),
    Mutant(
        "scales of even strips for odd ones",
        "blockwise",
        f"{THREADBLOCK}/mma_packed_blockwise.h",
        "scales_[m % 2][n + i]",
        "scales_[0][n + i]",
        "w8a8_s8_blocks",
        (tests("test_blockwise_gates.py", "test_every_tactic_against_both_oracles[torch.int8-128-", "-cuda]"),),
    ),
    Mutant(
        "the largest output of half a block decides its scale",
        "blockwise, quantised",
        f"{EPILOGUE}/blockwise_output.h",
        "distance < kMostLanes; distance *= 2)",
        "distance < kMostLanes / 2; distance *= 2)",
        "w8a8_s8_blocks",
        (tactic("blockwise, quantised-blocks of 128", "sm80_stream_n128m16k512w8_s3"),),
    ),
)

GROUPS_UNIT = "w4a8"
BY_32 = (tactic("gemm_w4a8-int8, groups of multiples of 32", "sm80_n64m16k256_s3"),)
BY_128 = (tactic("gemm_w4a8-int8, groups of multiples of 128", "sm80_n64m64k128_s3"),)

GROUPS = (
    Mutant(
        "sums have the scales of a slice's first group",
        "groups",
        f"{THREADBLOCK}/mma_packed_groups.h",
        "if (k % kRowSteps == 0) load_scales(place, m, k / kRowSteps);",
        "if (k % kRowSteps == 0) load_scales(place, m, 0);",
        GROUPS_UNIT,
        BY_32,
    ),
    Mutant(
        "rows of scales of the first slice for all slices",
        "groups",
        f"{THREADBLOCK}/mma_packed_groups.h",
        "(this->slice_ * kSliceRows + row) * Ring::GroupLoader::kRowBytes",
        "row * Ring::GroupLoader::kRowBytes",
        GROUPS_UNIT,
        BY_32,
    ),
    Mutant(
        "scales and zeros of the warp's first strip for all strips",
        "groups",
        f"{THREADBLOCK}/mma_packed_groups.h",
        "int strip(int m) const { return this->warp_m_ * kStrips + m; }",
        "int strip(int) const { return this->warp_m_ * kStrips; }",
        GROUPS_UNIT,
        BY_128,
    ),
    Mutant(
        "every step of k starts anew",
        "groups",
        f"{THREADBLOCK}/mma_packed_groups.h",
        "first ? start : blocks[i]);",
        "start);",
        GROUPS_UNIT,
        BY_128,
    ),
    Mutant(
        "zeros stay in the codes",
        "groups",
        f"{THREADBLOCK}/mma_packed_groups.h",
        "zero_[0] = operands.zero[0], zero_[1] = operands.zero[1];",
        "zero_[0] = zero_[1] = 0;",
        GROUPS_UNIT,
        BY_128,
    ),
    Mutant(
        "the codes of the other 16 columns of a step",
        "groups",
        f"{THREADBLOCK}/mma_packed_groups.h",
        "LayoutA::kWords + half;",
        "LayoutA::kWords + (half ^ 1);",
        GROUPS_UNIT,
        BY_128,
    ),
    Mutant(
        "a stage begins with the operands of the one before",
        "groups",
        f"{THREADBLOCK}/mma_packed_groups.h",
        "load_operands(left == 1 ? next_place : place,",
        "load_operands(place,",
        GROUPS_UNIT,
        BY_128,
    ),
)

OUTPUT = (
    Mutant(
        "sums of this block in place of another one's of the cluster",
        "epilogue of mma.sync",
        f"{EPILOGUE}/transposed_epilogue.h",
        "add(sum, load(row, 0, block));",
        "add(sum, load(row, 0, rank));",
        FEW,
        FEW_STREAM,
    ),
    Mutant(
        "a row behind the last one is written",
        "epilogue of mma.sync",
        f"{EPILOGUE}/bias_activation.h",
        "    if (token >= params_.tokens) return;\n    add_bias(sum);",
        "    if (token > params_.tokens) return;\n    add_bias(sum);",
        FEW,
        FEW_STREAM,
    ),
    Mutant(
        "the bias of the next channel",
        "epilogue of mma.sync",
        f"{EPILOGUE}/bias_activation.h",
        "load_channels(bias_, params.bias, params.bias_type, source, params.channels);",
        "load_channels(bias_, params.bias, params.bias_type, source + 1, params.channels);",
        FEW,
        FEW_STREAM,
    ),
    Mutant(
        "activation before bias, and again behind it",
        "epilogue of dense products",
        f"{EPILOGUE}/bias_activation.h",
        "    add_bias(sum);\n    finish_channels<Element>",
        "    activate(sum, params_.activation);\n    add_bias(sum);\n    finish_channels<Element>",
        "dense",
        (tests("test_dense_cuda.py", "test_every_scheme[", "-4-groups-everything]"),),
    ),
    Mutant(
        "minimums are added",
        "conversion",
        "cutlass_ext/arch/dequantize.h",
        "__fmaf_rn(q.x, s, -m), __fmaf_rn(q.y, s, -m)",
        "__fmaf_rn(q.x, s, m), __fmaf_rn(q.y, s, m)",
        FEW,
        FEW_STREAM,
    ),
    Mutant(
        "scales of two levels of row g for row g + 8",
        "conversion",
        "cutlass_ext/gemm/warp/group_scales.h",
        "__shfl_sync(~0u, number, lane / 4 + 8 * j);",
        "__shfl_sync(~0u, number, lane / 4);",
        FEW,
        LEVELS_STREAM,
    ),
)
