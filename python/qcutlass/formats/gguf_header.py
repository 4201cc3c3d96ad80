"""The header of a GGUF file, read without trust: no count in it makes more work than the file has bytes."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats.files import Stamp, check_no_pointer, open_regular
from qcutlass.formats.safetensors_header import MOST_TENSORS
from qcutlass.formats.source import TensorInfo

_VERSIONS: Final = (2, 3)
_SCALARS: Final = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING: Final = 8
_ARRAY: Final = 9
_DEEPEST_ARRAY: Final = 4
_MOST_DIMENSIONS: Final = 4
_MOST_BYTES: Final = 64 << 20  # of a header; those of models have up to 20 MB
_MOST_PAIRS: Final = 1 << 14
_MOST_STRING: Final = 16 << 20
_MOST_ITEMS: Final = 1 << 21  # strings and arrays in all arrays together, which are skipped one by one
_MOST_NUMBERS: Final = 1 << 10  # of an array that is kept: one for each block of a model
_ALIGNMENT: Final = 32


class Stored(NamedTuple):
    """Where a tensor lies: bytes [begin, begin + size) of the file."""

    info: TensorInfo
    begin: int
    size: int


class _Reader:
    """Numbers and strings of a file, never past its end, nor past the longest header."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self._file, self.path = file, path
        self.size = size
        self.position = 0
        self._items = 0

    @property
    def left(self) -> int:
        return min(self.size, _MOST_BYTES) - self.position

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: not a whole GGUF file: {message}, at byte {self.position}")

    def bytes(self, count: int) -> bytes:
        self._reserve(count)
        data = self._file.read(count)
        if len(data) != count:
            raise self.error(f"expected {count} more bytes, got {len(data)}")
        return data

    def skip(self, count: int) -> None:
        self._reserve(count)
        self._file.seek(count, 1)

    def items(self, count: int) -> range:
        """To go over `count` items of an array."""
        self._items += count
        if self._items > _MOST_ITEMS:
            raise self.error(f"expected at most {_MOST_ITEMS} strings in arrays, got {self._items}")
        return range(count)

    def _reserve(self, count: int) -> None:
        if count > self.left:
            most = f" of a header of at most {_MOST_BYTES}" if self.size > _MOST_BYTES else ""
            raise self.error(f"expected {count} more bytes, got {self.left}{most}")
        self.position += count

    def number(self, letter: str) -> Any:
        (value,) = struct.unpack(f"<{letter}", self.bytes(struct.calcsize(f"<{letter}")))
        return value

    def string(self) -> str:
        length = self.number("Q")
        if length > _MOST_STRING:
            raise self.error(f"expected a string of at most {_MOST_STRING} bytes, got {length}")
        try:
            return self.bytes(length).decode()
        except UnicodeDecodeError as error:
            raise self.error(f"expected UTF-8 ({error})") from error


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, Stored], Stamp]:
    """Metadata by key, all tensors by name, and what tells whether the file changes later.

    Metadata are numbers, strings, and short arrays of numbers, as tuples; other arrays are left out.

    Raises:
        FileNotFoundError: there is no such file.
        UnsupportedError: version 1, or big-endian.
        CheckpointError: the file is not GGUF, is truncated, or its header contradicts itself.
    """
    with open_regular(path) as file:
        stamp = Stamp.of(file)
        reader = _Reader(file, path, stamp.size)
        magic = reader.bytes(4)
        if magic != b"GGUF":
            check_no_pointer(path, magic)
            raise reader.error("expected it to begin with GGUF")
        version = reader.number("I")
        if version not in _VERSIONS:
            raise UnsupportedError(f"{path}: GGUF version {version} is not read, only 2 and 3, little-endian")
        tensors, pairs = reader.number("Q"), reader.number("Q")
        if tensors > MOST_TENSORS:
            raise reader.error(f"expected at most {MOST_TENSORS} tensors, got {tensors}")
        if pairs > _MOST_PAIRS:
            raise reader.error(f"expected at most {_MOST_PAIRS} keys, got {pairs}")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = reader.string()
            value = _value(reader, reader.number("I"), 0)
            if value is not None:
                metadata[key] = value
        return metadata, _tensors(reader, tensors, metadata.get("general.alignment", _ALIGNMENT)), stamp


def _value(reader: _Reader, kind: int, depth: int) -> Any:
    """One value; None for long arrays and those of anything but numbers, which are skipped."""
    if kind in _SCALARS:
        return reader.number(_SCALARS[kind])
    if kind == _STRING:
        return reader.string()
    if kind != _ARRAY or depth == _DEEPEST_ARRAY:
        raise reader.error(f"expected a type of values from 0 to 12, got {kind}")
    element, count = reader.number("I"), reader.number("Q")
    if element in _SCALARS:
        size = count * struct.calcsize(f"<{_SCALARS[element]}")
        if depth == 0 and count <= _MOST_NUMBERS:
            return struct.unpack(f"<{count}{_SCALARS[element]}", reader.bytes(size))
        reader.skip(size)
    elif element == _STRING:
        for _ in reader.items(count):
            reader.skip(reader.number("Q"))
    else:
        for _ in reader.items(count):
            _value(reader, element, depth + 1)
    return None


def _tensors(reader: _Reader, count: int, alignment: object) -> dict[str, Stored]:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    if isinstance(alignment, bool) or not isinstance(alignment, int) or not 1 <= alignment <= 1 << 16:
        raise reader.error(f"expected an alignment from 1 to 65536, got {alignment!r:.40}")
    found: dict[str, tuple[TensorInfo, int, int]] = {}
    for _ in range(count):
        name, dimensions = reader.string(), reader.number("I")
        if dimensions > _MOST_DIMENSIONS:
            raise reader.error(f"expected at most {_MOST_DIMENSIONS} dimensions of {name!r:.80}, got {dimensions}")
        shape = tuple(reader.number("Q") for _ in range(dimensions))[::-1]
        kind, offset = reader.number("I"), reader.number("Q")
        try:
            label = GGMLQuantizationType(kind).name
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError) as error:
            raise reader.error(f"{name!r:.80} has the unknown type {kind}") from error
        if name in found:
            raise reader.error(f"two tensors are named {name!r:.80}")
        if not shape or min(shape) < 1 or shape[-1] % block:
            raise reader.error(f"{name!r:.80} of shape {list(shape)} is no whole number of {label} blocks")
        if offset % alignment:
            raise reader.error(f"{name!r:.80} begins at {offset}, no multiple of {alignment}")
        found[name] = TensorInfo(label, shape, str(reader.path)), offset, math.prod(shape) // block * block_bytes
    begin = -(-reader.position // alignment) * alignment
    end_of_last = 0
    for name, (_, offset, size) in sorted(found.items(), key=lambda item: item[1][1:]):
        if offset < end_of_last:
            raise reader.error(f"the bytes of {name!r:.80} are also those of another tensor")
        end_of_last = offset + size
        if begin + end_of_last > reader.size:
            raise reader.error(f"the bytes of {name!r:.80} end at {begin + end_of_last}, the file at {reader.size}")
    return {name: Stored(info, begin + offset, size) for name, (info, offset, size) in found.items()}
