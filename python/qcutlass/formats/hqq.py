"""HQQ, axis 1: `W_q` uint8 with groups of g as rows, `scale` and `zero` `[N * K / g, 1]`, `shape` (N, K), `nbits`.

`w = (q - zero) * scale` with real-valued zeros. With 4 bits the first half of the `N * K / g` rows lies in the high
nibbles of `W_q` `[N * K / (2 g), g]`, the second half in the low ones; with 8 bits `W_q` is `[N * K / g, g]`. The
method: Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models" (2023).
"""

from __future__ import annotations

from typing import Final

import torch

from qcutlass.errors import UnsupportedError
from qcutlass.formats.layers import CanonicalLinear
from qcutlass.formats.tensors import FLOATS, LayerTensors, settle_zeros
from qcutlass.quantized import QuantizedTensor

SUFFIXES: Final = (
    "W_q", "scale", "zero", "shape", "nbits", "group_size", "axis", "bias", "packing", "unpack_view_dtype",
    "view_as_float", "quant_scale", "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict",
    "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip
_BYTES: Final = ("U8",)


def matches(layer: LayerTensors) -> bool:
    """Whether there are scales and zeros, quantised or not."""
    return "scale" in layer or "scale_q" in layer


def load(layer: LayerTensors) -> CanonicalLinear:
    """See `qcutlass.formats.load`."""
    parameters = layer.config.section("quant_config", "weight_quant_params")
    if layer.number("quant_scale") or layer.number("quant_zero") or "scale" not in layer or "zero" not in layer:
        raise UnsupportedError(f"{layer.name}: quantised scales and zeros are not read; export with quant_scale=False")
    said_axis = layer.number("axis")
    axis = parameters.integer("axis") if said_axis is None else said_axis
    if axis != 1:
        raise UnsupportedError(f"{layer.name}: groups along axis {axis} are not read; quantise with axis=1")
    if layer.number("view_as_float"):
        raise UnsupportedError(f"{layer.name}: codes viewed as floats are not read; export with view_as_float=False")
    rows, size = layer.matrix("W_q", _BYTES)
    count, _ = layer.matrix("scale", FLOATS)
    layer.check("scale", FLOATS, (count, 1))
    layer.check("zero", FLOATS, (count, 1))
    bits = {count: 8, count // 2: 4}.get(rows, 0)
    said_bits = layer.number("nbits")
    if bits == 0 or rows * 8 != count * bits:
        if (said_bits or 8) not in (4, 8):
            raise UnsupportedError(f"{layer.name}: {said_bits}-bit weights are not supported, only 4 and 8")
        raise layer.error(
            "W_q", f"expected {count} rows (8 bits) or half as many (4 bits) for {count} scales, got {rows}"
        )
    if said_bits not in (None, bits):
        raise layer.error("nbits", f"expected {bits}, as W_q and scale have it, got {said_bits}")
    if layer.number("group_size") not in (None, size):
        raise layer.error("group_size", f"expected {size}, the columns of W_q, got {layer.number('group_size')}")
    n, k = _shape(layer, count * size)
    if k % size:
        raise UnsupportedError(f"{layer.name}: groups of {size} reach over the end of rows of {k} columns")
    bias = layer.bias(n)
    scales = layer.finite("scale").view(n, -1).T.contiguous()
    zeros = settle_zeros(layer.finite("zero").view(n, -1).T, bits)
    packed = layer.read("W_q")
    codes = packed if bits == 8 else torch.cat([packed >> 4, packed & 15])
    return CanonicalLinear(QuantizedTensor(codes.view(n, k), scales, zeros, bits, size), bias)


def _shape(layer: LayerTensors, elements: int) -> tuple[int, int]:
    """(N, K)."""
    layer.check("shape", ("I64", "I32"), (2,))
    n, k = layer.read("shape").tolist()
    if n < 1 or k < 1 or n * k != elements:
        raise layer.error("shape", f"expected a product of {elements}, the number of codes, got {[n, k]}")
    return n, k
