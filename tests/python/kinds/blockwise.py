"""Blockwise int8 products, `qcutlass.blockwise`, of floating outputs, as the facets of the tests know them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from tests.python.blockwise import SIZES, pack, splits_of
from tests.python.faults import faults_of
from tests.python.kinds.description import (
    ACTIVATIONS,
    FLOATS,
    TYPES,
    Description,
    Draw,
    Judged,
    Product,
    Refusal,
    Row,
    half,
    int8,
    ones,
)
from torch import Tensor

import qcutlass
from qcutlass import _C, blockwise, testing
from qcutlass.testing import BlockwiseCase, BlockwiseProblem

M, N, K = 3, 160, 200
SIZE, BLOCKS = 128, 8  # of the products of models


def rows_of(dtype: torch.dtype) -> list[Row]:
    """Wrong arguments of products whose operands are of a type."""
    name, packed = str(dtype).removeprefix("torch."), "int8" if dtype == torch.int8 else "fp8"

    def codes(*shape: int) -> Tensor:
        return ones(*shape).to(dtype)

    return [
        ("a", lambda v: v["a"].tolist(), TypeError, ("list", "Tensor")),
        ("a", lambda v: v["a"].half(), TypeError, ("float16", name)),
        ("a", lambda v: v["a"][0, 0], ValueError, ("[..., K]", "without dimensions")),
        ("a_s", lambda v: None, TypeError, ("NoneType", "Tensor")),
        ("a_s", lambda v: v["a_s"].half(), TypeError, ("float16", "float32")),
        ("a_s", lambda v: ones(M, 3), ValueError, ("[3, 3]", "[3, 2]", "ceil(K / 128)")),
        ("a_s", lambda v: ones(M), ValueError, ("[3]", "[3, 2]")),
        ("a_s", lambda v: ones(2, M), ValueError, ("[2, 3]", "[3, 2]")),
        ("a_s", lambda v: v["a_s"].to("meta"), ValueError, ("meta", "cpu")),
        ("b", lambda v: v["b"].tolist(), TypeError, ("list", "Tensor")),
        ("b", lambda v: v["b"].view(torch.uint8), ValueError, ("uint8", f"activations='{packed}'")),
        (
            "b",
            lambda v: qcutlass.preprocess_weights(ones(N, K, dtype=torch.uint8), 8),
            ValueError,
            ("b was packed for 16-bit activations", "preprocess_weights"),
        ),
        ("b", lambda v: v["b"].float(), TypeError, ("float32", name)),
        ("b", lambda v: codes(N, K + 1), ValueError, ("[160, 201]", "K = 200")),
        ("b", lambda v: codes(N), ValueError, ("[160]", "32, 16")),
        ("b", lambda v: v["b"][:, :6].contiguous(), ValueError, ("[10, 6, 32, 16]", "200", "must be 7")),
        ("b", lambda v: v["b"].transpose(0, 1), ValueError, ("contiguous", "strides")),
        ("b", lambda v: v["b"].to("meta"), ValueError, ("meta", "cpu")),
        ("b_s", lambda v: v["b_s"].double(), TypeError, ("float64", "float32")),
        ("b_s", lambda v: ones(2, 1), ValueError, ("[2, 1]", "[2, 2]", "ceil(N / 128)")),
        ("b_s", lambda v: ones(1, 2), ValueError, ("[1, 2]", "[2, 2]")),
        ("b_s", lambda v: ones(4), ValueError, ("[4]", "[2, 2]")),
        ("b_s", lambda v: v["b_s"].to("meta"), ValueError, ("meta", "cpu")),
        ("bias", lambda v: v["bias"].int(), TypeError, ("int32", "float16")),
        ("bias", lambda v: ones(N - 1), ValueError, ("[159]", "160")),
        ("bias", lambda v: ones(M, N), ValueError, ("[3, 160]", "160")),
        ("bias", lambda v: v["bias"].to_sparse(), ValueError, ("dense", "sparse")),
        ("activation", lambda v: "swish", ValueError, ("swish", "silu", "gelu_tanh")),
        ("block_size", lambda v: 16, ValueError, ("16", "32, 64")),
        ("block_size", lambda v: 128.0, TypeError, ("float", "int")),
        ("n", lambda v: 176, ValueError, ("176", "[10, 7, 32, 16]", "11 tiles")),
        ("n", lambda v: v.update(b=codes(N, K)) or 159, ValueError, ("159", "160")),
        ("n", lambda v: -1, ValueError, ("-1",)),
        ("n", lambda v: True, TypeError, ("bool", "int")),
        ("tactic", lambda v: 3, TypeError, ("int",)),
        ("split_k", lambda v: -1, ValueError, ("-1",)),
    ]


OF_ALL = rows_of(torch.int8)
OF_OUT: list[Row] = [
    ("residual", lambda v: v["residual"].float(), TypeError, ("float32", "float16", "that of the output")),
    ("residual", lambda v: v["residual"][:, 1:], ValueError, ("[3, 159]", "[3, 160]")),
    ("residual", lambda v: v.update(activation="silu_mul") or v["residual"], ValueError, ("[3, 160]", "[3, 80]")),
    ("out_dtype", lambda v: torch.int8, TypeError, ("int8", "float16", "bfloat16", "float32")),
    ("out_dtype", lambda v: "float16", TypeError, ("float16", "bfloat16")),
    ("out", lambda v: [1.0], TypeError, ("list", "Tensor")),
    ("out", lambda v: ones(M, N), TypeError, ("float32", "float16", "out_dtype")),
    ("out", lambda v: half(M, N + 1), ValueError, ("[3, 161]", "[3, 160]")),
    ("out", lambda v: half(1, N).expand(M, N), ValueError, ("overlap", "[0, 1]")),
]
OF_QUANTIZED: list[Row] = [
    ("out_block_size", lambda v: 100, ValueError, ("100", "32, 64")),
    ("out_block_size", lambda v: "128", TypeError, ("str", "int")),
]
FAKE_ROWS: list[Row] = [("block_size", lambda v: 64, ValueError, ("a_s: expected shape",))]
REFUSALS: list[Refusal] = [
    (lambda: blockwise.act_quant([1.0]), TypeError, ("x", "list")),  # type: ignore[arg-type]
    (lambda: blockwise.act_quant(int8(2, 2)), TypeError, ("x", "int8", "float16")),
    (lambda: blockwise.act_quant(torch.tensor(1.0)), ValueError, ("x", "without dimensions")),
    (lambda: blockwise.act_quant(ones(3, 0)), ValueError, ("x", "[3, 0]")),
    (lambda: blockwise.act_quant(ones(3, 8), 100), ValueError, ("block_size", "100", "32, 64, ")),
    (lambda: blockwise.act_quant(ones(3, 8), 64.0), TypeError, ("block_size", "float")),  # type: ignore[arg-type]
    (lambda: blockwise.weight_quant(ones(8)), ValueError, ("x", "[N, K]", "[8]")),
    (lambda: blockwise.weight_quant(ones(2, 3, 8)), ValueError, ("x", "[N, K]", "[2, 3, 8]")),
    (lambda: blockwise.weight_quant(ones(2, 0)), ValueError, ("x", "[2, 0]")),
    (lambda: blockwise.weight_quant(ones(2, 8), 0), ValueError, ("block_size", "0")),
    (lambda: blockwise.act_dequant(ones(2, 8), ones(2, 1)), TypeError, ("x", "float32", "int8")),
    (lambda: blockwise.act_dequant(int8(2, 8), half(2, 1)), TypeError, ("s", "float16", "float32")),
    (lambda: blockwise.act_dequant(int8(2, 8), ones(2, 2)), ValueError, ("s", "[2, 2]", "[2, 1]")),
    (lambda: blockwise.act_dequant(int8(2, 8), ones(2)), ValueError, ("s", "[2]", "[2, 1]")),
    (lambda: blockwise.act_dequant(int8(2, 8), ones(2, 1).to("meta")), ValueError, ("s", "meta", "cpu")),
    (
        lambda: blockwise.act_dequant(int8(2, 8), ones(2, 1), output_dtype=torch.int8),
        TypeError,
        ("output_dtype", "int8", "float16"),
    ),
    (lambda: blockwise.weight_dequant(int8(2, 8), ones(2, 1)), ValueError, ("s", "[2, 1]", "[1, 1]")),
    (lambda: blockwise.weight_dequant(int8(2, 2, 8), ones(1, 1)), ValueError, ("x", "[2, 2, 8]")),
    (lambda: blockwise.int8_gelu(int8(2, 8), ones(1, 2)), ValueError, ("s_x", "[1, 2]", "[2, 1]")),
    (lambda: blockwise.int8_gelu(int8(2, 8), ones(2, 1), 256), ValueError, ("block_size", "256")),
    (lambda: blockwise.int8_gelu(ones(2, 8), ones(2, 1)), TypeError, ("x", "float32", "int8")),
]


@dataclass
class Model:
    """The kernel, each station of which a fault may replace: exact sums of blocks, scaled and added in fp32."""

    problem: BlockwiseProblem

    def columns(self) -> Tensor:
        """float64 [M, K]."""
        return self.problem.a.double()

    def weight(self) -> Tensor:
        """float64 [N, K]."""
        return self.problem.b.double()

    def row_scale(self) -> Tensor:
        """fp32 [M, G]."""
        return self.problem.a_s

    def channel_scale(self) -> Tensor:
        """fp32 [N, G]."""
        return self.problem.b_s.repeat_interleave(SIZE, 0)

    def sums(self) -> list[Tensor]:
        """Of each block, float64 [M, N], integers."""
        parts = zip(self.columns().split(SIZE, 1), self.weight().split(SIZE, 1), strict=True)
        return [a @ b.T for a, b in parts]

    def promote(self, total: Tensor, sums: Tensor, block: int) -> Tensor:
        """fp32 [M, N] with the next block."""
        return total + sums.float() * (self.row_scale()[:, block, None] * self.channel_scale()[:, block])

    def accumulate(self) -> Tensor:
        total = torch.zeros(self.problem.shape[0], self.problem.shape[1])
        for block, sums in enumerate(self.sums()):
            total = self.promote(total, sums, block)
        return total

    def convert(self, value: Tensor) -> Tensor:
        return value.to(self.problem.out_dtype)

    def store(self, out: Tensor) -> Tensor:
        """The output as memory holds it after the launch."""
        return out

    def epilogue(self) -> Tensor:
        """fp32 [M, N]: what is converted."""
        total = self.accumulate()
        biased = total if self.problem.bias is None else total + self.problem.bias
        return testing.activate(biased, self.problem.activation)

    def run(self) -> Tensor:
        return self.store(self.convert(self.epilogue()))


class RowScaleOfTheNextBlock(Model):
    def row_scale(self) -> Tensor:
        return super().row_scale().roll(-1, 1)


class RowScaleOfTheLastBlockIsThatBeforeIt(Model):
    def row_scale(self) -> Tensor:
        scale = super().row_scale().clone()
        scale[:, -1] = scale[:, -2]
        return scale


class RowScaleOfTheNextRow(Model):
    def row_scale(self) -> Tensor:
        return super().row_scale().roll(-1, 0)


class WeightScaleOfTheNextBlockOfColumns(Model):
    def channel_scale(self) -> Tensor:
        return super().channel_scale().roll(-1, 1)


class WeightScaleOfTheNextBlockOfChannels(Model):
    def channel_scale(self) -> Tensor:
        return super().channel_scale().roll(-SIZE, 0)


class WeightScaleOfTheNextBlockOneChannelEarly(Model):
    def channel_scale(self) -> Tensor:
        return super().channel_scale().roll(-1, 0)


class WeightScaleRoundedToBfloat16(Model):
    def channel_scale(self) -> Tensor:
        return super().channel_scale().bfloat16().float()


class LastBlockNotPromoted(Model):
    def sums(self) -> list[Tensor]:
        return super().sums()[:-1]


class LastBlockPromotedTwice(Model):
    def accumulate(self) -> Tensor:
        return self.promote(super().accumulate(), self.sums()[-1], BLOCKS - 1)


class SumsNotClearedBetweenBlocks(Model):
    def sums(self) -> list[Tensor]:
        sums = super().sums()
        return [sums[0], sums[0] + sums[1], *sums[2:]]


class BoundaryOffByOneStep(Model):
    """The first 32 columns of a block are scaled with the block before it."""

    def sums(self) -> list[Tensor]:
        a, b = self.columns(), self.weight()
        moved = a[:, SIZE : SIZE + 32] @ b[:, SIZE : SIZE + 32].T
        first, second, *rest = super().sums()
        return [first + moved, second - moved, *rest]


class LastK32StepDropped(Model):
    def columns(self) -> Tensor:
        a = super().columns().clone()
        a[:, -32:] = 0
        return a


class SixteenBitAccumulator(Model):
    def sums(self) -> list[Tensor]:
        return [(total + 2**15) % 2**16 - 2**15 for total in super().sums()]


class SumsOfBlocksRoundedToFloat16(Model):
    def sums(self) -> list[Tensor]:
        return [(total / 64).half().double() * 64 for total in super().sums()]


class AccumulatorRoundedToBfloat16(Model):
    def promote(self, total: Tensor, sums: Tensor, block: int) -> Tensor:
        return super().promote(total, sums, block).bfloat16().float()


class OneScaleForAllBlocks(Model):
    def row_scale(self) -> Tensor:
        return super().row_scale()[:, :1].expand(-1, BLOCKS)


class WeightsSaturateAtMinus127(Model):
    def weight(self) -> Tensor:
        return super().weight().clamp(min=-127)


class BiasOfTheNextChannel(Model):
    def accumulate(self) -> Tensor:
        assert self.problem.bias is not None
        return super().accumulate() - self.problem.bias + self.problem.bias.roll(-1)


class OutputTruncated(Model):
    def convert(self, value: Tensor) -> Tensor:
        nearest = super().convert(value)
        if nearest.dtype == torch.float32:
            return nearest * (1 - 2.0**-19)  # nothing is rounded: the fault of losing bits elsewhere
        bits = nearest.view(torch.int16)
        return torch.where(nearest.float().abs() > value.abs(), bits - 1, bits).view(nearest.dtype)


OF_SUMS: list[type[Model]] = [
    RowScaleOfTheNextBlock,
    RowScaleOfTheLastBlockIsThatBeforeIt,
    RowScaleOfTheNextRow,
    WeightScaleOfTheNextBlockOfColumns,
    WeightScaleOfTheNextBlockOfChannels,
    WeightScaleOfTheNextBlockOneChannelEarly,
    LastBlockNotPromoted,
    LastBlockPromotedTwice,
    SumsNotClearedBetweenBlocks,
    BoundaryOffByOneStep,
    LastK32StepDropped,
    SixteenBitAccumulator,
    OneScaleForAllBlocks,
    BiasOfTheNextChannel,
]
FAULTS = [
    *faults_of(Model),
    *OF_SUMS,
    WeightScaleRoundedToBfloat16,
    SumsOfBlocksRoundedToFloat16,
    AccumulatorRoundedToBfloat16,
    WeightsSaturateAtMinus127,
    OutputTruncated,
]


def judged(out_dtype: torch.dtype, bias: bool, activation: str | None = None) -> Judged:
    return Judged(BlockwiseCase(64, 256, BLOCKS * SIZE, SIZE, out_dtype, bias, activation=activation))


def draw(size: int) -> Draw:
    def case(m: int, n: int, k: int, choose: random.Random) -> BlockwiseCase:
        return BlockwiseCase(m, n, k, size, choose.choice(FLOATS), choose.random() < 0.5, choose.choice(FLOATS))

    return case


class BlockwiseInt8(Description):
    name = "blockwise"
    function = staticmethod(blockwise.int8_addmm)
    schema = (
        "Tensor a, Tensor a_s, Tensor b, Tensor b_s, Tensor? bias, str? activation, "
        "ScalarType out_dtype, ScalarType dtype, SymInt? n=None, int block_size=128, int? out_block_size=None, "
        "str? tactic=None, int split_k=0, "
        "bool batch_invariant=False, Tensor? residual=None"
    )
    settling = ("b", "b_s")
    place_of_weights = 2
    outputs = 1  # the scales, which the quantised form has
    of_rows: tuple[str, ...] = ("a_s", "residual")
    scale = "a_s"
    boxed = ("a", "a_s", "b_s", "bias", "residual")
    not_finite = ("a_s", "b_s", "bias")
    granule = 128
    may_refuse = True
    inductor = ("everything",)

    whole = BlockwiseCase(M, N, K, bias=True, activation="silu", residual=True)
    fake_rows = FAKE_ROWS
    refusals = REFUSALS

    model = Model

    layers = ("blocks of 128",)
    benched = ("blockwise", "blockwise_bf16")

    def __init__(self) -> None:
        self.variants = {f"blocks of {size}": {"block_size": size} for size in SIZES}
        self.cases = {
            "plain": BlockwiseCase(3, 160, 200),
            "everything": BlockwiseCase(9, 72, 96, 32, torch.bfloat16, True, torch.float16, "silu"),
            "residual": BlockwiseCase(7, 40, 128, activation="silu", residual=True),
        }
        self.rows = [*OF_ALL, *OF_OUT]
        self.faults = FAULTS
        self.fault_cases = {str(dtype).removeprefix("torch."): [judged(dtype, True)] for dtype in FLOATS}
        self.sound_cases = {
            str(dtype).removeprefix("torch."): [
                judged(dtype, bias, activation) for bias in (False, True) for activation in ACTIVATIONS
            ]
            for dtype in FLOATS
        }
        self.narrow = {
            "float32": [BlockwiseCase(17, 40, k, out_dtype=torch.float32, bias=True) for k in (200, 1000, 20000)]
        }
        self.families = {f"blocks of {size}": draw(size) for size in SIZES}
        self.asynchronous = {"blockwise": {"bias": True}}
        self.explained = {
            "plain": ({"bias": False}, "int8 activations by {n} x {k} int8 weights, blocks of 128, float16 out"),
            "bias": ({}, "int8 activations by {n} x {k} int8 weights, blocks of 128, float16 out, bias"),
            "epilogue": (
                {"out_dtype": torch.bfloat16, "activation": "silu"},
                "int8 activations by {n} x {k} int8 weights, blocks of 128, bfloat16 out, bias, silu",
            ),
        }

    def case(self, m: int, n: int, k: int, **options: Any) -> BlockwiseCase:
        return BlockwiseCase(m, n, k, **{"bias": True} | options)

    def product(self, problem: BlockwiseProblem) -> Product:
        operands = {"a": problem.a, "a_s": problem.a_s, "b": pack(problem), "b_s": problem.b_s}
        more = {"bias": problem.bias, "residual": problem.residual}
        operands |= {name: operand for name, operand in more.items() if operand is not None}
        names = ("activation", "out_dtype", "block_size")
        options = {name: getattr(problem, name) for name in names} | {"n": problem.shape[1]}
        return Product(self, problem, operands, options)

    def arguments(self, case: BlockwiseCase) -> _C.GemmArguments:
        weights = _C.WeightArguments()
        weights.packing = _C.Packing.W8A8
        weights.n, weights.k, weights.group_size = case.n, case.k, case.k
        result = _C.GemmArguments()
        result.m, result.weights, result.a_type = case.m, weights, _C.DType.INT8
        result.out_type, result.blocks.size = TYPES[case.out_dtype], case.block_size
        return result

    def reference(self, problem: BlockwiseProblem, **forced: Any) -> testing.BlockwiseReference:
        return problem.reference()

    def splits(self, problem: BlockwiseProblem, split_k: int) -> int:
        return splits_of(problem, split_k)

    def peak(self, problem: BlockwiseProblem, expected: Tensor) -> float:
        return max(float((term / 2.0**-12).abs().max()) for term in problem.terms())

    def narrowest(self, problem: BlockwiseProblem) -> float:
        return 2.0**11  # fp16: 11 bits


BLOCKWISE = BlockwiseInt8()
