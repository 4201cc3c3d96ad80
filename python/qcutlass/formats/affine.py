"""Weights given as `s * (q - offset) + m`."""

from __future__ import annotations

import torch
from torch import Tensor

from qcutlass.formats.tensors import SHORT, settle_zeros
from qcutlass.quantized import QuantizedTensor


def from_minima(
    codes: Tensor, scales: Tensor, minima: Tensor, bits: int, group_size: int, offset: int = 0
) -> QuantizedTensor:
    """The canonical form of `w[n, k] = scales[g, n] * (codes[n, k] - offset) + minima[g, n]`.

    The zero is offset - m / s, rounded to fp32. A group whose scale is 0 holds m everywhere: its codes become 0, its
    scale m and its zero -1.

    Args:
        codes: uint8 `[N, K]`, changed in place.
        scales, minima: of one type, `[G, N]`, finite.
    """
    flat = scales == 0
    zeros = torch.where(flat, -1.0, offset - _ratio(minima, scales)).float()
    if bool(flat.any()):
        for group in range(len(scales)):
            codes[:, group * group_size : (group + 1) * group_size][flat[group]] = 0
        # where m is 0 too, any zero does
        zeros = torch.where(flat & (minima == 0), float(2 ** (bits - 1)), zeros)
    return QuantizedTensor(codes, torch.where(flat, minima, scales), settle_zeros(zeros, bits), bits, group_size)


def zeros_of(scales: Tensor, minima: Tensor, bits: int) -> Tensor:
    """The zeros float32 of groups that hold `scales * code + minima`; where a scale is 0 any does, here the middle."""
    return torch.where(scales == 0, 2.0 ** (bits - 1), -_ratio(minima, scales)).float()


def minima_of(scales: Tensor, zeros: Tensor) -> Tensor:
    """The minima that zeros stand for, in the type of `scales`: the inverse of `zeros_of` where there is one."""
    return (-zeros.double() * scales.double()).to(scales.dtype)


def are_minima(scales: Tensor, zeros: Tensor | None, bits: int) -> bool:
    """Whether minima of 16 bits say the same as these float32 zeros, to the bit."""
    if zeros is None or zeros.dtype != torch.float32 or scales.dtype not in SHORT:
        return False
    return torch.equal(zeros_of(scales, minima_of(scales, zeros), bits), zeros)


def _ratio(minima: Tensor, scales: Tensor) -> Tensor:
    """float64 `minima / scales`, and anything where a scale is 0."""
    return minima.double() / torch.where(scales == 0, 1, scales).double()
