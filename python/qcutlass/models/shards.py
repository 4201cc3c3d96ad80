"""Writes safetensors files tensor by tensor: what is in memory is one tensor, whatever the size of the file."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

import torch
from torch import Tensor

from qcutlass.errors import UnsupportedError
from qcutlass.formats.safetensors_header import BITS, dtype_name, stored_shape

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
_ALIGNMENTS: Final = (8, 4, 2, 1)


def sync(path: Path) -> None:
    """Has a file or folder reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: object) -> None:
    """Writes a file that reaches the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file that reaches the disk, of tensors that are all in memory.

    Raises:
        OSError: the disk is full.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header, end = _empty_header(), 0
    for name, tensor in ordered:
        header[name] = _entry(tensor, end)
        end += tensor.nbytes
    try:
        with path.open("wb") as file:
            file.write(_packed(header))
            for _, tensor in ordered:
                file.write(_data(tensor))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _empty_header() -> dict[str, Any]:
    return {"__metadata__": {"format": "pt"}}


def _entry(tensor: Tensor, offset: int) -> dict[str, Any]:
    """The entry of a tensor in the header."""
    where = [offset, offset + tensor.nbytes]
    return {"dtype": dtype_name(tensor), "shape": stored_shape(tensor), "data_offsets": where}


def _packed(header: dict[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def as_bytes(tensor: Tensor) -> Tensor:
    """uint8 `[bytes]`, of elements row by row."""
    flat = tensor.contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element may have any stride


def _data(tensor: Tensor) -> memoryview:
    data: Any = as_bytes(tensor.detach().cpu()).numpy()
    return memoryview(data)


class _Shard:
    """One file in the making.

    Offsets of a file must be aligned and without gaps, so tensors lie in it by falling size of their elements; until it
    is complete those of each size are in a temporary file of their own.
    """

    def __init__(self, folder: Path) -> None:
        self._parts: dict[int, IO[bytes]] = {}
        for size in _ALIGNMENTS:
            self._parts[size] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # close() closes it
        self._entries: dict[int, list[tuple[str, Tensor, int]]] = {size: [] for size in _ALIGNMENTS}
        self.names: list[str] = []
        self.bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if dtype_name(tensor) not in BITS:
            raise UnsupportedError(f"{name}: safetensors has no type for {tensor.dtype}")
        part = self._parts[tensor.element_size()]
        self._entries[tensor.element_size()].append((name, tensor.to("meta"), part.tell()))
        part.write(_data(tensor))
        self.names.append(name)
        self.bytes += tensor.nbytes

    def finish(self, path: Path) -> None:
        header, begin = _empty_header(), 0
        for size, part in self._parts.items():
            for name, info, offset in self._entries[size]:
                header[name] = _entry(info, begin + offset)
            begin += part.tell()
        with path.open("wb") as file:
            file.write(_packed(header))
            for part in self._parts.values():
                part.seek(0)
                shutil.copyfileobj(part, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
        self.close()

    def close(self) -> None:
        for part in self._parts.values():
            part.close()


class ShardedWriter:
    """Writes tensors into a folder: one file, or several and an index where they are larger than `shard_bytes`.

    Args:
        folder: that exists.
        shard_bytes: no file gets larger, unless one group of tensors is.

    Raises:
        OSError: the disk is full.

    Example:
        >>> import tempfile, pathlib, torch
        >>> from qcutlass.models.shards import ShardedWriter
        >>> with tempfile.TemporaryDirectory() as folder, ShardedWriter(pathlib.Path(folder), 1 << 30) as writer:
        ...     writer.add({"x": torch.ones(3)})
        ...     writer.finish()
        ['model.safetensors']
    """

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder, self._shard_bytes = folder, shard_bytes
        self._shard = _Shard(folder)
        self._files: list[tuple[Path, list[str]]] = []
        self._total = 0

    def __enter__(self) -> ShardedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._shard.close()

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Tensors that are to lie in one file."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._shard.names and self._shard.bytes + size > self._shard_bytes:
            self._close_shard()
            self._shard = _Shard(self._folder)
        for name, tensor in tensors.items():
            self._shard.add(name, tensor)
        self._total += size

    def _close_shard(self) -> None:
        path = self._folder / f"part-{len(self._files)}.safetensors"
        self._shard.finish(path)
        self._files.append((path, self._shard.names))

    def finish(self) -> list[str]:
        """Names of the files; the index is written when all of them are complete."""
        self._close_shard()
        if len(self._files) == 1:
            self._files[0][0].rename(self._folder / SINGLE)
            return [SINGLE]
        weight_map, names = {}, []
        for i, (path, tensors) in enumerate(self._files):
            names.append(f"model-{i + 1:05}-of-{len(self._files):05}.safetensors")
            path.rename(self._folder / names[-1])
            weight_map.update(dict.fromkeys(tensors, names[-1]))
        write_json(self._folder / INDEX, {"metadata": {"total_size": self._total}, "weight_map": weight_map})
        return [*names, INDEX]
