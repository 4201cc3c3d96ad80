"""Descriptions of a converted folder's layers: enough to make each one empty, before its tensors are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qcutlass.errors import CheckpointError
from qcutlass.products.block_operators import BLOCK_SIZES
from qcutlass.products.checks import E8M0, FLOATING, ceil_div, short
from qcutlass.products.packing import CODE_TYPES, PACKINGS
from qcutlass.version import LAYOUT_VERSION

METHOD: Final = "qcutlass"
VERSION: Final = 2
"""Of the folder's format, which has guards since 2; the packed layout has a version of its own."""
_READ_VERSIONS: Final = (1, 2)
CODE_TABLE: Final = 16
"""Codes in the table of a layer whose packed weights are places in one."""
GUARD: Final = "weight"
"""Suffix of a tensor of one byte beside those of each layer: who looks for floats there finds a shape that fits none.

Without it transformers, where qcutlass is not imported, would take random numbers for the weights, with a warning.
"""

_DTYPES: Final = {
    short(kind): kind for kind in (*FLOATING, torch.uint8, torch.int8, torch.int32, torch.float8_e4m3fn, *E8M0)
}


def guard() -> torch.Tensor:
    """The tensor that `GUARD` names."""
    return torch.zeros(1, dtype=torch.uint8)


@dataclass(frozen=True)
class LayerSpec:
    """All of a layer but its shape and its numbers.

    Attributes:
        kind: a key of `LAYER_KINDS`.
        bits: of a weight.
        group_size: columns that share a scale, or the size of square blocks; -1: one scale a channel.
        buffers: types of the tensors that not every layer has, or not in one type.
        weight_dtype: of codes that are floating numbers, as for `gemm`; None: integers.
        super_size: columns of a super-block, where scales have two levels; None: they have one.

    Example:
        >>> import torch, qcutlass
        >>> layer = qcutlass.QuantLinear.from_linear(torch.nn.Linear(256, 48, bias=False))
        >>> layer.spec.to_dict()
        {'kind': 'weight_only', 'bits': 4, 'group_size': 128, 'scales': 'float32', 'zeros': 'uint8'}
    """

    kind: str
    bits: int
    group_size: int
    buffers: tuple[tuple[str, str], ...]
    weight_dtype: str | None = None
    super_size: int | None = None

    @staticmethod
    def of(
        kind: str,
        bits: int,
        group_size: int,
        k: int,
        tensors: Mapping[str, Tensor | None],
        weight_dtype: str | None = None,
    ) -> LayerSpec:
        """The description of a layer of K columns with these tensors, of which it takes those in `LAYER_KINDS`."""
        found = LAYER_KINDS[kind]
        held = {name: tensors.get(name) for name in found.buffers}
        present = tuple((name, short(part.dtype)) for name, part in held.items() if part is not None)
        is_size = group_size in (found.sizes or ()) or group_size < k
        supers, scales, super_size = held.get("super_scales"), held.get("scales"), None
        if scales is None:
            scales = held.get("levels")
        if supers is not None and scales is not None:
            super_size = group_size * (len(scales) // len(supers))
        return LayerSpec(kind, bits, group_size if is_size else -1, present, weight_dtype, super_size)

    @property
    def has_minimums(self) -> bool:
        """Whether its layers have minimums."""
        return not {"minimums", "levels"}.isdisjoint(dict(self.buffers))

    @property
    def words(self) -> str:
        """The scheme in words: bits, groups, zero points, options."""
        return LAYER_KINDS[self.kind].words(self)

    @staticmethod
    def from_dict(values: object, where: str) -> LayerSpec:
        """Raises CheckpointError, with `where`, for what no layer is like."""
        if not isinstance(values, dict) or values.get("kind") not in tuple(LAYER_KINDS):
            raise CheckpointError(
                f"{where}: expected an object whose kind is {' or '.join(LAYER_KINDS)}, got {values!r:.80}"
            )
        kind = LAYER_KINDS[values["kind"]]
        bits, group_size = values.get("bits"), values.get("group_size")
        if (
            type(bits) is not int
            or bits not in kind.bits
            or type(group_size) is not int
            or not (group_size == -1 or group_size > 0)
        ):
            allowed = " or ".join(map(str, kind.bits))
            raise CheckpointError(f"{where}: expected bits {allowed} and a group_size, got {bits!r} and {group_size!r}")
        if kind.sizes is not None and group_size not in kind.sizes:
            sizes = " or ".join(map(str, kind.sizes))
            raise CheckpointError(f"{where}: expected group_size {sizes} of kind {values['kind']}, got {group_size}")
        for name, dtype in values.items():
            if name not in _NUMBERS and dtype not in kind.buffers.get(name, ()):
                raise CheckpointError(
                    f"{where}: {name}: expected one of {kind.buffers.get(name, ())}, got {dtype!r:.40}"
                )
        held = _separate_levels(values, where)
        for name in kind.required:
            if name not in held:
                raise CheckpointError(f"{where}: expected the type of {name}")
        if "zeros" in held and "minima" in held:
            raise CheckpointError(f"{where}: expected zeros or minima, which they follow from, got both")
        if "minimums" in held and ("zeros" in held or "minima" in held):
            raise CheckpointError(f"{where}: expected zeros or minimums, got both")
        weight_dtype, super_size = _weight_dtype(held, where), _super_size(held, where)
        _check_scales(held, weight_dtype, where)
        if "code_table" in held and (bits != 8 or weight_dtype is not None):
            raise CheckpointError(f"{where}: expected a code_table of integer codes of 8 bits, got {values!r:.200}")
        present = tuple((name, values[name]) for name in kind.buffers if name in values)
        return LayerSpec(values["kind"], bits, group_size, present, weight_dtype, super_size)

    def to_dict(self) -> dict[str, Any]:
        """As in `config.json`."""
        codes = {} if self.weight_dtype is None else {"weight_dtype": self.weight_dtype}
        supers = {} if self.super_size is None else {"super_size": self.super_size}
        sizes = {"group_size": self.group_size, **supers}
        return {"kind": self.kind, "bits": self.bits, **codes, **sizes, **dict(self.buffers)}

    def columns(self, k: int) -> int:
        """Columns that share a scale in a layer of K columns."""
        return k if self.group_size == -1 else min(self.group_size, k)

    def tensors(self, n: int, k: int) -> dict[str, Tensor]:
        """The tensors of `buffers` without values, on the meta device, for a layer `[N, K]`."""
        groups = (ceil_div(k, self.columns(k)), n)
        of_groups = ("scales", "zeros", "minima", "minimums", "levels")
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(of_groups, groups)
        if self.super_size is not None:
            blocks = ceil_div(groups[0], max(1, self.super_size // self.columns(k)))
            shapes |= dict.fromkeys(("super_scales", "super_minimums"), (blocks, n))
        shapes |= {"bias": (n,), "a_scale": (1,), "global_scale": (1,), "code_table": (CODE_TABLE,)}
        return {
            name: torch.empty(shapes.get(name, (k,)), dtype=_DTYPES[dtype], device="meta")
            for name, dtype in self.buffers
        }


def _separate_levels(values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The same with the integer scales and minimums that `levels` hold; CheckpointError where these are named, too."""
    if "levels" not in values:
        return values
    both = dict.fromkeys(("scales", "minimums"), values["levels"])
    if not both.keys().isdisjoint(values):
        raise CheckpointError(f"{where}: expected levels, or scales and minimums, got {values!r:.200}")
    return {**values, **both}


def _super_size(values: Mapping[str, Any], where: str) -> int | None:
    """Columns of a super-block; CheckpointError where the levels of scales and minimums do not go together."""
    size, group_size = values.get("super_size"), values["group_size"]
    supers, minimums = "super_scales" in values, "minimums" in values
    integers = [values[name] in _INTEGERS for name in ("scales", "minimums") if name in values]
    if any(found != supers for found in integers) or ("super_minimums" in values) != (supers and minimums):
        raise CheckpointError(
            f"{where}: expected super_scales and super_minimums just beside integer scales and minimums, got "
            f"{values!r:.200}"
        )
    if supers and ("zeros" in values or "minima" in values or "weight_dtype" in values):
        raise CheckpointError(f"{where}: expected integer codes without zeros beside super_scales, got {values!r:.200}")
    if not (type(size) is int and size > 0 and size % max(1, group_size) == 0 if supers else size is None):
        raise CheckpointError(
            f"{where}: super_size: expected a multiple of group_size just beside super_scales, got {size!r:.40} and "
            f"{group_size}"
        )
    return size


def _weight_dtype(values: Mapping[str, Any], where: str) -> str | None:
    """That of a checked kind and bits; CheckpointError for what no such layer has."""
    weight_dtype = values.get("weight_dtype")
    if weight_dtype is None:
        return None
    allowed = LAYER_KINDS[values["kind"]].weight_dtypes
    if not isinstance(weight_dtype, str) or weight_dtype not in allowed:
        names = " or ".join(allowed) or "no such"
        raise CheckpointError(
            f"{where}: weight_dtype: expected {names} codes of kind {values['kind']}, got {weight_dtype!r:.40}"
        )
    if values["bits"] != CODE_TYPES[weight_dtype].bits or not values.keys().isdisjoint(("zeros", "minima", "minimums")):
        raise CheckpointError(
            f"{where}: {weight_dtype} codes have {CODE_TYPES[weight_dtype].bits} bits and no zeros, got {values!r:.200}"
        )
    return weight_dtype


def _check_scales(values: Mapping[str, Any], weight_dtype: str | None, where: str) -> None:
    """Raises CheckpointError for scales of a type that such codes do not have, and a global one beside others."""
    scales = values.get("scales")
    numbers = (*_FLOATS, *_INTEGERS)
    allowed = numbers if weight_dtype is None else tuple(map(short, CODE_TYPES[weight_dtype].scales))
    if scales is not None and scales not in allowed:
        raise CheckpointError(
            f"{where}: scales: expected one of {allowed} of {weight_dtype or 'integer'} codes, got {scales}"
        )
    if "global_scale" in values and scales != "float8_e4m3fn":
        raise CheckpointError(f"{where}: expected a global_scale just beside scales of float8_e4m3fn, got {scales}")


def _weight_only_words(spec: LayerSpec) -> str:
    types = dict(spec.buffers)
    groups = "channel" if spec.group_size == -1 else f"g{spec.group_size}"
    if spec.weight_dtype is not None:
        scales = {"float8_e8m0fnu": " e8m0 scales", "float8_e4m3fn": " e4m3 scales"}.get(types["scales"], "")
        return f"{spec.weight_dtype} {groups}{scales}" + _input_words(types)
    zeros = {None: "sym", "uint8": "int zeros"}.get(types.get("zeros", types.get("minima")), "real zeros")
    if spec.has_minimums:
        zeros = "minimums"
    return f"w{spec.bits} {groups} {zeros}" + _input_words(types)


def _input_words(types: Mapping[str, str]) -> str:
    return f"{' act-scale' * ('act_scale' in types)}{' act-order' * ('perm' in types)}"


def _int4_words(spec: LayerSpec) -> str:
    return f"{_weight_only_words(spec)}, {spec.kind.removeprefix('w4a8_')} activations"


def _int8_words(spec: LayerSpec) -> str:
    return f"w8a8 channel {_activations(spec)}"


def _fp8_words(spec: LayerSpec) -> str:
    return f"fp8 channel {_activations(spec)}"


def _activations(spec: LayerSpec) -> str:
    return "static" if "a_scale" in dict(spec.buffers) else "dynamic"


def _blockwise_words(spec: LayerSpec) -> str:
    return f"{'w8a8' if spec.weight_dtype is None else 'fp8'} blocks of {spec.group_size}"


class LayerKind(NamedTuple):
    """A kind of layers in converted folders.

    Attributes:
        buffers: the tensors whose presence or type is a layer's own, and the types that they may have.
        required: those that each layer has.
        words: its scheme in words.
        quantises_activations: whether the product takes activations of 8 bits.
        sizes: the group sizes that its layers may have, whatever K is; None: any.
        weight_dtypes: types of codes that its layers may say they have.
        bits: of their weights.
    """

    buffers: Mapping[str, tuple[str, ...]]
    required: tuple[str, ...]
    words: Callable[[LayerSpec], str]
    quantises_activations: bool
    sizes: tuple[int, ...] | None = None
    weight_dtypes: tuple[str, ...] = ()
    bits: tuple[int, ...] = tuple(PACKINGS)


_FLOATS: Final = ("float16", "bfloat16", "float32")
_INTEGERS: Final = ("uint8", "int8")
_NUMBERS: Final = ("kind", "bits", "group_size", "weight_dtype", "super_size")
_WEIGHT_ONLY: Final = {
    "scales": (*_FLOATS, *_INTEGERS, "float8_e8m0fnu", "float8_e4m3fn"), "zeros": (*_FLOATS, "uint8"),
    "minima": ("float16", "bfloat16"), "global_scale": ("float32",), "bias": _FLOATS,
    "act_scale": _FLOATS, "perm": ("int32",), "minimums": (*_FLOATS, *_INTEGERS),
    "levels": ("uint8",), "code_table": ("uint8",),
    "super_scales": ("float16",), "super_minimums": ("float16",),
}  # fmt: skip
_INT4: Final = {
    "scales": _FLOATS, "zeros": ("uint8",), "bias": _FLOATS, "act_scale": _FLOATS, "perm": ("int32",),
}  # fmt: skip
_EIGHT_BIT: Final = {"bias": _FLOATS, "a_scale": ("float32",), "smooth": ("float32",)}

LAYER_KINDS: Final = {
    "weight_only": LayerKind(_WEIGHT_ONLY, ("scales",), _weight_only_words, False, None, tuple(CODE_TYPES)),
    "w4a8_fp8": LayerKind(_INT4, ("scales",), _int4_words, True, bits=(4,)),
    "w4a8_int8": LayerKind(_INT4, ("scales",), _int4_words, True, bits=(4,)),
    "int8": LayerKind(_EIGHT_BIT, (), _int8_words, True, (-1,)),
    "fp8": LayerKind(_EIGHT_BIT, (), _fp8_words, True, (-1,)),
    "blockwise": LayerKind({"bias": _FLOATS}, (), _blockwise_words, True, BLOCK_SIZES, ("e4m3",)),
}
"""The kinds of layers in converted folders; layers in `qcutlass.layers` and `qcutlass.formats` name theirs."""
PARTS: Final = frozenset({"layout", "w_packed", "w_scale", GUARD}.union(*(k.buffers for k in LAYER_KINDS.values())))
"""Suffixes of the tensors that a layer may have in a converted folder."""


class Requantized(NamedTuple):
    """A layer that could not be kept as its source has it, and was quantised anew.

    Attributes:
        stored: the form in the source, in words.
        error: what its weights lost: the norm of the difference over the norm of the weights.
    """

    stored: str
    error: float

    @staticmethod
    def from_dict(values: object, where: str) -> Requantized:
        """Raises CheckpointError for what is none."""
        found = values if isinstance(values, dict) else {}
        stored, error = found.get("from"), found.get("error")
        if not isinstance(stored, str) or not isinstance(error, int | float):
            raise CheckpointError(f"{where}: expected an object with from and error, got {values!r:.80}")
        return Requantized(stored, float(error))


@dataclass(frozen=True)
class ModelSpec:
    """`quantization_config` of a converted folder.

    Attributes:
        default: of most layers; None: nothing is converted.
        exceptions: of the others, by name.
        modules_to_not_convert: names of modules that keep their floats.
        source: the format that was converted.
        requantized: the layers that were quantised anew, by name.
    """

    default: LayerSpec | None
    exceptions: Mapping[str, LayerSpec] = field(default_factory=dict)
    modules_to_not_convert: Sequence[str] = ()
    source: str = ""
    requantized: Mapping[str, Requantized] = field(default_factory=dict)

    @staticmethod
    def of(
        layers: Mapping[str, LayerSpec],
        modules_to_not_convert: Sequence[str],
        source: str,
        requantized: Mapping[str, Requantized] | None = None,
    ) -> ModelSpec:
        """With the most frequent description as the default."""
        counts = Counter(layers.values())
        default = max(counts, key=counts.__getitem__) if counts else None
        exceptions = {name: spec for name, spec in layers.items() if spec != default}
        return ModelSpec(default, exceptions, tuple(modules_to_not_convert), source, dict(requantized or {}))

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
        default, exceptions, lost = (values.get(key) for key in ("default", "exceptions", "requantized"))
        kept = values.get("modules_to_not_convert")
        if not isinstance(exceptions, dict) or not isinstance(kept, list) or not isinstance(lost, dict | None):
            raise CheckpointError(
                f"{where}: expected exceptions and requantized, objects, and modules_to_not_convert, a list"
            )
        return ModelSpec(
            None if default is None else LayerSpec.from_dict(default, f"{where}: default"),
            {name: LayerSpec.from_dict(spec, f"{where}: exceptions: {name}") for name, spec in exceptions.items()},
            tuple(str(name) for name in kept),
            str(values.get("source", "")),
            {
                name: Requantized.from_dict(found, f"{where}: requantized: {name}")
                for name, found in (lost or {}).items()
            },
        )

    def to_dict(self) -> dict[str, Any]:
        """As in `config.json`."""
        lost = {name: {"from": found.stored, "error": found.error} for name, found in self.requantized.items()}
        return {
            "quant_method": METHOD,
            "version": VERSION,
            "layout_version": LAYOUT_VERSION,
            "source": self.source,
            "default": None if self.default is None else self.default.to_dict(),
            "exceptions": {name: spec.to_dict() for name, spec in self.exceptions.items()},
            "modules_to_not_convert": list(self.modules_to_not_convert),
            **({"requantized": lost} if lost else {}),
        }
