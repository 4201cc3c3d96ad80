"""TensorRT-LLM's groupwise 4-bit weights: `w = s * (q - 8) + Z`.

`weight` int8 or uint8 holds q - 8 in two's complement, two channels a byte, the even one in the low nibble:
`[N / 2, K]` with `weights_scaling_factor` s and `zero` Z `[N, G]` (ModelOpt's export), or all transposed, `[K, N / 2]`
with `[G, N]`. `prequant_scaling_factor` `[K]` multiplies the activations. Symmetric weights have no Z.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from qcutlass.errors import UnsupportedError
from qcutlass.formats.affine import from_minima
from qcutlass.formats.layers import CanonicalLinear
from qcutlass.formats.tensors import FLOATS, LayerTensors
from qcutlass.quantized import QuantizedTensor

SUFFIXES: Final = (
    "weight", "weights_scaling_factor", "zero", "prequant_scaling_factor", "activation_scaling_factor",
    "weights_scaling_factor_2", "alpha", "bias",
)  # fmt: skip
_BYTES: Final = ("I8", "U8")
_MIDDLE: Final = 8


def matches(layer: LayerTensors) -> bool:
    """Whether there are weights beside the scales."""
    return "weight" in layer


def load(layer: LayerTensors) -> CanonicalLinear:
    """See `qcutlass.formats.load`."""
    if layer.info("weight").dtype in FLOATS:
        raise UnsupportedError(
            f"{layer.full_name('weight')}: bytes in an order of one GPU generation, seen as "
            f"{layer.info('weight').dtype}, are not read; load the checkpoint that this one was converted from"
        )
    for suffix in ("weights_scaling_factor_2", "activation_scaling_factor", "alpha"):
        if suffix in layer:
            raise UnsupportedError(f"{layer.full_name(suffix)}: weights for 8-bit float activations are not read")
    rows, columns = layer.matrix("weight", _BYTES)
    first, second = layer.matrix("weights_scaling_factor", FLOATS)
    channels_first = first == 2 * rows and second <= columns
    if not channels_first and not (second == 2 * columns and first <= rows):
        raise layer.error(
            "weights_scaling_factor",
            f"expected [{2 * rows}, G] or [G, {2 * columns}] for weights of {[rows, columns]}, got {[first, second]}",
        )
    n, k, groups = (2 * rows, columns, second) if channels_first else (2 * columns, rows, first)
    size = layer.group_size("weights_scaling_factor", k, groups)
    act_scale = layer.act_scale("prequant_scaling_factor", k)
    bias = layer.bias(n)
    if "zero" in layer:
        layer.check("zero", FLOATS, (first, second))
    weight, scales = layer.read("weight").view(torch.uint8), layer.finite("weights_scaling_factor")
    offsets = layer.finite("zero") if "zero" in layer else None
    if channels_first:
        scales, offsets = scales.T, None if offsets is None else offsets.T
    else:
        weight = weight.T
    codes = torch.stack([weight & 15, weight >> 4], dim=1).view(n, k) ^ _MIDDLE  # q - 8 to q
    return CanonicalLinear(_quantized(codes, scales.contiguous(), offsets, size), bias, None, act_scale)


def _quantized(codes: Tensor, scales: Tensor, offsets: Tensor | None, size: int) -> QuantizedTensor:
    if offsets is None:
        return QuantizedTensor(codes, scales, None, 4, size)
    return from_minima(codes, scales, offsets.contiguous(), 4, size, offset=_MIDDLE)
