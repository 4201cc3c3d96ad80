"""Folders that this package makes for its own use: how they are named, and marked, so that no other is ever removed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

MARK: Final = ".made-by-qcutlass"
_TEXT: Final = b"qcutlass made this folder for work in progress. It goes on from here, or removes the folder.\n"
_LONGEST: Final = 255  # bytes of a name, on file systems of Linux
_DIGITS: Final = 16


def mark(folder: Path) -> None:
    """Marks an empty folder as one of this package."""
    (folder / MARK).write_bytes(_TEXT)


def is_marked(folder: Path) -> bool:
    """Whether a folder holds the mark, or the part of it that a kill or a full disk has left."""
    path = folder / MARK
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return _TEXT.startswith(file.read(len(_TEXT) + 1))


def short_name(name: str, room: int) -> str:
    """The name of a destination, to which `room` bytes are added; one that gets too long is cut, and ends in a digest.

    Example:
        >>> from qcutlass.models.marks import short_name
        >>> short_name("llama-w4", 5)
        'llama-w4'
        >>> short_name("w" * 255, 5)[-20:]
        'www.5ba8cd329a209f78'
    """
    encoded = os.fsencode(name)
    if len(encoded) + room <= _LONGEST:
        return name
    head = encoded[: _LONGEST - room - 1 - _DIGITS].decode("utf-8", "ignore")  # no half of a character
    return f"{head}.{hashlib.sha256(encoded).hexdigest()[:_DIGITS]}"
