"""A layer's first call beside its second: eager, and in a graph that was captured with it, which keeps its launch."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator
from typing import Annotated, Final

import torch
import typer
from torch import Tensor, nn

from bench import origin
from bench.command_line import Json, Markdown, chosen_device, console
from bench.gpu_timing import Contestant, Graph, copies_for, measure, outputs
from bench.host import SCHEMES
from bench.report import Column, Report, Row
from qcutlass import QuantLinear, UnsupportedError

EAGER: Final = 32  # layers that are called for the first time
_MOST_BANDWIDTH: Final = 1e13  # bytes/s: no memory is faster

COLUMNS: Final = [
    Column("layer", "layer"),
    Column("m", "M", "{:d}"),
    Column("first_us", "first call us", "{:.1f}"),
    Column("second_us", "second call us", "{:.1f}"),
    Column("ratio", "first / second", "{:.2f}"),
    Column("first_graph_us", "graph of first calls us", "{:.2f}"),
    Column("second_graph_us", "graph of second calls us", "{:.2f}"),
    Column("graph_ratio", "first / second", "{:.2f}"),
    Column("spread", "spread", "{:.0%}"),
]


@torch.inference_mode()
def eager(layer: nn.Module, a: Tensor) -> Row:
    """Microseconds of calls of copies of a layer, each waited for; no product has read their weights."""
    copies = [copy.deepcopy(layer) for _ in range(EAGER + 1)]
    copies.pop()(a)  # what a process sets up once

    def seconds(call: nn.Module) -> float:
        begin = time.perf_counter()
        out = call(a)
        if out.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    first, second = (statistics.median([seconds(one) for one in copies]) for _ in range(2))
    return {"first_us": 1e6 * first, "second_us": 1e6 * second, "ratio": first / second}


@torch.inference_mode()
def graphs(layer: nn.Module, a: Tensor) -> Row:
    """Microseconds of a launch in two graphs, one captured behind the other with the same copies of a square layer."""
    size = sum(tensor.nbytes for tensor in layer.buffers())
    copies = [copy.deepcopy(layer) for _ in range(copies_for(size))]
    contestant = Contestant("layer", lambda index, out: copies[index](a), len(copies))
    outs = outputs(len(a), a.shape[1], a.dtype)
    both = [Graph.of(contestant, outs, size / _MOST_BANDWIDTH, warm=False) for _ in range(2)]
    results = [[result.clone() for result in graph.run()] for graph in both]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True)), "the graphs compute different numbers"
    first, second = measure(both)
    found: Row = {"first_graph_us": 1e6 * first.median, "second_graph_us": 1e6 * second.median}
    return found | {"graph_ratio": first.median / second.median, "spread": max(first.spread, second.spread)}


def run(size: int, ms: list[int], device: torch.device) -> Iterator[Row]:
    """Rows of every layer of `size` x `size` weights that the device has."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    linear = nn.Linear(size, size, bias=False, device=device, dtype=dtype)
    for name, scheme in SCHEMES.items():
        try:
            layer = QuantLinear.from_linear(linear, scheme)
        except UnsupportedError as error:
            console.print(f"{name}: left out ({error})", markup=False)
            continue
        for m in ms:
            a = torch.randn(m, size, device=device, dtype=dtype)
            yield {"layer": name, "m": m, **eager(layer, a), **(graphs(layer, a) if a.is_cuda else {})}


def main(
    m: Annotated[list[int], typer.Option("--m", min=1, help="Rows of activations; repeatable.")] = [1, 16],  # noqa: B006
    size: Annotated[int, typer.Option(min=128, help="Inputs and outputs of the layers.")] = 4096,
    device: Annotated[str, typer.Option(help="cuda; or cpu, where there are no graphs.")] = "cuda",
    json_path: Json = None,
    markdown_path: Markdown = None,
) -> None:
    """A layer's first call beside its second, eager and in CUDA graphs; stops where the graphs' results differ."""
    where, gpu = chosen_device(device), device == "cuda"
    facts: Row = {"GPU": torch.cuda.get_device_name() if gpu else "none", **origin.facts()}
    facts["layers"] = f"{size} x {size}, no bias, {'fp16' if gpu else 'fp32'}, inference mode"
    facts["method"] = f"medians of {EAGER} layers; graphs as in bench gpu, but nothing is launched before their capture"
    report = Report("First calls of layers", facts, COLUMNS, list(run(size, m, where)))
    report.print(console)
    report.write(json_path, markdown_path)
