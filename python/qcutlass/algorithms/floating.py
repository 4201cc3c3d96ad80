"""Weights that are floating numbers of 4 or 8 bits, e2m1 and e4m3, each the nearest of its group's grid."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from qcutlass.algorithms.nearest import grouped, quantize, round_up
from qcutlass.products.checks import E8M0, FLOATING, ceil_div, check_finite, check_group_size, check_matrix, names_of
from qcutlass.products.packing import CODE_TYPES, check_weight_dtype
from qcutlass.quantized import QuantizedTensor
from qcutlass.schemes import WeightOnly

_LARGEST: Final = {"e2m1": 6.0, "e4m3": 448.0}
_LARGEST_E4M3: Final = 448.0
_EXPONENT: Final = 2  # of e2m1's largest number

# Least magnitudes of e2m1 codes 1 to 7, in which 1, 3, 5 and 7 lose ties to their even neighbours.
_TIES: Final = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_BOUNDS: Final = tuple(
    tie if code % 2 else float(torch.nextafter(*torch.tensor([tie, 0.0], dtype=torch.float32)))
    for code, tie in enumerate(_TIES, 1)
)


def quantize_floats(
    weight: Tensor,
    weight_dtype: str = "e2m1",
    group_size: int | None = 32,
    *,
    scale_dtype: torch.dtype | None = None,
) -> QuantizedTensor:
    """Quantises a weight matrix to floating numbers of few bits, by rounding to nearest even.

    A group of weights with the largest magnitude `amax` gets, F being the largest number of `weight_dtype`,

    * floating scales: scale = amax / F, rounded up to their type, and 1 for groups of zeros;
    * float8_e8m0fnu: scale = 2**(floor(log2(amax)) - 2), as the OCP Microscaling specification has it (2023): numbers
      beyond 6 become 6. With groups of 32 this is MXFP4;
    * float8_e4m3fn: scale = round(amax / 6 / global_scale), global_scale = 1 / round(6 * 448 / amax of all weights).
      With groups of 16 this is NVFP4; compressed-tensors holds that rounded number.

    A code is the number nearest to weight / scale; where scales are 0, it is 0.

    Args:
        weight: float16, bfloat16 or float32 `[N, K]`, on the CPU or a GPU; finite.
        weight_dtype: "e2m1" or "e4m3".
        group_size: columns that share a scale; the last group may be shorter. None or -1: one scale a channel.
        scale_dtype: a type that `gemm` takes; None: the type of `weight`.

    Returns:
        Codes uint8 `[N, K]` and scales `[G, N]`, on the device of `weight`.

    Raises:
        TypeError: `weight` is not a floating tensor, or an option has another type.
        ValueError: `weight` is not a matrix, holds NaN or infinity, or a scale does not fit `scale_dtype`.

    Example:
        >>> import torch
        >>> from qcutlass.algorithms import quantize_floats
        >>> q = quantize_floats(torch.randn(64, 256), "e2m1", 32, scale_dtype=torch.float8_e8m0fnu)
        >>> q.scales.shape, q.bits_per_weight
        (torch.Size([8, 64]), 4.25)
    """
    check_matrix("weight", weight, FLOATING)
    if weight_dtype is None:
        raise TypeError("weight_dtype: expected 'e2m1' or 'e4m3', got None; use quantize for integers")
    check_weight_dtype(weight_dtype)
    size = -1 if group_size is None else group_size
    check_group_size(size)
    n, k = weight.shape
    if k < 1:
        raise ValueError(f"weight: K must be at least 1, got shape {[n, k]}")
    dtype = scale_dtype or weight.dtype
    allowed = CODE_TYPES[weight_dtype].scales
    if dtype not in allowed:
        raise TypeError(f"scale_dtype: expected one of {names_of(allowed)} for {weight_dtype}, got {dtype}")
    check_finite("weight", weight)
    step = k if size == -1 else min(size, k)
    blocks = grouped(weight.detach(), step)
    amax = blocks.abs().amax(dim=2) if n else blocks.new_zeros((n, ceil_div(k, step)))
    global_scale = None
    if dtype in E8M0:
        scales = _powers(amax).to(dtype)
    elif dtype == torch.float8_e4m3fn:
        whole = amax.amax().reshape(1) if n else amax.new_zeros(1)
        global_scale = _global_scale(whole)
        scales = (amax / _LARGEST["e2m1"] / global_scale).clamp(max=_LARGEST_E4M3).to(dtype)
    else:
        ideal = (amax / _LARGEST[weight_dtype]).clamp(min=torch.finfo(torch.float32).tiny)
        scales = torch.where(amax == 0, 1.0, round_up(ideal, dtype)).to(dtype)
        if not bool(scales.isfinite().all()):
            raise ValueError(f"weight: a scale overflows {dtype}; pass scale_dtype=torch.float32 or torch.bfloat16")
    divisor = scales.float() if global_scale is None else scales.float() * global_scale
    numbers = torch.where(divisor[:, :, None] == 0, 0.0, blocks / divisor[:, :, None])
    codes = (nearest_e2m1 if weight_dtype == "e2m1" else _nearest_e4m3)(numbers).flatten(1)[:, :k]
    bits = CODE_TYPES[weight_dtype].bits
    return QuantizedTensor(codes.contiguous(), scales.T.contiguous(), None, bits, step, weight_dtype, global_scale)


def _global_scale(amax: Tensor) -> Tensor:
    """float32 `[1]`: the reciprocal of the number by which others divide, where that is finite; 1 for zeros."""
    largest = torch.full_like(amax, _LARGEST["e2m1"] * _LARGEST_E4M3)
    divisor = largest / amax
    return torch.where(amax > 0, torch.where(divisor.isfinite(), 1 / divisor, amax / largest), 1)


def quantize_nearest(weight: Tensor, scheme: WeightOnly) -> QuantizedTensor:
    """Quantises a weight matrix as `scheme` says, to integers or floating numbers, by rounding to nearest."""
    if scheme.weight_dtype is not None:
        return quantize_floats(weight, scheme.weight_dtype, scheme.group_size, scale_dtype=scheme.scale_dtype)
    return quantize(weight, scheme.bits, scheme.group_size, scheme.symmetric, scale_dtype=scheme.scale_dtype)


def nearest_e2m1(numbers: Tensor) -> Tensor:
    """Bits of the e2m1 numbers nearest to float32 ones, ties to even codes; 6 for all beyond it. Zeros are positive."""
    codes = torch.bucketize(numbers.abs(), torch.tensor(_BOUNDS, dtype=numbers.dtype, device=numbers.device))
    return torch.where((numbers < 0) & (codes > 0), codes + 8, codes).to(torch.uint8)


def _nearest_e4m3(numbers: Tensor) -> Tensor:
    return numbers.clamp(-_LARGEST_E4M3, _LARGEST_E4M3).to(torch.float8_e4m3fn).view(torch.uint8)


def _powers(amax: Tensor) -> Tensor:
    """MX's scales; 1 for groups of zeros."""
    exponent = torch.frexp(amax).exponent - 1 - _EXPONENT
    return torch.where(amax == 0, 1.0, torch.ldexp(torch.ones_like(amax), exponent.clamp(-127, 127)))
