"""What a decoder block computes between its products: float64 answers, and how far correct ones may be from them."""

from __future__ import annotations

from typing import Final, TypeAlias

import torch
from torch import Tensor

from qcutlass.testing.bounds import UNDERFLOW, UNIT_ROUNDOFF, activate

Answer: TypeAlias = tuple[Tensor, Tensor]
"""float64 values, and the largest error of each in fp32, before it is rounded to the output's type."""

_ROUNDING: Final = UNIT_ROUNDOFF[torch.float32]
_LANES: Final = 16  # sums of squares are kept apart in at least so many parts


def _norm_error(columns: int) -> float:
    """Relative: each part adds up columns / _LANES squares, the parts are added in turn; the root halves that; then a
    root, a quotient and two products."""
    return _ROUNDING * ((columns / _LANES + _LANES) / 2 + 6)


def rms_norm_answer(x: Tensor, weight: Tensor, eps: float) -> Answer:
    """`x * weight / sqrt(mean(x^2) + eps)` over the last dimension."""
    numbers = x.double()
    value = numbers * torch.rsqrt(numbers.square().mean(-1, keepdim=True) + eps) * weight.double()
    return value, value.abs() * _norm_error(x.shape[-1])


def gate_answer(activation: str, gate: Tensor, up: Tensor) -> Answer:
    """`activation(gate) * up`. The error of an activation is relative to its argument: 2^-21 for exp() to within 2^-22,
    a polynomial in front of it, a sum and a quotient."""
    gate, up = gate.double(), up.double()
    return activate(gate, activation) * up, 2.0**-21 * (gate * up).abs()


def rotary_answer(x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None, eps: float) -> Answer:
    """Heads `[B, tokens, heads, size]`, normalised if there is a weight, turned: two products and a sum."""
    numbers, error = x.double(), torch.zeros_like(x, dtype=torch.float64)
    if norm is not None:
        numbers, error = rms_norm_answer(x, norm, eps)
    cos, sin = cos.double().unsqueeze(2), sin.double().unsqueeze(2)

    def turned(numbers: Tensor, sign: int) -> Tensor:
        first, second = numbers.chunk(2, dim=-1)
        return torch.cat((sign * second, first), dim=-1)

    value = numbers * cos + turned(numbers, -1) * sin
    spread = numbers.abs() * cos.abs() + turned(numbers.abs(), 1) * sin.abs()
    return value, 3 * _ROUNDING * spread + error * cos.abs() + turned(error, 1) * sin.abs()


def answer_ratio(out: Tensor, answer: Answer) -> float:
    """The largest error of `out` as a share of its bound, rounding to its type included; at most 1 if it is correct.

    Example:
        >>> import torch
        >>> from qcutlass.testing.decoder import answer_ratio, gate_answer
        >>> gate, up = torch.ones(4), torch.ones(4)
        >>> answer_ratio(torch.nn.functional.silu(gate) * up, gate_answer("silu", gate, up)) <= 1
        True
    """
    value, error = answer
    bound = error + UNIT_ROUNDOFF[out.dtype] * (value.abs() + error) + UNDERFLOW[out.dtype]
    return float(((out.double() - value).abs() / bound).max())
