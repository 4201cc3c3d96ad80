"""GGUF files (llama.cpp): linear layers in blocks along K.

The format is described in the ggml project's docs/gguf.md; the blocks are those of `gguf_blocks`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Final

import torch
from torch import Tensor

from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats.files import inside, read_span
from qcutlass.formats.gguf_blocks import DEQUANTIZED, QUANTIZED, dequantized
from qcutlass.formats.gguf_header import Stored, read_header
from qcutlass.formats.layers import CanonicalLinear, DequantizedLinear, FloatLinear
from qcutlass.formats.source import TensorInfo
from qcutlass.formats.tensors import FROM_FLOATS, LayerTensors

SUFFIXES: Final = ("weight", "bias", "scale", "input_scale")
_NOT_LINEAR: Final = ("token_embd", "token_types", "position_embd", "per_layer_token_embd")
_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SCALED: Final = "NVFP4"
"""The type beside whose blocks there is a scale of the whole matrix."""
_EXPERTS: Final = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))_exps\.(?:(weight)|scale|input_scale)")
_PART: Final = re.compile(r"(?P<model>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_READABLE: Final = tuple(sorted({*QUANTIZED, *_FLOATS, *DEQUANTIZED}))


def matches(layer: LayerTensors) -> bool:
    """Whether there is the weight of a linear layer."""
    return len(layer.info("weight").shape) == 2 and not layer.name.startswith(_NOT_LINEAR)


def obstacle(layer: LayerTensors) -> str | None:
    """The reason why a layer cannot be loaded; None if it can."""
    kind = layer.info("weight").dtype
    if kind in _READABLE and "scale" in layer and kind != _SCALED:
        return f"a scale of the whole matrix is read beside {_SCALED} alone, and this is {kind}; {FROM_FLOATS}"
    return None if kind in _READABLE else f"{kind} blocks are not read, only {', '.join(_READABLE)}; {FROM_FLOATS}"


def is_float(layer: LayerTensors) -> bool:
    """Whether a layer is not quantised."""
    return layer.info("weight").dtype in _FLOATS


def load(layer: LayerTensors) -> CanonicalLinear | FloatLinear:
    """See `qcutlass.formats.load`. `input_scale`, for activations of 4 bits, is not read: they stay as they are."""
    n, _ = layer.matrix("weight", _READABLE)
    bias = layer.bias(n)
    if is_float(layer):
        return FloatLinear(layer.finite("weight"), bias)
    kind, blocks = layer.info("weight").dtype, layer.read("weight")
    if kind in DEQUANTIZED:
        numbers = dequantized(blocks, kind)
        if not bool(numbers.isfinite().all()):
            raise layer.error("weight", "expected finite scales, got NaN or infinity; download it again")
        return DequantizedLinear(numbers, bias, stored=kind, stored_bytes=blocks.nbytes)
    if not QUANTIZED[kind].is_finite(blocks):
        raise layer.error("weight", "expected finite scales and minima, got NaN or infinity; download it again")
    weight = QUANTIZED[kind].decode(blocks)
    if "scale" in layer:
        weight = replace(weight, global_scale=layer.one_scale("scale"))
    return CanonicalLinear(weight, bias)


def _taken_apart(tensors: Mapping[str, Stored], path: Path) -> dict[str, Stored]:
    """The tensors, those of all experts of a block (`blk.0.ffn_up_exps.weight` `[E, N, K]`) as one of each.

    They get the names that older files have for them, `blk.0.ffn_up.3.weight`; so do scales of whole matrices.
    """
    found: dict[str, Stored] = {}
    for name, (info, begin, size) in tensors.items():
        stack, suffix = _EXPERTS.fullmatch(name), name.rpartition(".")[2]
        count = info.shape[0] if stack is not None and len(info.shape) == (3 if stack[2] else 1) else 0
        parts = {name: Stored(info, begin, size)} if stack is None or not count else {
            f"{stack[1]}.{expert}.{suffix}": Stored(
                info._replace(shape=info.shape[1:]), begin + expert * (size // count), size // count
            )
            for expert in range(count)
        }  # fmt: skip
        twice = found.keys() & parts
        if twice:
            raise CheckpointError(f"{path}: the tensor {min(twice)!r} is there twice, one of them in {name!r}")
        found |= parts
    return found


def models_in(names: Iterable[str]) -> list[str]:
    """Of the files with these names those that hold a GGUF model or, where it is split into several, begin it.

    Example:
        >>> from qcutlass.formats.gguf import models_in
        >>> models_in(["a.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "config.json"])
        ['a.gguf', 'b-00001-of-00002.gguf']
    """
    parts = ((name, _PART.fullmatch(name)) for name in names if name.endswith(".gguf"))
    return sorted({name if part is None else f"{part['model']}-00001-of-{part['count']}.gguf" for name, part in parts})


def files_of(name: str) -> list[str]:
    """The names of all files of the model that a GGUF file with this name is of; the first one has its header."""
    part = _PART.fullmatch(name)
    if part is None:
        return [name]
    return [f"{part['model']}-{number:05}-of-{part['count']}.gguf" for number in range(1, int(part["count"]) + 1)]


def _other_files(path: Path, count: int) -> list[Path]:
    """Those of a model of `count` files that come after the first, which `path` has to be."""
    names = files_of(path.name)
    if len(names) != count:
        raise CheckpointError(
            f"{path}: one of {count} files of a model (split.count), expected the name NAME-00001-of-{count:05}.gguf; "
            "give all of them the names with which they were published"
        )
    if path.name != names[0]:
        raise CheckpointError(f"{path}: one of {count} files of a model; pass the first, {names[0]}, or their folder")
    return [inside(path.parent, name, str(path)) for name in names[1:]]


class GGUFSource:
    """The tensors of a GGUF file, or of all files of a split model; blocks are read as uint8 `[N, blocks, bytes]`, and
    as `[N, bytes]` where their type is in `DEQUANTIZED`.

    Tensors of all experts of a block are given as those of each.

    Args:
        path: of the file, or of the first of several, whose headers are read as a whole.

    Attributes:
        metadata: numbers, strings and short arrays of numbers of the header, by key; other arrays are left out.

    Raises:
        UnsupportedError: version 1, or big-endian.
        CheckpointError: a file is not GGUF, is truncated, absent, or its header contradicts itself or another file.
    """

    format: ClassVar[str | None] = "gguf"

    def __init__(self, path: Path) -> None:
        self.metadata, stored, stamp = read_header(path)
        self._stamps = {str(path): stamp}
        count = self.metadata.get("split.count")
        if isinstance(count, int) and count > 1:
            for number, file in enumerate(_other_files(path, count), start=1):
                self._add(file, number, count, stored)
            expected = self.metadata.get("split.tensors.count", len(stored))
            if expected != len(stored):
                raise CheckpointError(f"{path}: expected {expected} tensors in {count} files, got {len(stored)}")
        self._stored = _taken_apart(stored, path)
        self._infos = {name: stored.info for name, stored in self._stored.items()}

    def _add(self, file: Path, number: int, count: int, stored: dict[str, Stored]) -> None:
        """Adds the tensors of another file of the model to `stored`."""
        metadata, more, self._stamps[str(file)] = read_header(file)
        place = metadata.get("split.no"), metadata.get("split.count")
        if place != (number, count):
            raise CheckpointError(
                f"{file}: expected split.no {number} and split.count {count}, got {place[0]!r:.40} and "
                f"{place[1]!r:.40}; it is of another model, or has another's name"
            )
        twice = stored.keys() & more
        if twice:
            raise CheckpointError(f"{file}: the tensor {min(twice)!r} is also in {stored[min(twice)].info.file}")
        stored |= more

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See `TensorSource`."""
        return self._infos

    def read(self, name: str) -> Tensor:
        """See `TensorSource`; KeyError for a name that is not there."""
        info, begin, size = self._stored[name]
        data = read_span(Path(info.file), self._stamps[info.file], begin, size, name)
        if info.dtype in _FLOATS:
            return data.view(_FLOATS[info.dtype]).view(info.shape)
        if info.dtype not in _READABLE:
            raise UnsupportedError(f"{info.file}: {name}: {info.dtype} is not read, only {', '.join(_READABLE)}")
        rows = math.prod(info.shape[:-1])
        if info.dtype in DEQUANTIZED:
            return data.view(rows, size // rows)
        blocks = info.shape[-1] // QUANTIZED[info.dtype].columns
        return data.view(rows, blocks, size // (rows * blocks))

    def plain(self, name: str) -> Tensor:
        """See `TensorSource`; float32 where the file holds blocks."""
        info, data = self._infos[name], self.read(name)
        if info.dtype in _FLOATS:
            return data
        if info.dtype in DEQUANTIZED:
            return dequantized(data, info.dtype).view(info.shape)
        return QUANTIZED[info.dtype].decode(data).dequantize(torch.float32).view(info.shape)
