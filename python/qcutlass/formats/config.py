"""JSON files beside the weights: what a checkpoint says of itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from qcutlass.errors import CheckpointError
from qcutlass.formats.files import check_no_pointer, inside, parsed_json, read_whole

_MOST_BYTES: Final = 32 << 20
_SECTIONS: Final = {  # file: where in it the quantisation is described; "": everywhere
    "config.json": ("quantization_config", "compression_config", "quantization"),
    "quantize_config.json": ("",),
    "quant_config.json": ("",),
    "hf_quant_config.json": ("quantization",),
}
VERSIONS: Final = ("checkpoint_format", "format")
"""Keys that name the version of a format; a file may have either, and several files of a folder one each."""
PACKINGS: Final = ("packing_format", "backend")
"""Keys under which AutoRound names the format that it writes, in newer and in older files."""
_PATTERN: Final = re.compile(r"[][*+?^$(){}|\\]")
"""What tells AutoRound's patterns from names of layers."""


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is no regular file, or a link out of its folder, holds something else, is larger than
            32 MiB, or has more than 2**19 lists and objects, or more than 64 in each other.
    """
    if path.is_symlink() and path.exists():
        inside(path.parent, path.name, str(path.parent))
    data = read_whole(path, _MOST_BYTES)
    if len(data) >= 4:
        check_no_pointer(path, data)
    try:
        value = parsed_json(data)
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_json_if_there(path: Path) -> dict[str, Any] | None:
    """As `read_json`; None where there is no such file."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return None


@dataclass(frozen=True)
class Config:
    """The quantisation that a checkpoint claims to have.

    Attributes:
        values: keys and values; empty where nothing describes it.
        where: for messages.
        others: what other files of the folder say.
        model_types: what `config.json` calls the model and its parts.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    where: str = "config"
    others: tuple[Config, ...] = ()
    model_types: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.values)

    def updated(self, values: Mapping[str, Any] | None) -> Config:
        """With some values replaced; a version takes the place of what any key of any file says of it."""
        if not values:
            return self
        if values.keys().isdisjoint(VERSIONS):
            return replace(self, values={**self.values, **values})
        kept = {key: value for key, value in self.values.items() if key not in (*VERSIONS, *PACKINGS)}
        return replace(self, values={**kept, **values}, others=())

    def of_layer(self, name: str) -> Config:
        """With what it says of one layer apart: in GPTQModel's `dynamic`, or AutoRound's `extra_config`."""
        key, rule = self._rule(name)
        own = self.values[key][rule] if rule is not None and not rule.startswith("-:") else None
        if not own:
            return self
        where = f"{self.where}: {key}: {rule}"
        if not isinstance(own, dict):
            raise CheckpointError(f"{where}: expected an object, got {_short(own)}")
        return replace(self, values={**self.values, **own}, where=where)

    def versions(self) -> dict[str, str]:
        """What the folder calls the version of its format, in lower case, by file and key."""
        found = ((config, key, config.text(key)) for config in (self, *self.others) for key in VERSIONS)
        return {f"{config.where}: {key}": text for config, key, text in found if text is not None}

    def section(self, *keys: str) -> Config:
        """The object under nested keys, empty where it is absent or null."""
        values: Any = self.values
        where = self.where
        for key in keys:
            values = values.get(key)
            where = f"{where}: {key}"
            if values is None:
                return Config({}, where)
            if not isinstance(values, dict):
                raise CheckpointError(f"{where}: expected an object, got {_short(values)}")
        return Config(values, where)

    def integer(self, *keys: str) -> int | None:
        """The value of the first key that is there; None where none is, or where it is null."""
        found = self._first(keys, (int,), "an integer")
        return None if found is None else int(found)

    def text(self, *keys: str) -> str | None:
        """As `integer`, in lower case."""
        found = self._first(keys, (str,), "a string")
        return None if found is None else str(found).lower()

    def flag(self, *keys: str) -> bool | None:
        """As `integer`."""
        found = self._first(keys, (bool,), "true or false")
        return None if found is None else bool(found)

    def _rule(self, name: str) -> tuple[str, str | None]:
        """The key of what describes layers apart, and the rule under it that is this layer's; None: there is none."""
        found = next((rule for pattern, rule in self._dynamic if pattern.match(name)), None)
        if found is not None:
            return "dynamic", found
        if name in self._extra_config:
            return "extra_config", name
        return "extra_config", next((rule for pattern, rule in self._extra_patterns if pattern.search(name)), None)

    @cached_property
    def _dynamic(self) -> list[tuple[re.Pattern[str], str]]:
        """GPTQModel's rules, which begin with "+:" or nothing; with "-:" those of layers that are not quantised."""
        rules = self.values.get("dynamic")  # compressed-tensors has a flag of this name
        rules = rules if isinstance(rules, dict) else {}
        return [(pattern(re.sub("^[-+]:", "", rule), f"{self.where}: dynamic"), rule) for rule in rules]

    @cached_property
    def _extra_config(self) -> Mapping[str, Any]:
        return self.section("extra_config").values

    @cached_property
    def _extra_patterns(self) -> list[tuple[re.Pattern[str], str]]:
        """AutoRound's patterns, which stand among names of layers."""
        rules = filter(_PATTERN.search, self._extra_config)
        return [(pattern(rule, f"{self.where}: extra_config"), rule) for rule in rules]

    def _first(self, keys: tuple[str, ...], types: tuple[type, ...], expected: str) -> Any:
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise CheckpointError(f"{self.where}: {key}: expected {expected}, got {_short(value)}")
            return value
        return None


def read_config(folder: Path) -> Config:
    """The description of the quantisation in the JSON files of a folder: that of the first one, with the others'."""
    found, types = [], frozenset[str]()
    for name, keys in _SECTIONS.items():
        path = folder / name
        values = read_json_if_there(path)
        if values is None:
            continue
        types |= set(model_types(values))
        whole = Config(values, str(path))
        sections = (whole.section(key) if key else whole for key in keys)
        found.append(next(filter(None, sections), Config()))
    found = list(filter(None, found)) or [Config({}, str(folder / "config.json"))]
    return replace(found[0], others=tuple(found[1:]), model_types=types)


def model_types(values: Mapping[str, Any]) -> Iterator[str]:
    """Those of a configuration and of the ones in it."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from model_types(value)
        elif key == "model_type" and isinstance(value, str):
            yield value


def pattern(text: str, where: str) -> re.Pattern[str]:
    """A regular expression of a configuration; CheckpointError, with `where`, if it is none."""
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{where}: expected a regular expression, got {_short(text)}: {error}") from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
