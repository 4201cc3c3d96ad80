"""GGUF files (llama.cpp): linear layers in blocks of 32 along K.

A block of Q4_0 holds a float16 scale d and sixteen bytes, w = d * (q - 8); of Q4_1 a further float16 minimum m,
w = d * q + m; of Q8_0 32 signed bytes, w = d * q. Low nibbles are elements 0 to 15, high nibbles 16 to 31.
The format is described in the ggml project's docs/gguf.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from qcutlass.errors import UnsupportedError
from qcutlass.formats.affine import from_minima
from qcutlass.formats.files import read_span
from qcutlass.formats.gguf_header import read_header
from qcutlass.formats.layers import CanonicalLinear, FloatLinear
from qcutlass.formats.source import TensorInfo
from qcutlass.formats.tensors import FROM_FLOATS, LayerTensors
from qcutlass.quantized import QuantizedTensor

SUFFIXES: Final = ("weight", "bias")
GROUP: Final = 32
_NOT_LINEAR: Final = ("token_embd", "token_types", "position_embd", "per_layer_token_embd")
_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _halves(blocks: Tensor, begin: int) -> Tensor:
    """The float16 number in bytes [begin, begin + 2) of every block `[N, G, bytes]`, as `[G, N]`."""
    return blocks[:, :, begin : begin + 2].contiguous().view(torch.float16).squeeze(2).T.contiguous()


def _nibbles(blocks: Tensor, begin: int) -> Tensor:
    """4-bit codes `[N, K]`."""
    packed = blocks[:, :, begin:]
    return torch.cat([packed & 15, packed >> 4], dim=2).reshape(len(blocks), -1)


def _q4_0(blocks: Tensor) -> QuantizedTensor:
    return QuantizedTensor(_nibbles(blocks, 2), _halves(blocks, 0), None, 4, GROUP)


def _q4_1(blocks: Tensor) -> QuantizedTensor:
    return from_minima(_nibbles(blocks, 4), _halves(blocks, 0), _halves(blocks, 2), 4, GROUP)


def _q8_0(blocks: Tensor) -> QuantizedTensor:
    codes = (blocks[:, :, 2:] ^ 0x80).reshape(len(blocks), -1)  # q + 128
    return QuantizedTensor(codes, _halves(blocks, 0), None, 8, GROUP)


class _Blocks(NamedTuple):
    decode: Callable[[Tensor], QuantizedTensor]
    halves: int  # float16 numbers at the begin of a block


QUANTIZED: Final = {"Q4_0": _Blocks(_q4_0, 1), "Q4_1": _Blocks(_q4_1, 2), "Q8_0": _Blocks(_q8_0, 1)}
"""The types of blocks that are read."""
_READABLE: Final = tuple(sorted(QUANTIZED.keys() | _FLOATS.keys()))


def matches(layer: LayerTensors) -> bool:
    """Whether there is the weight of a linear layer."""
    return len(layer.info("weight").shape) == 2 and not layer.name.startswith(_NOT_LINEAR)


def obstacle(layer: LayerTensors) -> str | None:
    """The reason why a layer cannot be loaded; None if it can."""
    kind = layer.info("weight").dtype
    return None if kind in _READABLE else f"{kind} blocks are not read, only {', '.join(_READABLE)}; {FROM_FLOATS}"


def load(layer: LayerTensors) -> CanonicalLinear | FloatLinear:
    """See `qcutlass.formats.load`."""
    n, _ = layer.matrix("weight", _READABLE)
    kind = layer.info("weight").dtype
    bias = layer.bias(n)
    if kind in _FLOATS:
        return FloatLinear(layer.finite("weight"), bias)
    blocks = layer.read("weight")
    head = blocks[:, :, : 2 * QUANTIZED[kind].halves].contiguous().view(torch.float16)
    if not bool(head.isfinite().all()):
        raise layer.error("weight", "expected finite scales and minima, got NaN or infinity; download it again")
    return CanonicalLinear(QUANTIZED[kind].decode(blocks), bias)


class GGUFSource:
    """The tensors of a GGUF file; blocks are read as uint8 `[N, K / 32, bytes]`.

    Args:
        path: of the file, whose header is read as a whole.

    Attributes:
        metadata: numbers and strings of the header, by key; arrays are left out.

    Raises:
        UnsupportedError: version 1, or big-endian.
        CheckpointError: the file is not GGUF, is truncated, or its header contradicts itself.
    """

    format: ClassVar[str | None] = "gguf"

    def __init__(self, path: Path) -> None:
        self._path = path
        self.metadata, self._stored, self._stamp = read_header(path)
        self._infos = {name: stored.info for name, stored in self._stored.items()}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See `TensorSource`."""
        return self._infos

    def read(self, name: str) -> Tensor:
        """See `TensorSource`; KeyError for a name that is not there."""
        info, begin, size = self._stored[name]
        data = read_span(self._path, self._stamp, begin, size, name)
        if info.dtype in _FLOATS:
            return data.view(_FLOATS[info.dtype]).view(info.shape)
        if info.dtype not in QUANTIZED:
            raise UnsupportedError(f"{self._path}: {name}: {info.dtype} is not read, only {', '.join(_READABLE)}")
        groups = info.shape[-1] // GROUP
        rows = math.prod(info.shape[:-1])
        return data.view(rows, groups, size // (rows * groups))

    def plain(self, name: str) -> Tensor:
        """See `TensorSource`; float32 where the file holds blocks."""
        info, data = self._infos[name], self.read(name)
        if info.dtype in _FLOATS:
            return data
        return QUANTIZED[info.dtype].decode(data).dequantize(torch.float32).view(info.shape)
