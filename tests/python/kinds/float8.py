"""Products of fp8 activations by fp8 weights, `qcutlass.gemm_fp8`, as the facets of the tests know them."""

from __future__ import annotations

from typing import Any

import torch
from tests.python.eight_bit import FLOAT8, pack
from tests.python.kinds.description import FLOATS, Judged, Product, Row, ones
from tests.python.kinds.eight_bit import FAULTS, ROWS, EightBit, K, M, Model, N, narrow, sound
from torch import Tensor

import qcutlass
from qcutlass.testing import EightBitCase, EightBitProblem, EightBitReference

FP8 = torch.float8_e4m3fn

OF_FP8: list[Row] = [
    ("a", lambda v: v["a"].float(), TypeError, ("float32", "float8_e4m3fn", "float8_e5m2")),
    ("a", lambda v: v["a"].view(torch.int8), TypeError, ("int8", "float8_e4m3fn")),
    ("a", lambda v: v["a"][0, 0], ValueError, ("[..., K]", "without dimensions")),
    ("w", lambda v: None, TypeError, ("NoneType", "Tensor")),
    ("w", lambda v: v["w"].view(torch.float8_e5m2), TypeError, ("float8_e5m2", "float8_e4m3fn")),
    ("w", lambda v: v["w"].view(torch.int8), TypeError, ("int8", "float8_e4m3fn")),
    ("w", lambda v: v["w"].flatten(), ValueError, (str([3 * 4 * 512]), "32, 16")),
    ("w", lambda v: v["w"].transpose(0, 1), ValueError, ("contiguous", "strides")),
    ("w", lambda v: v["w"][:, :3].contiguous(), ValueError, ("[3, 3, 32, 16]", str(K))),
    ("w", lambda v: v["w"][:2], ValueError, ("[2, 4, 32, 16]", str(N))),
    ("w", lambda v: ones(N, K + 1).to(FP8), ValueError, ("[48, 129]", "128")),
    ("n", lambda v: v.update(w=ones(N, K).to(FP8)) or 47, ValueError, ("47", "48")),
    ("out_dtype", lambda v: torch.int32, TypeError, ("int32", "float16")),
    ("w", lambda v: v["w"].to("meta"), ValueError, ("meta", "cpu")),
]
FAKE_ROWS: list[Row] = [("n", lambda v: 70, ValueError, ("n: 70",))]


def align(terms: Tensor, largest: Tensor) -> Tensor:
    """The terms of a sum, cut off 13 bits below the exponent of `largest`, the largest number in it."""
    unit = torch.exp2(torch.floor(torch.log2(largest.clamp(min=2.0**-100))) - 13)
    return torch.trunc(terms / unit) * unit


class Promoted(Model):
    """Asynchronous MMAs of fp8: steps of 32 columns align with the sum so far, which is promoted every 128."""

    every = 128

    def accumulate(self) -> Tensor:
        a, w = self.columns(), self.weight()
        total = torch.zeros(len(a), len(w), dtype=torch.float64)
        for begin in range(0, a.shape[1], self.every):
            block = torch.zeros_like(total)
            for k in range(begin, min(begin + self.every, a.shape[1]), 32):
                terms = a[:, None, k : k + 32] * w[None, :, k : k + 32]
                largest = torch.maximum(terms.abs().amax(-1), block.abs())
                block = align(block, largest) + align(terms, largest[..., None]).sum(-1)
            total += block
        return total


class PromotedEvery512(Promoted):
    every = 512


class NotPromoted(Promoted):
    every = 1 << 30


def judged(dtype: torch.dtype, aligned: bool) -> list[Judged]:
    """Every output; `aligned`: within the bound of asynchronous MMAs."""
    return [
        Judged(EightBitCase(64, 256, 1024, dtype, out_dtype, bias=True), {"aligned": aligned}) for out_dtype in FLOATS
    ]


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.float8_")


class Float8(EightBit):
    name = "gemm_fp8"
    function = staticmethod(qcutlass.gemm_fp8)
    schema = (
        "Tensor a, Tensor w, Tensor a_scale, Tensor w_scale, Tensor? bias, str? activation, "
        "ScalarType out_dtype, SymInt? n=None, str? tactic=None, int split_k=0, "
        "bool batch_invariant=False, Tensor? residual=None"
    )
    settling = ("w", "w_scale")
    capability = (8, 9)
    not_finite = ("a", "a_scale", "w_scale", "bias")

    inductor = ("everything",)
    whole = EightBitCase(M, N, K, FP8, bias=True, activation="silu", residual=True)
    fake_rows = FAKE_ROWS
    refusals = ()

    layers = ("e4m3fn", "e4m3fn")
    benched = ("fp8", "fp8_e5m2")

    def __init__(self) -> None:
        self.variants = {short(dtype): {"dtype": dtype} for dtype in FLOAT8}
        self.cases = {
            "plain": EightBitCase(3, 40, 128, FP8, torch.bfloat16),
            "everything": EightBitCase(
                9, 33, 100, torch.float8_e5m2, torch.float32, w_scale="one", bias=True, activation="gelu"
            ),
            "residual": EightBitCase(7, 40, 128, FP8, activation="silu", residual=True),
        }
        self.rows = [*ROWS, *OF_FP8]
        self.faults = FAULTS
        self.fault_cases = {
            f"{short(dtype)}{', aligned' if aligned else ''}": judged(dtype, aligned)
            for dtype in FLOAT8
            for aligned in (False, True)
        }
        self.sound_cases = {name: cases for dtype in FLOAT8 for name, cases in sound(dtype, "none").items()}
        self.narrow = {short(dtype): narrow(dtype) for dtype in FLOAT8}
        self.asynchronous = {"fp8": {"dtype": FP8}}
        self.explained = {
            short(dtype): (
                {"dtype": dtype, "bias": False},
                f"float8_{short(dtype)} activations by {{n}} x {{k}} float8_e4m3fn weights, float16 out",
            )
            for dtype in FLOAT8
        }
        self.families = {short(dtype): self.draw(dtype) for dtype in FLOAT8}

    def product(self, problem: EightBitProblem) -> Product:
        return self.product_of(problem, {"a": problem.a, "w": pack(problem)})

    def narrowest(self, problem: EightBitProblem) -> float:
        return 2.0**11  # fp16: 11 bits

    def reference(self, problem: EightBitProblem, **forced: Any) -> EightBitReference:
        """Within the bound of asynchronous MMAs where these multiply."""
        if not problem.a.is_cuda or problem.a.numel() == 0:
            return problem.reference()
        tactic = forced.get("tactic") or qcutlass.plan(self.function, **self.product(problem).values | forced).tactic
        return problem.reference(aligned="_sm90a_" in tactic)


FLOAT8_PRODUCTS = Float8()
