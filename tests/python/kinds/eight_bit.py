"""What both kinds of 8-by-8-bit products share: wrong arguments, the model of their kernels, its faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from tests.python.eight_bit import arguments
from tests.python.faults import faults_of
from tests.python.kinds.description import (
    ACTIVATIONS,
    FLOATS,
    Description,
    Judged,
    Product,
    Row,
    Values,
    half,
    ones,
)
from torch import Tensor

from qcutlass import _C, testing
from qcutlass.testing import EightBitCase, EightBitProblem, EightBitReference, Scope

M, N, K = 3, 48, 128  # three by four tiles
SCOPES: tuple[Scope, ...] = ("one", "each")

ROWS: list[Row] = [
    ("residual", lambda v: v["residual"].float(), TypeError, ("float32", "float16", "that of the output")),
    ("residual", lambda v: v["residual"][:, 1:], ValueError, ("[3, 47]", "[3, 48]")),
    ("activation", lambda v: "silu_mul", ValueError, ("32", "N = 48", "interleave_gate_up")),
    ("a_scale", lambda v: None, TypeError, ("NoneType", "Tensor")),
    ("a_scale", lambda v: 0.5, TypeError, ("float", "Tensor")),
    ("a_scale", lambda v: v["a_scale"].half(), TypeError, ("float16", "float32")),
    ("a_scale", lambda v: ones(M + 1), ValueError, ("[4]", "[3]")),
    ("a_scale", lambda v: ones(1, M), ValueError, ("[1, 3]", "[3]")),
    ("w_scale", lambda v: None, TypeError, ("NoneType", "Tensor")),
    ("w_scale", lambda v: v["w_scale"].double(), TypeError, ("float64", "float32")),
    ("w_scale", lambda v: ones(N + 1), ValueError, ("[49]", "[48]")),
    ("w_scale", lambda v: ones(1, N), ValueError, ("[1, 48]", "[48]")),
    ("bias", lambda v: v["bias"].int(), TypeError, ("int32", "float16")),
    ("bias", lambda v: ones(N - 1), ValueError, ("[47]", "48")),
    ("bias", lambda v: ones(M, N), ValueError, ("[3, 48]", "48")),
    ("activation", lambda v: "swish", ValueError, ("swish", "silu", "gelu_tanh")),
    ("activation", lambda v: ["silu"], TypeError, ("list",)),
    ("out_dtype", lambda v: torch.float64, TypeError, ("float64", "float16", "bfloat16", "float32")),
    ("out_dtype", lambda v: "float16", TypeError, ("float16", "bfloat16")),
    ("n", lambda v: 49, ValueError, ("49", "[3, 4, 32, 16]", "4 tiles")),
    ("n", lambda v: 32, ValueError, ("32", "[3, 4, 32, 16]")),
    ("n", lambda v: -1, ValueError, ("-1",)),
    ("n", lambda v: 48.0, TypeError, ("float", "int")),
    ("n", lambda v: True, TypeError, ("bool", "int")),
    ("tactic", lambda v: 3, TypeError, ("int",)),
    ("split_k", lambda v: -1, ValueError, ("-1",)),
    ("split_k", lambda v: 1.0, TypeError, ("float",)),
    ("out", lambda v: [1.0], TypeError, ("list", "Tensor")),
    ("out", lambda v: ones(M, N), TypeError, ("float32", "float16", "out_dtype")),
    ("out", lambda v: half(M, N + 1), ValueError, ("[3, 49]", "[3, 48]")),
    ("out", lambda v: half(M * N), ValueError, ("[144]", "[3, 48]")),
    ("out", lambda v: half(1, N).expand(M, N), ValueError, ("overlap", "[0, 1]")),
    ("a_scale", lambda v: v["a_scale"].to("meta"), ValueError, ("meta", "cpu")),
    ("w_scale", lambda v: v["w_scale"].to("meta"), ValueError, ("meta", "cpu")),
    ("bias", lambda v: v["bias"].to("meta"), ValueError, ("meta", "cpu")),
    ("out", lambda v: half(M, N).to("meta"), ValueError, ("meta", "cpu")),
    ("bias", lambda v: v["bias"].to_sparse(), ValueError, ("dense", "sparse")),
]


@dataclass
class Model:
    """The kernel, each station of which a fault may replace: exact sums, then scales and bias in fp32."""

    problem: EightBitProblem

    def columns(self) -> Tensor:
        """Activations less their zero points, float64 [M, K]."""
        a = self.problem.a.double()
        return a if self.problem.azp is None else a - self.problem.azp.double()[:, None]

    def weight(self) -> Tensor:
        """float64 [N, K]."""
        return self.problem.w.double()

    def accumulate(self) -> Tensor:
        """float64 [M, N]: exact for integers."""
        return self.columns() @ self.weight().T

    def row_scale(self) -> Tensor:
        assert self.problem.a_scale is not None
        return self.problem.a_scale

    def channel_scale(self) -> Tensor:
        assert self.problem.w_scale is not None
        return self.problem.w_scale

    def scale(self, total: Tensor) -> Tensor:
        """fp32 [M, N]: what the activation function is applied to."""
        scaled = total.float() * self.row_scale()[:, None] * self.channel_scale()
        return scaled if self.problem.bias is None else scaled + self.problem.bias

    def convert(self, value: Tensor) -> Tensor:
        return value.to(self.problem.out_dtype)

    def store(self, out: Tensor) -> Tensor:
        """The output as memory holds it after the launch."""
        return out

    def run(self) -> Tensor:
        total = self.accumulate()
        if self.problem.out_dtype == torch.int32:
            return self.store(total.to(torch.int32))
        return self.store(self.convert(testing.activate(self.scale(total), self.problem.activation)))


class RowScaleOffByOne(Model):
    def row_scale(self) -> Tensor:
        return super().row_scale().roll(1)


class ChannelScaleOffByOne(Model):
    def channel_scale(self) -> Tensor:
        return super().channel_scale().roll(1)


class ChannelScaleOfTheOtherHalfOfATile(Model):
    def channel_scale(self) -> Tensor:
        return super().channel_scale().view(-1, 2, 8).flip(1).flatten()


class RowScaleCutToBfloat16(Model):
    """Not rounded to nearest: that error is as small as a bfloat16 output's own, and the bound allows it at times."""

    def row_scale(self) -> Tensor:
        return (super().row_scale().view(torch.int32) & -(1 << 16)).view(torch.float32)


class BiasBeforeScale(Model):
    def scale(self, total: Tensor) -> Tensor:
        assert self.problem.bias is not None
        return (total.float() + self.problem.bias) * self.row_scale()[:, None] * self.channel_scale()


class BiasOfTheNextChannel(Model):
    def scale(self, total: Tensor) -> Tensor:
        assert self.problem.bias is not None
        return super().scale(total) - self.problem.bias + self.problem.bias.roll(1)


class LastK32StepDropped(Model):
    def columns(self) -> Tensor:
        a = super().columns().clone()
        a[:, -32:] = 0
        return a


class SumsScaledInFloat16(Model):
    def scale(self, total: Tensor) -> Tensor:
        return super().scale((total / 64).half().double() * 64)


class OutputTruncated(Model):
    def convert(self, value: Tensor) -> Tensor:
        nearest = super().convert(value)
        if nearest.dtype == torch.float32:
            return nearest * (1 - 2.0**-20)  # nothing is rounded: the fault of losing bits elsewhere
        bits = nearest.view(torch.int16)
        return torch.where(nearest.float().abs() > value.abs(), bits - 1, bits).view(nearest.dtype)


SHARED = faults_of(Model)
FAULTS: list[type[Model]] = [
    *SHARED,
    RowScaleOffByOne,
    ChannelScaleOffByOne,
    ChannelScaleOfTheOtherHalfOfATile,
    RowScaleCutToBfloat16,
    BiasBeforeScale,
    BiasOfTheNextChannel,
    LastK32StepDropped,
    SumsScaledInFloat16,
    OutputTruncated,
]


def sound(dtype: torch.dtype, azp: Scope) -> dict[str, list[Judged]]:
    """Every output and epilogue."""
    return {
        f"{dtype} {out_dtype}".replace("torch.", ""): [
            Judged(EightBitCase(64, 256, 1024, dtype, out_dtype, azp=azp, bias=bias, activation=activation))
            for bias in (False, True)
            for activation in ACTIVATIONS
        ]
        for out_dtype in FLOATS
    }


def narrow(dtype: torch.dtype) -> list[EightBitCase]:
    return [EightBitCase(17, 40, k, dtype, torch.float32, bias=True) for k in (200, 1000, 20000)]


class EightBit(Description):
    """What both kinds share."""

    of_rows: tuple[str, ...] = ("a_scale", "residual")
    scale = "a_scale"
    boxed: tuple[str, ...] = ("a", "a_scale", "w_scale", "bias", "residual")
    not_finite: tuple[str, ...] = ("a_scale", "w_scale", "bias")
    model = Model
    out_dtypes: tuple[torch.dtype, ...] = FLOATS
    azp: Scope = "none"

    def case(self, m: int, n: int, k: int, **options: Any) -> EightBitCase:
        return EightBitCase(m, n, k, **{"dtype": self.kind.activations[0], "azp": self.azp, "bias": True} | options)

    def product_of(self, problem: EightBitProblem, names: dict[str, Any], **more: Any) -> Product:
        """`names`: activations and weights by their parameters."""
        operands = names | {name: getattr(problem, name) for name in ("a_scale", "w_scale", "bias", "residual")} | more
        options = {"activation": problem.activation, "out_dtype": problem.out_dtype, "n": problem.shape[1]}
        there = {name: tensor for name, tensor in operands.items() if tensor is not None}
        absent: Values = {name: None for name in ("a_scale", "w_scale") if operands[name] is None}
        return Product(self, problem, there, options | absent)

    def arguments(self, case: EightBitCase) -> _C.GemmArguments:
        return arguments(case)

    def peak(self, problem: EightBitProblem, expected: Tensor) -> float:
        return float(problem.sums().abs().max())

    def reference(self, problem: EightBitProblem, **forced: Any) -> EightBitReference:
        return problem.reference()

    def assert_correct(self, outs: Any, problem: EightBitProblem, label: object = "", **forced: Any) -> float:
        if problem.out_dtype == torch.int32:
            testing.assert_equal(
                outs[0].reshape(problem.shape[:2]), problem.integer_sums(), label=f"{label}: {problem}"
            )
            return 0.0
        return super().assert_correct(outs, problem, label, **forced)

    def with_activation(self, case: EightBitCase, names: Any, choose: random.Random) -> Any:
        return case if case.out_dtype == torch.int32 else super().with_activation(case, names, choose)

    def draw(self, dtype: torch.dtype) -> Any:
        """Cases of a type of activations with everything else at random."""

        def case(m: int, n: int, k: int, choose: random.Random) -> EightBitCase:
            out_dtype = choose.choice(self.out_dtypes)
            drawn = EightBitCase(m, n, k, dtype, out_dtype, choose.choice(SCOPES), choose.choice(SCOPES))
            if dtype == torch.int8:
                drawn = replace(drawn, azp=choose.choice(("none", *SCOPES)))
            if out_dtype == torch.int32:
                return drawn
            return replace(drawn, bias=choose.random() < 0.5, bias_dtype=choose.choice(FLOATS))

        return case
