"""Hears which files are opened while a folder is read: none outside of it, wherever links lead."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import Any

_MODULES = tuple(all_suffixes())
_watched: list[list[str]] = []  # the paths that are opened within each `inside_alone`


@functools.cache
def _install() -> None:
    """Hooks stay until the process ends, so there is one."""
    sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _watched and not isinstance(arguments[0], int):  # a number is of a file that is open
        path = os.fsdecode(arguments[0])
        for opened in _watched:
            opened.append(os.path.realpath(path))


def _is_imported(path: str) -> bool:
    """Whether Python opens it to import: a place of `sys.path`, or below one a module or the metadata of a package."""
    for place in map(os.path.realpath, sys.path):
        below = path.startswith(f"{place}{os.sep}")
        if path == place or (below and (path.endswith(_MODULES) or ".dist-info/" in path[len(place) :])):
            return True
    return False


@contextmanager
def inside_alone(folder: Path) -> Iterator[None]:
    """Has files opened in `folder` alone, and the folder itself; imports are let be.

    It hears of what Python opens, by `open` or `os.open`, at the place that links lead to, whether or not that fails;
    not of what a library opens in C.

    Raises:
        AssertionError: another file was opened; instead of what the block raises, if it does.
    """
    _install()
    root = os.path.realpath(folder)
    opened: list[str] = []
    _watched.append(opened)
    try:
        yield
    finally:
        _watched.pop()
        outside = [path for path in opened if path != root and not path.startswith(f"{root}{os.sep}")]
        outside = sorted({path for path in outside if not _is_imported(path)})
        if outside:
            raise AssertionError(f"opened outside of the folder: {', '.join(outside)}")
