"""Quantisers to 8 bits: bytes that they read and write a second, beside torch's copy of as many in the same run."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

import qcutlass
from bench import origin
from bench.gpu_timing import Contestant, Graph, copies_for, measure
from bench.report import Column, Report, Row
from qcutlass import blockwise, testing

GOAL: Final = 0.8  # of the bandwidth of a copy
GOAL_OF: Final = {"int8 per token": (4096, 8192), "act_quant": (8192, 8192), "int8_gelu": (8192, 8192)}
"""Shapes at which these have to reach it."""
BLOCK: Final = 128
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

Quantizer: TypeAlias = Callable[[Tensor], Sequence[Tensor]]
Launch: TypeAlias = Callable[[int], Tensor]
"""The codes of one of the copies of the input."""


def quantizers(k: int, device: str) -> dict[str, Quantizer]:
    """The quantisers that are measured, by name, for rows of k values."""
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
    found: dict[str, Quantizer] = {
        name: functools.partial(qcutlass.quantize_activations, **chosen) for name, chosen in options.items()
    }
    in_blocks = {"act_quant": blockwise.act_quant, "fp8_act_quant": blockwise.fp8_act_quant}
    return found | {name: functools.partial(quantize, block_size=BLOCK) for name, quantize in in_blocks.items()}


def _graph(name: str, launch: Launch, copies: int, moved: int) -> Graph:
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


def _rows(
    shape: tuple[int, int],
    dtype: str,
    moved: int,
    copies: int,
    launches: dict[str, Launch],
    expected: dict[str, Tensor],
) -> list[Row]:
    """Quantisers of as many copies of an input, and one copy that moves as many bytes, timed in turn."""
    sources = [torch.zeros(moved // 2, dtype=torch.uint8, device="cuda") for _ in range(copies)]
    targets = [torch.empty_like(source) for source in sources]
    graphs = [_graph("copy", lambda copy: targets[copy].copy_(sources[copy]), copies, moved)]
    for name, launch in launches.items():
        graphs.append(_graph(name, launch, copies, moved))
        _check(name, graphs[-1], expected[name])
    copied, *samples = measure(graphs)
    return [
        {
            "quantizer": name,
            "shape": f"{shape[0]}x{shape[1]}",
            "dtype": dtype,
            "us": 1e6 * sample.median,
            "gb_per_s": moved / sample.median / 1e9,
            "copy_us": 1e6 * copied.median,
            "copy_gb_per_s": moved / copied.median / 1e9,
            "share": copied.median / sample.median,
            "goal_ok": copied.median / sample.median >= GOAL if GOAL_OF.get(name) == shape else None,
        }
        for name, sample in zip(launches, samples, strict=True)
    ]


def cell(m: int, k: int, dtype: torch.dtype) -> list[Row]:
    """All quantisers of one shape."""
    a = torch.randn(m, k, device="cuda", dtype=dtype)
    moved = a.nbytes + m * k
    inputs = [a, *(a.clone() for _ in range(copies_for(moved) - 1))]
    names, on_cpu = quantizers(k, "cuda"), quantizers(k, "cpu")

    def launch_of(quantize: Quantizer) -> Launch:
        return lambda copy: quantize(inputs[copy])[0]

    launches = {name: launch_of(quantize) for name, quantize in names.items()}
    expected = {name: quantize(a.cpu())[0] for name, quantize in on_cpu.items()}
    return _rows((m, k), str(dtype).removeprefix("torch."), moved, len(inputs), launches, expected)


def check_silu_mul(codes: Tensor, scales: Tensor, gate_up: Tensor) -> None:
    """Raises AssertionError unless each code is within half a step of e4m3 of silu(gate) * up, and little more.

    A step is 1/8 of a number, or that of subnormal ones; silu is within 2^-20 of its argument.
    """
    gate, up = gate_up.double().chunk(2, -1)
    exact, wide = gate * torch.sigmoid(gate) * up, scales.repeat_interleave(BLOCK, 1)[:, : codes.shape[1]].double()
    half_a_step = torch.maximum(exact.abs() * 2.0**-4, wide * 2.0**-10)
    error = (codes.double() * wide - exact).abs() - half_a_step * (1 + 2.0**-10)
    if not bool((error <= 2.0**-20 * (gate * up).abs()).all()):  # NaN, too
        raise AssertionError("fp8_silu_mul_quant: codes are farther from silu(gate) * up than rounding takes them")


def silu_cell(m: int, k: int, dtype: torch.dtype) -> list[Row]:
    """`fp8_silu_mul_quant` that writes one shape, from twice as many columns."""
    gate_up = torch.randn(m, 2 * k, device="cuda", dtype=dtype)
    codes, scales = blockwise.fp8_silu_mul_quant(gate_up, BLOCK)
    check_silu_mul(codes, scales, gate_up)
    moved = gate_up.nbytes + m * k
    inputs = [gate_up, *(gate_up.clone() for _ in range(copies_for(moved) - 1))]

    def launch(copy: int) -> Tensor:
        return blockwise.fp8_silu_mul_quant(inputs[copy], BLOCK)[0]

    name = "fp8_silu_mul_quant"
    return _rows((m, k), str(dtype).removeprefix("torch."), moved, len(inputs), {name: launch}, {name: codes.cpu()})


def gelu_cell(m: int, k: int) -> list[Row]:
    """`int8_gelu` of one shape."""
    x, s = blockwise.act_quant(2 * torch.randn(m, k, device="cuda"), BLOCK)
    codes, scales = blockwise.int8_gelu(x, s, BLOCK)
    testing.assert_gelu(codes, scales, x, s, BLOCK, label=f"{m}x{k}")
    moved = 2 * (x.nbytes + s.nbytes)
    inputs = [(x, s), *((x.clone(), s.clone()) for _ in range(copies_for(moved) - 1))]

    def launch(copy: int) -> Tensor:
        return blockwise.int8_gelu(*inputs[copy], BLOCK)[0]

    return _rows((m, k), "int8", moved, len(inputs), {"int8_gelu": launch}, {"int8_gelu": codes.cpu()})


def run(shapes: Sequence[tuple[int, int]], dtypes: Sequence[torch.dtype]) -> Iterator[list[Row]]:
    """Rows of a shape at a time."""
    for m, k in shapes:
        for dtype in dtypes:
            yield cell(m, k, dtype)
            yield silu_cell(m, k, dtype)
        yield gelu_cell(m, k)


def report(rows: list[Row]) -> Report:
    facts = {
        "GPU": torch.cuda.get_device_name(),
        **origin.facts(),
        "bytes": "activations read once, codes written; the copy reads half of them and writes the other half",
        "method": "CUDA graphs of launches on inputs that are cold in L2, replayed in turn; medians",
    }
    return Report("Quantisers", facts, COLUMNS, rows)
