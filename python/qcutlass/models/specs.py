"""What a converted folder says of its layers: enough to make each one empty, before its tensors are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from qcutlass.errors import CheckpointError
from qcutlass.layers import Int8Linear, QuantLinear, WeightOnlyLinear
from qcutlass.layers.base import LAYOUT_VERSION, short
from qcutlass.products.checks import ceil_div
from qcutlass.products.packing import PACKINGS
from qcutlass.quantization import QuantizedTensor

METHOD: Final = "qcutlass"
VERSION: Final = 2
"""Of the folder's format, which has guards since 2; the packed layout has a version of its own."""
_READ_VERSIONS: Final = (1, 2)
GUARD: Final = "weight"
"""Suffix of a tensor of one byte beside those of each layer: who looks for floats there finds a shape that fits none.

Without it transformers, where qcutlass is not imported, would take random numbers for the weights, with a warning.
"""

_DTYPES: Final = {
    short(kind): kind for kind in (torch.float16, torch.bfloat16, torch.float32, torch.uint8, torch.int32)
}
_BUFFERS: Final = {  # by kind: those whose presence or type is a layer's own, and the types they may have
    "weight_only": {
        "scales": ("float16", "bfloat16", "float32"),
        "zeros": ("float16", "bfloat16", "float32", "uint8"),
        "bias": ("float16", "bfloat16", "float32"),
        "act_scale": ("float16", "bfloat16", "float32"),
        "perm": ("int32",),
    },
    "int8": {"bias": ("float16", "bfloat16", "float32"), "a_scale": ("float32",), "smooth": ("float32",)},
}
PARTS: Final = frozenset({"layout", "w_packed", "w_scale", GUARD}.union(*_BUFFERS.values()))
"""Suffixes of the tensors that a layer may have in a converted folder."""


def guard() -> torch.Tensor:
    """The tensor that `GUARD` names."""
    return torch.zeros(1, dtype=torch.uint8)


@dataclass(frozen=True)
class LayerSpec:
    """All of a layer but its shape and its numbers.

    Attributes:
        kind: "weight_only" or "int8".
        bits: of a weight.
        group_size: columns that share a scale; -1: one scale a channel.
        buffers: types of the tensors that not every layer has, or not in one type.

    Example:
        >>> import torch, qcutlass
        >>> from qcutlass.models.specs import LayerSpec
        >>> layer = qcutlass.QuantLinear.from_linear(torch.nn.Linear(256, 48, bias=False))
        >>> LayerSpec.of(layer).to_dict()
        {'kind': 'weight_only', 'bits': 4, 'group_size': 128, 'scales': 'float32', 'zeros': 'uint8'}
    """

    kind: str
    bits: int
    group_size: int
    buffers: tuple[tuple[str, str], ...]

    @staticmethod
    def of(layer: QuantLinear) -> LayerSpec:
        """The description of a layer as checkpoints yield it."""
        kind = "weight_only" if isinstance(layer, WeightOnlyLinear) else "int8"
        buffers = {name: getattr(layer, name) for name in _BUFFERS[kind]}
        present = tuple((name, short(part.dtype)) for name, part in buffers.items() if part is not None)
        group_size = -1 if layer.group_size == layer.in_features else layer.group_size
        return LayerSpec(kind, layer.bits, group_size, present)

    @staticmethod
    def from_dict(values: object, where: str) -> LayerSpec:
        """Raises CheckpointError, with `where`, for what no layer is like."""
        if not isinstance(values, dict) or values.get("kind") not in tuple(_BUFFERS):
            raise CheckpointError(f"{where}: expected an object whose kind is weight_only or int8, got {values!r:.80}")
        buffers = _BUFFERS[values["kind"]]
        bits, group_size = values.get("bits"), values.get("group_size")
        if (
            type(bits) is not int
            or bits not in PACKINGS
            or type(group_size) is not int
            or not (group_size == -1 or group_size > 0)
        ):
            raise CheckpointError(f"{where}: expected bits 4 or 8 and a group_size, got {bits!r} and {group_size!r}")
        for name, dtype in values.items():
            if name not in ("kind", "bits", "group_size") and dtype not in buffers.get(name, ()):
                raise CheckpointError(f"{where}: {name}: expected one of {buffers.get(name, ())}, got {dtype!r:.40}")
        if values["kind"] == "weight_only" and "scales" not in values:
            raise CheckpointError(f"{where}: expected the type of scales")
        present = tuple((name, values[name]) for name in buffers if name in values)
        return LayerSpec(values["kind"], bits, group_size, present)

    def to_dict(self) -> dict[str, Any]:
        """As in `config.json`."""
        return {"kind": self.kind, "bits": self.bits, "group_size": self.group_size, **dict(self.buffers)}

    def empty(self, n: int, k: int) -> QuantLinear:
        """Such a layer on the meta device, `[N, K]`."""
        size = k if self.group_size == -1 else min(self.group_size, k)
        shapes = {
            "scales": (ceil_div(k, size), n),
            "bias": (n,),
            "act_scale": (k,),
            "perm": (k,),
            "a_scale": (1,),
            "smooth": (k,),
        }
        shapes["zeros"] = shapes["scales"]
        parts: dict[str, Any] = {
            name: torch.empty(shapes[name], dtype=_DTYPES[dtype], device="meta") for name, dtype in self.buffers
        }
        codes = torch.empty((n, k), dtype=torch.uint8 if self.kind == "weight_only" else torch.int8, device="meta")
        if self.kind == "int8":
            return Int8Linear(codes, torch.empty(n, device="meta"), **parts)
        scales, zeros = parts.pop("scales"), parts.pop("zeros", None)
        return WeightOnlyLinear(QuantizedTensor(codes, scales, zeros, self.bits, size), **parts)


@dataclass(frozen=True)
class ModelSpec:
    """`quantization_config` of a converted folder.

    Attributes:
        default: of most layers; None: nothing is converted.
        exceptions: of the others, by name.
        modules_to_not_convert: names of modules that keep their floats.
        source: the format that was converted.
    """

    default: LayerSpec | None
    exceptions: Mapping[str, LayerSpec] = field(default_factory=dict)
    modules_to_not_convert: Sequence[str] = ()
    source: str = ""

    @staticmethod
    def of(layers: Mapping[str, LayerSpec], modules_to_not_convert: Sequence[str], source: str) -> ModelSpec:
        """With the most frequent description as the default."""
        counts = Counter(layers.values())
        default = max(counts, key=counts.__getitem__) if counts else None
        exceptions = {name: spec for name, spec in layers.items() if spec != default}
        return ModelSpec(default, exceptions, tuple(modules_to_not_convert), source)

    def __getitem__(self, name: str) -> LayerSpec:
        """The description of one layer."""
        spec = self.exceptions.get(name, self.default)
        if spec is None:
            raise CheckpointError(f"{name}: quantization_config describes no layer")
        return spec

    @staticmethod
    def from_dict(values: Mapping[str, Any], where: str = "quantization_config") -> ModelSpec:
        """Raises CheckpointError where it is not that of a converted folder, or of other versions."""
        if values.get("quant_method") != METHOD:
            raise CheckpointError(f"{where}: expected quant_method {METHOD!r}, got {values.get('quant_method')!r:.60}")
        versions = values.get("version"), values.get("layout_version")
        if versions[0] not in _READ_VERSIONS or versions[1] != LAYOUT_VERSION:
            raise CheckpointError(
                f"{where}: version {versions[0]!r:.20} with packed layout {versions[1]!r:.20}, this build reads "
                f"{VERSION} with {LAYOUT_VERSION}: convert the model again"
            )
        default, exceptions = values.get("default"), values.get("exceptions")
        kept = values.get("modules_to_not_convert")
        if not isinstance(exceptions, dict) or not isinstance(kept, list):
            raise CheckpointError(f"{where}: expected exceptions, an object, and modules_to_not_convert, a list")
        return ModelSpec(
            None if default is None else LayerSpec.from_dict(default, f"{where}: default"),
            {name: LayerSpec.from_dict(spec, f"{where}: exceptions: {name}") for name, spec in exceptions.items()},
            tuple(str(name) for name in kept),
            str(values.get("source", "")),
        )

    def to_dict(self) -> dict[str, Any]:
        """As in `config.json`."""
        return {
            "quant_method": METHOD,
            "version": VERSION,
            "layout_version": LAYOUT_VERSION,
            "source": self.source,
            "default": None if self.default is None else self.default.to_dict(),
            "exceptions": {name: spec.to_dict() for name, spec in self.exceptions.items()},
            "modules_to_not_convert": list(self.modules_to_not_convert),
        }
