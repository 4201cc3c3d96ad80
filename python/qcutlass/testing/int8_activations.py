"""Weight-only products of activations that are quantised to int8 in blocks: their oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from qcutlass.testing.bounds import (
    EXACT_LIMIT,
    UNIT_ROUNDOFF,
    Reference,
    combined_levels,
    finished_by,
    scaled_activations,
)
from qcutlass.testing.problems import Problem

BLOCK: Final = 32
"""Columns of activations that share a scale."""
STEP: Final = 16
"""Columns of which a group of weights holds a whole number, unless it is the only one."""
_LARGEST: Final = 127
_LEAST_SCALE: Final = 2.0**-126
_ROUNDING: Final = UNIT_ROUNDOFF[torch.float32]


@dataclass(frozen=True)
class Int8ActivationsReference(Reference):
    """The float64 answer for quantised activations.

    Oracle T. The sum of codes by codes over a run of columns, d, and that of the activations' codes, s, are exact. With
    a zero point z, d - z * s has two roundings, of z * s and of the difference (none where z is an integer and the
    product holds no more than 24 bits); two scales add two more. Of R terms t, in fp32 and in any order, each takes
    part in at most R additions. So

        |x' - x| <= 2^-24 * (sum|z * s * a_scale * w_scale| + (R + 3) * sum|t|),

    beside what `bound` adds for the bias, the activation and the output. With a minimum m both products of
    (d * w_scale - m * s) * a_scale are rounded, so that sum|d * w_scale * a_scale| + sum|m * s * a_scale| takes the
    first sum's place.

    Attributes:
        magnitude: float64 `[M, N]`, sum|t|.
        offset: float64 `[M, N]`, the first sum, of the products that are rounded before a difference.
        runs: R.
    """

    magnitude: Tensor
    offset: Tensor
    runs: int

    def rows(self, begin: int, end: int) -> Int8ActivationsReference:
        parts = {name: getattr(self, name)[begin:end] for name in ("sum", "spread", "magnitude", "offset")}
        residual = None if self.residual is None else self.residual[begin:end]
        return replace(self, **parts, residual=residual)

    def sum_error(self, splits: int) -> Tensor:
        return _ROUNDING * (self.offset + (self.runs + 3) * self.magnitude)


def int8_activations(x: Tensor, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Quantises rows in blocks of columns: codes = round(x / scale), scale = max|x| / 127, every operation in fp32.

    Args:
        x: floating `[M, K]`.
        block: columns of a block; the last one may be short.

    Returns:
        int8 codes `[M, K]`, float32 scales `[M, ceil(K / block)]`.

    Example:
        >>> import torch
        >>> from qcutlass import testing
        >>> codes, scales = testing.int8_activations(torch.tensor([[2.0, -1.0, 0.5]]))
        >>> codes.tolist()
        [[127, -64, 32]]
    """
    m, k = x.shape
    blocks = -(-k // block)
    padded = torch.nn.functional.pad(x.float(), (0, blocks * block - k)).view(m, blocks, block)
    largest = padded.abs().amax(2)
    scales = torch.where(largest == 0, 1.0, (largest / _LARGEST).clamp(min=_LEAST_SCALE))
    codes = (padded / scales[..., None]).round().to(torch.int8)
    return codes.view(m, blocks * block)[:, :k], scales


def int8_activations_reference(problem: Problem) -> Int8ActivationsReference:
    """The float64 answer of `qcutlass.gemm(..., activations="int8")` for a problem.

    ValueError where groups of weights are neither one a channel nor a multiple of 16 columns.
    """
    n, k = problem.codes.shape
    grouped = problem.group_size < k
    if grouped and problem.group_size % STEP:
        raise ValueError(f"group_size must be a multiple of {STEP}, or one group, got {problem.group_size}")
    run = STEP if grouped and problem.group_size % BLOCK else BLOCK
    x = scaled_activations(problem.a, problem.act_scale, problem.perm).reshape(-1, k)
    codes, a_scales = int8_activations(x)
    w_scales = combined_levels(problem.scales.reshape(-1, n), problem.super_scales).double()
    minimums = problem.minimums
    if minimums is not None:
        minimums = combined_levels(minimums.reshape(-1, n), problem.super_minimums).double()
    if problem.zeros is None:
        zeros = torch.full_like(w_scales, 2.0 ** (problem.bits - 1))
    else:
        zeros = problem.zeros.reshape(-1, n).double()
    real = problem.zeros is not None and problem.zeros.is_floating_point()
    total, magnitude, offset = (torch.zeros(len(x), n, dtype=torch.float64) for _ in range(3))
    for begin in range(0, k, run):
        columns, group = slice(begin, min(begin + run, k)), begin // problem.group_size if grouped else 0
        a_q, w_q = codes[:, columns].double(), problem.codes[:, columns].double()
        a_scale, dots, codes_sum = a_scales[:, begin // BLOCK, None].double(), a_q @ w_q.T, a_q.sum(1, keepdim=True)
        if minimums is None:
            shift, scale = codes_sum * zeros[group], a_scale * w_scales[group]
            term = (dots - shift) * scale
            offset += (shift * scale).abs() * ((shift.abs() > EXACT_LIMIT) | real)
        else:
            product, shift = dots * w_scales[group] * a_scale, codes_sum * minimums[group] * a_scale
            term = product - shift
            offset += product.abs() + shift.abs()
        total += term
        magnitude += term.abs()
    bias = None if problem.bias is None else problem.bias.double()
    runs = -(-k // run)
    sums = total, total, k, bias, problem.activation, problem.a.dtype
    return finished_by(Int8ActivationsReference(*sums, magnitude, offset, runs), problem.residual)
