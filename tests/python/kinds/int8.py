"""Products of int8 activations by int8 weights, `qcutlass.gemm_w8a8`, as the facets of the tests know them."""

from __future__ import annotations

from typing import Any

import torch
from tests.python.eight_bit import pack
from tests.python.kinds.description import FLOATS, Judged, Product, Refusal, Row, ones
from tests.python.kinds.eight_bit import (
    FAULTS,
    SHARED,
    EightBit,
    K,
    LastK32StepDropped,
    M,
    Model,
    N,
    narrow,
    sound,
)
from tests.python.kinds.eight_bit import ROWS as SHARED_ROWS
from torch import Tensor

import qcutlass
from qcutlass.testing import EightBitCase, EightBitProblem

FP8 = torch.float8_e4m3fn

OF_INT8_ROWS: list[Row] = [
    ("a_q", lambda v: v["a_q"].tolist(), TypeError, ("list", "Tensor")),
    ("a_q", lambda v: v["a_q"].half(), TypeError, ("float16", "int8")),
    ("a_q", lambda v: v["a_q"].to(torch.uint8), TypeError, ("uint8", "int8")),
    ("a_q", lambda v: torch.tensor(1, dtype=torch.int8), ValueError, ("[..., K]", "without dimensions")),
    ("w_packed", lambda v: v["a_q"], ValueError, ("[3, 128]", "32, 16", "preprocess_weights")),
    ("w_packed", lambda v: v["w_packed"].tolist(), TypeError, ("list", "Tensor")),
    ("w_packed", lambda v: v["w_packed"].view(torch.uint8), ValueError, ("uint8", "int8", "activations='int8'")),
    ("w_packed", lambda v: v["w_packed"].view(FP8), TypeError, ("float8_e4m3fn", "int8")),
    ("w_packed", lambda v: v["w_packed"].reshape(3, 4, 16, 32), ValueError, ("[3, 4, 16, 32]",)),
    ("w_packed", lambda v: v["w_packed"].transpose(0, 1), ValueError, ("contiguous", "strides")),
    ("w_packed", lambda v: v["w_packed"][:, :3].contiguous(), ValueError, ("[3, 3, 32, 16]", str(K), "must be 4")),
    ("w_packed", lambda v: v["w_packed"][:2], ValueError, ("[2, 4, 32, 16]", str(N))),
    ("w_packed", lambda v: v["w_packed"].to("meta"), ValueError, ("meta", "cpu")),
    ("azp", lambda v: v["azp"].to(torch.int8), TypeError, ("int8", "int32")),
    ("azp", lambda v: 3, TypeError, ("int", "Tensor")),
    ("azp", lambda v: v["azp"][:2], ValueError, ("[2]", "[3]")),
    ("azp", lambda v: v["azp"].to("meta"), ValueError, ("meta", "cpu")),
    ("w_sums", lambda v: v["w_sums"].long(), TypeError, ("int64", "int32")),
    ("w_sums", lambda v: v["w_sums"][1:], ValueError, ("[47]", "48")),
    ("w_sums", lambda v: v["w_sums"].to("meta"), ValueError, ("meta", "cpu")),
]
FAKE_ROWS: list[Row] = [("n", lambda v: 70, ValueError, ("n: 70",))]
REFUSALS: list[Refusal] = [
    (lambda: qcutlass.preprocess_weights(ones(4, 4), 8, "int8"), TypeError, ("codes", "float32", "int8")),
    (lambda: qcutlass.preprocess_weights(ones(4, 4), 8, "fp8"), TypeError, ("codes", "float32", "float8_e4m3fn")),
    (
        lambda: qcutlass.preprocess_weights(ones(4, 4).to(torch.float8_e5m2), 8, "fp8"),
        TypeError,
        ("codes", "float8_e5m2", "float8_e4m3fn"),
    ),
    (lambda: qcutlass.preprocess_weights(ones(4, 4).to(FP8), 4, "fp8"), TypeError, ("codes", "bits=4", "uint8")),
    (
        lambda: qcutlass.unpack_weights(ones(1, 1, 32, 16).to(FP8), 8, (17, 32)),
        ValueError,
        ("[1, 1, 32, 16]", "[2, 1, 32, 16]"),
    ),
    (lambda: qcutlass.weight_sums(ones(4, 4)), TypeError, ("w", "float32", "int8")),
    (lambda: qcutlass.weight_sums(ones(4, dtype=torch.int8)), ValueError, ("w", "[4]")),
    (lambda: qcutlass.weight_sums(ones(4, 4, dtype=torch.int8), 5), ValueError, ("n", "5", "4")),
    (lambda: qcutlass.weight_sums(ones(1, 1, 32, 16, dtype=torch.int8), 17), ValueError, ("n", "17", "2 tiles")),
    (
        lambda: qcutlass.weight_sums(torch.zeros(1, 4097, 32, 16, dtype=torch.int8)),
        ValueError,
        ("w", "131073", "131071"),
    ),
]


class ZeroPointIgnored(Model):
    def columns(self) -> Tensor:
        return self.problem.a.double()


class ZeroPointOfTheNextRow(Model):
    def columns(self) -> Tensor:
        assert self.problem.azp is not None
        return self.problem.a.double() - self.problem.azp.double().roll(1)[:, None]


class ZeroPointAdded(Model):
    def columns(self) -> Tensor:
        return 2 * self.problem.a.double() - super().columns()


class ActivationsSaturateAtMinus127(Model):
    def columns(self) -> Tensor:
        return super().columns() + (self.problem.a == -128)


class WeightsSaturateAtMinus127(Model):
    def weight(self) -> Tensor:
        return super().weight().clamp(min=-127)


class OneWeightSaturates(Model):
    def weight(self) -> Tensor:
        w = super().weight().clone()
        n, k = (w == -128).nonzero()[0].tolist()
        w[n, k] = -127
        return w


class SixteenBitAccumulator(Model):
    def accumulate(self) -> Tensor:
        return (super().accumulate() + 2**15) % 2**16 - 2**15


OF_INT8: list[type[Model]] = [
    ZeroPointIgnored,
    ZeroPointOfTheNextRow,
    ZeroPointAdded,
    ActivationsSaturateAtMinus127,
    WeightsSaturateAtMinus127,
    SixteenBitAccumulator,
]
OF_INTEGER_SUMS: list[type[Model]] = [
    *SHARED,
    *OF_INT8,
    OneWeightSaturates,
    LastK32StepDropped,
]


class Int8(EightBit):
    name = "gemm_w8a8"
    function = staticmethod(qcutlass.gemm_w8a8)
    schema = (
        "Tensor a_q, Tensor w_packed, Tensor? a_scale, Tensor? w_scale, Tensor? bias, Tensor? azp, "
        "str? activation, ScalarType out_dtype, SymInt? n=None, Tensor? w_sums=None, str? tactic=None, int split_k=0, "
        "bool batch_invariant=False, Tensor? residual=None"
    )
    settling = ("w_packed", "w_scale", "w_sums")
    of_rows = ("a_scale", "azp", "residual")
    computed = ("w_sums",)
    boxed = ("a_q", "a_scale", "w_scale", "bias", "azp", "residual")
    out_dtypes = (*FLOATS, torch.int32)
    azp = "each"

    inductor = ("everything",)
    whole = EightBitCase(M, N, K, azp="each", bias=True, activation="silu", residual=True)
    fake_rows = FAKE_ROWS
    refusals = REFUSALS

    integer_case = EightBitCase(64, 256, 1024, torch.int8, torch.int32, azp="each")

    layers = ("int8", "int8")
    benched = ("w8a8", "w8a8_azp", "w8a8_f16")

    def __init__(self) -> None:
        self.variants = {"int8": {}}
        self.cases = {
            "plain": EightBitCase(3, 40, 128),
            "everything": EightBitCase(
                9, 33, 100, torch.int8, torch.bfloat16, "one", azp="each", bias=True, activation="silu"
            ),
            "sums": EightBitCase(5, 40, 64, torch.int8, torch.int32),
            "residual": EightBitCase(7, 40, 128, activation="silu", residual=True),
        }
        self.rows = [*SHARED_ROWS, *OF_INT8_ROWS]
        self.faults = [*FAULTS, *OF_INT8, OneWeightSaturates]
        self.fault_cases = {
            str(out_dtype).removeprefix("torch."): [
                Judged(EightBitCase(64, 256, 1024, torch.int8, out_dtype, azp="each", bias=True))
            ]
            for out_dtype in FLOATS
        }
        self.sound_cases = sound(torch.int8, "each")
        self.narrow = {"int8": narrow(torch.int8)}
        self.asynchronous = {"int8": {"azp": "none"}}
        self.explained = {
            "epilogue": (
                {"azp": "none", "activation": "silu", "out_dtype": torch.bfloat16},
                "int8 activations by {n} x {k} int8 weights, bfloat16 out, bias, silu",
            ),
            "zero points": ({"bias": False}, "int8 activations by {n} x {k} int8 weights, float16 out, azp"),
            "sums": (
                {"azp": "none", "out_dtype": torch.int32},
                "int8 activations by {n} x {k} int8 weights, int32 out",
            ),
        }
        self.families = {"int8": self.draw(torch.int8)}

    def product(self, problem: EightBitProblem) -> Product:
        sums = None if problem.azp is None else qcutlass.weight_sums(problem.w)
        names = {"a_q": problem.a, "w_packed": pack(problem)}
        return self.product_of(problem, names, azp=problem.azp, w_sums=sums)

    def narrowest(self, problem: EightBitProblem) -> float:
        return 2.0**15

    def rejects(self, fault: type[Any], judged: Judged, seed: int) -> bool:
        """Wrong integer sums are enough: int32 outputs show them."""
        if fault in OF_INTEGER_SUMS and self.rejects_sums(fault, seed):
            return True
        return super().rejects(fault, judged, seed)

    def rejects_sums(self, fault: type[Any], seed: int) -> bool:
        p = self.integer_case.random(seed=seed)
        return not torch.equal(fault(p).run(), p.integer_sums())


INT8 = Int8()
