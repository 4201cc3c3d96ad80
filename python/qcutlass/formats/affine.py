"""Weights given as `s * (q - offset) + m`."""

from __future__ import annotations

import torch
from torch import Tensor

from qcutlass.formats.tensors import settle_zeros
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
    ratio = minima.double() / torch.where(flat, 1, scales).double()
    zeros = torch.where(flat, -1.0, offset - ratio).float()
    if bool(flat.any()):
        for group in range(len(scales)):
            codes[:, group * group_size : (group + 1) * group_size][flat[group]] = 0
        # where m is 0 too, any zero does
        zeros = torch.where(flat & (minima == 0), float(2 ** (bits - 1)), zeros)
    return QuantizedTensor(codes, torch.where(flat, minima, scales), settle_zeros(zeros, bits), bits, group_size)
