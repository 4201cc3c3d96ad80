"""`qcutlass.gemm` with minimums instead of zeros: another description of the kind of `weight_only`."""

from __future__ import annotations

import random
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from tests.python.faults import faults_of
from tests.python.kinds import weight_only
from tests.python.kinds.description import FLOATS, Judged, Row, half
from tests.python.kinds.weight_only import GROUPS, OF_MINIMUMS, SIXTEEN_BIT, Model, N, WithProblem, draw, short
from torch import Tensor

from qcutlass.testing import Case, Problem

ROWS: list[Row] = [
    *(row for row in weight_only.ROWS if row[0] != "zeros"),
    ("minimums", lambda v: v["minimums"].to(torch.uint8), TypeError, ("uint8", "float32")),
    ("minimums", lambda v: v["minimums"][:, :-1], ValueError, ("[4, 47]", "[4, 48]")),
    ("minimums", lambda v: v["minimums"].to("meta"), ValueError, ("meta", "cpu")),
    ("zeros", lambda v: half(GROUPS, N), ValueError, ("minimums: expected zeros or minimums, got both",)),
]


def minimums_of(problem: Problem) -> Tensor:
    assert problem.minimums is not None
    return problem.minimums


class MinimumIgnored(WithProblem):
    def change(self, problem: Problem) -> Problem:
        return replace(problem, minimums=torch.zeros_like(minimums_of(problem)))


class MinimumAdded(WithProblem):
    def change(self, problem: Problem) -> Problem:
        return replace(problem, minimums=-minimums_of(problem))


class MinimumOfTheNextGroup(WithProblem):
    def change(self, problem: Problem) -> Problem:
        return replace(problem, minimums=minimums_of(problem).roll(-1, 0))


class MinimumOfAnotherGroupInOneChannel(WithProblem):
    def change(self, problem: Problem) -> Problem:
        minimums = minimums_of(problem).clone()
        minimums[5, 200] = minimums[6, 200] + minimums[6].abs().max() / 8
        return replace(problem, minimums=minimums)


class MinimumTakenForAZero(Model):
    def weight(self) -> Tensor:
        p = self.problem
        return replace(p, minimums=None, zeros=minimums_of(p)).weight(p.a.dtype).float()


class MagnitudeOfTheScale(WithProblem):
    """As though scales had no sign: only random problems have negative ones."""

    def change(self, problem: Problem) -> Problem:
        return replace(problem, scales=problem.scales.abs())


class FlatGroupsAreZero(Model):
    """Groups with a scale of 0 hold nothing but minus their minimum."""

    def weight(self) -> Tensor:
        p = self.problem
        flat = (p.scales == 0).T.repeat_interleave(p.group_size, dim=1)
        return super().weight().masked_fill(flat, 0)


class RoundedBeforeTheMinimum(Model):
    def weight(self) -> Tensor:
        p = self.problem
        scaled = replace(p, minimums=torch.zeros_like(minimums_of(p))).weight(p.a.dtype).float()
        minimum = minimums_of(p).to(p.a.dtype).float().T.repeat_interleave(p.group_size, dim=1)
        return (scaled - minimum).to(p.a.dtype).float()


FAULTS: list[type[Model]] = [
    *faults_of(Model),
    weight_only.LastK16StepDropped,
    weight_only.GroupBoundaryOffByOne,
    weight_only.NeighbourScaleInOneGroup,
    weight_only.SixteenBitAccumulator,
    weight_only.OneTileFromAStaleStage,
    weight_only.OutputTruncated,
    MinimumIgnored,
    MinimumAdded,
    MinimumOfTheNextGroup,
    MinimumOfAnotherGroupInOneChannel,
    MinimumTakenForAZero,
    MagnitudeOfTheScale,
    FlatGroupsAreZero,
    RoundedBeforeTheMinimum,
]


def of_model(dtype: torch.dtype, bits: int) -> Judged:
    case = Case(64, 256, 4096, bits=bits, group_size=32, zeros="minimum", dtype=dtype, scale_dtype=torch.float32)
    return Judged(case, {"weight_dtype": dtype})


def of_sums(dtype: torch.dtype, bits: int) -> Judged:
    """Judged by the wider bound of kernels that scale sums of codes."""
    return replace(of_model(dtype, bits), reference={"weight_dtype": dtype, "scaled_sums": True})


def draw_levels(dtype: torch.dtype, bits: int) -> Any:
    """Of two levels, with minimums and without."""
    other = draw(OF_MINIMUMS, dtype, bits)

    def case(m: int, n: int, k: int, choose: random.Random) -> Case:
        group, zeros = choose.choice((16, 32, 64, 128)), choose.choice(("minimum", "none"))
        super_groups = choose.choice((128, 256, 512)) // group
        return replace(
            other(m, n, k, choose), group_size=group, zeros=zeros, zero_dtype=None, super_groups=super_groups
        )

    return case


class Minimums(weight_only.WeightOnly):
    name = "gemm with minimums"
    excluded = ("zeros", "global_scale", "super_scales", "super_minimums")
    scale = "a"  # minimums have signs of their own
    boxed = ("a", "scales", "minimums", "bias", "act_scale", "residual")
    finely = MappingProxyType({"group_size": 16})
    inductor = ("plain",)
    whole = replace(weight_only.WeightOnly.whole, zeros="minimum")
    refusals = ()
    layers = ("w4 float16",)
    benched = ("w4a16_g32_min",)

    def __init__(self) -> None:
        super().__init__()
        self.variants = {
            name: options | {"zeros": "minimum", "group_size": 32, "scale_dtype": torch.float32}
            for name, options in self.variants.items()
        }
        self.cases = {name: replace(case, zeros="minimum") for name, case in self.cases.items()}
        self.rows = ROWS
        self.faults = FAULTS
        self.fault_cases = {short(dtype): [of_model(dtype, 4)] for dtype in SIXTEEN_BIT}
        self.fault_cases |= {f"{short(dtype)}, scaled sums": [of_sums(dtype, 4)] for dtype in SIXTEEN_BIT}
        self.sound_cases = {f"w{bits} {short(d)}": [of_model(d, bits)] for bits in (4, 8) for d in SIXTEEN_BIT}
        self.narrow = {
            f"w{bits} {short(d)}": [Case(17, 40, 1000, bits, 32, "minimum", d, bias=True)]
            for bits in (4, 8)
            for d in FLOATS
        }
        self.families = {
            f"{short(d)} w{bits} minimums": draw(OF_MINIMUMS, d, bits) for d in SIXTEEN_BIT for bits in (4, 8)
        }
        self.families |= {
            f"{short(d)} w{bits} two levels": draw_levels(d, bits) for d in SIXTEEN_BIT for bits in (4, 8)
        }
        self.asynchronous = {
            "w4a16 fp16, minimums": {"bits": 4, "dtype": torch.float16, "zeros": "minimum", "bias": True}
        }
        self.explained = {
            "float32": (
                {"zeros": "minimum", "group_size": 32, "scale_dtype": torch.float32},
                "float16 activations by {n} x {k} 4-bit weights, groups of 32, float32 scales, float32 minimums",
            ),
        }

    def case(self, m: int, n: int, k: int, **options: Any) -> Case:
        return Case(m, n, k, **{"zeros": "minimum"} | options)

    def full(self, m: int, n: int, k: int, **options: Any) -> Case:
        return super().full(m, n, k, **{"zeros": "minimum"} | options)

    def any_case(self, variant: str, m: int, n: int, k: int, choose: random.Random) -> Case:
        options = self.variants[variant]
        case: Case = draw(OF_MINIMUMS, options["dtype"], options["bits"])(m, n, k, choose)
        return case


MINIMUMS = Minimums()
