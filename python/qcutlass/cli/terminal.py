"""Common parts of the commands: options, text for terminals, errors that end a command."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any, Final

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, ProgressColumn
from safetensors import SafetensorError
from typer.core import TyperGroup

from qcutlass.errors import UnsupportedError
from qcutlass.models.memory import memory_shortage

USER_ERRORS: Final = (UnsupportedError, ValueError, OSError, MemoryError, torch.OutOfMemoryError, SafetensorError)
"""Errors of users' files, places and options (CheckpointError is a ValueError); all others are faults of ours."""

_MOST_TEXT_BYTES: Final = 1 << 30
_UNSEEN: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters: move the cursor, clear the screen, name the window
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # turn the direction of what is written around them
    "\u2028\u2029\ud800-\udfff]"  # end lines; are no characters
)
_UsageError: Final[Any] = typer.BadParameter.__bases__[0]  # typer has click, or a copy of it


class Device(str, Enum):
    """Where to run."""

    cpu = "cpu"
    cuda = "cuda"


class Bits(str, Enum):
    """Bits of a weight."""

    four = "4"
    eight = "8"


class HeadBits(str, Enum):
    """Bits of the output head."""

    eight = "8"
    four = "4"
    keep = "keep"

    @property
    def bits(self) -> int | None:
        """As `qcutlass.models.convert` takes them."""
        return None if self is HeadBits.keep else int(self.value)


HEAD_HELP: Final = "Bits of the output head, and of an embedding tied to it; keep: as in the source."


class Commands(TyperGroup):
    """A group whose commands end with a line: `USER_ERRORS` with exit status 2, Ctrl-C with 130."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command that the command line names."""
        try:
            with _warnings_as_lines():
                try:
                    return super().invoke(ctx)
                finally:
                    _flush()
        except _UsageError as error:
            error.message = printable(error.message)
            raise
        except BrokenPipeError:
            raise  # `qcutlass ... | head`: typer ends without a word
        except KeyboardInterrupt as error:
            raise typer.Exit(130) from error
        except USER_ERRORS as error:
            raise failed(error) from error
        except RuntimeError as error:
            if memory_shortage(error) is None:
                raise
            raise failed(error) from error


def _flush() -> None:
    """Writes printed text now, while an error can still say that the disk is full."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):  # of streams without a file; others are not to try again when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        say(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def printable(text: object, keep: str = "") -> str:
    """Text from a file or a command line as a terminal may see it: what it would act upon is escaped, but for `keep`.

    Tensors, paths and configurations can hold any character; all of them go through here on their way to the terminal.
    """
    return _UNSEEN.sub(
        lambda found: found[0] if found[0] in keep else found[0].encode("unicode_escape").decode(), str(text)
    )


def markup(text: object) -> str:
    """The same for what rich prints: its brackets are no tags."""
    return escape(printable(text))


def echo(text: object, end: str = "\n", keep: str = "\n") -> None:
    """Prints a result, whose lines stay lines."""
    typer.echo(printable(text, keep) + end, nl=False)


def say(text: object) -> None:
    """Prints a line that belongs to no result to stderr."""
    typer.echo(printable(text), err=True)


def console(stderr: bool = False) -> Console:
    """One that leaves names as they are: `:x:` is no emoji. What is printed goes through `markup`."""
    return Console(stderr=stderr, emoji=False)


def progress(console: Console, *columns: ProgressColumn) -> Progress:
    """A line that changes with what is done, on a terminal alone."""
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def read_text(option: str, path: Path) -> str:
    """The text file that an option names, or a pipe; ValueError if it cannot be read, or is not UTF-8."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for somebody to write
        with open(descriptor, "rb") as file:
            os.set_blocking(descriptor, True)
            content = file.read(_MOST_TEXT_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}") from error
    if len(content) > _MOST_TEXT_BYTES:
        raise ValueError(f"{option} {path}: expected a text of at most {_MOST_TEXT_BYTES} bytes; take a part of it")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {path}: expected a text file in UTF-8 ({error})") from error


def failed(error: object) -> typer.Exit:
    """Prints an error of the user's, in one line; exit status 2."""
    reason = str(error) or type(error).__name__  # a MemoryError says nothing
    with suppress(OSError):  # of a stderr that is full or closed
        console(stderr=True).print(f"[red]error:[/red] {markup(reason)}", soft_wrap=True)
    return typer.Exit(2)
