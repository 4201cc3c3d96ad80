"""Blockwise fp8 products, `qcutlass.blockwise.fp8_gemm`, as the facets of the tests know them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from tests.python.kinds import blockwise as of_int8
from tests.python.kinds.blockwise import BLOCKS, OF_OUT, SIZE, K, M, Model, N
from tests.python.kinds.description import ACTIVATIONS, FLOATS, Draw, Judged, Refusal, Row
from torch import Tensor

import qcutlass
from qcutlass import _C, blockwise, testing
from qcutlass.testing import BlockwiseCase, BlockwiseProblem

FP8 = torch.float8_e4m3fn

OF_TYPE: list[Row] = [
    ("a", lambda v: v["a"].view(torch.int8), TypeError, ("int8", "float8_e4m3fn")),
    ("a", lambda v: v["a"].view(torch.float8_e5m2), TypeError, ("float8_e5m2", "float8_e4m3fn")),
    ("b", lambda v: v["b"].view(torch.float8_e5m2), TypeError, ("float8_e5m2", "float8_e4m3fn")),
]
REFUSALS: list[Refusal] = [
    (
        lambda: torch.ops.qcutlass.blockwise_gemm_quant(
            *(torch.ones(2, 32).to(FP8), torch.ones(2, 1), torch.ones(2, 32).to(FP8), torch.ones(1, 1)),
            *(None, None, torch.int8, FP8, 2, 128, 128),
        ),
        ValueError,
        ("out_block_size", "int8", "float8_e4m3fn"),
    ),
]


class HalvesOfABlockSwapped(Model):
    def weight(self) -> Tensor:
        w = super().weight().clone()
        w[:, :SIZE] = w[:, :SIZE].roll(SIZE // 2, 1)
        return w


class WeightsReadAsE5M2(Model):
    def weight(self) -> Tensor:
        return self.problem.b.view(torch.float8_e5m2).double()


class NotPromoted(Model):
    """One sum over all of K, scaled at its end."""

    def accumulate(self) -> Tensor:
        total = torch.stack(self.sums()).sum(0)
        return self.promote(torch.zeros_like(total, dtype=torch.float32), total, BLOCKS - 1)


class PromotedEverySecondBlock(Model):
    def sums(self) -> list[Tensor]:
        sums = super().sums()
        pairs = [first + second for first, second in zip(sums[::2], sums[1::2], strict=True)]
        return [part for pair in pairs for part in (torch.zeros_like(pair), pair)]


class SumsOfBlocksRoundedToBfloat16(Model):
    def sums(self) -> list[Tensor]:
        return [total.bfloat16().double() for total in super().sums()]


OF_FP8: list[type[Model]] = [
    HalvesOfABlockSwapped,
    WeightsReadAsE5M2,
    NotPromoted,
    PromotedEverySecondBlock,
    SumsOfBlocksRoundedToBfloat16,
]
OF_INT8 = {"SixteenBitAccumulator", "WeightsSaturateAtMinus127"}
"""Faults that products of int8 alone can have."""
FAULTS = [*(fault for fault in of_int8.FAULTS if fault.__name__ not in OF_INT8), *OF_FP8]


def of_fp8(case: BlockwiseCase) -> BlockwiseCase:
    return replace(case, dtype=FP8)


def judged(*arguments: Any) -> Judged:
    return Judged(of_fp8(of_int8.judged(*arguments).case))


def draw(size: int) -> Draw:
    of_codes = of_int8.draw(size)

    def case(m: int, n: int, k: int, choose: random.Random) -> BlockwiseCase:
        return of_fp8(of_codes(m, n, k, choose))

    return case


class BlockwiseFloat8(of_int8.BlockwiseInt8):
    """As that of int8 but for the operands' type; GPUs have blocks of 128 alone."""

    name = "blockwise, fp8"
    function = staticmethod(blockwise.fp8_gemm)
    capability = (8, 9)
    not_finite = ("a", "a_s", "b_s", "bias")

    whole = BlockwiseCase(M, N, K, bias=True, activation="silu", dtype=FP8, residual=True)
    refusals = REFUSALS

    benched = ("blockwise_fp8",)

    def __init__(self) -> None:
        super().__init__()
        self.cases = {name: of_fp8(case) for name, case in self.cases.items()}
        self.rows = [*of_int8.rows_of(FP8), *OF_TYPE, *OF_OUT]
        self.faults = FAULTS
        self.fault_cases = {str(dtype).removeprefix("torch."): [judged(dtype, True)] for dtype in FLOATS}
        self.sound_cases = {
            str(dtype).removeprefix("torch."): [
                judged(dtype, bias, activation) for bias in (False, True) for activation in ACTIVATIONS
            ]
            for dtype in FLOATS
        }
        self.narrow = {name: [of_fp8(case) for case in cases] for name, cases in self.narrow.items()}
        self.families = {"blocks of 128": draw(128)}
        self.variants = {"blocks of 128": {}}
        self.asynchronous = {"blockwise, fp8": {"bias": True}}
        self.explained = {
            "plain": (
                {"bias": False},
                "float8_e4m3fn activations by {n} x {k} float8_e4m3fn weights, blocks of 128, float16 out",
            )
        }

    def case(self, m: int, n: int, k: int, **options: Any) -> BlockwiseCase:
        return BlockwiseCase(m, n, k, **{"bias": True, "dtype": FP8} | options)

    def on(self, device: str, case: BlockwiseCase) -> BlockwiseCase:
        """Kernels take blocks of 128."""
        return replace(case, block_size=128) if device == "cuda" else case

    def arguments(self, case: BlockwiseCase) -> _C.GemmArguments:
        result = super().arguments(case)
        result.a_type = _C.DType.FLOAT8_E4M3
        return result

    def reference(self, problem: BlockwiseProblem, **forced: Any) -> testing.BlockwiseReference:
        """Within the bound of asynchronous MMAs where these multiply."""
        if not problem.a.is_cuda or problem.a.numel() == 0:
            return problem.reference()
        tactic = forced.get("tactic") or qcutlass.plan(self.function, **self.product(problem).values | forced).tactic
        return problem.reference(aligned="_sm90a_" in tactic)


FLOAT8_BLOCKWISE = BlockwiseFloat8()
