"""One layer of a checkpoint of any format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from os import PathLike
from typing import Any

from torch import Tensor

from qcutlass import formats
from qcutlass.formats.converted import PackedFolder, PackedLinear, is_converted
from qcutlass.formats.files import as_path

_OTHERS = ", a mapping from names to tensors or an opened checkpoint"
Source = str | PathLike[str] | Mapping[str, Tensor] | formats.Checkpoint


def stored_layer(
    checkpoint: Source, name: str, format: str, config: Mapping[str, Any] | None
) -> formats.Layer | PackedLinear:
    """The layer as its file holds it; errors as for `QuantLinear.from_checkpoint`."""
    names: Collection[str]
    read: Callable[[str], formats.Layer | PackedLinear]
    if not isinstance(checkpoint, Mapping) and is_converted(as_path("checkpoint", checkpoint, _OTHERS)):
        folder = PackedFolder(checkpoint)
        names, read = folder.names, folder.packed
    else:
        opened = checkpoint if isinstance(checkpoint, formats.Checkpoint) else formats.load(checkpoint, format, config)
        names, read = opened, opened.__getitem__
    if name not in names:
        known = ", ".join(list(names)[:4]) or "none"
        raise ValueError(f"name: expected one of the checkpoint's {len(names)} layers ({known}, ...), got {name!r}")
    return read(name)
