"""The smoothing factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from qcutlass.products.checks import FLOATING, check_matrix, check_tensor, shape_of

_NORMAL: Final = torch.finfo(torch.float32)


def check_channels(name: str, value: Tensor, k: int) -> None:
    """Raises unless `value` is a finite floating vector `[K]`."""
    check_tensor(name, value, FLOATING)
    if value.shape != (k,):
        raise ValueError(f"{name}: expected shape [K] = [{k}], got {shape_of(value)}")
    if not bool(value.isfinite().all()):
        raise ValueError(f"{name}: expected finite values, got NaN or infinity")


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
    if isinstance(alpha, bool) or not isinstance(alpha, float | int):
        raise TypeError(f"alpha: expected a number in [0, 1], got {type(alpha).__name__}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha: expected a number in [0, 1], got {alpha}")

    activations = act_absmax.double()
    columns = torch.zeros_like(activations)
    for name, matrix in zip(names, weights, strict=True):
        if matrix.shape[0]:
            columns = columns.maximum(matrix.detach().abs().amax(dim=0).to(columns))
        if not bool(columns.isfinite().all()):
            raise ValueError(f"{name}: expected finite values, got NaN or infinity")
    dead = (activations == 0) | (columns == 0)
    factors = activations.pow(alpha) / columns.pow(1 - alpha)  # in float64 neither power leaves its range
    factors = factors.masked_fill(dead, 1).clamp(_NORMAL.tiny, _NORMAL.max)
    return factors.float()
