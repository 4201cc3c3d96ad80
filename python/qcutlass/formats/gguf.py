"""GGUF files (llama.cpp): linear layers in blocks along K.

The format is described in the ggml project's docs/gguf.md; the blocks are those of `gguf_blocks`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Final

import torch
from torch import Tensor

from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats.files import read_span
from qcutlass.formats.gguf_blocks import QUANTIZED
from qcutlass.formats.gguf_header import Stored, read_header
from qcutlass.formats.layers import CanonicalLinear, FloatLinear
from qcutlass.formats.source import TensorInfo
from qcutlass.formats.tensors import FROM_FLOATS, LayerTensors

SUFFIXES: Final = ("weight", "bias")
_NOT_LINEAR: Final = ("token_embd", "token_types", "position_embd", "per_layer_token_embd")
_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EXPERTS: Final = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))_exps\.weight")
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
    if not QUANTIZED[kind].is_finite(blocks):
        raise layer.error("weight", "expected finite scales and minima, got NaN or infinity; download it again")
    return CanonicalLinear(QUANTIZED[kind].decode(blocks), bias)


def _taken_apart(tensors: Mapping[str, Stored], path: Path) -> dict[str, Stored]:
    """The tensors, those of all experts of a block (`blk.0.ffn_up_exps.weight` `[E, N, K]`) as one of each.

    They get the names that older files have for them, `blk.0.ffn_up.3.weight`.
    """
    found: dict[str, Stored] = {}
    for name, (info, begin, size) in tensors.items():
        stack = _EXPERTS.fullmatch(name)
        count = info.shape[0] if stack is not None and len(info.shape) == 3 else 0
        parts = {name: Stored(info, begin, size)} if stack is None or not count else {
            f"{stack[1]}.{expert}.weight": Stored(
                info._replace(shape=info.shape[1:]), begin + expert * (size // count), size // count
            )
            for expert in range(count)
        }  # fmt: skip
        twice = found.keys() & parts
        if twice:
            raise CheckpointError(f"{path}: the tensor {min(twice)!r} is there twice, one of them in {name!r}")
        found |= parts
    return found


class GGUFSource:
    """The tensors of a GGUF file; blocks are read as uint8 `[N, blocks of a row, bytes]`.

    Tensors of all experts of a block are given as those of each.

    Args:
        path: of the file, whose header is read as a whole.

    Attributes:
        metadata: numbers, strings and short arrays of numbers of the header, by key; other arrays are left out.

    Raises:
        UnsupportedError: version 1, or big-endian.
        CheckpointError: the file is not GGUF, is truncated, or its header contradicts itself.
    """

    format: ClassVar[str | None] = "gguf"

    def __init__(self, path: Path) -> None:
        self._path = path
        self.metadata, stored, self._stamp = read_header(path)
        self._stored = _taken_apart(stored, path)
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
        blocks = info.shape[-1] // QUANTIZED[info.dtype].columns
        rows = math.prod(info.shape[:-1])
        return data.view(rows, blocks, size // (rows * blocks))

    def plain(self, name: str) -> Tensor:
        """See `TensorSource`; float32 where the file holds blocks."""
        info, data = self._infos[name], self.read(name)
        if info.dtype in _FLOATS:
            return data
        return QUANTIZED[info.dtype].decode(data).dequantize(torch.float32).view(info.shape)
