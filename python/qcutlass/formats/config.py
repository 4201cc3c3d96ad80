"""JSON files beside the weights: what a checkpoint says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    where: str = "config"

    def __bool__(self) -> bool:
        return bool(self.values)

    def updated(self, values: Mapping[str, Any] | None) -> Config:
        """With some values replaced."""
        return Config({**self.values, **values}, self.where) if values else self

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
    """The description of the quantisation in the JSON files of a folder."""
    for name, keys in _SECTIONS.items():
        path = folder / name
        values = read_json_if_there(path)
        if values is None:
            continue
        whole = Config(values, str(path))
        for key in keys:
            found = whole.section(key) if key else whole
            if found:
                return found
    return Config({}, str(folder / "config.json"))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
