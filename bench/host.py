"""Host time of a layer's call beside that of `torch.nn.Linear`: what Python and the launch take, not the GPU.

``python -m bench.host --json host.json --markdown host.md``
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from rich.console import Console
from torch import Tensor, nn

from bench import origin
from bench.report import Column, Report, Row
from bench.timing import interleave
from qcutlass import FP8, W4A8, W8A8, Blockwise, QuantLinear, UnsupportedError, WeightOnly
from qcutlass.schemes import Scheme

CALLS: Final = 1000
"""Of each layer, by default."""
_TOGETHER: Final = 10  # of a round, one behind the other, so that each finds what the one before left in caches

SCHEMES: Final[dict[str, Scheme]] = {
    "WeightOnly(4, 128)": WeightOnly(4, 128),
    "WeightOnly(8, None, symmetric=True)": WeightOnly(8, None, symmetric=True),
    "W8A8()": W8A8(),
    "FP8()": FP8(),
    "W4A8()": W4A8(),
    "Blockwise()": Blockwise(),
}

COLUMNS: Final = [
    Column("layer", "layer"),
    Column("m", "M", "{:d}"),
    Column("host_us", "host us", "{:.2f}"),
    Column("linear_us", "Linear us", "{:.2f}"),
    Column("ratio", "of Linear's", "{:.2f}"),
]


def run(size: int, ms: Sequence[int], device: torch.device, calls: int) -> list[Row]:
    """Rows of every layer of `size` x `size` weights that the device has."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    linear = nn.Linear(size, size, bias=False, device=device, dtype=dtype)
    layers: dict[str, nn.Module] = {"Linear": linear}
    for name, scheme in SCHEMES.items():
        try:
            layers[name] = QuantLinear.from_linear(linear, scheme)
        except UnsupportedError as error:
            print(f"{name}: left out ({error})", file=sys.stderr)
    rows: list[Row] = []
    for m in ms:
        a = torch.randn(m, size, device=device, dtype=dtype)
        seconds = host_seconds([functools.partial(layer, a) for layer in layers.values()], device, calls)
        found = dict(zip(layers, seconds, strict=True))
        own = found.pop("Linear")
        rows += [
            {"layer": name, "m": m, "host_us": 1e6 * host, "linear_us": 1e6 * own, "ratio": host / own}
            for name, host in found.items()
        ]
    return rows


@torch.inference_mode()
def host_seconds(calls: Sequence[Callable[[], Tensor]], device: torch.device, count: int) -> list[float]:
    """Medians of `count` calls of each, every one timed by itself with nothing before it on the device."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def measured(call: Callable[[], Tensor], times: list[float]) -> float:
        for _ in range(_TOGETHER):
            wait()
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        wait()
        return 0.0

    times: list[list[float]] = [[] for _ in calls]
    measures = [functools.partial(measured, *pair) for pair in zip(calls, times, strict=True)]
    interleave(measures, -(-count // _TOGETHER))
    return [statistics.median(own[_TOGETHER:]) for own in times]  # without the round that warms up


def main(
    m: Annotated[list[int], typer.Option("--m", min=1, help="Rows of activations; repeatable.")] = [1, 16],  # noqa: B006
    size: Annotated[int, typer.Option(min=128, help="Inputs and outputs of the layers.")] = 4096,
    calls: Annotated[int, typer.Option(min=1, help="Of each layer; the median counts.")] = CALLS,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", help="Write the table to this file.")] = None,
) -> None:
    """Host time of an eager call of every kind of layer beside torch.nn.Linear's."""
    if device not in ("cuda", "cpu"):
        raise typer.BadParameter(f"expected cuda or cpu, got {device}", param_hint="--device")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device", param_hint="--device")
    where = torch.device(device)
    facts: Row = {
        "GPU": torch.cuda.get_device_name() if device == "cuda" else "none",
        **origin.facts(),
        "layers": f"{size} x {size}, no bias, {'fp16' if device == 'cuda' else 'fp32'}, inference mode",
        "method": f"medians of {calls} calls, each timed by itself behind a synchronisation, the layers in turn",
    }
    report = Report("Host time of a call", facts, COLUMNS, run(size, m, where, calls))
    report.print(Console(width=None if sys.stdout.isatty() else 240))
    report.write(json_path, markdown_path)


if __name__ == "__main__":
    typer.run(main)
