"""Grids of scales and zero points, the search for the best clipped one, and rounding to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from qcutlass.algorithms.nearest import grouped, overflow, scales_of, shifts_of
from qcutlass.algorithms.statistics import check_weight
from qcutlass.products.checks import ceil_div, check_flag, check_values
from qcutlass.quantized import QuantizedTensor
from qcutlass.schemes import WeightOnly

RATIOS: Final = tuple(1 - step / 32 for step in range(17))
"""Shares of a group's range that are tried, the whole first."""

_BLOCK: Final = 1 << 22  # weights worked on at a time: bounds the temporaries

Penalty = Callable[[Tensor], Tensor]
"""The cost of errors `[n, G, group_size]` for each group, `[n, G]`."""


class Grid(NamedTuple):
    """`w = (code - shift) * scale` for each row and group."""

    scales: Tensor
    shifts: Tensor

    def codes(self, blocks: Tensor, bits: int) -> Tensor:
        """Whole numbers in fp32 `[n, G, group_size]`, the nearest for each weight."""
        codes = blocks / self.scales.float()[:, :, None]
        return codes.round_().add_(self.shifts[:, :, None]).clamp_(0, 2**bits - 1)

    def values(self, codes: Tensor) -> Tensor:
        """The weights that codes stand for, fp32."""
        return (codes - self.shifts[:, :, None]) * self.scales.float()[:, :, None]


def checked_scheme(scheme: WeightOnly | None) -> WeightOnly:
    """The scheme, or the default one; TypeError for any other kind."""
    if not isinstance(scheme, WeightOnly | None):
        raise TypeError(
            f"scheme: expected a qcutlass.WeightOnly or None, got {type(scheme).__name__}; "
            "activations keep their type here, only weights are quantised"
        )
    if scheme is not None and scheme.weight_dtype is not None:
        raise ValueError(f"scheme: expected integer codes, got {scheme.weight_dtype}: these are rounded to the nearest")
    return scheme or WeightOnly()


def group_size_of(scheme: WeightOnly, k: int) -> int:
    """Columns of a group."""
    return k if scheme.group_size in (None, -1) else min(scheme.group_size or k, k)


def fit_grid(blocks: Tensor, scheme: WeightOnly, dtype: torch.dtype, penalty: Penalty | None) -> Grid:
    """The grid of each group, clipped as costs the least; spanning all of it where there is no `penalty`.

    Args:
        blocks: float32 `[n, G, group_size]`.
        scheme: bits, and whether the grid is symmetric.
        dtype: of the scales.
        penalty: of errors. The first of equally good ratios, the widest, is taken.
    """
    low, high = blocks.amin(dim=2).clamp_(max=0), blocks.amax(dim=2).clamp_(min=0)
    best = _grid(low, high, scheme, dtype)
    if not bool(best.scales.isfinite().all()):
        raise overflow(blocks, dtype)
    if penalty is None:
        return best
    least = _cost(blocks, best, scheme.bits, penalty)
    for ratio in RATIOS[1:]:
        grid = _grid(low * ratio, high * ratio, scheme, dtype)
        cost = _cost(blocks, grid, scheme.bits, penalty)
        better = cost < least
        least = torch.where(better, cost, least)
        best = Grid(*(torch.where(better, new, old) for new, old in zip(grid, best, strict=True)))
    return best


def _grid(low: Tensor, high: Tensor, scheme: WeightOnly, dtype: torch.dtype) -> Grid:
    scales = scales_of(low, high, scheme.bits, scheme.symmetric, dtype)
    return Grid(scales, shifts_of(low, scales.float(), scheme.bits, scheme.symmetric))


def _cost(blocks: Tensor, grid: Grid, bits: int, penalty: Penalty) -> Tensor:
    return penalty(grid.values(grid.codes(blocks, bits)).sub_(blocks))


def squares(errors: Tensor) -> Tensor:
    """The penalty of weights that all matter alike."""
    return errors.square().sum(dim=2)


def quantize_with(weight: Tensor, scheme: WeightOnly, penalty: Penalty | None) -> QuantizedTensor:
    """Rounds each weight to the nearest value of the grid that `fit_grid` finds."""
    n, k = weight.shape
    step = group_size_of(scheme, k)
    groups, dtype = ceil_div(k, step), scheme.scale_dtype or weight.dtype
    codes = torch.empty((n, k), dtype=torch.uint8, device=weight.device)
    scales = torch.empty((groups, n), dtype=dtype, device=weight.device)
    shifts = torch.empty((groups, n), dtype=torch.uint8, device=weight.device)
    rows = max(1, _BLOCK // k)
    for begin in range(0, n, rows):
        part = slice(begin, min(n, begin + rows))
        blocks = grouped(weight[part].detach(), step)
        grid = fit_grid(blocks, scheme, dtype, penalty)
        codes[part] = grid.codes(blocks, scheme.bits).view(len(blocks), -1)[:, :k]
        scales[:, part], shifts[:, part] = grid.scales.T, grid.shifts.T.to(torch.uint8)
    return QuantizedTensor(codes, scales, None if scheme.symmetric else shifts, scheme.bits, step)


def round_to_nearest(weight: Tensor, scheme: WeightOnly | None = None, *, clip: bool = True) -> QuantizedTensor:
    """Rounds to nearest, with the range of each group clipped where that makes the squared error smaller.

    Like `qcutlass.quantize`, which spans the whole range of a group; here the range is also shrunk, in 16 steps down to
    half, and the one with the smallest sum of squared errors is taken. Without calibration this is the best that is
    known of the weights; see Nagel et al., "A White Paper on Neural Network Quantization" (2021), section 3.1.

    Args:
        weight: float16, bfloat16 or float32 `[N, K]`, finite, on any device.
        scheme: bits, group size, symmetry and type of the scales; None: `WeightOnly()`.
        clip: False: `qcutlass.quantize`.

    Returns:
        Codes, scales and zeros, on the device of `weight`.

    Raises:
        TypeError: `weight` is not a floating tensor, an option not of its type.
        ValueError: `weight` is not a matrix, holds NaN or infinity, or a scale does not fit its type.

    Example:
        >>> import torch, qcutlass
        >>> from qcutlass.algorithms import round_to_nearest
        >>> weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
        >>> errors = [(q.dequantize() - weight).norm() for q in (round_to_nearest(weight), qcutlass.quantize(weight))]
        >>> bool(errors[0] < errors[1])
        True
    """
    check_weight("weight", weight)
    check_values("weight", weight)
    check_flag("clip", clip)
    return quantize_with(weight, checked_scheme(scheme), squares if clip else None)
