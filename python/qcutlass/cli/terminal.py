"""Common parts of the commands: options, text for terminals, errors that end a command."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors import SafetensorError
from typer.core import TyperGroup

from qcutlass.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

USER_ERRORS: Final = (UnsupportedError, ValueError, OSError, MemoryError, SafetensorError)
"""Errors of users' files, places and options (CheckpointError is a ValueError); all others, but for torch's when memory
is short, are faults of ours."""

_MOST_TEXT_BYTES: Final = 1 << 30
_NARROWEST: Final = 40
"""Columns of a table: in fewer the names of layers go, and with COLUMNS=0, as some terminals have it, all of it."""
_UNSEEN: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # control characters: move the cursor, clear the screen, name the window
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # turn the direction of what is written around them
    "\u2028\u2029\ud800-\udfff]"  # end lines; are no characters
)
GPU_GROUP: Final = 16
"""The CUDA kernels take groups of a multiple of this many columns: their smallest step along K."""
_UsageError: Final[Any] = typer.BadParameter.__bases__[0]  # typer has click, or a copy of it


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


Skip = Annotated[list[str], typer.Option(help="A layer to leave alone, by name or pattern. It can be repeated.")]
HEAD_HELP: Final = "The bits of the output head, and of an embedding tied to it. keep leaves it as the source has it."


class Commands(TyperGroup):
    """A group whose commands end with a line: `USER_ERRORS` with exit status 2, Ctrl-C with 130."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, whose help has arguments in capitals, and no type behind options that take no value."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _name_values(command, ctx)
        return command

    def get_help_option(self, ctx: Any) -> Any:
        """The same for the group's own options."""
        option = super().get_help_option(ctx)
        for each in (*self.params, option):
            _name_value(each)
        return option

    def invoke(self, ctx: Any) -> Any:
        """Runs the command that the command line names."""
        try:
            with _warnings_as_lines():
                try:
                    return super().invoke(ctx)
                finally:
                    _flush()
        except _UsageError as error:
            error.message = printable(error.message).replace("Value error, ", "")
            raise
        except (BrokenPipeError, typer.Exit, typer.Abort):
            raise  # `qcutlass ... | head`: typer ends without a word; the others are RuntimeErrors
        except KeyboardInterrupt as error:
            raise typer.Exit(130) from error
        except USER_ERRORS as error:
            raise failed(error) from error
        except RuntimeError as error:
            from qcutlass.models.memory import memory_shortage  # loads torch

            if memory_shortage(error) is None:
                raise
            raise failed(error) from error


def _name_values(command: Any, ctx: Any) -> None:
    for parameter in (*command.params, command.get_help_option(ctx)):
        _name_value(parameter)


def _name_value(parameter: Any) -> None:
    if getattr(parameter, "is_flag", False):
        parameter.metavar = ""
    elif parameter is not None and parameter.param_type_name == "argument" and parameter.metavar is None:
        parameter.metavar = parameter.name.upper()


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
    """One that leaves text as it is: no emoji for `:x:`, no coloured numbers. What is printed goes through `markup`."""
    found = Console(stderr=stderr, emoji=False, highlight=False)
    if not stderr and found.width < _NARROWEST:
        found.width = _NARROWEST
    return found


Steps = Callable[[str, int, int], None]
"""Called with what is being done, how many steps of it are, and of how many; 0 of 0 where nobody knows."""


@contextmanager
def steps(console: Console, first: str) -> Iterator[Steps]:
    """A line that changes with what is done, on a terminal alone; it moves from the beginning, with `first`."""
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task(printable(first), total=None, count="")
    phase = [0, 0]  # the last number of steps done, and of all

    def report(what: str, done: int, total: int) -> None:
        if total != phase[1] or done < phase[0]:
            bar.reset(task)  # another phase, with a time of its own
        phase[:] = done, total
        # One step more than there are: what comes behind the last one takes time, in which the clock must not stand.
        known = {"completed": done, "total": total + 1, "count": f"{done}/{total}"} if total else {"count": ""}
        bar.update(task, description=printable(what), **known)

    with bar:
        yield report


def chosen_device(text: str | None) -> torch.device:
    """The value of `--device`; None: a GPU, where torch sees one. A GPU with a number becomes torch's current one."""
    import torch

    if text is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = re.fullmatch(r"cpu|cuda(?::(\d{1,3}))?", text)
    if found is None:
        raise ValueError(f"--device {text}: expected cpu, cuda, or cuda:N for GPU number N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text != "cpu" and not count:
        raise UnsupportedError(f"--device {text}: torch sees no CUDA device; use --device cpu")
    if int(found[1] or 0) >= max(count, 1):
        raise UnsupportedError(f"--device {text}: torch sees {count} CUDA devices; the last one is cuda:{count - 1}")
    if found[1] is not None:
        torch.cuda.set_device(int(found[1]))  # whose streams and graphs are meant where none are named
    return torch.device(text)


def read_text(option: str, path: Path) -> str:
    """The text file that an option names, or a pipe; ValueError if it cannot be read, or is not UTF-8."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for somebody to write
        with open(descriptor, "rb") as file:
            os.set_blocking(descriptor, True)
            content = file.read(_MOST_TEXT_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}") from error
    return _decoded(f"{option} {path}", content)


def decoded_text(name: str, file: BinaryIO) -> str:
    """The text in an open file; ValueError as for `read_text`."""
    return _decoded(name, file.read(_MOST_TEXT_BYTES + 1))


def _decoded(name: str, content: bytes) -> str:
    if len(content) > _MOST_TEXT_BYTES:
        raise ValueError(f"{name}: expected a text of at most {_MOST_TEXT_BYTES} bytes; take a part of it")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: expected a text file in UTF-8 ({error})") from error


def note_group_size(group_size: int) -> None:
    """Says where no GPU takes groups of this size; -1 is one group a channel."""
    if group_size != -1 and group_size % GPU_GROUP:
        say(f"note: groups of {group_size} run on the CPU alone; GPU kernels take multiples of {GPU_GROUP}, or -1")


def failed(error: object) -> typer.Exit:
    """Prints an error of the user's, in one line; exit status 2."""
    reason = str(error) or type(error).__name__  # a MemoryError says nothing
    with suppress(OSError):  # of a stderr that is full or closed
        console(stderr=True).print(f"[red]error:[/red] {markup(reason)}", soft_wrap=True)
    return typer.Exit(2)
