"""SmoothQuant's factors, which move outliers of activations into the weights, and the search for their exponent.

Source of the method: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models" (2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from qcutlass.algorithms.eight_bit import quantize_activations, quantize_weights_int8
from qcutlass.algorithms.statistics import InputStatistics, check_inputs
from qcutlass.products.checks import (
    FLOATING,
    check_channels,
    check_finite,
    check_matrix,
    check_share,
    check_shares,
    shape_of,
)

ALPHAS: Final = tuple(step / 20 for step in range(4, 20))
_NORMAL: Final = torch.finfo(torch.float32)


def smooth(act_absmax: Tensor, weight: Tensor | Sequence[Tensor], alpha: float = 0.5) -> Tensor:
    """SmoothQuant's factors: `s[k] = act_absmax[k]**alpha / max_n |weight[n, k]|**(1 - alpha)`.

    `(a / s) @ (w * s).T` is the product `a @ w.T`, but the outlier channels of `a` are `alpha` of the way into the
    weights. Channels whose activations or weights are all zero get 1. Xiao et al., "SmoothQuant: Accurate and Efficient
    Post-Training Quantization for Large Language Models" (2022), equation 4.

    Args:
        act_absmax: float16, bfloat16 or float32 `[K]`: largest |activation| of each channel, from `calibrate`.
        weight: float16, bfloat16 or float32 `[N, K]`, or several `[N_i, K]` that share the input (q, k and v).
        alpha: in [0, 1]: how much of the difficulty goes to the weights; 0.5 suits most models, 0.75 those with many
            outliers.

    Returns:
        float32 `[K]` on the device of `act_absmax`: positive, finite and normal.

    Raises:
        TypeError: an operand is not a floating tensor, `alpha` not a number.
        ValueError: shapes disagree, a value is NaN, infinite or (an absmax) negative, `alpha` is outside [0, 1].

    Example:
        >>> import torch, qcutlass
        >>> s = qcutlass.smooth(torch.tensor([100.0, 1.0, 0.0]), torch.tensor([[1.0, 1.0, 1.0], [0.5, 4.0, 1.0]]))
        >>> s
        tensor([10.0000,  0.5000,  1.0000])
    """
    if not isinstance(weight, Tensor | list | tuple):
        raise TypeError(f"weight: expected a matrix or a list of some, got {type(weight).__name__}")
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    if not weights:
        raise ValueError("weight: expected a matrix or several, got none")
    names = ["weight"] if isinstance(weight, Tensor) else [f"weight[{i}]" for i in range(len(weights))]
    for name, matrix in zip(names, weights, strict=True):
        check_matrix(name, matrix, FLOATING)
        if matrix.shape[1] != weights[0].shape[1]:
            raise ValueError(
                f"{name}: expected K = {weights[0].shape[1]} columns as {names[0]}, got {shape_of(matrix)}"
            )
    check_channels("act_absmax", act_absmax, weights[0].shape[1])
    if bool((act_absmax < 0).any()):
        raise ValueError("act_absmax: expected largest absolute values, got a negative one")
    check_share("alpha", alpha)

    activations = act_absmax.double()
    columns = torch.zeros_like(activations)
    for name, matrix in zip(names, weights, strict=True):
        check_finite(name, matrix)
        if matrix.shape[0]:
            columns = columns.maximum(matrix.detach().abs().amax(dim=0).to(columns))
    dead = (activations == 0) | (columns == 0)
    factors = activations.pow(alpha) / columns.pow(1 - alpha)  # in float64 neither power leaves its range
    factors = factors.masked_fill(dead, 1).clamp(_NORMAL.tiny, _NORMAL.max)
    return factors.float()


@dataclass(frozen=True, eq=False)
class Smoothing:
    """The result of `search_smoothing`.

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
        TypeError, ValueError: no weights or no rows, an exponent outside [0, 1]; or as for `qcutlass.smooth`.

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
    check_shares("alphas", alphas)
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
