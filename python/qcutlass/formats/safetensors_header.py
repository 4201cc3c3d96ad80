"""The header of a safetensors file, read without trust: what it says of the file is checked against the file.

The file begins with the header's length, 8 bytes, and the header: a JSON object that gives each tensor its type, its
shape and its place in the bytes that follow, which the tensors fill without gaps.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeGuard

import torch
from torch import Tensor

from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats.files import MOST_BRACKETS, Stamp, check_no_pointer, open_regular, parsed_json

MOST_TENSORS: Final = MOST_BRACKETS // 8  # in one file; models with more are sharded. One has three lists or objects
_MOST_BYTES: Final = 16 << 20
_MOST_ELEMENTS: Final = 1 << 63
_METADATA: Final = "__metadata__"

BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Of an element, by the name of its type in safetensors."""

_TORCH_NAMES: Final = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "F4": "float4_e2m1fn_x2",
}  # fmt: skip
_DTYPES: Final[dict[str, torch.dtype]] = {  # those that this torch has
    label: getattr(torch, name) for label, name in _TORCH_NAMES.items() if hasattr(torch, name)
}
_LABELS: Final = {dtype: label for label, dtype in _DTYPES.items()}


class Entry(NamedTuple):
    """A tensor of the file: bytes [begin, begin + size)."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    size: int


def dtype_name(tensor: Tensor) -> str:
    """The type of a tensor in the words of safetensors; torch's own where it has none."""
    return _LABELS.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


def stored_shape(tensor: Tensor) -> list[int]:
    """The shape of a tensor in a file, where elements count; torch counts pairs of 4-bit ones."""
    shape = list(tensor.shape)
    return [*shape[:-1], 2 * shape[-1]] if dtype_name(tensor) == "F4" else shape


def as_tensor(data: Tensor, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """The inverse, of bytes uint8."""
    if dtype == "F4":
        shape = (*shape[:-1], shape[-1] // 2)
    return data.view(_DTYPES[dtype]).view(shape)


def read_header(path: Path) -> tuple[dict[str, Entry], Stamp]:
    """All tensors of a file by name, and what tells later whether it is still the same file.

    Raises:
        FileNotFoundError: there is no such file.
        UnsupportedError: torch lacks the type of a tensor.
        CheckpointError: the file is damaged.
    """
    with open_regular(path) as file:
        stamp = Stamp.of(file)
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{path}: not a whole safetensors file ({stamp.size} bytes)")
        check_no_pointer(path, prefix)
        (length,) = struct.unpack("<Q", prefix)
        most = min(stamp.size - 8, _MOST_BYTES)
        if length > most:
            raise CheckpointError(
                f"{path}: expected a header of at most {most} bytes, got {length}: not a whole safetensors file"
            )
        text = file.read(length)
    header = _parsed(path, text)
    if len(header) > MOST_TENSORS:
        raise CheckpointError(f"{path}: expected at most {MOST_TENSORS} tensors, got {len(header)}; split the file")
    entries = {name: _entry(path, name, values, 8 + length) for name, values in header.items()}
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].size)):
        if entry.begin != end:
            raise _error(path, name, f"begins at byte {entry.begin}, expected {end}: no gaps, no overlaps")
        end += entry.size
    if end != stamp.size:
        raise CheckpointError(f"{path}: not a whole safetensors file: expected {end} bytes, got {stamp.size}")
    return entries, stamp


def _error(path: Path, name: str, message: str) -> CheckpointError:
    return CheckpointError(f"{path}: not a whole safetensors file: {name!r:.80} {message}")


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    """The header's tensors, in the order of the file."""
    if text.count(b"[") + text.count(b"{") > MOST_BRACKETS:
        raise CheckpointError(f"{path}: expected at most {MOST_TENSORS} tensors, got a header of more; split the file")
    try:
        header = parsed_json(text)
        if not isinstance(header, dict):
            raise ValueError("no JSON object")
        "".join(header).encode()  # names have no halves of surrogate pairs, which nothing can print
    except ValueError as error:
        raise CheckpointError(f"{path}: not a whole safetensors file: its header is damaged ({error})") from error
    metadata = header.pop(_METADATA, None)
    if metadata is not None and not (isinstance(metadata, dict) and all(type(v) is str for v in metadata.values())):
        raise _error(path, _METADATA, "is no object of strings")
    return header


def _entry(path: Path, name: str, values: object, begin: int) -> Entry:
    """One tensor, in itself whole; `begin`: of the tensors' bytes."""
    if not isinstance(values, dict):
        raise _error(path, name, "is described by no object")
    dtype, shape, place = values.get("dtype"), values.get("shape"), values.get("data_offsets")
    if type(dtype) is not str or dtype not in BITS:
        raise _error(path, name, f"has the unknown type {dtype!r:.40}")
    if not _are_sizes(shape) or math.prod(max(1, extent) for extent in shape) >= _MOST_ELEMENTS:
        raise _error(path, name, f"has the shape {shape!r:.60}")
    if not _are_sizes(place) or len(place) != 2:
        raise _error(path, name, f"has the data_offsets {place!r:.60}")
    if dtype not in _DTYPES:
        raise UnsupportedError(f"{path}: {name}: torch {torch.__version__} has no type for {dtype}")
    size = math.prod(shape) * BITS[dtype]
    if size != 8 * (place[1] - place[0]) or (dtype == "F4" and (not shape or shape[-1] % 2)):
        raise _error(path, name, f"of {dtype} {shape!r:.60} does not fill the bytes {place!r:.60}")
    return Entry(dtype, tuple(shape), begin + place[0], size // 8)


def _are_sizes(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < _MOST_ELEMENTS for value in values)
