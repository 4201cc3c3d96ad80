"""What the commands share: options, how errors are shown."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from qcutlass.errors import CheckpointError, UnsupportedError

USER_ERRORS = (UnsupportedError, CheckpointError, FileNotFoundError, FileExistsError, ValueError, MemoryError)


class Device(str, Enum):
    """Where to run."""

    cpu = "cpu"
    cuda = "cuda"


class Bits(str, Enum):
    """Bits of a weight."""

    four = "4"
    eight = "8"


def console(stderr: bool = False) -> Console:
    """One that leaves names as they are: `:x:` is no emoji. What is printed has its brackets escaped."""
    return Console(stderr=stderr, emoji=False)


def read_text(option: str, path: Path) -> str:
    """The text file that an option names; ValueError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {path}: expected a text file in UTF-8 ({error})") from error
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}") from error


def failed(error: object) -> typer.Exit:
    """Prints an error of the user's; exit status 2."""
    console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
    return typer.Exit(2)
