"""Products of 8-bit activations by 4-bit weights, `qcutlass.gemm_w4a8`, as the facets of the tests know them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from tests.python.faults import faults_of
from tests.python.kinds.description import (
    ACTIVATIONS,
    FLOATS,
    Description,
    Draw,
    Judged,
    Product,
    Refusal,
    Row,
    half,
    ones,
)
from tests.python.kinds.weight_only import INTEGER_TYPES, TYPES
from torch import Tensor

import qcutlass
from qcutlass import _C, testing
from qcutlass.testing import Int4Case, Int4Problem, Int4Reference

M, N, K = 3, 48, 128  # three by two tiles
GROUPS = 4
FP8 = torch.float8_e4m3fn
DTYPES = {"int8": torch.int8, "fp8": FP8}
OPERANDS = ("a_scale", "scales", "zeros", "bias", "residual")

ROWS: list[Row] = [
    ("residual", lambda v: v["residual"].float(), TypeError, ("float32", "float16", "that of the output")),
    ("residual", lambda v: v["residual"][:, 1:], ValueError, ("[3, 47]", "[3, 48]")),
    ("activation", lambda v: "silu_mul", ValueError, ("32", "N = 48", "interleave_gate_up")),
    ("a_q", lambda v: v["a_q"].float(), TypeError, ("float32", "int8", "float8_e4m3fn")),
    ("a_q", lambda v: v["a_q"].view(torch.uint8), TypeError, ("uint8", "int8")),
    ("a_q", lambda v: v["a_q"].view(torch.float8_e5m2), TypeError, ("float8_e5m2", "float8_e4m3fn")),
    ("a_q", lambda v: v["a_q"][0, 0], ValueError, ("[..., K]", "without dimensions")),
    ("w_packed", lambda v: None, TypeError, ("NoneType", "Tensor")),
    ("w_packed", lambda v: v["w_packed"].view(torch.int8), ValueError, ("int8", "4 bits", "preprocess_weights")),
    ("w_packed", lambda v: v["w_packed"].view(FP8), ValueError, ("float8_e4m3fn", "4 bits", "preprocess_weights")),
    ("w_packed", lambda v: v["w_packed"].flatten(), ValueError, (str([3 * 2 * 512]), "32, 16")),
    ("w_packed", lambda v: v["w_packed"].transpose(0, 1), ValueError, ("contiguous", "strides")),
    ("w_packed", lambda v: v["w_packed"][:, :1].contiguous(), ValueError, ("[3, 1, 32, 16]", str(K))),
    ("w_packed", lambda v: v["w_packed"][:2], ValueError, ("[2, 2, 32, 16]", str(N))),
    ("a_scale", lambda v: None, TypeError, ("NoneType", "Tensor")),
    ("a_scale", lambda v: v["a_scale"].half(), TypeError, ("float16", "float32")),
    ("a_scale", lambda v: ones(M + 1), ValueError, ("[4]", "[3]")),
    ("a_scale", lambda v: ones(1, M), ValueError, ("[1, 3]", "[3]")),
    ("scales", lambda v: None, TypeError, ("NoneType", "Tensor")),
    ("scales", lambda v: v["scales"].double(), TypeError, ("float64", "float16")),
    ("scales", lambda v: half(GROUPS, N + 16), ValueError, (str(N + 16),)),
    ("group_size", lambda v: 48, ValueError, ("48", "3", "4")),
    ("group_size", lambda v: 0, ValueError, ("0",)),
    ("zeros", lambda v: v["zeros"].half(), TypeError, ("float16", "uint8", "gemm")),
    ("zeros", lambda v: v["zeros"][:, :-1], ValueError, ("[4, 47]", "[4, 48]")),
    ("bias", lambda v: v["bias"].int(), TypeError, ("int32", "float16")),
    ("bias", lambda v: ones(N - 1), ValueError, ("[47]", "48")),
    ("activation", lambda v: "swish", ValueError, ("swish", "silu", "gelu_tanh")),
    ("out_dtype", lambda v: torch.int32, TypeError, ("int32", "float16")),
    ("n", lambda v: 47, ValueError, ("47", "48")),
    ("n", lambda v: 48.0, TypeError, ("float", "int")),
    ("tactic", lambda v: 3, TypeError, ("int",)),
    ("split_k", lambda v: -1, ValueError, ("-1",)),
    ("out", lambda v: [1.0], TypeError, ("list", "Tensor")),
    ("out", lambda v: ones(M, N), TypeError, ("float32", "float16", "out_dtype")),
    ("out", lambda v: half(M, N + 1), ValueError, ("[3, 49]", "[3, 48]")),
    ("out", lambda v: half(1, N).expand(M, N), ValueError, ("overlap", "[0, 1]")),
    ("a_scale", lambda v: v["a_scale"].to("meta"), ValueError, ("meta", "cpu")),
    ("scales", lambda v: v["scales"].to("meta"), ValueError, ("meta", "cpu")),
    ("zeros", lambda v: v["zeros"].to("meta"), ValueError, ("meta", "cpu")),
    ("w_packed", lambda v: v["w_packed"].to("meta"), ValueError, ("meta", "cpu")),
    ("bias", lambda v: v["bias"].to_sparse(), ValueError, ("dense", "sparse")),
]
FAKE_ROWS: list[Row] = [
    ("n", lambda v: 47, ValueError, ("n: ", "48")),
    ("bias", lambda v: half(N + 1).to(v["bias"].device), ValueError, ("[49]", "48")),
]
REFUSALS: list[Refusal] = [
    (
        lambda: qcutlass.preprocess_weights(torch.zeros(4, 4, dtype=torch.int8), 4, "int8"),
        TypeError,
        ("codes", "int8", "uint8"),
    ),
    (
        lambda: qcutlass.preprocess_weights(torch.full((4, 4), 16, dtype=torch.uint8), 4, "fp8"),
        ValueError,
        ("codes", "16", "4-bit"),
    ),
    (
        lambda: qcutlass.unpack_weights(torch.zeros(1, 1, 32, 16, dtype=torch.int8), 4, (16, 64)),
        ValueError,
        ("bits", "int8", "8 bits"),
    ),
]


@dataclass
class Model:
    """The product, each station of which a fault may replace: exact sums, then scales and bias in fp32."""

    problem: Int4Problem

    def columns(self) -> Tensor:
        """Activations, float64 [M, K]."""
        return self.problem.rows()

    def weight(self) -> Tensor:
        """float64 [N, K]."""
        return self.problem.weight()

    def accumulate(self) -> Tensor:
        """float64 [M, N]."""
        return self.columns() @ self.weight().T

    def row_scale(self) -> Tensor:
        """fp32 [M, 1]."""
        return self.problem.row_scale().float()

    def scale(self, total: Tensor) -> Tensor:
        """fp32 [M, N]: what the activation function is applied to."""
        scaled = total.float() * self.row_scale()
        return scaled if self.problem.bias is None else scaled + self.problem.bias

    def convert(self, value: Tensor) -> Tensor:
        return value.to(self.problem.out_dtype)

    def store(self, out: Tensor) -> Tensor:
        """The output as memory holds it afterwards."""
        return out

    def run(self) -> Tensor:
        value = testing.activate(self.scale(self.accumulate()), self.problem.activation)
        return self.store(self.convert(value))


class WithProblem(Model):
    """The sound weights of a changed problem."""

    def change(self, problem: Int4Problem) -> Int4Problem:
        raise NotImplementedError

    def weight(self) -> Tensor:
        return self.change(self.problem).weight()


class ZerosIgnored(WithProblem):
    def change(self, problem: Int4Problem) -> Int4Problem:
        return replace(problem, zeros=None)


class ZeroPlusOneInOneGroup(WithProblem):
    def change(self, problem: Int4Problem) -> Int4Problem:
        assert problem.zeros is not None
        zeros = problem.zeros.clone()
        zeros[3] += 1
        return replace(problem, zeros=zeros)


class NeighbourScaleInOneGroup(WithProblem):
    def change(self, problem: Int4Problem) -> Int4Problem:
        scales = problem.scales.clone()
        scales[5] = scales[6]
        return replace(problem, scales=scales)


class GroupBoundaryOffByOne(Model):
    def weight(self) -> Tensor:
        p = self.problem
        shifted = torch.cat([p.codes[:, :1], p.codes[:, :-1]], dim=1)  # code k - 1 at k: its group is that of k
        return torch.cat([replace(p, codes=shifted).weight()[:, 1:], super().weight()[:, -1:]], dim=1)


class ZeroOfTheActivationsOfTheNextRow(Model):
    """zero * (sum of activations' codes) taken off with the sum of another row."""

    def accumulate(self) -> Tensor:
        p = self.problem
        scaled_zeros = replace(p, codes=torch.zeros_like(p.codes)).weight()
        of_zeros = self.columns() @ scaled_zeros.T
        return super().accumulate() - of_zeros + of_zeros.roll(1, 0)


class LastK16StepDropped(Model):
    def columns(self) -> Tensor:
        a = super().columns().clone()
        a[:, -16:] = 0
        return a


class SixteenBitAccumulator(Model):
    def accumulate(self) -> Tensor:
        total = super().accumulate()
        return torch.where(total.abs() > 2**15, total.sign() * 2**15, total.half().double())


class RowScaleOffByOne(Model):
    def row_scale(self) -> Tensor:
        return super().row_scale().roll(1, 0)


class BiasBeforeScale(Model):
    def scale(self, total: Tensor) -> Tensor:
        assert self.problem.bias is not None
        return (total.float() + self.problem.bias) * self.row_scale()


class BiasOfTheNextChannel(Model):
    def scale(self, total: Tensor) -> Tensor:
        assert self.problem.bias is not None
        return super().scale(total) - self.problem.bias + self.problem.bias.roll(1)


class SumsScaledInFloat16(Model):
    def scale(self, total: Tensor) -> Tensor:
        return super().scale((total / 64).half().double() * 64)


FAULTS: list[type[Model]] = [
    *faults_of(Model),
    ZerosIgnored,
    ZeroPlusOneInOneGroup,
    NeighbourScaleInOneGroup,
    GroupBoundaryOffByOne,
    ZeroOfTheActivationsOfTheNextRow,
    LastK16StepDropped,
    SixteenBitAccumulator,
    RowScaleOffByOne,
    BiasBeforeScale,
    BiasOfTheNextChannel,
    SumsScaledInFloat16,
]


def draw(dtype: torch.dtype, groups: tuple[int, ...]) -> Draw:
    """Cases of a type of activations with everything else at random."""

    def case(m: int, n: int, k: int, choose: random.Random) -> Int4Case:
        return Int4Case(
            m,
            n,
            k,
            dtype,
            choose.choice(FLOATS),
            choose.choice(groups),
            choose.choice(("none", "int")),
            choose.choice(FLOATS),
            choose.choice(tuple(INTEGER_TYPES)),
            choose.choice(("one", "each")),
            bias=choose.random() < 0.5,
        )

    return case


class Int4(Description):
    name = "gemm_w4a8"
    function = staticmethod(qcutlass.gemm_w4a8)
    schema = (
        "Tensor a_q, Tensor w_packed, Tensor a_scale, Tensor scales, Tensor? zeros, Tensor? bias, str? activation, "
        "ScalarType out_dtype, int? group_size=None, SymInt? n=None, str? tactic=None, int split_k=0, "
        "bool batch_invariant=False, Tensor? residual=None"
    )
    settling = ("w_packed", "scales", "zeros")
    finely = MappingProxyType({"group_size": 32})
    of_rows = ("a_scale", "residual")
    scale = "a_scale"
    boxed = ("a_q", "a_scale", "scales", "zeros", "bias", "residual")
    not_finite = ("a_scale", "bias")
    granule = 128
    capability = (8, 9)

    inductor = ("everything",)
    whole = Int4Case(M, N, K, group_size=K // GROUPS, bias=True, activation="silu", residual=True)
    rows = ROWS
    fake_rows = FAKE_ROWS
    refusals = REFUSALS

    model = Model
    faults = FAULTS

    layers = ("int8", "fp8")
    asynchronous = MappingProxyType({"4 by 8 bits": {"dtype": torch.int8}, "4 by fp8": {"dtype": FP8}})
    explained = MappingProxyType(
        {
            name: (
                {"dtype": dtype, "bias": False},
                f"{str(dtype).removeprefix('torch.')} activations by {{n}} x {{k}} 4-bit weights, groups of 128, "
                "float16 scales, uint8 zeros, float16 out",
            )
            for name, dtype in DTYPES.items()
        }
    )
    benched = ("w4a8_g128", "w4a8_int8_g128")

    def __init__(self) -> None:
        self.variants = {name: {"dtype": dtype} for name, dtype in DTYPES.items()}
        self.cases = {
            "plain": Int4Case(3, 40, 128, zeros="none"),
            "everything": Int4Case(
                9, 33, 100, FP8, torch.float32, 48, scale_dtype=torch.float32, bias=True, activation="gelu"
            ),
            "no whole steps": Int4Case(5, 20, 70, group_size=10, a_scale="one"),
            "residual": Int4Case(7, 40, 128, FP8, activation="silu", residual=True),
        }
        self.fault_cases = {
            f"{name} {out}".replace("torch.", ""): [Judged(Int4Case(64, 256, 1024, dtype, out, bias=True))]
            for name, dtype in DTYPES.items()
            for out in FLOATS
        }
        self.sound_cases = {
            name: [
                Judged(Int4Case(64, 256, 1024, dtype, out, bias=bias, activation=activation))
                for out in FLOATS
                for bias in (False, True)
                for activation in ACTIVATIONS
            ]
            for name, dtype in DTYPES.items()
        }
        self.narrow = {
            name: [Int4Case(17, 40, k, dtype, torch.float32, bias=True) for k in (1000, 20000)]
            for name, dtype in DTYPES.items()
        }
        self.families = {
            f"{name}, {groups}": draw(dtype, sizes)
            for name, dtype in DTYPES.items()
            for groups, sizes in {
                "per channel": (10**6,),
                "groups of multiples of 128": (128, 256, 1024),
                "groups of multiples of 32": (32, 64, 96, 160),
            }.items()
        }

    def serves(self, gpu: _C.DeviceTraits, case: Any = None) -> bool:
        is_int8 = case is not None and case.dtype == torch.int8
        return gpu.code_capability >= 80 if is_int8 else super().serves(gpu, case)

    def case(self, m: int, n: int, k: int, **options: Any) -> Int4Case:
        return Int4Case(m, n, k, **{"bias": True} | options)

    def on(self, device: str, case: Int4Case) -> Int4Case:
        """Kernels take groups of multiples of 32."""
        return replace(case, group_size=96) if device == "cuda" and case.group_size % 32 else case

    def any_case(self, variant: str, m: int, n: int, k: int, choose: random.Random) -> Int4Case:
        case: Int4Case = draw(DTYPES[variant], (32, 64, 96, 128, 10**6))(m, n, k, choose)
        return case

    def product(self, problem: Int4Problem) -> Product:
        activations = "int8" if problem.a.dtype == torch.int8 else "fp8"
        operands = {"a_q": problem.a, "w_packed": qcutlass.preprocess_weights(problem.codes, 4, activations)}
        optional = {name: getattr(problem, name) for name in OPERANDS}
        operands |= {name: tensor for name, tensor in optional.items() if tensor is not None}
        options = {"out_dtype": problem.out_dtype, "group_size": problem.group_size, "activation": problem.activation}
        if problem.group_size >= problem.shape[2]:
            options["group_size"] = -1
        return Product(self, problem, operands, options)

    def arguments(self, case: Int4Case) -> _C.GemmArguments:
        weights = _C.WeightArguments()
        weights.packing = _C.Packing.W4A16
        weights.n, weights.k, weights.group_size = case.n, case.k, case.group_size
        weights.scale_type = TYPES[case.scale_dtype]
        if case.zeros == "int":
            weights.zero_type = INTEGER_TYPES[case.zero_dtype]
        result = _C.GemmArguments()
        result.m, result.weights = case.m, weights
        result.a_type = _C.DType.INT8 if case.dtype == torch.int8 else _C.DType.FLOAT8_E4M3
        result.out_type = TYPES[case.out_dtype]
        return result

    def reference(self, problem: Int4Problem, **forced: Any) -> Int4Reference:
        """Of the runs whose sums leave the MMAs where these multiply, within the bound of asynchronous ones of fp8."""
        if not problem.a.is_cuda or problem.a.numel() == 0:
            return problem.reference()
        whole = problem.group_size >= problem.shape[2] or problem.group_size % 128 == 0
        tactic = forced.get("tactic") or qcutlass.plan(self.function, **self.product(problem).values | forced).tactic
        return problem.reference(promoted=128 if whole else 32, aligned="_sm90a_" in tactic)

    def peak(self, problem: Int4Problem, expected: Tensor) -> float:
        return float(problem.sums().abs().max())

    def narrowest(self, problem: Int4Problem) -> float:
        return 2.0**11  # fp16: 11 bits


INT4 = Int4()
