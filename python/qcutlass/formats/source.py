"""Where tensors come from: files whose headers are checked as a whole, and whose tensors are read one at a time."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from torch import Tensor

from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats.config import read_json

MOST_TENSORS: Final = 1 << 16  # in one file; models with more are sharded
_MOST_HEADER_BYTES: Final = 16 << 20
_MOST_MAPPED_BYTES: Final = 32 << 20
_INDEX: Final = ".safetensors.index.json"
_PLAIN_NAME: Final = re.compile(r"[^/\\\0]+\.safetensors")
_DTYPES: Final = {  # names of safetensors, by those of torch
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


class TensorInfo(NamedTuple):
    """What a header says of a tensor.

    Attributes:
        dtype: in the words of safetensors ("F16", "I32", ...), or a block type of GGUF ("Q4_0", ...).
        shape: `[N, K]` for matrices, in every format.
        file: that holds it, for messages.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str

    @property
    def nbytes(self) -> int:
        """Of a tensor in safetensors."""
        bits = re.sub(r"\D+", "", self.dtype.partition("_")[0]) or 8  # of BOOL; F8_E4M3 has 8
        return max(1, int(bits) // 8) * math.prod(self.shape)


class TensorSource(Protocol):
    """Tensors by name."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All of them, in the order of the files."""

    def read(self, name: str) -> Tensor:
        """One tensor as it is stored, in memory of its own."""

    def plain(self, name: str) -> Tensor:
        """One tensor as numbers: dequantised where the file holds blocks."""


class MemorySource:
    """Tensors that are in memory already."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._values = tensors
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(dtype_name(value), tuple(value.shape), "tensors") for name, value in tensors.items()
        }

    def read(self, name: str) -> Tensor:
        return self._values[name].detach().to("cpu", copy=True)

    plain = read


class SafetensorsSource:
    """One or more safetensors files. At most one is mapped into memory, at most a bounded part of it is kept there.

    Args:
        files: whose headers are read.
        shards: the file of each tensor, where several hold the same name or an index tells.

    Raises:
        CheckpointError: a file is truncated, or its header contradicts it, another file or `shards`.
    """

    def __init__(self, files: Iterable[Path], shards: Mapping[str, Path] | None = None) -> None:
        self._shards: dict[str, Path] = {}
        self._infos: dict[str, TensorInfo] = {}
        self._open: tuple[Path, Any] | None = None
        self._mapped_bytes = 0
        for file in files:
            self._add(file, shards or {})
        for name, file in (shards or {}).items():
            if name not in self._shards:
                raise CheckpointError(f"{file}: expected the tensor {name!r} that the index places there; it is absent")

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See `TensorSource`."""
        return self._infos

    def _add(self, file: Path, shards: Mapping[str, Path]) -> None:
        handle = open_safetensors(file)
        names = handle.keys()
        if len(names) > MOST_TENSORS:
            raise CheckpointError(f"{file}: expected at most {MOST_TENSORS} tensors, got {len(names)}; split the file")
        for name in names:
            if shards.get(name, file) != file:
                continue
            if name in self._shards:
                raise CheckpointError(f"{file}: the tensor {name!r} is also in {self._shards[name]}; keep one of them")
            part = handle.get_slice(name)
            self._infos[name] = TensorInfo(part.get_dtype(), tuple(part.get_shape()), str(file))
            self._shards[name] = file

    def read(self, name: str) -> Tensor:
        """See `TensorSource`; KeyError for a name that is not there."""
        info, file = self._infos[name], self._shards[name]
        if self._open is None or self._open[0] != file or self._mapped_bytes > _MOST_MAPPED_BYTES:
            self._open = None  # unmaps what was read before
            self._open = file, open_safetensors(file)
            self._mapped_bytes = 0
        from safetensors import SafetensorError

        try:
            mapped: Tensor = self._open[1].get_tensor(name)
        except (SafetensorError, AttributeError, RuntimeError, ValueError) as error:
            raise UnsupportedError(f"{file}: {name} of type {info.dtype} cannot be read ({error})") from error
        self._mapped_bytes += mapped.nbytes
        return mapped.clone()

    plain = read


def dtype_name(tensor: Tensor) -> str:
    """The type of a tensor in the words of safetensors."""
    name = str(tensor.dtype).removeprefix("torch.")
    return _DTYPES.get(name, name)


def open_safetensors(file: Path) -> Any:
    """An open file whose header has been checked: against its size, for overlaps, gaps and shapes that lie."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        raise CheckpointError(f"{file}: expected a file")
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
    if len(prefix) < 8:
        raise CheckpointError(f"{file}: not a whole safetensors file ({size} bytes)")
    (header_bytes,) = struct.unpack("<Q", prefix)
    if header_bytes > min(size - 8, _MOST_HEADER_BYTES):
        raise CheckpointError(
            f"{file}: expected a header of at most {min(size - 8, _MOST_HEADER_BYTES)} bytes, got {header_bytes}: "
            "not a whole safetensors file"
        )
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, ValueError, MemoryError) as error:
        raise CheckpointError(f"{file}: not a whole safetensors file ({error})") from error


def open_folder(folder: Path) -> SafetensorsSource | None:
    """The safetensors files of a folder, as its index lists them; None where there is none.

    Without an index: `model.safetensors`, or else all files.
    """
    indexes = sorted(folder.glob(f"*{_INDEX}"))
    if len(indexes) > 1:
        raise CheckpointError(f"{folder}: expected one index, got {', '.join(path.name for path in indexes)}")
    if indexes:
        shards = _read_index(indexes[0])
        return SafetensorsSource(sorted(set(shards.values())), shards)
    files = sorted(path for path in folder.glob("*.safetensors"))
    whole = folder / "model.safetensors"
    if whole in files:
        files = [whole]
    return SafetensorsSource([_inside(folder, file.name, str(folder)) for file in files]) if files else None


def _read_index(index: Path) -> dict[str, Path]:
    """The file of each tensor."""
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{index}: expected an object weight_map that names the file of each tensor")
    files: dict[str, Path] = {}
    for name in listed.values():
        if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
            raise CheckpointError(
                f"{index}: expected the name of a .safetensors file beside the index, got {name!r:.80}"
            )
        if name not in files:
            files[name] = _inside(index.parent, name, str(index))
    return {tensor: files[name] for tensor, name in listed.items()}


def _inside(folder: Path, name: str, where: str) -> Path:
    """The path of a file in `folder`, which a link must not leave but for the blobs of a hub's cache."""
    path = folder / name
    try:
        root, target = folder.resolve(), path.resolve()
        exists = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{where}: {name!r:.80} is no readable path ({error})") from error
    roots = [root]
    if root.parent.name == "snapshots":  # <model>/snapshots/<revision>/file -> <model>/blobs/<hash>
        roots.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(allowed) for allowed in roots):
        raise CheckpointError(f"{where}: {name!r} is a link out of the folder, to {target}; copy the file into it")
    if not exists:
        raise CheckpointError(f"{where}: expected the file {name!r}; it is absent, download it")
    return path
