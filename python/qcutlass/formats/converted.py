"""Converted folders: layers with packed weights, as `qcutlass.models.convert` writes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, Final

from torch import Tensor

from qcutlass.errors import CheckpointError
from qcutlass.formats.config import Config, read_json, read_json_if_there
from qcutlass.formats.files import as_path
from qcutlass.formats.source import SafetensorsSource, TensorInfo, open_folder
from qcutlass.formats.specs import GUARD, METHOD, PARTS, LayerSpec, ModelSpec

CONFIG: Final = "config.json"
QUANTIZATION: Final = "quantization_config"
_MARKS: Final = ("layout", "w_packed", "scales", "levels", "w_scale")
"""Suffixes of which every layer has three: two make one that may be damaged, one may be any module's tensor."""


def is_converted(path: str | PathLike[str]) -> bool:
    """Whether this is a folder whose `config.json` says that qcutlass made it."""
    config = as_path("path", path) / CONFIG
    values = read_json_if_there(config)
    if values is None:
        return False
    return Config(values, str(config)).section(QUANTIZATION).values.get("quant_method") == METHOD


def _layers(tensors: Iterable[str]) -> list[str]:
    """Names of the layers that a converted folder with these tensors has."""
    parts = [name.rpartition(".") for name in tensors]
    marks = Counter(name for name, _, suffix in parts if name and suffix in _MARKS)
    return [name for name, count in marks.items() if count > 1]


def check_rest(rest: Iterable[str], layers: Container[str], where: object) -> None:
    """Raises CheckpointError if a converted folder's reader would take one of these for a part of a layer."""
    names = list(rest)
    mistaken = set(_layers(names))
    for name in names:
        layer, _, suffix = name.rpartition(".")
        if suffix in PARTS and (layer in layers or layer in mistaken):
            raise CheckpointError(f"{where}: {name}: expected no tensor named as a part of a packed layer; rename it")


def check_described(tensors: Mapping[str, TensorInfo]) -> None:
    """Raises CheckpointError if these have packed layers, of which nothing says what they are."""
    for name, info in tensors.items():
        layer, _, suffix = name.rpartition(".")
        if suffix == "w_packed" and f"{layer}.layout" in tensors:
            raise CheckpointError(
                f"{info.file}: {name}: qcutlass has packed these layers, but no quantization_config in config.json "
                "says how; save the model that has them again, with save_pretrained of transformers, or convert what "
                "it was made of; the file alone is a state for load_state_dict, of a model with the same layers"
            )


@dataclass(frozen=True)
class PackedLinear:
    """A layer of a converted folder: its description and shape; its tensors are read when asked for.

    Attributes:
        spec: the description.
        shape: (N, K).
        where: folder and name, for errors.
        suffixes: of the tensors in the files, the buffers of a layer in `qcutlass.layers`.
    """

    spec: LayerSpec
    shape: tuple[int, int]
    where: str
    suffixes: list[str]
    _source: SafetensorsSource
    _name: str

    @property
    def kind(self) -> str:
        """That of `spec`."""
        return self.spec.kind

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """Of `w_packed` in the file."""
        return self._source.tensors[f"{self._name}.w_packed"].shape

    def read(self) -> dict[str, Tensor]:
        """All tensors, by suffix."""
        return {suffix: self.part(suffix) for suffix in self.suffixes}

    def part(self, suffix: str) -> Tensor:
        """One of them."""
        return self._source.read(f"{self._name}.{suffix}")


class PackedFolder:
    """The tensors of a folder that `qcutlass.models.convert` wrote.

    Args:
        folder: with `config.json` and safetensors files.

    Attributes:
        config: what `config.json` holds.
        spec: its `quantization_config`.
        names: of the quantised layers.
        rest: names of the tensors that belong to no quantised layer.

    Raises:
        FileNotFoundError: there is no such folder.
        TypeError, ValueError: `folder` is no path.
        CheckpointError: it is damaged, or written for another layout.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        path = as_path("folder", folder)
        if not path.is_dir():
            what = "a file, expected a converted folder; qcutlass convert makes one"
            got = what if path.exists() else "no such folder"
            raise FileNotFoundError(f"{path}: {got}")
        if not is_converted(path):
            raise CheckpointError(f"{path}: not a converted folder; qcutlass convert makes one")
        where = path / CONFIG
        self.config: dict[str, Any] = read_json(where)
        self.spec = ModelSpec.from_dict(Config(self.config, str(where)).section(QUANTIZATION).values, str(where))
        source = open_folder(path)
        if source is None:
            raise CheckpointError(f"{path}: expected .safetensors files, got none")
        self._source: SafetensorsSource = source
        self._path = path
        tensors = source.tensors
        self.names: list[str] = _layers(tensors)
        self._suffixes: dict[str, list[str]] = {name: [] for name in self.names}
        self.rest: list[str] = []
        for tensor in tensors:
            layer, _, suffix = tensor.rpartition(".")
            if layer in self._suffixes and suffix in PARTS:
                if suffix == GUARD and tensors[tensor][:2] == ("U8", (1,)):
                    continue
                self._suffixes[layer].append(suffix)
            else:
                self.rest.append(tensor)

    @property
    def files(self) -> list[str]:
        """Those that hold tensors."""
        return sorted({info.file for info in self._source.tensors.values()})

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Types and shapes of all tensors."""
        return self._source.tensors

    def tensors_of(self, name: str) -> Iterator[TensorInfo]:
        """Types and shapes of a layer's tensors."""
        return (self._source.tensors[f"{name}.{suffix}"] for suffix in self._suffixes[name])

    def shape(self, name: str) -> tuple[int, int]:
        """(N, K) of a layer; CheckpointError where it says none."""
        if "layout" not in self._suffixes[name]:
            raise CheckpointError(f"{self._path}: {name}: expected {name}.layout beside the weights; it is absent")
        expected = f"{self._path}: {name}.layout: expected int64 [version, bits, N, K, group_size]"
        info = self._source.tensors[f"{name}.layout"]
        if info.dtype != "I64" or info.shape != (5,):
            raise CheckpointError(f"{expected}, got {info.dtype} {list(info.shape)}")
        found = self._source.read(f"{name}.layout").tolist()
        _, _, n, k, _ = found
        if n < 1 or k < 1:
            raise CheckpointError(f"{expected}, got {found}")
        return n, k

    def tensor(self, name: str) -> Tensor:
        """One of `rest`; KeyError for another name."""
        return self._source.plain(name)

    def packed(self, name: str) -> PackedLinear:
        """One layer.

        Raises:
            KeyError: no layer has this name.
            CheckpointError: `config.json` does not describe it, or the file holds fewer weights than its shape says.
        """
        suffixes, where = self._suffixes[name], f"{self._path}: {name}"
        return PackedLinear(self.spec[name], self._checked_shape(name), where, suffixes, self._source, name)

    def _checked_shape(self, name: str) -> tuple[int, int]:
        """The shape, if the file holds as many packed weights."""
        n, k = self.shape(name)
        packed = self._source.tensors.get(f"{name}.w_packed")
        if packed is None or len(packed.shape) < 2 or 16 * packed.shape[0] < n or 64 * packed.shape[1] < k:
            raise CheckpointError(f"{self._path}: {name}: expected w_packed of {[n, k]} weights, got {packed}")
        return n, k
