"""A summary of a folder or file: layers, schemes, sizes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any

from qcutlass import formats
from qcutlass.formats.converted import PackedFolder, is_converted
from qcutlass.formats.specs import Requantized


@dataclass(frozen=True)
class LayerGroup:
    """Layers that differ in the number of their block alone.

    Attributes:
        name: with `*` for numbers.
        shape: (N, K).
        scheme: in words.
        count: how many they are.
        bits_per_weight: stored bits, scales, zeros and padding included.
        size: bytes of all of them.
        requantized: of layers that were quantised anew: the form in which their source had them; "" of others.
        error: the largest that one of them lost then, relative; None of layers that lost nothing.
    """

    name: str
    shape: tuple[int, int]
    scheme: str
    count: int
    bits_per_weight: float
    size: int
    requantized: str = ""
    error: float | None = None


@dataclass(frozen=True)
class FolderSummary:
    """The result of `inspect`.

    Attributes:
        format: "qcutlass" for a converted folder, else a key of `qcutlass.formats.FORMATS`, or several, joined by ", ".
        groups: of linear layers.
        rest: number of the tensors that belong to none.
        rest_size: their bytes; None where the format does not tell.
        skipped: names of the linear layers that cannot be read, by the reason.
    """

    format: str
    groups: list[LayerGroup]
    rest: int
    rest_size: int | None
    skipped: dict[str, list[str]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Row:
    name: str
    shape: tuple[int, int]
    scheme: str
    size: float
    requantized: Requantized | None = None


def inspect(path: str | PathLike[str]) -> FolderSummary:
    """Lists the linear layers of a converted folder, from its headers, or of any checkpoint, whose layers are read.

    Raises:
        FileNotFoundError, UnsupportedError, CheckpointError: as for `qcutlass.formats.load`.

    Example:
        >>> import tempfile, torch
        >>> from safetensors.torch import save_file
        >>> from qcutlass import models
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_file({"up.weight": torch.randn(32, 64)}, f"{folder}/model.safetensors")
        ...     [group] = models.inspect(folder).groups
        >>> group.name, group.shape, group.scheme, group.bits_per_weight, group.size
        ('up', (32, 64), 'float32', 32.0, 8192)
    """
    if is_converted(path):
        folder = PackedFolder(path)
        infos = [folder.tensors[name] for name in folder.rest]
        rest_size = sum(info.nbytes for info in infos)
        return FolderSummary("qcutlass", _grouped(_converted_rows(folder)), len(infos), rest_size)
    checkpoint = formats.load(path)
    rows = (_Row(name, layer.shape, layer.words, layer.nbytes) for name, layer in checkpoint.items())
    skipped: dict[str, list[str]] = defaultdict(list)
    for name, reason in checkpoint.skipped.items():
        skipped[reason].append(name)
    return FolderSummary(checkpoint.format, _grouped(rows), len(checkpoint.rest), None, dict(skipped))


def _converted_rows(folder: PackedFolder) -> Iterator[_Row]:
    for name in folder.names:
        size = sum(info.nbytes for info in folder.tensors_of(name))
        yield _Row(name, folder.shape(name), folder.spec[name].words, size, folder.spec.requantized.get(name))


def _grouped(rows: Iterator[_Row]) -> list[LayerGroup]:
    groups: dict[tuple[Any, ...], list[_Row]] = defaultdict(list)
    for row in rows:
        stored = "" if row.requantized is None else row.requantized.stored
        groups[re.sub(r"(?<![^.])\d+(?![^.])", "*", row.name), row.shape, row.scheme, stored].append(row)
    summaries = []
    for (name, shape, scheme, stored), members in groups.items():
        size = sum(member.size for member in members)
        bits = 8 * size / (len(members) * shape[0] * shape[1])
        error = max((member.requantized.error for member in members if member.requantized is not None), default=None)
        summaries.append(LayerGroup(name, shape, scheme, len(members), bits, round(size), stored, error))
    return summaries
