"""Rules of single layers where an engine calls a layer otherwise than the checkpoint does.

Configurations describe layers apart by name: GPTQModel's `dynamic`, AutoRound's `extra_config`, the targets of
compressed-tensors' `config_groups`. An engine has names of its own: of what is around a model, of experts. This module
alone knows what is read nevertheless.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats import Layer, compressed_tensors
from qcutlass.formats.config import Config

Values = Mapping[str, Any]
Rename = Callable[[list[str]], list[str]]
"""Names in the checkpoint to names in the engine, as `apply_list` of vLLM's mappers."""
_RULES: Final = ("dynamic", "extra_config")
_GROUPS: Final = "config_groups"
_MARKED: Final = re.compile(r"((?:[-+]:|re:)?\^?)(.*)", re.DOTALL)
"""What rules and targets may begin with, and a name or a pattern."""
_LEFT_OUT: Final = "-:"
"""What rules of layers begin with that are not quantised."""


def with_names(values: Values, renames: Sequence[Rename]) -> dict[str, Any]:
    """A configuration whose rules stand there under the engine's names, too, beside those of the checkpoint.

    Example:
        >>> from qcutlass.vllm.naming import with_names
        >>> values = {"bits": 4, "extra_config": {"model.up": {"bits": 8}}}
        >>> with_names(values, [lambda names: [f"language_model.{name}" for name in names]])["extra_config"]
        {'model.up': {'bits': 8}, 'language_model.model.up': {'bits': 8}}
    """
    found = dict(values)
    for key in _RULES:
        rules = values.get(key)
        if isinstance(rules, Mapping):
            found[key] = {name: own for rule, own in rules.items() for name in _spellings(rule, renames)}
    if isinstance(values.get(_GROUPS), Mapping):
        found[_GROUPS] = {name: _with_targets(group, renames) for name, group in values[_GROUPS].items()}
    return found


def read(load: Callable[[str, Values], Layer], values: Values, names: Sequence[str]) -> Layer:
    """The layer as its own rule describes it, or else as what is said of all layers.

    Where no rule matches a name, it may be that the checkpoint has another one. If the tensors contradict what is said
    of all layers, then what is said of some goes before, provided that it makes one layer of these tensors.

    Args:
        load: reads the layer under a name, described by a configuration.
        values: `quantization_config` of the folder.
        names: which the layer may have in the checkpoint, at least one.

    Raises:
        CheckpointError, UnsupportedError: `load` raises it, or rules that contradict each other fit the tensors.
    """
    config = Config(values)
    own = next((name for name in names if _is_described_apart(config, name)), None)
    if own is not None:
        return load(own, values)
    try:
        return load(names[0], values)
    except (CheckpointError, UnsupportedError) as error:
        fitting = list(_fitting(load, values, names[0]))
        if not fitting:
            raise
        if not all(_are_alike(fitting[0], layer) for layer in fitting):
            raise CheckpointError(
                f"{error}; rules of other layers that contradict each other fit its tensors"
            ) from error
        return fitting[0]


def _spellings(rule: str, renames: Sequence[Rename]) -> list[str]:
    """A rule's names or patterns: its own, then the engine's."""
    mark, name = _MARKED.fullmatch(rule).groups()  # type: ignore[union-attr]  # it matches everything
    plain = name.replace(r"\.", ".")  # mappers know names without escapes; a pattern's "." matches a dot, too
    renamed = [new for rename in renames for new in rename([plain]) if new != plain]
    return list(dict.fromkeys([rule, *(f"{mark}{new}" for new in renamed)]))


def _with_targets(group: Any, renames: Sequence[Rename]) -> Any:
    targets = group.get("targets") if isinstance(group, Mapping) else None
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        return group  # what reads it says what is wrong
    return {**group, "targets": [name for target in targets for name in _spellings(target, renames)]}


def _is_described_apart(config: Config, name: str) -> bool:
    return config.of_layer(name) is not config or compressed_tensors.is_named(config, name)


def _fitting(load: Callable[[str, Values], Layer], values: Values, name: str) -> Iterator[Layer]:
    """The layers that descriptions of others make of the tensors."""
    for described in _descriptions(values):
        try:
            yield load(name, described)
        except (CheckpointError, UnsupportedError):
            continue


def _descriptions(values: Values) -> list[Values]:
    """What is said of all layers with what is said of some of them; each once."""
    common = {key: value for key, value in values.items() if key not in _RULES}
    found: list[Values] = []
    for key in _RULES:
        rules = values.get(key)
        for rule, own in rules.items() if isinstance(rules, Mapping) else ():
            if own and isinstance(own, Mapping) and not rule.startswith(_LEFT_OUT) and own not in found:
                found.append(own)
    groups = values.get(_GROUPS)
    found += [{_GROUPS: {name: group}} for name, group in groups.items()] if isinstance(groups, Mapping) else []
    return [{**common, **own} for own in found]


def _are_alike(one: Layer, other: Layer) -> bool:
    return one.kind == other.kind and torch.equal(one.effective_weight(), other.effective_weight())
