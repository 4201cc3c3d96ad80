"""GPTQ: rounding column by column, each error made up for by the columns that are still to come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from qcutlass.algorithms.clipping import Penalty, checked_scheme, fit_grid, group_size_of
from qcutlass.algorithms.statistics import check_layer
from qcutlass.defaults import DAMPING as DAMPING
from qcutlass.products.checks import ceil_div, check_flag
from qcutlass.quantized import QuantizedTensor
from qcutlass.schemes import WeightOnly

_COLUMNS: Final = 128  # columns behind these wait until all of them are done
_AT_ONCE: Final = 16  # and among them those behind these: few enough that an update is too small for threads
_LEAST_DAMPING: Final = 1e-3  # of a matrix that is singular in fp32: with less, its rounding errors decide
_MOST_DAMPING: Final = 100.0


@dataclass(frozen=True, eq=False)
class GptqResult:
    """The result of `gptq`.

    Attributes:
        weight: codes, scales and zeros, columns in the order of `perm`.
        perm: int32 `[K]`: column k of the codes meets activation column `perm[k]`; None: in order.
        damping: that was added to the diagonal, as a share of its mean; more than was asked for where the matrix was
            not positive definite.
    """

    weight: QuantizedTensor
    perm: Tensor | None
    damping: float


def gptq(
    weight: Tensor,
    second_moment: Tensor,
    scheme: WeightOnly | None = None,
    *,
    damping: float = DAMPING,
    act_order: bool = False,
    clip: bool = True,
) -> GptqResult:
    """Quantises a layer so that its outputs, not its weights, change little.

    Columns are rounded one after the other; what an error does to the outputs is made up for, as well as can be, by
    changing the columns that follow. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative
    Pre-trained Transformers" (2022): lazy updates of blocks of columns, and the Cholesky factor U of the inverse
    Hessian in place of its repeated elimination. An error e of column k costs (e / U[k, k])^2.

    Scales and zero points of a group are fitted when its first column comes, to the weights as they are then, with the
    range clipped where these costs say so. Where the damped matrix has no Cholesky factor in fp32, the damping grows
    tenfold, to 0.001 at least, until it has one.

    Args:
        weight: float16, bfloat16 or float32 `[N, K]`, finite, on any device.
        second_moment: float32 `[K, K]`, of the layer's `InputStatistics`, on the same device.
        scheme: bits, group size, symmetry and type of the scales; None: `WeightOnly()`.
        damping: share of the diagonal's mean that is added to it.
        act_order: takes the columns by falling diagonal, the most active first; a group is then made of columns from
            anywhere, and the layer gathers its activations by `perm`, which is in order within each group.
        clip: whether ranges are clipped.

    Returns:
        See `GptqResult`. The same bits for the same input on one device.

    Raises:
        TypeError: an operand is not a floating tensor, an option not of its type.
        ValueError: shapes disagree, a value is NaN or infinite, or no damping makes `second_moment` positive definite.

    Example:
        >>> import torch
        >>> from qcutlass.algorithms import InputStatistics, gptq, output_error, round_to_nearest
        >>> generator = torch.Generator().manual_seed(0)
        >>> weight, statistics = torch.randn(64, 256, generator=generator), InputStatistics.empty(256)
        >>> mixing = torch.randn(32, 256, generator=generator)  # inputs that lie near 32 dimensions
        >>> statistics.add(torch.randn(2048, 32, generator=generator) @ mixing)
        >>> found = [gptq(weight, statistics.second_moment).weight, round_to_nearest(weight)]
        >>> errors = [output_error(weight, q.dequantize(), statistics.second_moment) for q in found]
        >>> errors[0] < errors[1] / 4
        True
    """
    check_layer(weight, second_moment)
    check_flag("act_order", act_order)
    check_flag("clip", clip)
    check_damping(damping)
    scheme, second_moment = checked_scheme(scheme), second_moment.detach()
    perm = second_moment.diagonal().argsort(descending=True, stable=True) if act_order else None
    columns = weight.detach().float().T if perm is None else weight.detach().float().T[perm]
    moment = second_moment if perm is None else second_moment[perm][:, perm]
    factor, used = inverse_factor(moment, float(damping))
    codes, scales, zeros = _round(columns.contiguous(), factor, scheme, scheme.scale_dtype or weight.dtype, clip)
    step = group_size_of(scheme, len(codes))
    if perm is not None:
        within = (torch.arange(len(perm), device=perm.device) // step * len(perm) + perm).argsort()
        codes, perm = codes[within], perm[within].to(torch.int32)
    return GptqResult(QuantizedTensor(codes.T.contiguous(), scales, zeros, scheme.bits, step), perm, used)


def check_damping(damping: object) -> None:
    """Raises TypeError or ValueError unless this can be a damping."""
    if isinstance(damping, bool) or not isinstance(damping, float | int):
        raise TypeError(f"damping: expected a number, got {type(damping).__name__}")
    if not 0 <= damping <= _MOST_DAMPING:
        raise ValueError(f"damping: expected a number in [0, {_MOST_DAMPING:g}], got {damping}")


def inverse_factor(moment: Tensor, damping: float) -> tuple[Tensor, float]:
    """The upper Cholesky factor of the inverse of the damped matrix, over its mean diagonal; and the damping used.

    Inputs that are all zero count as uncorrelated.
    """
    mean = float(moment.diagonal().double().mean())
    if mean == 0:
        return torch.eye(len(moment), dtype=torch.float32, device=moment.device), damping
    while damping <= _MOST_DAMPING:
        damped = moment / mean
        damped.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed) and bool(factor.isfinite().all()):
                return factor, damping
        damping = max(_LEAST_DAMPING, 10 * damping)
    raise ValueError("second_moment: expected a positive semidefinite matrix, a mean of x xT; it is far from one")


def _weighted(diagonal: Tensor) -> Penalty:
    """Squares, each column's times its cost, over that of the first: columns that cost alike count as `squares` do."""
    costs = (diagonal[0] / diagonal).square()
    return lambda errors: errors.square().mul_(costs).sum(dim=2)


def _round(
    columns: Tensor, factor: Tensor, scheme: WeightOnly, dtype: torch.dtype, clip: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes `[K, N]`, scales and zeros; `columns`: float32 `[K, N]`, which is used up; `factor`: `[K, K]`."""
    k, n = columns.shape
    step, highest = group_size_of(scheme, k), 2**scheme.bits - 1
    groups = ceil_div(k, step)
    scales = torch.empty((groups, n), dtype=dtype, device=columns.device)
    shifts = torch.empty((groups, n), dtype=torch.float32, device=columns.device)
    codes = torch.empty((k, n), dtype=torch.uint8, device=columns.device)
    diagonal = factor.diagonal()
    for group in range(groups):
        end = min(k, (group + 1) * step)
        for begin in range(group * step, end, _COLUMNS):
            part = slice(begin, min(end, begin + _COLUMNS))
            if begin == group * step:
                penalty = _weighted(diagonal[begin:end]) if clip else None
                grid = fit_grid(columns[begin:end].T[:, None].contiguous(), scheme, dtype, penalty)
                scales[group], shifts[group] = grid.scales[:, 0], grid.shifts[:, 0]
            scale, shift = scales[group].float(), shifts[group]
            errors = torch.empty_like(columns[part])
            for inner in range(begin, part.stop, _AT_ONCE):
                last = min(part.stop, inner + _AT_ONCE)
                for column in range(inner, last):
                    row = factor[column, column:last]
                    code = (columns[column] / scale).round_().add_(shift).clamp_(0, highest)
                    codes[column] = code
                    error = errors[column - begin]
                    torch.div(columns[column] - (code - shift) * scale, row[0], out=error)
                    columns[column:last].addr_(row, error, alpha=-1)
                done = errors[inner - begin : last - begin]
                columns[last : part.stop].addmm_(factor[inner:last, last : part.stop].T, done, alpha=-1)
            columns[part.stop :].addmm_(factor[part, part.stop :].T, errors, alpha=-1)
    return codes, scales, None if scheme.symmetric else shifts.to(torch.uint8)
