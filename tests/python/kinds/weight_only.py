"""Products of 16-bit activations by 4- and 8-bit codes, `qcutlass.gemm`, as the facets of the tests know them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from tests.python.faults import faults_of
from tests.python.kinds.description import (
    FLOATS,
    TYPES,
    Description,
    Judged,
    Product,
    Refusal,
    Row,
    half,
)
from torch import Tensor

import qcutlass
from qcutlass import _C, testing
from qcutlass.products.selection import weight_dtype
from qcutlass.testing import Case, Problem

M, N, K = 3, 48, 128  # 4-bit: three by two tiles
GROUPS = 4
SIXTEEN_BIT = (torch.float16, torch.bfloat16)
OF_LEVELS = ("minimums", "super_scales", "super_minimums")
OPERANDS = ("a", "scales", "zeros", "bias", "act_scale", "perm", *OF_LEVELS, "residual", "global_scale")
INTEGER_TYPES = {torch.uint8: _C.DType.UINT8, torch.int8: _C.DType.INT8, torch.int32: _C.DType.INT32}
ONE = 10**6  # one group a channel


def codes(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


ROWS: list[Row] = [
    ("a", lambda v: v["a"].tolist(), TypeError, ("list", "Tensor")),
    ("a", lambda v: v["a"].double(), TypeError, ("float64", "float16", "bfloat16", "float32")),
    ("a", lambda v: v["a"].to(torch.int8), TypeError, ("int8", "float16")),
    ("a", lambda v: torch.tensor(1.0).half(), ValueError, ("[..., K]", "without dimensions")),
    ("a", lambda v: half(M, K + 64), ValueError, (str(K + 64), "2")),
    ("a", lambda v: half(M, 64), ValueError, ("64", "2")),
    ("w_packed", lambda v: None, TypeError, ("NoneType", "Tensor")),
    ("w_packed", lambda v: v["w_packed"].int(), TypeError, ("int32", "uint8")),
    ("w_packed", lambda v: v["w_packed"].view(torch.int8), ValueError, ("int8", "uint8", "preprocess_weights")),
    ("w_packed", lambda v: v["w_packed"].view(torch.int8), ValueError, ("w_packed was packed for int8 activations",)),
    ("w_packed", lambda v: v["w_packed"].view(torch.float8_e4m3fn), TypeError, ("w_packed: ", "uint8", "float8_e4m3")),
    ("w_packed", lambda v: v["w_packed"].flatten(), ValueError, (str([3 * 2 * 512]),)),
    ("w_packed", lambda v: v["w_packed"].reshape(3, 2, 16, 32), ValueError, ("[3, 2, 16, 32]",)),
    ("w_packed", lambda v: v["w_packed"][:, :1].contiguous(), ValueError, ("1", str(K))),
    ("w_packed", lambda v: v["w_packed"][:2], ValueError, ("[2, 2, 32, 16]", str(N))),
    ("scales", lambda v: v["scales"].int(), TypeError, ("int32", "float16", "bfloat16", "float32")),
    ("scales", lambda v: v["scales"].double(), TypeError, ("float64", "float16")),
    ("scales", lambda v: [0.5], TypeError, ("list", "Tensor")),
    ("scales", lambda v: half(GROUPS, N + 16), ValueError, (str(N + 16),)),
    ("scales", lambda v: half(1, GROUPS, N), ValueError, ("[1, 4, 48]",)),
    ("group_size", lambda v: 48, ValueError, ("48", "3", "4")),
    ("group_size", lambda v: 0, ValueError, ("0",)),
    ("group_size", lambda v: -2, ValueError, ("-2",)),
    ("zeros", lambda v: v["zeros"].bool(), TypeError, ("bool", "uint8")),
    ("zeros", lambda v: v["zeros"][:, :-1], ValueError, ("[4, 47]", "[4, 48]")),
    ("zeros", lambda v: v["zeros"][:1], ValueError, ("[1, 48]", "[4, 48]")),
    ("bias", lambda v: v["bias"].int(), TypeError, ("int32", "float16")),
    ("bias", lambda v: half(N + 1), ValueError, ("[49]", "48")),
    ("bias", lambda v: half(M, N), ValueError, ("[3, 48]", "48")),
    ("act_scale", lambda v: v["act_scale"].int(), TypeError, ("int32", "float16")),
    ("act_scale", lambda v: half(K - 1), ValueError, ("[127]", "128")),
    ("perm", lambda v: v["perm"].float(), TypeError, ("float32", "int32")),
    ("perm", lambda v: v["perm"][1:], ValueError, ("[127]", "128")),
    ("activation", lambda v: "swish", ValueError, ("swish", "silu", "gelu_tanh")),
    ("residual", lambda v: v["residual"].tolist(), TypeError, ("list", "Tensor")),
    ("residual", lambda v: v["residual"].double(), TypeError, ("float64", "float16", "that of the output")),
    ("residual", lambda v: v["residual"][:, 1:], ValueError, ("[3, 47]", "[3, 48]")),
    ("residual", lambda v: v["residual"][:2], ValueError, ("[2, 48]", "[3, 48]")),
    ("residual", lambda v: v["residual"].to("meta"), ValueError, ("meta", "cpu")),
    ("activation", lambda v: "silu_mul", ValueError, ("32", "N = 48", "interleave_gate_up")),
    ("out", lambda v: [1.0], TypeError, ("list", "Tensor")),
    ("out", lambda v: torch.zeros(M, N), (TypeError, ValueError), ("float32", "float16")),  # type: ignore[list-item]
    ("out", lambda v: half(M, N + 1), ValueError, ("[3, 49]", "[3, 48]")),
    ("out", lambda v: half(M * N), ValueError, ("[144]", "[3, 48]")),
    ("out", lambda v: v["a"][:, :N], ValueError, ("overlaps a",)),
    ("out", lambda v: half(1, N).expand(M, N), ValueError, ("overlap", "[0, 1]")),
    ("bias", lambda v: v["bias"].to("meta"), ValueError, ("meta", "cpu")),
    ("scales", lambda v: v["scales"].to("meta"), ValueError, ("meta", "cpu")),
    ("zeros", lambda v: v["zeros"].to("meta"), ValueError, ("meta", "cpu")),
    ("w_packed", lambda v: v["w_packed"].to("meta"), ValueError, ("meta", "cpu")),
    ("perm", lambda v: v["perm"].to("meta"), ValueError, ("meta", "cpu")),
    ("out", lambda v: half(M, N).to("meta"), ValueError, ("meta", "cpu")),
]
FAKE_ROWS: list[Row] = [
    ("bias", lambda v: half(N + 1).to(v["bias"].device), ValueError, ("[49]", "48")),
    ("a", lambda v: v["a"].to(torch.int8), TypeError, ("a: ", "int8")),
]
REFUSALS: list[Refusal] = [
    (lambda: qcutlass.preprocess_weights([[1]], bits=4), TypeError, ("codes", "list")),  # type: ignore[arg-type]
    (lambda: qcutlass.preprocess_weights(torch.zeros(4, 4), bits=4), TypeError, ("codes", "float32", "uint8")),
    (lambda: qcutlass.preprocess_weights(codes(4), bits=4), ValueError, ("codes", "[4]")),
    (lambda: qcutlass.preprocess_weights(codes(4, 4), bits=3), ValueError, ("bits", "3", "4", "8")),
    (lambda: qcutlass.preprocess_weights(codes(4, 4) + 16, bits=4), ValueError, ("codes", "16", "4-bit", "[0, 0]")),
    (
        lambda: qcutlass.preprocess_weights(codes(4, 4), bits=8, activations="fp4"),
        ValueError,
        ("activations", "fp4", "int8"),
    ),
    (
        lambda: qcutlass.unpack_weights(codes(1, 1, 32, 16), bits=4, shape=(17, 64)),
        ValueError,
        ("[1, 1, 32, 16]", "[2, 1, 32, 16]"),
    ),
    (
        lambda: qcutlass.unpack_weights(codes(1, 1, 32, 16), bits=8, shape=(16, 64)),
        ValueError,
        ("[1, 1, 32, 16]", "[1, 2, 32, 16]"),
    ),
    (
        lambda: qcutlass.unpack_weights(torch.zeros(1, 1, 32, 16), bits=4, shape=(16, 64)),
        TypeError,
        ("w_packed", "float32", "uint8"),
    ),
    (lambda: qcutlass.dequantize(half(1, 1, 32, 16), half(1, 16), k=64), TypeError, ("w_packed", "float16", "uint8")),
    (lambda: qcutlass.dequantize(codes(1, 1, 32, 16), half(1, 17), k=64), ValueError, ("[1, 1, 32, 16]", "17")),
    (
        lambda: qcutlass.dequantize(codes(1, 1, 32, 16), half(1, 16), half(2, 16), k=64),
        ValueError,
        ("zeros", "[2, 16]", "[1, 16]"),
    ),
    (lambda: qcutlass.dequantize(codes(1, 3, 32, 16), half(1, 16), k=64), ValueError, ("[1, 3, 32, 16]", "64")),
    (lambda: qcutlass.quantize(half(4, 4).int(), bits=4), TypeError, ("weight", "int32", "float16")),
    (lambda: qcutlass.quantize(half(4), bits=4), ValueError, ("weight", "[4]")),
    (lambda: qcutlass.quantize(half(4, 4), bits=5), ValueError, ("bits", "5", "4", "8")),
    (lambda: qcutlass.quantize(half(4, 4), bits=4, group_size=0), ValueError, ("group_size", "0")),
    (lambda: qcutlass.quantize(torch.full((4, 4), torch.nan), bits=4), ValueError, ("weight", "finite")),
]


@dataclass
class Model:
    """The fused kernel, each station of which a fault may replace: weights of 16 bits, products summed in fp32."""

    problem: Problem

    def columns(self) -> Tensor:
        """Activations, fp32 [M, K]."""
        return self.problem.a.float()

    def weight(self) -> Tensor:
        """Dequantised weights, fp32 [N, K]."""
        return self.problem.weight(self.problem.a.dtype).float()

    def accumulate(self, a: Tensor, w: Tensor) -> Tensor:
        """fp32 [M, N]."""
        return a @ w.T

    def convert(self, total: Tensor) -> Tensor:
        """The output's type."""
        return total.to(self.problem.a.dtype)

    def store(self, out: Tensor) -> Tensor:
        """The output as memory holds it after the launch."""
        return out

    def run(self) -> Tensor:
        return self.store(self.convert(self.accumulate(self.columns(), self.weight())))


class WithProblem(Model):
    """The sound product of a changed problem."""

    def change(self, problem: Problem) -> Problem:
        raise NotImplementedError

    def run(self) -> Tensor:
        return Model(self.change(self.problem)).run()


class LastK16StepDropped(Model):
    def columns(self) -> Tensor:
        a = super().columns().clone()
        a[:, -16:] = 0
        return a


class ZeroPlusOneEverywhere(WithProblem):
    where = (slice(None), slice(None))

    def change(self, problem: Problem) -> Problem:
        assert problem.zeros is not None
        zeros = problem.zeros.clone()
        zeros[self.where] += 1
        return replace(problem, zeros=zeros)


class ZeroPlusOneInOneGroup(ZeroPlusOneEverywhere):
    where = (slice(3, 4), slice(None))


class ZeroPlusOneInOneGroupAndChannel(ZeroPlusOneEverywhere):
    where = (slice(3, 4), slice(200, 201))


class GroupBoundaryOffByOne(Model):
    def weight(self) -> Tensor:
        p = self.problem
        shifted = torch.cat([p.codes[:, :1], p.codes[:, :-1]], dim=1)  # code k - 1 at k: its group is that of k
        w = replace(p, codes=shifted).weight(p.a.dtype).float()
        return torch.cat([w[:, 1:], super().weight()[:, -1:]], dim=1)


class NeighbourScaleInOneGroup(WithProblem):
    def change(self, problem: Problem) -> Problem:
        scales = problem.scales.clone()
        scales[5] = scales[6]
        return replace(problem, scales=scales)


class SixteenBitAccumulator(Model):
    def accumulate(self, a: Tensor, w: Tensor) -> Tensor:
        total = torch.zeros(a.shape[0], w.shape[0])
        for begin in range(0, a.shape[1], 16):
            step = slice(begin, begin + 16)
            total = (total + a[:, step] @ w[:, step].T).to(self.problem.a.dtype).float()
        return total


class OneTileFromAStaleStage(Model):
    def accumulate(self, a: Tensor, w: Tensor) -> Tensor:
        total = super().accumulate(a, w)
        a_stale = a[16:24].clone()
        a_stale[:, 1024:1088] = a[16:24, 960:1024]  # one 64-wide stage still holds the one before
        total[16:24, 32:48] = a_stale @ w[32:48].T
        return total


class ScalesRoundedToBfloat16(WithProblem):
    def change(self, problem: Problem) -> Problem:
        return replace(problem, scales=problem.scales.bfloat16().to(problem.scales.dtype))


class ScaledCodeMinusScaledZero(Model):
    def weight(self) -> Tensor:
        p = self.problem
        assert p.zeros is not None
        code = testing.dequantized_weight(p.codes, p.scales, torch.zeros_like(p.zeros), p.group_size, p.bits, p.a.dtype)
        zero = (p.zeros.float() * p.scales.float()).to(p.a.dtype).T.repeat_interleave(p.group_size, dim=1)
        return (code - zero).float()


class ScaleFoldedIntoTheMagicNumber(Model):
    def weight(self) -> Tensor:
        p = self.problem
        assert p.zeros is not None
        scale = p.scales.float().T.repeat_interleave(p.group_size, dim=1)
        magic = ((1024 + p.zeros.float()).T.repeat_interleave(p.group_size, dim=1) * scale).to(p.a.dtype).float()
        return ((1024 + p.codes.float()) * scale - magic).to(p.a.dtype).float()


class OutputTruncated(Model):
    def convert(self, total: Tensor) -> Tensor:
        nearest = total.to(self.problem.a.dtype)
        bits = nearest.view(torch.int16)
        return torch.where(nearest.float().abs() > total.abs(), bits - 1, bits).view(nearest.dtype)


FAULTS: list[type[Model]] = [
    *faults_of(Model),
    LastK16StepDropped,
    ZeroPlusOneEverywhere,
    ZeroPlusOneInOneGroup,
    ZeroPlusOneInOneGroupAndChannel,
    GroupBoundaryOffByOne,
    NeighbourScaleInOneGroup,
    SixteenBitAccumulator,
    OneTileFromAStaleStage,
    ScalesRoundedToBfloat16,
    ScaledCodeMinusScaledZero,
    ScaleFoldedIntoTheMagicNumber,
    OutputTruncated,
]


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def of_model(dtype: torch.dtype, bits: int) -> Judged:
    case = Case(64, 256, 4096, bits=bits, group_size=128, zeros="int", dtype=dtype, scale_dtype=torch.float16)
    return Judged(case, {"weight_dtype": dtype})


@dataclass(frozen=True)
class Scheme:
    """A kind of scales and zeros that kernels tell apart."""

    name: str
    groups: tuple[int, ...]
    zeros: tuple[testing.Zeros, ...]
    zero_dtypes: tuple[torch.dtype | None, ...] = (None,)
    scale_dtypes: tuple[torch.dtype | None, ...] = (None,)

    def options(self, choose: random.Random) -> dict[str, Any]:
        zeros = choose.choice(self.zeros)
        dtypes = [d for d in self.zero_dtypes if d is None or d.is_floating_point == (zeros != "int")]
        return {
            "group_size": choose.choice(self.groups),
            "zeros": zeros,
            "zero_dtype": choose.choice(dtypes or [None]),
            "scale_dtype": choose.choice(self.scale_dtypes),
        }


INTEGERS = (torch.int8, torch.int32)
SCHEMES = [
    Scheme("per channel", (ONE,), ("none", "int")),
    Scheme("groups of 64 and more", (64, 128, 192, 256), ("none", "int")),
    Scheme("groups of 16 and more", (16, 32, 48, 80, 144), ("none", "int")),
    Scheme("real zeros", (16, 32, 64, 128, ONE), ("real",), (None, *FLOATS)),
    Scheme("mixed types", (32, 64, 128, ONE), ("int", "real"), (None, *INTEGERS, *FLOATS), FLOATS),
]

OF_MINIMUMS = Scheme("minimums", (16, 32, 48, 64, 128, ONE), ("minimum",), FLOATS, FLOATS)
"""Of the description in `minimums`."""


def draw(scheme: Scheme, dtype: torch.dtype, bits: int) -> Any:
    def case(m: int, n: int, k: int, choose: random.Random) -> Case:
        epilogue = {name: choose.random() < 0.3 for name in ("bias", "act_scale", "perm")}
        return Case(m, n, k, bits, dtype=dtype, **scheme.options(choose), **epilogue)

    return case


class WeightOnly(Description):
    name = "gemm"
    function = staticmethod(qcutlass.gemm)
    schema = (
        "Tensor a, Tensor w_packed, Tensor scales, Tensor? zeros=None, Tensor? bias=None, str? activation=None, "
        "Tensor? act_scale=None, Tensor? perm=None, int? group_size=None, int? bits=None, str? tactic=None, "
        "int split_k=0, str? activations=None, str? weight_dtype=None, Tensor? global_scale=None, "
        "Tensor? minimums=None, bool batch_invariant=False, Tensor? super_scales=None, Tensor? super_minimums=None, "
        "Tensor? residual=None"
    )
    settling = ("w_packed", "scales", "zeros", "minimums", "super_scales", "super_minimums")
    excluded = ("minimums", "global_scale", "super_scales", "super_minimums")
    of_rows = ("residual",)
    scale = "scales"
    boxed = ("a", "scales", "zeros", "bias", "act_scale", "residual")
    not_finite = ("a",)
    finely = MappingProxyType({"group_size": 32})
    settled = (4096, 4096, 200)

    inductor = ("plain", "ragged", "epilogue")
    whole = Case(
        M, N, K, group_size=K // GROUPS, bias=True, act_scale=True, perm=True, activation="silu", residual=True
    )
    fake_rows = FAKE_ROWS
    refusals = REFUSALS

    model = Model

    layers = ("w4 float16", "w4 bfloat16", "w8 float16")
    benched = ("w4a16_g128", "w8a16_channel_int", "w4a16_g64_real_bf16", "mxfp4", "nvfp4", "e4m3_bf16")

    def __init__(self) -> None:
        self.variants = {f"w{bits} {short(d)}": {"bits": bits, "dtype": d} for d in SIXTEEN_BIT for bits in (4, 8)}
        self.cases = {
            "plain": Case(3, 40, 128, zeros="none"),
            "ragged": Case(9, 33, 100, bits=8, group_size=48, zeros="int", dtype=torch.bfloat16, activation="silu"),
            "epilogue": Case(20, 64, 256, zeros="real", bias=True, act_scale=True, perm=True, activation="gelu"),
            "residual": Case(7, 40, 128, activation="silu", residual=True),
        }
        self.rows = ROWS
        self.faults = FAULTS
        self.fault_cases = {short(dtype): [of_model(dtype, 4)] for dtype in SIXTEEN_BIT}
        self.sound_cases = {f"w{bits} {short(d)}": [of_model(d, bits)] for bits in (4, 8) for d in SIXTEEN_BIT}
        self.narrow = {
            f"w{bits} {zeros} {short(d)}": [
                Case(17, 40, 1000, bits, 128, zeros, d, bias=True, act_scale=True, perm=True)
            ]
            for bits in (4, 8)
            for zeros in ("none", "int", "real")
            for d in FLOATS
        }
        self.families = {
            f"{short(d)} w{bits} {scheme.name}": draw(scheme, d, bits)
            for d in SIXTEEN_BIT
            for bits in (4, 8)
            for scheme in SCHEMES
        }
        self.asynchronous = {
            "w4a16 fp16": {"bits": 4, "dtype": torch.float16, "zeros": "none", "bias": True},
            "w4a16 bf16, zeros": {"bits": 4, "dtype": torch.bfloat16, "zeros": "int", "bias": True},
            "w8a16 fp16": {"bits": 8, "dtype": torch.float16, "zeros": "none", "bias": True},
        }
        self.explained = {
            "everything": (
                {"bias": True, "activation": "silu"},
                "float16 activations by {n} x {k} 4-bit weights, groups of 128, float16 scales, uint8 zeros, bias, "
                "silu",
            ),
            "no zeros": (
                {"zeros": "none", "bits": 8, "dtype": torch.bfloat16},
                "bfloat16 activations by {n} x {k} 8-bit weights, groups of 128, bfloat16 scales, symmetric",
            ),
        }

    def case(self, m: int, n: int, k: int, **options: Any) -> Case:
        return Case(m, n, k, **options)

    def full(self, m: int, n: int, k: int, **options: Any) -> Case:
        return Case(m, n, k, **{"bias": True, "act_scale": True, "perm": True} | options)

    def any_case(self, variant: str, m: int, n: int, k: int, choose: random.Random) -> Case:
        case: Case = draw(choose.choice(SCHEMES), **self.variants[variant])(m, n, k, choose)
        return case

    def layer(self, variant: str, m: int, n: int, k: int, choose: random.Random) -> Case:
        return self.case(m, n, k, **self.variants[variant])

    def product(self, problem: Problem) -> Product:
        given = {name: getattr(problem, name) for name in OPERANDS}
        operands = {"a": given.pop("a"), "w_packed": qcutlass.preprocess_weights(problem.codes, bits=problem.bits)}
        operands |= {name: tensor for name, tensor in given.items() if tensor is not None}
        named = {"activation": problem.activation, "weight_dtype": problem.weight_dtype}
        options = {name: value for name, value in named.items() if value is not None}
        return Product(self, problem, operands, options | problem.ambiguous)

    def arguments(self, case: Case) -> _C.GemmArguments:
        types = TYPES | INTEGER_TYPES
        weights = _C.WeightArguments()
        weights.packing = _C.Packing.W4A16 if case.bits == 4 else _C.Packing.W8A16
        weights.n, weights.k, weights.group_size = case.n, case.k, case.group_size
        weights.scale_type = types[case.scale_dtype or case.dtype]
        default = torch.uint8 if case.zeros == "int" else case.scale_dtype or case.dtype
        if case.zeros == "minimum":
            weights.minimum_type = types[case.zero_dtype or default]
        elif case.zeros != "none":
            weights.zero_type = types[case.zero_dtype or default]
        if case.super_groups:
            weights.super_groups, weights.scale_type = case.groups_of_super_block, types[torch.int8]
            if case.zeros == "minimum":
                weights.minimum_type = types[torch.uint8]
        result = _C.GemmArguments()
        result.m, result.weights, result.a_type = case.m, weights, types[case.dtype]
        return result

    def reference(self, problem: Problem, **forced: Any) -> testing.Reference:
        return problem.reference(weight_dtype(**self.product(problem).values | forced))

    def narrowest(self, problem: Problem) -> float:
        return {torch.float16: 2048.0, torch.bfloat16: 256.0, torch.float32: 2.0**14}[problem.a.dtype]

    def out_dtype(self, problem: Problem) -> torch.dtype:
        return problem.a.dtype


WEIGHT_ONLY = WeightOnly()
