"""Quantisers to 8 bits: bytes that they read and write a second, beside torch's copy of as many in the same run."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

import qcutlass
from bench.gpu_timing import Contestant, Graph, copies_for, measure
from bench.report import Column, Report, Row

GOAL: Final = 0.8  # of the bandwidth of a copy, for the default quantiser of GOAL_SHAPE
GOAL_SHAPE: Final = (4096, 8192)
_MOST_BANDWIDTH: Final = 10e12  # bytes/s, more than any GPU has: sizes the graphs

COLUMNS: Final = [
    Column("quantizer", "quantiser"),
    Column("shape", "M x K"),
    Column("dtype", "from"),
    Column("us", "us", "{:.1f}"),
    Column("gb_per_s", "GB/s", "{:.0f}"),
    Column("copy_us", "copy us", "{:.1f}"),
    Column("copy_gb_per_s", "copy GB/s", "{:.0f}"),
    Column("share", "of the copy", "{:.2f}"),
    Column("goal_ok", f">= {GOAL}"),
]

Quantizer = Callable[[Tensor], Sequence[Tensor]]


def quantizers(k: int, device: str) -> dict[str, Quantizer]:
    """What is measured, by name."""
    scale, smooth = torch.full((1,), 0.04, device=device), torch.linspace(0.5, 1.5, k, device=device)
    options: dict[str, dict[str, Any]] = {
        "int8 per token": {},
        "int8 per token, smooth": {"smooth": smooth},
        "int8 per token, asymmetric": {"asymmetric": True},
        "int8 per tensor": {"per_tensor": True},
        "int8 given scale": {"scale": scale},
        "e4m3 per token": {"dtype": torch.float8_e4m3fn},
        "e4m3 given scale": {"dtype": torch.float8_e4m3fn, "scale": scale},
    }
    return {name: functools.partial(qcutlass.quantize_activations, **chosen) for name, chosen in options.items()}


def _graph(name: str, launch: Callable[[int], Tensor], copies: int, moved: int) -> Graph:
    """Launches on `copies` inputs in turn, whose outputs are cold in L2 too: as many of them are alive at any time."""
    outputs: deque[Tensor] = deque(maxlen=copies)

    def keep(copy: int, _: Tensor) -> Tensor:
        outputs.append(launch(copy))
        return outputs[-1]

    return Graph.of(Contestant(name, keep, copies), [torch.empty(0, device="cuda")], moved / _MOST_BANDWIDTH)


def _check(name: str, graph: Graph, expected: Tensor) -> None:
    graph.graph.replay()
    if not torch.equal(graph.results[0].cpu().view(torch.uint8), expected.view(torch.uint8)):
        raise AssertionError(f"{name}: codes differ from those of the CPU")


def cell(m: int, k: int, dtype: torch.dtype) -> list[Row]:
    """All quantisers of one shape, and one copy that moves as many bytes, timed in turn."""
    a = torch.randn(m, k, device="cuda", dtype=dtype)
    moved = a.nbytes + m * k
    inputs = [a, *(a.clone() for _ in range(copies_for(moved) - 1))]
    sources = [torch.zeros(moved // 2, dtype=torch.uint8, device="cuda") for _ in inputs]
    targets = [torch.empty_like(source) for source in sources]
    graphs = [_graph("copy", lambda copy: targets[copy].copy_(sources[copy]), len(inputs), moved)]
    names, on_cpu = quantizers(k, "cuda"), quantizers(k, "cpu")
    for name, quantize in names.items():

        def launch(copy: int, quantize: Quantizer = quantize) -> Tensor:
            return quantize(inputs[copy])[0]

        graphs.append(_graph(name, launch, len(inputs), moved))
        _check(name, graphs[-1], on_cpu[name](a.cpu())[0])
    copied, *samples = measure(graphs)
    return [
        {
            "quantizer": name,
            "shape": f"{m}x{k}",
            "dtype": str(dtype).removeprefix("torch."),
            "us": 1e6 * sample.median,
            "gb_per_s": moved / sample.median / 1e9,
            "copy_us": 1e6 * copied.median,
            "copy_gb_per_s": moved / copied.median / 1e9,
            "share": copied.median / sample.median,
            "goal_ok": copied.median / sample.median >= GOAL
            if (m, k) == GOAL_SHAPE and name == "int8 per token"
            else None,
        }
        for name, sample in zip(names, samples, strict=True)
    ]


def run(shapes: Sequence[tuple[int, int]], dtypes: Sequence[torch.dtype]) -> Iterator[list[Row]]:
    """Rows of a shape at a time."""
    for m, k in shapes:
        for dtype in dtypes:
            yield cell(m, k, dtype)


def report(rows: list[Row]) -> Report:
    facts = {
        "GPU": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "bytes": "activations read once, codes written; the copy reads half of them and writes the other half",
        "method": "CUDA graphs of launches on inputs that are cold in L2, replayed in turn; medians",
    }
    return Report("Quantisers", facts, COLUMNS, rows)
