"""Products of a mixture of experts to test: each expert's rows are a product of their own, judged by its oracles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qcutlass.testing.bounds import UNIT_ROUNDOFF, evaluation_error, rounding_error
from qcutlass.testing.fields import check_fields, generator
from qcutlass.testing.problems import Case, Problem


@dataclass(frozen=True, eq=False, repr=False)
class GroupedProblem:
    """A grouped product.

    Attributes:
        a: `[T, K]`.
        experts: a problem each, whose activations are `a`.
        offsets, rows, row_scale: as `qcutlass.gemm_grouped` takes them.
        m: rows of the output.
    """

    a: Tensor
    experts: tuple[Problem, ...]
    offsets: Tensor
    rows: Tensor | None
    row_scale: Tensor | None
    m: int
    seed: int = 0

    def stacked(self, name: str) -> Tensor | None:
        """Codes, scales, biases or other parts of all experts."""
        tensors = [getattr(expert, name) for expert in self.experts]
        return None if tensors[0] is None else torch.stack(tensors)

    def parts(self) -> Iterator[tuple[slice, Problem]]:
        """The rows of each expert that has some, and their product before rows are scaled."""
        source = torch.arange(self.m, device=self.a.device) if self.rows is None else self.rows.long()
        for expert, (begin, end) in zip(self.experts, itertools.pairwise(self.offsets.tolist()), strict=True):
            if end > begin:
                yield slice(begin, end), replace(expert, a=self.a[source[begin:end]])

    def _scale(self, rows: slice) -> Tensor:
        ones = torch.ones(self.m, device=self.a.device)
        return (ones if self.row_scale is None else self.row_scale)[rows, None].double()

    def expected(self) -> Tensor:
        """Oracle E: `[m, N]`, where sums are exact."""
        out = self.a.new_zeros(self.m, self.experts[0].codes.shape[0])
        for rows, part in self.parts():
            out[rows] = (part.reference().value * self._scale(rows)).to(out.dtype)
        return out

    def error_ratio(self, out: Tensor, weight_dtype: torch.dtype | None = None) -> float:
        """Oracle T: the largest error over its bound; infinite where a row of nobody is not zero.

        A row's scale s multiplies the fp32 result and its error, and rounds once more, u(fp32) |s value|.
        """
        nobodys = torch.ones(self.m, dtype=torch.bool, device=out.device)
        worst = 0.0
        for rows, part in self.parts():
            nobodys[rows] = False
            ref, scale = part.reference(weight_dtype), self._scale(rows)
            value = ref.value * scale
            limit = rounding_error(value, ref.dtype) + evaluation_error(ref) * scale.abs() + ref.underflow
            if self.row_scale is not None:
                limit = limit + UNIT_ROUNDOFF[torch.float32] * value.abs()
            ratios = (out[rows].double() - value).abs() / limit
            worst = max(worst, float(ratios.nan_to_num(nan=torch.inf).max()))
        return worst if bool((out[nobodys] == 0).all()) else torch.inf

    def __repr__(self) -> str:
        counts = self.offsets.diff().tolist()
        gathers, scales = self.rows is not None, self.row_scale is not None
        return f"rows {counts} of {self.m}, gathers={gathers}, scales={scales}, seed={self.seed}, {self.experts[0]}"


@dataclass(frozen=True)
class GroupedCase:
    """A case of grouped products; `random` and `exact` fill it with data.

    Attributes:
        case: of every expert; its m is the number of tokens T.
        counts: rows of each expert.
        before, after: rows of nobody before and after them.
        gathered: rows are any tokens, some of them several times; otherwise there are as many tokens as rows.
        scaled: rows have scales.
    """

    case: Case
    counts: tuple[int, ...]
    before: int = 0
    after: int = 0
    gathered: bool = True
    scaled: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def m(self) -> int:
        """Rows of the output."""
        return self.before + sum(self.counts) + self.after

    def _problem(self, experts: list[Problem], seed: int, row_scale: Tensor) -> GroupedProblem:
        a = experts[0].a
        g = generator(a.device, seed + 1)
        offsets = torch.tensor([0, *itertools.accumulate(self.counts)], device=a.device) + self.before
        rows = torch.randint(0, max(1, a.shape[0]), (self.m,), generator=g, device=a.device, dtype=torch.int32)
        return GroupedProblem(
            a,
            tuple(experts),
            offsets.int(),
            rows if self.gathered else None,
            row_scale if self.scaled else None,
            self.m,
            seed,
        )

    def _of_experts(self) -> Case:
        return self.case if self.gathered else replace(self.case, m=self.m)

    def random(self, *, device: torch.device | str = "cpu", seed: int = 0) -> GroupedProblem:
        """Data as `Case.random` draws it; scales of rows in [-1, 1)."""
        count = range(len(self.counts))
        experts = [self._of_experts().random(device=device, seed=seed + 1000 * e) for e in count]
        g = generator(device, seed + 2)
        return self._problem(experts, seed, 2 * torch.rand(self.m, generator=g, device=device) - 1)

    def exact(self, *, device: torch.device | str = "cpu", seed: int = 0) -> tuple[GroupedProblem, Tensor]:
        """Oracle E, as `Case.exact`; scales of rows are 1, 1/2 and 1/4 in turn."""
        count = range(len(self.counts))
        experts = [self._of_experts().exact(device=device, seed=seed + 1000 * e)[0] for e in count]
        powers = torch.exp2(-(torch.arange(self.m, device=device) % 3).float())
        problem = self._problem(experts, seed, powers)
        return problem, problem.expected()
