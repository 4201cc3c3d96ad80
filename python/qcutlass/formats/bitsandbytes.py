"""bitsandbytes: LLM.int8, and the 4-bit types NF4 and FP4.

LLM.int8: `weight` int8 `[N, K]`, `SCB` float32 `[N]`, the largest magnitude of each row: `w = weight * SCB / 127`;
`weight_format` 0: rows. Codes stay what they are; activations keep 16 bits.

4 bits: `weight` holds bytes of two codes, the first one in the high half, of `[N, K]` row by row; `weight.absmax` the
largest magnitude of each `blocksize` of these, `weight.quant_map` float32 `[16]` the numbers that codes stand for, and
`weight.quant_state.bitsandbytes__nf4` (or `fp4`) the bytes of a JSON object: `quant_type`, `blocksize`, `shape`, more.
`w = quant_map[code] * absmax`. With double quantisation absmax is uint8, and stands for
`weight.nested_quant_map[absmax] * weight.nested_absmax + nested_offset`: a `nested_absmax` for each `nested_blocksize`.
NF4's table is that of no type that products take, and FP4's that of e4m3 but for a factor, in twice the bytes: these
weights are given dequantised.

The methods: Dettmers et al., "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale" (2022) and "QLoRA:
Efficient Finetuning of Quantized LLMs" (2023).
"""

from __future__ import annotations

import json
import math
from typing import Final

import torch
from torch import Tensor

from qcutlass.errors import UnsupportedError
from qcutlass.formats.config import Config
from qcutlass.formats.layers import CanonicalLinear, DequantizedLinear
from qcutlass.formats.tensors import FLOATS, LayerTensors
from qcutlass.products.checks import ceil_div
from qcutlass.quantized import QuantizedTensor

_STATES: Final = {kind: f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}
SUFFIXES: Final = (
    "weight", "SCB", "weight_format", "weight.absmax", "weight.quant_map", "weight.nested_absmax",
    "weight.nested_quant_map", *_STATES.values(), "bias",
)  # fmt: skip
_BYTES: Final = ("U8",)
_NUMBERS: Final = ("F32",)
_STORAGE: Final = ("U8", "F16", "BF16", "F32")
"""Types that bytes of codes are stored as: some ways of training in parts need floating ones."""
_LARGEST: Final = 127
_MOST_STATE: Final = 1 << 16


def matches(layer: LayerTensors) -> bool:
    """Whether there are the scales of LLM.int8, or the state of a 4-bit matrix."""
    return "SCB" in layer or _kind(layer) is not None


def load(layer: LayerTensors) -> CanonicalLinear | DequantizedLinear:
    """See `qcutlass.formats.load`."""
    kind = _kind(layer)
    return _int8(layer) if kind is None else _four_bits(layer, kind)


def _kind(layer: LayerTensors) -> str | None:
    return next((kind for kind, state in _STATES.items() if state in layer), None)


def _int8(layer: LayerTensors) -> CanonicalLinear:
    n, k = layer.matrix("weight", ("I8",))
    layer.check("SCB", FLOATS, (n,), f"weight has {n} rows")
    if layer.number("weight_format"):
        raise UnsupportedError(
            f"{layer.full_name('weight_format')}: rows in an order of one GPU generation are not read; save the model "
            "with bitsandbytes 0.45 or newer"
        )
    bias, scales = layer.bias(n), layer.finite("SCB").float() / _LARGEST
    codes = layer.read("weight").view(torch.uint8) ^ 0x80  # plus 128
    return CanonicalLinear(QuantizedTensor(codes, scales[None].contiguous(), None, 8, k), bias)


def _four_bits(layer: LayerTensors, kind: str) -> DequantizedLinear:
    state = _state(layer, kind)
    n, k = _shape(layer, state)
    count, info = n * k, layer.info("weight")
    if info.dtype not in _STORAGE or info.nbytes != ceil_div(count, 2):
        raise layer.error(
            "weight", f"expected {ceil_div(count, 2)} bytes for {[n, k]} weights, got {info.dtype} {[*info.shape]}"
        )
    size = min(_block_size(layer, state, "blocksize"), count)
    table, absmax = _table(layer, "weight.quant_map", 16), _absmax(layer, state, ceil_div(count, size))
    bias = layer.bias(n)
    packed = layer.read("weight").contiguous().view(-1).view(torch.uint8)
    codes = torch.stack([packed >> 4, packed & 15], dim=-1).view(-1)[:count]
    weight = table[codes.int()]
    whole = count // size * size
    weight[:whole].view(-1, size).mul_(absmax[: count // size, None])
    weight[whole:].mul_(absmax[-1])
    if not bool(weight.isfinite().all()):
        raise layer.error("weight.absmax", "expected scales of finite weights, got larger ones; download it again")
    stored = info.nbytes + layer.info("weight.absmax").nbytes
    double = " of double quantisation" * (layer.info("weight.absmax").dtype == "U8")
    return DequantizedLinear(weight.view(n, k), bias, stored=f"{kind} g{size}{double}", stored_bytes=stored)


def _state(layer: LayerTensors, kind: str) -> Config:
    """The JSON object of a matrix."""
    suffix = _STATES[kind]
    info = layer.info(suffix)
    if info.dtype not in _BYTES or len(info.shape) != 1 or not 0 < info.shape[0] <= _MOST_STATE:
        raise layer.error(suffix, f"expected the bytes of a JSON object, got {info.dtype} {[*info.shape]}")
    try:
        values = json.loads(bytes(layer.read(suffix).tolist()).decode())
    except (ValueError, RecursionError) as error:
        raise layer.error(suffix, f"expected the bytes of a JSON object ({error})") from error
    if not isinstance(values, dict):
        raise layer.error(suffix, f"expected a JSON object, got {type(values).__name__}")
    found = Config(values, layer.full_name(suffix))
    if found.text("quant_type") not in (None, kind):
        raise layer.error(suffix, f"expected quant_type {kind}, got {values['quant_type']!r:.40}")
    return found


def _shape(layer: LayerTensors, state: Config) -> tuple[int, int]:
    shape = state.values.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(x) is int and x > 0 for x in shape):
        raise layer.error("weight", f"expected a state with the shape of a matrix, got {shape!r:.60}")
    return shape[0], shape[1]


def _block_size(layer: LayerTensors, state: Config, key: str) -> int:
    size = state.integer(key)
    if size is None or size < 1:
        raise layer.error("weight", f"expected a state with {key}, got {size}")
    return size


def _table(layer: LayerTensors, suffix: str, length: int) -> Tensor:
    """The numbers that codes stand for."""
    layer.check(suffix, _NUMBERS, (length,))
    return layer.finite(suffix)


def _absmax(layer: LayerTensors, state: Config, blocks: int) -> Tensor:
    """float32 `[blocks]`."""
    why = f"weights {state.values['shape']} in blocks of {state.values['blocksize']}"
    layer.check("weight.absmax", (*_NUMBERS, *_BYTES), (blocks,), why)
    if layer.info("weight.absmax").dtype in _NUMBERS:
        return layer.finite("weight.absmax")
    size = min(_block_size(layer, state, "nested_blocksize"), blocks)
    table = _table(layer, "weight.nested_quant_map", 256)
    layer.check("weight.nested_absmax", _NUMBERS, (ceil_div(blocks, size),), f"{blocks} blocks, {size} at a time")
    offset = state.values.get("nested_offset")
    if type(offset) is not float or not math.isfinite(offset):
        raise layer.error("weight", f"expected a state with the number nested_offset, got {offset!r:.40}")
    scales = layer.finite("weight.nested_absmax").repeat_interleave(size)[:blocks]
    return table[layer.read("weight.absmax").int()] * scales + offset
