"""Mixtures of experts in files: names of their layers, which of them converted folders hold, what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from torch import Tensor

from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats.expert_rows import FOLDERS, MODELS, USUAL, WORDS
from qcutlass.formats.specs import LAYER_KINDS, LayerSpec
from qcutlass.formats.tensors import REQUANTIZE
from qcutlass.layers.experts import Expert, have_one_order

TAKEN: Final = (*MODELS, "gpt_oss")
"""The models (`model_type`) whose experts converted folders hold, a layer for each part of each expert."""
STACKED: Final = ("gpt_oss",)
"""Those of them of which transformers reads no floats of a single expert."""
_COUNTS: Final = (  # in configurations: of the experts that tokens are sent to
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_routed_experts",
    "moe_num_experts",
)
_NAME: Final = re.compile(r"(^|\.)(experts|block_sparse_moe)(\.|$)")
_LAYER: Final = re.compile(r"(?P<block>.+\.experts)\.(?P<expert>\d{1,6})\.(?P<part>\w+)")
_ROUTER: Final = re.compile(r"(.*\.)?((mlp|block_sparse_moe)\.gate|mlp\.router)")
_PARTS: Final = {
    word: part for words in (USUAL, *WORDS.values()) for word, part in zip(words, Expert._fields, strict=True)
}


class ExpertLayer(NamedTuple):
    """The layer of one expert in a file.

    Attributes:
        block: the name of the experts' module.
        expert: its number.
        part: "gate", "up" or "down".
    """

    block: str
    expert: int
    part: str


def expert_layer(name: str) -> ExpertLayer | None:
    """The place in a mixture that a layer's name tells; None for other layers.

    Example:
        >>> from qcutlass.models.experts import expert_layer
        >>> expert_layer("model.layers.0.block_sparse_moe.experts.7.w2")
        ExpertLayer(block='model.layers.0.block_sparse_moe.experts', expert=7, part='down')
    """
    found = _LAYER.fullmatch(name)
    part = None if found is None else _PARTS.get(found["part"])
    return None if found is None or part is None else ExpertLayer(found["block"], int(found["expert"]), part)


def is_router(name: str) -> bool:
    """Whether this layer chooses the experts of a mixture: it stays a float one."""
    return _ROUTER.fullmatch(name) is not None


def part_names(model_type: str) -> tuple[str, ...]:
    """The names of gate, up and down in the files of a model."""
    return WORDS.get(model_type, USUAL)


def stored_forms(name: str) -> Iterator[str]:
    """The names that files may have for what transformers calls `name`, this one first."""
    yield name
    for ours, theirs in FOLDERS.items():
        if ours in name:
            renamed = name.replace(ours, theirs)
            yield renamed
            for words in WORDS.values():
                for usual, word in zip(USUAL, words, strict=True):
                    yield renamed.replace(f".{usual}", f".{word}")


def module_forms(block: str) -> Iterator[str]:
    """The names that transformers may have for the experts that a file calls `block`, this one first."""
    yield block
    for ours, theirs in FOLDERS.items():
        if theirs in block:
            yield block.replace(theirs, ours)


def file_forms(block: str, model_type: str) -> Iterator[str]:
    """The names that files of a model may have for the experts that transformers calls `block`, this one first."""
    yield block
    for ours, theirs in FOLDERS.items() if model_type in WORDS else ():
        if ours in block:
            yield block.replace(ours, theirs)


def check_configuration(values: Any, where: object) -> None:
    """Raises UnsupportedError if this is the configuration of a mixture of experts that is not taken."""
    if isinstance(values, dict) and values.get("model_type") in TAKEN:
        return
    for name, count in _counts(values):
        raise _refused(where, f"{name} is {count}")


def check_names(layers: Iterable[str], rest: Iterable[str], config: Mapping[str, Any] | None, where: object) -> None:
    """Raises UnsupportedError if layers or other tensors belong to a mixture of experts that is not taken.

    Args:
        config: that of the model; None where there is none.
    """
    taken = config is not None and config.get("model_type") in TAKEN
    modules = {**{name: name for name in layers}, **{name: name.rpartition(".")[0] for name in rest}}
    for name, module in modules.items():
        if _NAME.search(name) and not (taken and (expert_layer(module) or is_router(module))):
            raise _refused(where, name)


def _counts(values: Any) -> Iterator[tuple[str, Any]]:
    """At any depth: `text_config`, `ffn_config`; a dense model may say 0 or 1."""
    for value in values if isinstance(values, list) else ():
        yield from _counts(value)
    for key, value in values.items() if isinstance(values, dict) else ():
        counts = value if isinstance(value, list) else [value]
        if key in _COUNTS and any(isinstance(count, int) and count > 1 for count in counts):
            yield key, value
        yield from _counts(value)


def _refused(where: object, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where}: a mixture of experts ({reason}) of a form that converted folders do not hold; they hold those of "
        f"{', '.join(TAKEN)}, a layer for each expert. Load this one with transformers and call "
        "qcutlass.replace_linear(model, scheme), which packs its dense layers"
    )


class ExpertBlocks:
    """The experts of a folder in the making: those of a block must be of one scheme, as one product takes them.

    Args:
        stacked: whether the model is one of `STACKED`, whose experts can't stay floats.
    """

    def __init__(self, stacked: bool = False) -> None:
        self._stacked = stacked
        self._first: dict[tuple[str, str], tuple[str, tuple[Any, ...]]] = {}
        self._found: dict[str, set[tuple[int, str]]] = {}
        self._orders: dict[tuple[str, int], tuple[str, Tensor | None]] = {}  # of one of gate and up, till the other

    def add(self, name: str, spec: LayerSpec | None, shape: tuple[int, int], perm: Tensor | None = None) -> None:
        """Checks a layer, of whatever kind.

        Args:
            spec: None for floats.
            perm: int32 `[K]`, the order of its columns, or None.

        Raises:
            UnsupportedError: a router is quantised; experts differ from others of their block, or have what their
                product does not; it says what.
        """
        if is_router(name) and spec is not None:
            raise UnsupportedError(
                f"{name}: a router is quantised, which is to be in floats; qcutlass convert --requantize makes it so"
            )
        layer = expert_layer(name)
        if layer is None:
            return
        if spec is not None:
            _check_spec(name, spec)
        elif self._stacked:
            raise UnsupportedError(f"{name}: stays floats, which such experts can't in a folder; skip no experts")
        described = ("floats",) if spec is None else _described(spec)
        # gate and up are one matrix, and all are floats or none
        for key, facts in (
            (layer.part.replace("up", "gate"), (*described, f"shape {[*shape]}")),
            ("", (spec is None,)),
        ):
            other, expected = self._first.setdefault((layer.block, key), (name, facts))
            if facts != expected:
                words = [", ".join(each) if key else "floats" * each[0] or "quantised" for each in (facts, expected)]
                raise UnsupportedError(
                    f"{name}: {words[0]}, but {other}: {words[1]}; the experts of a block need one shape and one "
                    f"scheme; {REQUANTIZE}"
                )
        if layer.part != "down":
            self._check_order(name, layer, perm)
        self._found.setdefault(layer.block, set()).add((layer.expert, layer.part))

    def _check_order(self, name: str, layer: ExpertLayer, perm: Tensor | None) -> None:
        """Raises UnsupportedError if the gate and up of an expert have their columns in different orders."""
        key = layer.block, layer.expert
        if key not in self._orders:
            self._orders[key] = name, perm
            return
        other, expected = self._orders.pop(key)
        if not have_one_order(perm, expected):
            raise UnsupportedError(
                f"{name}: its columns are in another order (act-order) than those of {other}, and one product "
                f"multiplies both; {REQUANTIZE}"
            )

    def finish(self) -> None:
        """Raises CheckpointError if an expert, or a part of one, is absent."""
        for block, found in self._found.items():
            count = 1 + max(expert for expert, _ in found)
            absent = [(i, part) for i in range(count) for part in Expert._fields if (i, part) not in found]
            if absent:
                expert, part = absent[0]
                raise CheckpointError(f"{block}: expert {expert} of {count} has no {part} projection")


def _described(spec: LayerSpec) -> tuple[Any, ...]:
    """What the layers of a stack have in common."""
    minimums = ("minimums",) if spec.has_minimums else ()
    return (spec.weight_dtype or f"{spec.bits} bits", f"group_size {spec.group_size}", *minimums)


def _check_spec(name: str, spec: LayerSpec) -> None:
    if LAYER_KINDS[spec.kind].quantises_activations:
        raise UnsupportedError(
            f"{name}: experts of quantised activations ({spec.words}) are not taken, only those of weights alone; "
            "qcutlass convert --requantize (requantize=True) keeps their codes and leaves their activations as they are"
        )
    if "act_scale" in dict(spec.buffers):
        raise UnsupportedError(
            f"{name}: experts with scales of their own activations are not taken, as one product multiplies all of a "
            f"block; {REQUANTIZE}"
        )
