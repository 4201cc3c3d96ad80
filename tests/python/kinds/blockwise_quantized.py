"""Blockwise int8 products with outputs quantised in blocks, as the facets of the tests know them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from tests.python.blockwise import SIZES
from tests.python.kinds import blockwise as floating
from tests.python.kinds.blockwise import BLOCKS, OF_SUMS, SIZE, K, M, Model, N
from tests.python.kinds.description import FLOATS, Draw, Judged, Product, Refusal, Row, half
from torch import Tensor

from qcutlass import _C, blockwise, testing
from qcutlass.testing import BlockwiseCase, BlockwiseProblem


@dataclass(frozen=True, eq=False, repr=False)
class Problem(BlockwiseProblem):
    """A problem with the size of the output's blocks."""

    out_size: int = 128

    def __repr__(self) -> str:
        return f"{super().__repr__()} in blocks of {self.out_size}"


def quantized(problem: BlockwiseProblem, out_size: int) -> Problem:
    return Problem(**{one.name: getattr(problem, one.name) for one in fields(problem)}, out_size=out_size)


@dataclass(frozen=True)
class Case(BlockwiseCase):
    """A case with the size of the output's blocks, of problems whose references are not rounded."""

    out_dtype: torch.dtype = torch.float32
    out_size: int = 128

    def _problem(self, *arguments: Any) -> Problem:
        return quantized(super()._problem(*arguments), self.out_size)


class QuantizedModel(Model):
    """The kernel of quantised outputs: codes [M, N] and scales [M, N / SIZE] of what the other stations give."""

    def scales(self, y: Tensor) -> Tensor:
        return y.view(len(y), -1, SIZE).abs().amax(-1) / 127

    def codes(self, y: Tensor, scales: Tensor) -> Tensor:
        return self.rounded(y.view(len(y), -1, SIZE) / scales[..., None]).to(torch.int8).view(y.shape)

    def rounded(self, quotients: Tensor) -> Tensor:
        return quotients.round()

    def quantize(self, y: Tensor) -> tuple[Tensor, Tensor]:
        scales = self.scales(y)
        return self.codes(y, scales), scales

    def run(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.quantize(super().run())


class CodesTruncated(QuantizedModel):
    def rounded(self, quotients: Tensor) -> Tensor:
        return quotients.trunc()


class ScalesOfTheNextBlock(QuantizedModel):
    def quantize(self, y: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = super().quantize(y)
        return codes, scales.roll(1, 1)


class ScalesOfTheNextRow(QuantizedModel):
    def quantize(self, y: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = super().quantize(y)
        return codes, scales.roll(1, 0)


class LastChannelsLeftOutOfScales(QuantizedModel):
    """The largest magnitude of all but 32 channels of a block, and codes that saturate."""

    def scales(self, y: Tensor) -> Tensor:
        return y.view(len(y), -1, SIZE)[..., :-32].abs().amax(-1) / 127

    def rounded(self, quotients: Tensor) -> Tensor:
        return quotients.round().clamp(-127, 127)


class ScalesBy128(QuantizedModel):
    def quantize(self, y: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = super().quantize(y)
        return codes, scales * (127 / 128)


class NumbersRoundedToFloat16(QuantizedModel):
    def quantize(self, y: Tensor) -> tuple[Tensor, Tensor]:
        return super().quantize(y.half().float())


class ScalesRoundedToFloat16(QuantizedModel):
    def quantize(self, y: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = super().quantize(y)
        return codes, scales.half().float()


class OneCodeOff(QuantizedModel):
    """Away from its number: towards it is right where that is as good as half way to the next code."""

    def quantize(self, y: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = super().quantize(y)
        number = y[41, 77] / scales[41, 77 // SIZE]
        codes[41, 77] += 1 if codes[41, 77] < 127 and number <= codes[41, 77] else -1
        return codes, scales


class ACodeOfMinus128(QuantizedModel):
    def quantize(self, y: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = super().quantize(y)
        row, column = (codes == -127).nonzero()[0]
        codes[row, column] = -128
        return codes, scales


OF_QUANTISING: list[type[QuantizedModel]] = [
    CodesTruncated,
    ScalesOfTheNextBlock,
    ScalesOfTheNextRow,
    LastChannelsLeftOutOfScales,
    ScalesBy128,
    NumbersRoundedToFloat16,
    ScalesRoundedToFloat16,
    OneCodeOff,
    ACodeOfMinus128,
]
OF_QUANTIZED: list[Row] = [
    ("out_block_size", lambda v: 100, ValueError, ("100", "32, 64")),
    ("out_block_size", lambda v: "128", TypeError, ("str", "int")),
    ("activation", lambda v: "silu_mul", ValueError, ("quantised", "silu_mul", "int8_addmm")),
]
REFUSALS: list[Refusal] = [
    (
        lambda: torch.ops.qcutlass.blockwise_gemm_quant(
            *(torch.ones(2, 32, dtype=torch.int8), torch.ones(2, 1), torch.ones(16, 32, dtype=torch.int8)),
            *(torch.ones(1, 1), None, None, torch.int8, torch.int8, 16, 128, 128),
            residual=half(2, 16),
        ),
        ValueError,
        ("residual: expected None", "quantised", "int8_addmm"),
    ),
]


def draw(size: int) -> Draw:
    def case(m: int, n: int, k: int, choose: random.Random) -> Case:
        bias, dtype, out_size = choose.random() < 0.5, choose.choice(FLOATS), choose.choice(SIZES)
        return Case(m, n, k, size, bias=bias, bias_dtype=dtype, out_size=out_size)

    return case


class QuantizedBlockwise(floating.BlockwiseInt8):
    """As the floating one but for its output: codes and their scales, and no `out`."""

    name = "blockwise, quantised"
    function = staticmethod(blockwise.int8_addmm_quant)
    operator_suffix = "_quant"
    has_out = False
    excluded = ("residual",)
    of_rows = ("a_s",)
    boxed = ("a", "a_s", "b_s", "bias")
    not_finite = ()

    whole = Case(M, N, K, bias=True, activation="silu", out_size=64)
    refusals = REFUSALS

    model = QuantizedModel

    benched = ("blockwise_quant", "blockwise_quant_bf16")

    def __init__(self) -> None:
        super().__init__()
        self.cases = {
            "plain": Case(3, 160, 200),
            "everything": Case(9, 72, 96, 32, bias=True, bias_dtype=torch.float16, activation="silu", out_size=32),
        }
        self.rows = [*floating.OF_ALL, *OF_QUANTIZED]
        self.faults = [*OF_QUANTISING, *(type(fault.__name__, (fault, QuantizedModel), {}) for fault in OF_SUMS)]
        self.fault_cases = {"blocks of 128": [Judged(Case(64, 256, BLOCKS * SIZE, SIZE, bias=True))]}
        self.sound_cases = {
            "blocks of 128": [
                Judged(Case(64, 256, BLOCKS * SIZE, SIZE, bias=bias, activation=activation))
                for bias in (False, True)
                for activation in (None, "silu")
            ]
        }
        self.narrow = {}
        self.families = {f"blocks of {size}": draw(size) for size in SIZES}
        self.asynchronous = {
            "blockwise, quantised": {"bias": True, "out_size": 128},
            "blockwise, quantised finely": {"bias": True, "out_size": 32},
        }
        self.explained = {
            "plain": (
                {"bias": False, "out_size": 32},
                "int8 activations by {n} x {k} int8 weights, blocks of 128, int8 out in blocks of 32",
            ),
            "bias": (
                {"out_size": 64},
                "int8 activations by {n} x {k} int8 weights, blocks of 128, int8 out in blocks of 64, bias",
            ),
            "both of 128": (
                {},
                "int8 activations by {n} x {k} int8 weights, blocks of 128, int8 out in blocks of 128, bias",
            ),
        }

    def case(self, m: int, n: int, k: int, **options: Any) -> Case:
        return Case(m, n, k, **{"bias": True} | options)

    def product(self, problem: Problem) -> Product:  # type: ignore[override]
        product = super().product(problem)
        del product.options["out_dtype"]
        product.options["out_block_size"] = problem.out_size
        return product

    def of_layer(self, problem: BlockwiseProblem) -> Problem:
        return quantized(replace(problem, out_dtype=torch.float32), 128)

    def arguments(self, case: Case) -> _C.GemmArguments:  # type: ignore[override]
        result = super().arguments(case)
        result.out_type, result.quantized.size = _C.DType.INT8, case.out_size
        return result

    def out_dtype(self, problem: Problem) -> torch.dtype:
        return torch.int8

    def products(self, case: Case, device: str, seed: int) -> tuple[Product, tuple[Tensor, ...]]:
        """The outputs are those of a call, which oracle T has judged."""
        product = self.product(case.exact(device=device, seed=seed)[0])  # type: ignore[arg-type]
        outs = product.outs()
        self.assert_correct(outs, product.problem)
        return product, outs

    def assert_exact(self, outs: Sequence[Tensor], expected: Sequence[Tensor], product: Product, label: object) -> None:
        """Sums are, their quotients by scales are not: other kernels may round these to a neighbour."""
        self.assert_correct(outs, product.problem, label)

    def assert_correct(
        self, outs: Sequence[Tensor], problem: BlockwiseProblem, label: object = "", **forced: Any
    ) -> float:
        n, size = problem.shape[1], problem.out_size  # type: ignore[attr-defined]
        codes, scales = outs
        assert codes.shape == (*problem.a.shape[:-1], n)
        assert scales.shape == (*problem.a.shape[:-1], -(-n // size))
        splits, label = self.splits(problem, forced.get("split_k", 0)), f"{label} {forced}: {problem}"
        return testing.assert_quantized(codes, scales, problem.reference(), size, splits=splits, label=label)

    def accepts_exactly(self, model: type[Any], judged: Judged, seed: int) -> bool:
        """No exact output is known: oracle T judges alone."""
        return True

    def ratio(self, out: Any, problem: Any, judged: Judged) -> float:
        ref = problem.reference()
        return testing.quantized_error_ratio(*out, ref.value, testing.bound(ref), problem.out_size)


QUANTIZED_BLOCKWISE = QuantizedBlockwise()
