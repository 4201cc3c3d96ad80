"""Fields of cases, and devices and seeds of their data, are refused by name where they are none such."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch

_LEAST: Final[Mapping[str, int]] = {"group_size": 1, "block_size": 1, "k": 1}  # of numbers; 0 of others
_BITS: Final = (4, 8)


class _Allowed(NamedTuple):
    """What a field may be: of some types, or one of some words."""

    types: tuple[type, ...]
    words: tuple[Any, ...]


def _allowed(hint: Any) -> _Allowed:
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return _Allowed((), typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        parts = [_allowed(part) for part in typing.get_args(hint)]
        return _Allowed(sum((part.types for part in parts), ()), sum((part.words for part in parts), ()))
    kind: type = hint if origin is None else origin
    return _Allowed((float, int) if kind is float else (kind,), ())


@functools.cache
def _fields(case: type) -> dict[str, _Allowed]:
    return {name: _allowed(hint) for name, hint in typing.get_type_hints(case).items()}


def check_fields(case: Any) -> None:
    """Raises TypeError or ValueError unless each field of a dataclass is of its type, and numbers are not too small."""
    kind: Any = type(case)
    for name, (kinds, words) in _fields(kind).items():
        value = getattr(case, name)
        if words:
            if not isinstance(value, str) or value not in words:
                raise ValueError(f"{name}: expected one of {', '.join(map(repr, words))}, got {value!r}")
        elif not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            known = " or ".join("None" if one is types.NoneType else one.__name__ for one in kinds)
            raise TypeError(f"{name}: expected {known}, got {type(value).__name__}")
        elif type(value) is int and value < _LEAST.get(name, 0):
            raise ValueError(f"{name}: expected at least {_LEAST.get(name, 0)}, got {value}")
        if name == "bits" and value not in _BITS:
            raise ValueError(f"bits: expected one of {', '.join(map(str, _BITS))}, got {value}")


def generator(device: torch.device | str, seed: int) -> torch.Generator:
    """A generator of random numbers on a device, seeded; TypeError or ValueError where there is none."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed: expected an int, got {type(seed).__name__}")
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device: expected 'cpu', 'cuda' or 'cuda:N', or a torch.device, got {type(device).__name__}")
    try:
        made = torch.Generator(device)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device: expected 'cpu', 'cuda' or 'cuda:N', got {str(device)!r} ({reason})") from error
    return made.manual_seed(seed)
