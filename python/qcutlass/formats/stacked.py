"""Tensors that hold all experts of a block, as those of each expert's layers: how gpt-oss is stored.

`X.experts.gate_up_proj` and `X.experts.down_proj` have the experts as their first dimension, and gate and up in turns:

    gate_up_proj_blocks, _scales   uint8 [E, 2 I, H / 32, 16] and [E, 2 I, H / 32], MXFP4
    gate_up_proj                   floats [E, H, 2 I], the input's dimension first
    gate_up_proj_bias              floats [E, 2 I]

and likewise `down_proj`, of [E, H, ...]. Each becomes the tensors `X.experts.7.gate_proj.blocks` and so on; the bytes
of one expert are read at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Final, NamedTuple, Protocol

from torch import Tensor

from qcutlass.errors import CheckpointError
from qcutlass.formats.source import TensorInfo

_MOST: Final = 1 << 16
_MARKS: Final = (".experts.gate_up_proj_bias", ".experts.down_proj_bias")
"""What no other model has beside stacked experts."""
_FORMS: Final = {"blocks": ("_blocks", 4), "scales": ("_scales", 3), "bias": ("_bias", 2), "weight": ("", 3)}
"""What a layer's tensors are called here and in the files, behind the projection's name, and their dimensions."""
_PARTS: Final = {
    "gate_up_proj": (("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2))),
    "down_proj": (("down_proj", slice(None)),),
}
"""The layers that a projection holds, and their rows."""


class StackedSource(Protocol):
    """Tensors of which one entry along the first dimension can be read."""

    format: ClassVar[str | None]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> Tensor: ...

    def plain(self, name: str) -> Tensor: ...

    def read_entry(self, name: str, index: int) -> Tensor: ...


class _Part(NamedTuple):
    """A tensor of one layer of one expert: some rows of an entry of a stored one."""

    stored: str
    expert: int
    rows: slice
    is_transposed: bool


class UnstackedSource:
    """The tensors of a source, stacked ones as those of each expert.

    Raises:
        CheckpointError: a stacked tensor has another shape than such ones have.
    """

    format: ClassVar[str | None] = None

    def __init__(self, source: StackedSource) -> None:
        self._source = source
        self._parts: dict[str, _Part] = {}
        self._infos: dict[str, TensorInfo] = {}
        for name, info in source.tensors.items():
            found = dict(_parts(name, info))
            self._parts |= found
            self._infos |= {part: _info(info, found[part]) for part in found} or {name: info}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See `TensorSource`."""
        return self._infos

    def read(self, name: str) -> Tensor:
        """See `TensorSource`."""
        part = self._parts.get(name)
        return self._source.read(name) if part is None else self._read(part)

    def plain(self, name: str) -> Tensor:
        """See `TensorSource`."""
        part = self._parts.get(name)
        return self._source.plain(name) if part is None else self._read(part)

    def _read(self, part: _Part) -> Tensor:
        entry = self._source.read_entry(part.stored, part.expert)
        return (entry.T if part.is_transposed else entry)[part.rows].contiguous()


def is_stacked(tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether experts lie in tensors of all of them, as gpt-oss has them."""
    return any(name.endswith(_MARKS) for name in tensors)


def _parts(name: str, info: TensorInfo) -> Iterator[tuple[str, _Part]]:
    """The tensors of each expert that a stored one holds; none for other tensors."""
    block, separator, last = name.rpartition(".experts.")
    for projection, layers in _PARTS.items():
        for suffix, (ending, dimensions) in _FORMS.items():
            if not separator or last != projection + ending:
                continue
            _check(name, info, dimensions, projection, suffix == "weight")
            for expert in range(info.shape[0]):
                for layer, rows in layers:
                    part = _Part(name, expert, rows, suffix == "weight")
                    yield f"{block}.experts.{expert}.{layer}.{suffix}", part


def _check(name: str, info: TensorInfo, dimensions: int, projection: str, is_transposed: bool) -> None:
    shape = info.shape
    channels = shape[2 if is_transposed else 1] if len(shape) == dimensions else 0
    if not channels or min(shape) < 1 or shape[0] > _MOST or (projection == "gate_up_proj" and channels % 2):
        expected = f"{dimensions} dimensions, the first of up to {_MOST} experts"
        even = ", and an even number of channels" if projection == "gate_up_proj" else ""
        raise CheckpointError(f"{info.file}: {name}: expected {expected}{even}, got {info.dtype} {list(shape)}")


def _info(info: TensorInfo, part: _Part) -> TensorInfo:
    channels, *others = info.shape[:0:-1] if part.is_transposed else info.shape[1:]
    return info._replace(shape=(len(range(channels)[part.rows]), *others))
