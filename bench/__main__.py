"""Command line of the benches: ``python -m bench cpu``, ``python -m bench gpu``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from bench import cpu, dense, gpu, schemes, shapes
from bench.report import Row

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
console = Console(width=None if sys.stdout.isatty() else 240)

Shapes = Annotated[
    list[str], typer.Option("--shapes", help="bench, all, a model (llama3-8b, ...), or NxK; repeatable.")
]
Rows = Annotated[list[int], typer.Option("--m", min=1, help="Rows of activations; repeatable.")]
Schemes = Annotated[
    list[str], typer.Option("--scheme", help="w<4|8>a16_<g<size>|channel>[_int|_real][_f16|_bf16]; repeatable.")
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")]
Markdown = Annotated[Path | None, typer.Option("--markdown", help="Write the table to this file.")]

_Result = TypeVar("_Result")


def _parsed(parse: Callable[[], _Result]) -> _Result:
    try:
        return parse()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _collect(rows: Iterable[Row], total: int) -> list[Row]:
    """Runs the bench with a progress bar that names what was measured last."""
    collected = []
    with Progress(*Progress.get_default_columns(), "{task.fields[last]}", console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=total, last="")
        for row in rows:
            collected.append(row)
            done = len({(r["scheme"], r["shape"], r["m"]) for r in collected})
            progress.update(task, completed=done, last=f"{row['scheme']} {row['shape']} M={row['m']}")
    return collected


@app.command("cpu")
def cpu_command(
    shape: Shapes = ["smollm2-135m", "4096x4096", "4096x14336"],  # noqa: B006
    m: Rows = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048],  # noqa: B006
    scheme: Schemes = ["w4a16_g128"],  # noqa: B006
    json_path: Json = None,
    markdown_path: Markdown = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch and qcutlass.")] = None,
) -> None:
    """CPU backend against torch's fp32 product; exits with 1 if a promise (time, memory, packing) is broken."""
    layers, kinds = _parsed(lambda: shapes.parse(shape)), _parsed(lambda: [schemes.parse(name) for name in scheme])
    if threads is not None:
        torch.set_num_threads(threads)
    seconds = cpu.pack_seconds()
    rows = _collect(cpu.run(kinds, layers, m, torch.float32), len(kinds) * len(layers) * len(m))
    report = cpu.report(rows, seconds)
    report.print(console)
    report.write(json_path, markdown_path)
    raise typer.Exit(1 if cpu.failures(rows, seconds) else 0)


@app.command("gpu")
def gpu_command(
    shape: Shapes = ["bench"],  # noqa: B006
    m: Rows = [1, 16, 64, 512, 4096],  # noqa: B006
    scheme: Schemes = ["w4a16_g128"],  # noqa: B006
    json_path: Json = None,
    markdown_path: Markdown = None,
    tactics: Annotated[
        str | None, typer.Option(help="all, or a part of the names: also time these one by one.")
    ] = None,
    split_k: Annotated[list[int], typer.Option(min=0, help="Split-K of these (0: chosen); repeatable.")] = [0],  # noqa: B006
    dense_library: Annotated[
        Path | None, typer.Option(help=f"libqcutlass_bench_dense.so; default: {dense.ENVIRONMENT_VARIABLE}.")
    ] = None,
    peers: Annotated[bool, typer.Option(help="Whether to run cuBLAS, CUTLASS and int4pack beside.")] = True,
    eager: Annotated[bool, typer.Option(help="Also measure the host time of an eager call.")] = False,
) -> None:
    """GPU kernels against dense fp16 products in the same run; stops at the first wrong result."""
    layers, kinds = _parsed(lambda: shapes.parse(shape)), _parsed(lambda: [schemes.parse(name) for name in scheme])
    if not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device")
    options = gpu.Options(
        tactics="" if tactics == "all" else tactics,
        splits=split_k,
        dense=dense.load(dense_library),
        peers=peers,
        eager=eager,
    )
    report = gpu.report(_collect(gpu.run(kinds, layers, m, options), len(kinds) * len(layers) * len(m)))
    report.print(console)
    report.write(json_path, markdown_path)


if __name__ == "__main__":
    app()
