"""An open checkpoint, whatever its format."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from torch import Tensor

from qcutlass.formats import floats
from qcutlass.formats.config import Config
from qcutlass.formats.layers import Layer
from qcutlass.formats.source import TensorInfo, TensorSource
from qcutlass.formats.tensors import LayerTensors

_CODES: Final = frozenset(
    {
        "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2",
        "U8", "I8", "U16", "I16", "U32", "I32",
    }
)  # fmt: skip
"""Types of which codes of weights are: as numbers, without their scales, these would be wrong weights."""
_MOST_DIMENSIONS: Final = 3
"""Of codes, those of all experts of a block; bytes with more are masks of attention, which old files have."""


@dataclass(frozen=True)
class Format:
    """One row of the table of formats.

    Attributes:
        name: for `qcutlass.formats.load`.
        summary: what is read.
        key: suffix of the tensor that marks a layer.
        suffixes: of all tensors that may belong to one.
        labels: values of `quant_method` that mean this format.
        matches: whether types and shapes of a layer's tensors are those of this format.
        load: reads one layer.
        selects: whether only what matches is a layer; else what does not is a damaged one.
        obstacle: why a layer cannot be loaded; None if it can.
        is_float: whether a layer is not quantised.
    """

    name: str
    summary: str
    key: str
    suffixes: Sequence[str]
    labels: Sequence[str]
    matches: Callable[[LayerTensors], bool]
    load: Callable[[LayerTensors], Layer]
    selects: bool = False
    obstacle: Callable[[LayerTensors], str | None] = lambda layer: None
    is_float: Callable[[LayerTensors], bool] = lambda layer: False

    def candidates(self, source: TensorSource, config: Config) -> Iterator[LayerTensors]:
        """The layers that have a tensor `*.key`."""
        for tensor in source.tensors:
            name, _, suffix = tensor.rpartition(".")
            if suffix == self.key:
                yield LayerTensors(source, name, config)


def _numbers(name: str) -> list[int]:
    """Those in a name, by which files sort block 10 behind block 9 (9 digits each: names can have millions)."""
    return [int(digits) for digits in re.findall(r"\d{1,9}", name)]


class Checkpoint(Mapping[str, Layer]):
    """The linear layers of a checkpoint, by name, block by block; each is read when it is asked for, and not kept.

    Attributes:
        format: a name in `qcutlass.formats.FORMATS`; where layers are of several, all of them: "fp8, nvfp4".
        config: what the checkpoint says of its quantisation.
        skipped: names of layers that cannot be loaded, and why.
        rest: names of the tensors that belong to no layer: embeddings, norms, layers that were not quantised.
        metadata: numbers, strings and short arrays of numbers of a GGUF file's header, by key; empty for others.
    """

    def __init__(self, source: TensorSource, layouts: Sequence[Format], config: Config) -> None:
        self.format: str = ", ".join(layout.name for layout in layouts)
        self.config: Mapping[str, Any] = config.values
        self.skipped: dict[str, str] = {}
        self.metadata: Mapping[str, Any] = getattr(source, "metadata", {})
        self._source, self._config = source, config
        self._load_matrix: Callable[[LayerTensors], Layer] = floats.load if source.format is None else layouts[0].load
        self._layers: dict[str, LayerTensors] = {}
        self._layouts: dict[str, Format] = {}
        self._add_layers(layouts)
        taken = {self._layers[name].full_name(each) for name, row in self._layouts.items() for each in row.suffixes}
        self.rest: list[str] = [name for name in source.tensors if name not in taken]

    def _add_layers(self, layouts: Sequence[Format]) -> None:
        found: dict[str, tuple[LayerTensors, Format]] = {}
        for layout in layouts:
            for layer in layout.candidates(self._source, self._config):
                is_match = layout.matches(layer)
                if is_match or not (layout.selects or layer.name in found):
                    found[layer.name] = layer, layout
        for name, (layer, layout) in sorted(found.items(), key=lambda item: _numbers(item[0])):
            reason = layout.obstacle(layer)
            if reason is None:
                self._layers[name], self._layouts[name] = layer, layout
            else:
                self.skipped[name] = reason

    def __getitem__(self, name: str) -> Layer:
        """One layer.

        Raises:
            KeyError: no layer has this name.
            CheckpointError: its tensors contradict each other or the configuration, or hold NaN or infinity.
            UnsupportedError: it is whole, but of a kind that is not read.
        """
        return self._layouts[name].load(self._layers[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __contains__(self, name: object) -> bool:
        return name in self._layers

    @cached_property
    def is_float(self) -> bool:
        """Whether no layer is quantised."""
        return all(self._layouts[name].is_float(layer) for name, layer in self._layers.items())

    @property
    def files(self) -> list[str]:
        """Those that hold tensors."""
        return sorted({info.file for info in self._source.tensors.values()})

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors, as they are stored."""
        return self._source.tensors

    def tensors_of(self, name: str) -> Iterator[TensorInfo]:
        """Types and shapes of a layer's tensors, as they are stored."""
        layer, tensors = self._layers[name], self._source.tensors
        return (tensors[layer.full_name(suffix)] for suffix in self._layouts[name].suffixes if suffix in layer)

    def codes(self) -> Iterator[str]:
        """Names of `rest` that hold codes, of which no layer has the scales: they are no numbers of a model."""
        for name in self.rest:
            info = self._source.tensors[name]
            if info.dtype in _CODES and len(info.shape) <= _MOST_DIMENSIONS:
                yield name

    def tensor(self, name: str) -> Tensor:
        """One of `rest`, as numbers: blocks of GGUF are dequantised to float32.

        Raises:
            KeyError: no tensor has this name.
            UnsupportedError: torch has no such type.
        """
        return self._source.plain(name)

    def info(self, name: str) -> TensorInfo:
        """Type and shape of one of `rest`, as it is stored; KeyError for a name that is not there."""
        return self._source.tensors[name]

    def matrix(self, name: str) -> Layer:
        """A module of which `rest` has the weight, as a layer: packed where the file holds it in blocks, else floats.

        Raises:
            CheckpointError, UnsupportedError: as for a layer.
        """
        return self._load_matrix(LayerTensors(self._source, name, self._config))
