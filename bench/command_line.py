"""What the commands of the benches share: options, and what becomes of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import torch
import typer
from rich.console import Console

if TYPE_CHECKING:
    from bench.llama import Size

console = Console(width=None if sys.stdout.isatty() else 240)

Json = Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")]
Markdown = Annotated[Path | None, typer.Option("--markdown", help="Write the table to this file.")]

_Result = TypeVar("_Result")


def parsed(parse: Callable[[], _Result]) -> _Result:
    """The result, or an error of the command line for a ValueError."""
    try:
        return parse()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def at_most_every(seconds: float, call: Callable[[_Result], None]) -> Callable[[_Result], None]:
    """Calls `call` where so many seconds have passed since it did, or since now."""
    last = time.monotonic()

    def sometimes(value: _Result) -> None:
        nonlocal last
        if time.monotonic() - last >= seconds:
            call(value)
            last = time.monotonic()

    return sometimes


def one_of(option: str, name: str, names: Iterable[str]) -> str:
    if name not in names:
        raise typer.BadParameter(f"{option} {name!r}: expected one of {', '.join(names)}")
    return name


def size_of(option: str, name: str, blocks: int | None) -> tuple[str, Size]:
    """The model of a name, however it is hyphenated (llama-3-8b), and the name that it has here."""
    from bench import llama

    found = {plain_name(known): known for known in llama.SIZES}.get(plain_name(name))
    if found is None:
        raise typer.BadParameter(f"{option} {name!r}: expected one of {', '.join(llama.SIZES)}")
    size = llama.SIZES[found]
    return found, size if blocks is None else replace(size, blocks=blocks)


def plain_name(name: str) -> str:
    return name.replace("-", "").lower()


def chosen_device(name: str) -> torch.device:
    if name not in ("cuda", "cpu"):
        raise typer.BadParameter(f"--device {name!r}: expected cuda or cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device; use --device cpu")
    return torch.device(name)
