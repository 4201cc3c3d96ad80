"""TensorRT-LLM's groupwise 4-bit weights, and ModelOpt's W4A16_AWQ for transformers: `w = s * (q - 8) + Z`.

`weight` int8 or uint8 holds q - 8 in two's complement, two channels a byte, the even one in the low nibble:
`[N / 2, K]` with `weights_scaling_factor` s and `zero` Z `[N, G]` (ModelOpt's export), or all transposed, `[K, N / 2]`
with `[G, N]`. `prequant_scaling_factor` `[K]` multiplies the activations. Symmetric weights have no Z. In folders for
transformers ModelOpt calls s `weight_scale` and the factors of activations `pre_quant_scale`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from qcutlass.errors import UnsupportedError
from qcutlass.formats.affine import from_minima
from qcutlass.formats.layers import CanonicalLinear
from qcutlass.formats.tensors import FLOATS, FROM_FLOATS, PRE_QUANT_SCALE, LayerTensors
from qcutlass.quantized import QuantizedTensor

SUFFIXES: Final = (
    "weight", "weights_scaling_factor", "zero", "prequant_scaling_factor", "activation_scaling_factor",
    "weights_scaling_factor_2", "alpha", "bias",
)  # fmt: skip
MODELOPT_SUFFIXES: Final = (
    "weight", "weight_scale", "weight_scale_2", PRE_QUANT_SCALE, "input_scale", "bias",
)  # fmt: skip
_BYTES: Final = ("I8", "U8")
_MIDDLE: Final = 8


class _Suffixes(NamedTuple):
    """Those of the tensors; `of_eight_bits` are of layers for 8-bit activations."""

    scales: str
    act_scale: str
    of_eight_bits: tuple[str, ...]


_TENSORRT_LLM: Final = _Suffixes(
    "weights_scaling_factor", "prequant_scaling_factor",
    ("weights_scaling_factor_2", "activation_scaling_factor", "alpha"),
)  # fmt: skip
_MODELOPT: Final = _Suffixes("weight_scale", PRE_QUANT_SCALE, ("weight_scale_2", "input_scale"))


def matches(layer: LayerTensors) -> bool:
    """Whether there are weights beside the scales."""
    return "weight" in layer


def matches_modelopt(layer: LayerTensors) -> bool:
    """Whether there are two channels of weights a byte beside floating scales of each channel."""
    if "weight" not in layer or layer.info("weight").dtype != "U8":
        return False
    weight, scales = layer.info("weight").shape, layer.info("weight_scale")
    return len(weight) == len(scales.shape) == 2 and scales.dtype in FLOATS and scales.shape[0] == 2 * weight[0]


def load(layer: LayerTensors) -> CanonicalLinear:
    """See `qcutlass.formats.load`."""
    if layer.info("weight").dtype in FLOATS:
        raise UnsupportedError(
            f"{layer.full_name('weight')}: bytes in an order of one GPU generation, seen as "
            f"{layer.info('weight').dtype}, are not read; load the checkpoint that this one was converted from"
        )
    return _load(layer, _TENSORRT_LLM)


def load_modelopt(layer: LayerTensors) -> CanonicalLinear:
    """ModelOpt's for transformers; see `qcutlass.formats.load`."""
    return _load(layer, _MODELOPT)


def _load(layer: LayerTensors, names: _Suffixes) -> CanonicalLinear:
    for suffix in names.of_eight_bits:
        if suffix in layer:
            raise UnsupportedError(
                f"{layer.full_name(suffix)}: 4-bit weights for 8-bit float activations are not read; {FROM_FLOATS}"
            )
    rows, columns = layer.matrix("weight", _BYTES)
    first, second = layer.matrix(names.scales, FLOATS)
    channels_first = first == 2 * rows and second <= columns
    if not channels_first and not (second == 2 * columns and first <= rows):
        raise layer.error(
            names.scales,
            f"expected [{2 * rows}, G] or [G, {2 * columns}] for weights of {[rows, columns]}, got {[first, second]}",
        )
    n, k, groups = (2 * rows, columns, second) if channels_first else (2 * columns, rows, first)
    size = layer.group_size(names.scales, k, groups)
    act_scale = layer.act_scale(names.act_scale, k)
    bias = layer.bias(n)
    if "zero" in layer:
        layer.check("zero", FLOATS, (first, second))
    weight, scales = layer.read("weight").view(torch.uint8), layer.finite(names.scales)
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
