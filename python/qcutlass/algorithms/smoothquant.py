"""SmoothQuant's exponent, chosen for each group of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from qcutlass.algorithms.statistics import InputStatistics, check_inputs
from qcutlass.quantizers import quantize_activations, quantize_weights_int8
from qcutlass.smoothquant.factors import smooth

ALPHAS: Final = tuple(step / 20 for step in range(4, 20))


@dataclass(frozen=True, eq=False)
class Smoothing:
    """What `search_smoothing` found.

    Attributes:
        factors: float32 `[K]`, by which activations are divided and the weights' columns multiplied; None: none help.
        alpha: of `qcutlass.smooth`; None: no smoothing.
        error: sum of squared errors of the outputs on the kept rows.
        plain_error: the same without smoothing.
    """

    factors: Tensor | None
    alpha: float | None
    error: float
    plain_error: float


def search_smoothing(
    weights: Sequence[Tensor], statistics: InputStatistics, alphas: Sequence[float] = ALPHAS
) -> Smoothing:
    """Searches the exponent of `qcutlass.smooth` with which W8A8 layers err least on some of their inputs.

    Activations are quantised per token and weights per channel, as `qcutlass.W8A8()` does. Xiao et al., "SmoothQuant"
    (2022), section 4, which searches one exponent for a model; here each group of layers has its own.

    Args:
        weights: floating `[N_i, K]`: all layers that read the same input.
        statistics: of that input, with kept rows (`InputStatistics.empty(k, rows_a_call=...)`).
        alphas: that are tried, beside no smoothing. The first of equally good ones is taken.

    Raises:
        ValueError: no weights or no rows; or as for `qcutlass.smooth`.

    Example:
        >>> import torch
        >>> from qcutlass.algorithms import InputStatistics, search_smoothing
        >>> x, statistics = torch.randn(64, 256), InputStatistics.empty(256, rows_a_call=64)
        >>> x[:, :4] *= 100  # outliers that spoil the scale of every token
        >>> statistics.add(x)
        >>> found = search_smoothing([torch.randn(32, 256)], statistics)
        >>> found.error < found.plain_error / 10
        True
    """
    check_inputs(weights, statistics)
    if not len(statistics.rows):
        raise ValueError("statistics: expected some rows of inputs; make them with InputStatistics.empty(rows_a_call=)")
    rows = statistics.rows
    exact = [rows @ weight.float().T for weight in weights]
    ones = torch.ones_like(statistics.absmax)
    plain = _error(rows, weights, exact, ones)
    best = Smoothing(None, None, plain, plain)
    for alpha in alphas:
        factors = smooth(statistics.absmax, list(weights), alpha)
        error = _error(rows, weights, exact, factors)
        if error < best.error:
            best = Smoothing(factors, alpha, error, plain)
    return best


def _error(rows: Tensor, weights: Sequence[Tensor], exact: Sequence[Tensor], factors: Tensor) -> float:
    codes, scales = quantize_activations(rows / factors)[:2]
    activations = codes.float() * scales[:, None]
    error = 0.0
    for weight, expected in zip(weights, exact, strict=True):
        w_q, w_scale = quantize_weights_int8(weight.float() * factors)
        found = activations @ (w_q.float() * w_scale[:, None]).T
        error += float((found - expected).double().square().sum())
    return error
