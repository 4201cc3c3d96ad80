"""Sources of tensors: files whose headers are checked as a whole, and whose tensors are read one at a time."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final, NamedTuple, Protocol

from torch import Tensor

from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats.config import read_json, read_json_if_there
from qcutlass.formats.expert_rows import BLOCK, SCALES, Model, Rows, rows_of, scale_rows_of
from qcutlass.formats.files import Stamp, inside, read_span
from qcutlass.formats.safetensors_header import BITS, Entry, as_tensor, dtype_name, read_header
from qcutlass.products.checks import check_strided, check_values

_INDEX: Final = ".safetensors.index.json"
_WHOLE: Final = "model.safetensors"
FLOATS: Final = ("F16", "BF16", "F32")
_SCALED: Final = ("F8_E4M3",)
_SCALES: Final = (*FLOATS, "F8_E8M0")
_UNKNOWN: Final = Model()
_PLAIN_NAME: Final = re.compile(r"[^/\\\0]+\.safetensors")


class TensorInfo(NamedTuple):
    """A tensor as its header describes it.

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
        return math.prod(self.shape) * BITS[self.dtype] // 8


class TensorSource(Protocol):
    """Tensors by name."""

    format: ClassVar[str | None]
    """The format that all such sources have; None: their tensors tell."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All of them, in the order of the files."""

    def read(self, name: str) -> Tensor:
        """One tensor as it is stored, in memory of its own."""

    def plain(self, name: str) -> Tensor:
        """One tensor as numbers: dequantised where the file holds blocks."""


class MemorySource:
    """Tensors that are in memory already."""

    format: ClassVar[str | None] = None

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        for name, value in tensors.items():
            if not isinstance(name, str):
                raise TypeError(f"checkpoint: expected texts as names of tensors, got {name!r:.80}")
            if not isinstance(value, Tensor):
                raise TypeError(f"checkpoint[{name!r:.80}]: expected a torch.Tensor, got {type(value).__name__}")
            check_strided(f"checkpoint[{name!r:.80}]", value)
        self._values = tensors
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(dtype_name(value), tuple(value.shape), "tensors") for name, value in tensors.items()
        }

    def read(self, name: str) -> Tensor:
        return self._held(name).to("cpu", copy=True)

    plain = read

    def read_entry(self, name: str, index: int) -> Tensor:
        """One entry along the first dimension."""
        return self._held(name)[index].to("cpu", copy=True)

    def _held(self, name: str) -> Tensor:
        check_values(f"checkpoint[{name!r:.80}]", self._values[name])
        return self._values[name].detach()


class SafetensorsSource:
    """One or more safetensors files. None is held open or mapped into memory.

    Args:
        files: whose headers are read.
        shards: the file of each tensor, where several hold the same name or an index tells.
        model: what `config.json` says of it: floats, and e4m3 weights with their scales, or these scales alone, of all
            its experts in one tensor are given as those of each (`expert_rows`).

    Raises:
        FileNotFoundError: a file is absent.
        UnsupportedError: torch lacks the type of a tensor; scales of all experts have another form.
        CheckpointError: a file is damaged, or its header contradicts it, another file or `shards`.
    """

    format: ClassVar[str | None] = None

    def __init__(
        self, files: Iterable[Path], shards: Mapping[str, Path] | None = None, model: Model = _UNKNOWN
    ) -> None:
        self._stamps: dict[Path, Stamp] = {}
        self._stored: dict[str, tuple[Path, Entry]] = {}
        for file in files:
            self._add(file, shards or {})
        for name, file in (shards or {}).items():
            if name not in self._stored:
                raise CheckpointError(f"{file}: expected the tensor {name!r} that the index places there; it is absent")
        self._take_apart(model)
        self._infos = {
            name: TensorInfo(entry.dtype, entry.shape, str(file)) for name, (file, entry) in self._stored.items()
        }

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See `TensorSource`."""
        return self._infos

    def _take_apart(self, model: Model) -> None:
        for stack in list(self._stored):
            _, entry = self._stored[stack]
            scaled = f"{stack}{SCALES}"
            is_scaled = entry.dtype in _SCALED and scaled in self._stored
            parts = rows_of(stack, entry.shape, model.type) if is_scaled or entry.dtype in FLOATS else []
            if not parts:
                continue
            if is_scaled:
                self._split(scaled, self._scale_rows(scaled, parts, entry.shape, model))
            self._split(stack, parts)
        for scaled in [name for name in self._stored if name.endswith(SCALES)]:
            self._take_scales_apart(scaled, model)

    def _take_scales_apart(self, scaled: str, model: Model) -> None:
        """Scales of all experts beside weights of each, as transformers saves what it has quantised itself.

        It leaves weights floats whose sizes are no multiples of its blocks, and saves scales of nothing beside them.
        """
        stack, shape = scaled.removesuffix(SCALES), self._stored[scaled][1].shape
        names = [stack]
        if len(shape) == 3 and min(shape) > 0:
            names = [part.name for part in rows_of(stack, (shape[0], 2, 1), model.type)]
        weights = [self._stored[name][1] for name in names if name in self._stored]
        kinds = {(weight.dtype, weight.shape) for weight in weights}
        if len(kinds) != 1 or len(weights) < len(names):
            return
        ((dtype, matrix),) = kinds
        if dtype in FLOATS:
            del self._stored[scaled]
        elif dtype in _SCALED and len(matrix) == 2 and stack not in names:
            whole = shape[0], len(names) // shape[0] * matrix[0], matrix[1]
            self._split(scaled, self._scale_rows(scaled, rows_of(stack, whole, model.type), whole, model))

    def _scale_rows(self, scaled: str, parts: Sequence[Rows], shape: Sequence[int], model: Model) -> list[Rows]:
        """The scales of matrices in a stack of this shape."""
        file, scales = self._stored[scaled]
        found = scale_rows_of(parts, scales.shape, model.block) if scales.dtype in _SCALES else None
        if found is None:
            raise UnsupportedError(
                f"{file}: {scaled}: expected scales of floats [experts, rows of blocks, columns of blocks] for "
                f"weights {list(shape)}, of blocks of {model.block or BLOCK} rows, of gate or of up "
                f"alone, got {scales.dtype} {list(scales.shape)}; quantise the model's float original "
                "instead: qcutlass quantize"
            )
        return found

    def _split(self, stack: str, parts: Iterable[Rows]) -> None:
        """Puts rows of a tensor, as tensors of their own, in its place."""
        file, entry = self._stored.pop(stack)
        row = entry.size // math.prod(entry.shape[:-1])  # bytes
        for name, begin, size in parts:
            if name in self._stored:
                raise CheckpointError(f"{file}: {stack}: the tensor {name!r} is also there; keep one of them")
            shape = (size, entry.shape[-1])
            self._stored[name] = file, Entry(entry.dtype, shape, entry.begin + begin * row, size * row)

    def _add(self, file: Path, shards: Mapping[str, Path]) -> None:
        entries, self._stamps[file] = read_header(file)
        for name, entry in entries.items():
            if shards.get(name, file) != file:
                continue
            if name in self._stored:
                raise CheckpointError(
                    f"{file}: the tensor {name!r} is also in {self._stored[name][0]}; keep one of them"
                )
            self._stored[name] = file, entry

    def read(self, name: str) -> Tensor:
        """See `TensorSource`; KeyError for a name that is not there."""
        file, entry = self._stored[name]
        data = read_span(file, self._stamps[file], entry.begin, entry.size, name)
        return as_tensor(data, entry.dtype, entry.shape)

    plain = read

    def read_entry(self, name: str, index: int) -> Tensor:
        """One entry along the first dimension, of a tensor of whole bytes; the others are not read."""
        file, entry = self._stored[name]
        count, *shape = entry.shape
        size = entry.size // count
        data = read_span(file, self._stamps[file], entry.begin + index * size, size, name)
        return as_tensor(data, entry.dtype, tuple(shape))


def open_folder(folder: Path) -> SafetensorsSource | None:
    """The safetensors files of a folder, as its index lists them; None where there is none.

    Without an index: `model.safetensors`, or else all files. A folder of which transformers would read other files is
    refused: it takes what `transformers_weights` in `config.json` names, else `model.safetensors`, else the index.
    """
    names, model = listed(folder), _model(folder)
    indexes = [name for name in names if name.endswith(_INDEX)]
    if len(indexes) > 1:
        raise CheckpointError(f"{folder}: expected one index, got {', '.join(indexes)}")
    if indexes:
        shards = _read_index(folder / indexes[0])
        files = sorted(set(shards.values()))
        if _WHOLE in names and files != [folder / _WHOLE]:
            raise CheckpointError(
                f"{folder}: two sources of weights, {_WHOLE} and the files of {indexes[0]}; remove the one that is "
                "left over"
            )
        _check_named(folder, indexes[0])
        return SafetensorsSource(files, shards, model)
    found = [name for name in names if name.endswith(".safetensors")]
    if _WHOLE in found:
        found = [_WHOLE]
    if not found:
        return None
    _check_named(folder, found[0] if len(found) == 1 else "")
    return SafetensorsSource([inside(folder, name, str(folder)) for name in found], model=model)


def _model(folder: Path) -> Model:
    """What `config.json` says; of blocks, those of the form that loaders check."""
    values = read_json_if_there(folder / "config.json") or {}
    quantization = values.get("quantization_config")
    block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    rows = block[0] if isinstance(block, list) and block else None
    return Model(str(values.get("model_type", "")), rows if type(rows) is int and rows > 0 else None)


def listed(folder: Path) -> list[str]:
    """Names in a folder, sorted; CheckpointError where they cannot be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise CheckpointError(f"{folder}: the folder cannot be listed ({error.strerror})") from error


def _check_named(folder: Path, read: str) -> None:
    """Raises CheckpointError if `config.json` names another source of weights than the one that is read."""
    named = (read_json_if_there(folder / "config.json") or {}).get("transformers_weights")
    if named is not None and named != read:
        raise CheckpointError(
            f"{folder}: two sources of weights, {read or 'its .safetensors files'} and transformers_weights of "
            f"config.json, {named!r:.80}; remove one of them"
        )


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
            files[name] = inside(index.parent, name, str(index))
    return {tensor: files[name] for tensor, name in listed.items()}
