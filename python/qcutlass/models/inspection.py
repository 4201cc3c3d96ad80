"""What is in a folder or file: layers, schemes, sizes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

from qcutlass import formats
from qcutlass.formats import CanonicalLinear, Int8Linear, Layer
from qcutlass.models.converted import ConvertedFolder, is_converted
from qcutlass.products.checks import short


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
    """

    name: str
    shape: tuple[int, int]
    scheme: str
    count: int
    bits_per_weight: float
    size: int


@dataclass(frozen=True)
class FolderSummary:
    """What `inspect` found.

    Attributes:
        format: "qcutlass" for a converted folder, else a key of `qcutlass.formats.FORMATS`.
        groups: of linear layers.
        rest: number of the tensors that belong to none.
        rest_size: their bytes; None where the format does not tell.
    """

    format: str
    groups: list[LayerGroup]
    rest: int
    rest_size: int | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Row:
    name: str
    shape: tuple[int, int]
    scheme: str
    size: float


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
        ...     models.inspect(folder).groups
        [LayerGroup(name='up', shape=(32, 64), scheme='float32', count=1, bits_per_weight=32.0, size=8192)]
    """
    if is_converted(path):
        folder = ConvertedFolder(path)
        infos = [folder.tensors[name] for name in folder.rest]
        rest_size = sum(info.nbytes for info in infos)
        return FolderSummary("qcutlass", _grouped(_converted_rows(folder)), len(infos), rest_size)
    checkpoint = formats.load(path)
    rows = (_row(name, layer) for name, layer in checkpoint.items())
    return FolderSummary(checkpoint.format, _grouped(rows), len(checkpoint.rest), None)


def _converted_rows(folder: ConvertedFolder) -> Iterator[_Row]:
    for name in folder:
        spec = folder.spec[name]
        types = dict(spec.buffers)
        scheme = _words(
            spec.bits,
            spec.group_size,
            types.get("zeros"),
            "act_scale" in types,
            "perm" in types,
            None if spec.kind == "weight_only" else "static" if "a_scale" in types else "dynamic",
        )
        size = sum(info.nbytes for info in folder.tensors_of(name))
        yield _Row(name, folder.shape(name), scheme, size)


def _row(name: str, layer: Layer) -> _Row:
    n, k = layer.shape
    if isinstance(layer, CanonicalLinear):
        weight = layer.weight
        groups = -1 if weight.group_size >= k else weight.group_size
        zeros = None if weight.zeros is None else short(weight.zeros.dtype)
        scheme = _words(weight.bits, groups, zeros, layer.act_scale is not None, layer.perm is not None, None)
        return _Row(name, (n, k), scheme, weight.bits_per_weight * n * k / 8)
    if isinstance(layer, Int8Linear):
        kind = "dynamic" if layer.input_scale is None else "static"
        return _Row(name, (n, k), _words(8, -1, None, False, False, kind), n * k + layer.scales.nbytes)
    return _Row(name, (n, k), short(layer.weight.dtype), layer.weight.nbytes)


def _words(bits: int, group_size: int, zeros: str | None, act_scale: bool, perm: bool, activations: str | None) -> str:
    if activations is not None:
        return f"w8a8 channel {activations}"
    groups = "channel" if group_size == -1 else f"g{group_size}"
    kind = "sym" if zeros is None else "int zeros" if zeros == "uint8" else "real zeros"
    return f"w{bits} {groups} {kind}{' act-scale' * act_scale}{' act-order' * perm}"


def _grouped(rows: Iterator[_Row]) -> list[LayerGroup]:
    groups: dict[tuple[Any, ...], list[_Row]] = defaultdict(list)
    for row in rows:
        groups[re.sub(r"\d+", "*", row.name), row.shape, row.scheme].append(row)
    summaries = []
    for (name, shape, scheme), members in groups.items():
        size = sum(member.size for member in members)
        bits = 8 * size / (len(members) * shape[0] * shape[1])
        summaries.append(LayerGroup(name, shape, scheme, len(members), bits, round(size)))
    return summaries
