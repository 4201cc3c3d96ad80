"""Weights of 4 or 8 bits, each the nearest code of its group's grid."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from qcutlass.products.checks import (
    FLOATING,
    ceil_div,
    check_flag,
    check_group_size,
    check_integer,
    check_matrix,
    check_values,
)
from qcutlass.products.packing import PACKINGS
from qcutlass.quantized import QuantizedTensor

_BLOCK: Final = 1 << 23  # weights worked on at a time: bounds the fp32 temporaries


def round_up(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest value of `dtype` that is not below the positive fp32 `scales`."""
    rounded = scales.to(dtype)
    if dtype == torch.float32:
        return rounded
    successor = (rounded.view(torch.int16) + 1).view(dtype)  # positive numbers are ordered like their bit patterns
    return torch.where(rounded.float() < scales, successor, rounded)


def grouped(weight: Tensor, group_size: int) -> Tensor:
    """float32 `[n, G, group_size]` of a matrix `[n, K]`, zeros behind its end, which never widen a range."""
    n, k = weight.shape
    groups = ceil_div(k, group_size)
    blocks = weight.new_zeros((n, groups * group_size), dtype=torch.float32)
    blocks[:, :k] = weight
    return blocks.view(n, groups, group_size)


def scales_of(low: Tensor, high: Tensor, bits: int, symmetric: bool, dtype: torch.dtype) -> Tensor:
    """The scales in `dtype` that span fp32 ranges with low <= 0 <= high; 1 where both are 0, infinity on overflow."""
    if symmetric:
        extent = high.maximum(-low)
        ideal = extent / (2 ** (bits - 1) - 1)
    else:
        extent = high - low
        ideal = extent / (2**bits - 1)
    scales = round_up(ideal.clamp(min=torch.finfo(torch.float32).tiny), dtype)
    return torch.where(extent == 0, torch.ones_like(scales), scales)


def overflow(blocks: Tensor, dtype: torch.dtype) -> ValueError:
    """The error where scales of fp32 groups `[n, G, group_size]`, as `scales_of` makes them, overflow `dtype`.

    In float32 and bfloat16 that happens where the extent of a group, from low to high, does.
    """
    if not bool(blocks.isfinite().all()):
        return ValueError("weight: expected finite values, got NaN or infinity")
    if dtype == torch.float16:
        return ValueError(f"weight: a scale overflows {dtype}; pass scale_dtype=torch.float32 or torch.bfloat16")
    return ValueError(
        f"weight: the range of a group overflows float32, got weights from {float(blocks.amin()):.3g} to "
        f"{float(blocks.amax()):.3g}; pass symmetric=True, whose scales come from the largest magnitude alone, or "
        "smaller weights"
    )


def shifts_of(low: Tensor, divisor: Tensor, bits: int, symmetric: bool) -> Tensor:
    """The zero points of ranges that begin at `low`, whole numbers in fp32; `divisor`: fp32 scales."""
    if symmetric:
        return torch.full_like(divisor, 2 ** (bits - 1))
    return (-low / divisor).round_().clamp_(0, 2**bits - 1)


def _quantize_rows(
    weight: Tensor, bits: int, group_size: int, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes `[n, K]`, scales `[n, G]` and zero points `[n, G]` of some rows."""
    n, k = weight.shape
    blocks = grouped(weight, group_size)
    low, high = blocks.amin(dim=2).clamp_(max=0), blocks.amax(dim=2).clamp_(min=0)
    scales = scales_of(low, high, bits, symmetric, scale_dtype)
    if not bool(scales.isfinite().all()):
        raise overflow(blocks, scale_dtype)
    divisor, highest = scales.float(), 2**bits - 1
    shift = shifts_of(low, divisor, bits, symmetric)
    zeros = None if symmetric else shift.to(torch.uint8)
    codes = (blocks / divisor[:, :, None]).round_().add_(shift[:, :, None]).clamp_(0, highest).to(torch.uint8)
    return codes.view(n, -1)[:, :k], scales, zeros


def quantize(
    weight: Tensor,
    bits: int = 4,
    group_size: int | None = 128,
    symmetric: bool = False,
    *,
    scale_dtype: torch.dtype | None = None,
) -> QuantizedTensor:
    """Quantises a weight matrix by rounding to nearest.

    With lo = min(group, 0) and hi = max(group, 0), a group of weights gets

    * asymmetric: scale = (hi - lo) / (2**bits - 1), zero = round(-lo / scale), code = round(w / scale) + zero;
    * symmetric: scale = max|w| / (2**(bits - 1) - 1), code = round(w / scale) + 2**(bits - 1), `zeros` is None.

    The scale is rounded up to `scale_dtype` before the codes are computed, so that the stored scale spans the group:
    every weight is reproduced to within half a scale (before the dequantised weight itself is rounded to its type),
    and weights that are zero stay zero. Groups of zeros get scale 1. This is the min-max quantiser of Jacob et al.,
    "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference" (2018), per group.

    Args:
        weight: float16, bfloat16 or float32 `[N, K]` (out_features, in_features), on the CPU or a GPU; finite.
        bits: 4 or 8.
        group_size: columns that share a scale, any number; the last group may be shorter. None or -1: one scale a
            channel. The CUDA kernels take multiples of 16 and one scale a channel.
        symmetric: whether the zero point is fixed at 2**(bits - 1).
        scale_dtype: float16, bfloat16 or float32; None: the type of `weight`.

    Returns:
        Codes uint8 `[N, K]`, scales `[G, N]`, zeros uint8 `[G, N]` or None, on the device of `weight`.

    Raises:
        TypeError: `weight` is not a floating tensor, or an option has another type.
        ValueError: `weight` is not a matrix, holds NaN or infinity, or a scale does not fit `scale_dtype`.

    Example:
        >>> import torch, qcutlass
        >>> q = qcutlass.quantize(torch.randn(64, 256), bits=4, group_size=128)
        >>> q.scales.shape, q.bits_per_weight
        (torch.Size([2, 64]), 4.3125)
    """
    check_matrix("weight", weight, FLOATING)
    check_integer("bits", bits, PACKINGS)
    n, k = weight.shape
    if k < 1:
        raise ValueError(f"weight: K must be at least 1, got shape {[n, k]}")
    size = -1 if group_size is None else group_size
    check_group_size(size)
    check_flag("symmetric", symmetric)
    dtype = weight.dtype if scale_dtype is None else scale_dtype
    check_values("weight", weight)
    if dtype not in FLOATING:
        raise TypeError(f"scale_dtype: expected float16, bfloat16 or float32, got {dtype}")
    step = k if size == -1 else min(size, k)
    groups = ceil_div(k, step)

    codes = torch.empty((n, k), dtype=torch.uint8, device=weight.device)
    scales = torch.empty((groups, n), dtype=dtype, device=weight.device)
    zeros = None if symmetric else torch.empty((groups, n), dtype=torch.uint8, device=weight.device)
    rows = max(1, _BLOCK // k)
    for begin in range(0, n, rows):
        part = slice(begin, min(n, begin + rows))
        codes[part], part_scales, part_zeros = _quantize_rows(weight[part].detach(), bits, step, bool(symmetric), dtype)
        scales[:, part] = part_scales.T
        if zeros is not None and part_zeros is not None:
            zeros[:, part] = part_zeros.T
    return QuantizedTensor(codes, scales, zeros, bits, step)
