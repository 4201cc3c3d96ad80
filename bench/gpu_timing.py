"""Timing GPU launches inside CUDA graphs, with weights that are cold in L2."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from bench.timing import Sample, interleave, wall_time

ROTATION_BYTES: Final = 256 << 20  # weights that pass between two uses of the same copy: more than any L2 holds
ROUNDS: Final = 9
_MOST_COPIES: Final = 1024
_OUTPUTS: Final = 4
_REPLAY_SECONDS: Final = 1e-3  # a replay lasts about this long or more
_EAGER_CALLS: Final = 200  # fewer than the launch queue holds


def copies_for(weight_bytes: int) -> int:
    """How many copies of a weight matrix make a rotation."""
    return min(_MOST_COPIES, math.ceil(ROTATION_BYTES / weight_bytes) + 1)


def outputs(m: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    """Buffers that the launches of a graph write in turn."""
    return list(torch.empty(_OUTPUTS, m, n, dtype=dtype, device="cuda"))


@dataclass(frozen=True)
class Contestant:
    """One way to compute the product.

    Attributes:
        name: of the kernel.
        launch: launches one product with copy i of the weights on the current stream; takes i and a buffer for the
            output, and returns the output (which may be another tensor).
        copies: of the weights.
    """

    name: str
    launch: Callable[[int, Tensor], Tensor]
    copies: int


@dataclass(frozen=True)
class Graph:
    """Many launches of a contestant, each with the next copy of the weights.

    Attributes:
        graph: to be replayed.
        launches: in one replay.
        results: outputs of the first launches.
    """

    graph: torch.cuda.CUDAGraph
    launches: int
    results: list[Tensor]

    @classmethod
    def of(cls, contestant: Contestant, outs: Sequence[Tensor], least_seconds: float) -> Graph:
        """Captures; `least_seconds`, what a launch takes at least, sizes the graph."""
        launches = contestant.copies * max(1, round(_REPLAY_SECONDS / (contestant.copies * least_seconds)))
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            contestant.launch(0, outs[0])  # what a first call sets up must not be captured
        stream.synchronize()
        graph, results = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph, stream=stream):
            for index in range(launches):
                result = contestant.launch(index % contestant.copies, outs[index % len(outs)])
                if index < len(outs):
                    results.append(result)
        return cls(graph, launches, results)

    def seconds(self) -> float:
        """Seconds a launch takes, from events around one replay."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / self.launches


def measure(
    contestants: Sequence[Contestant],
    outs: Sequence[Tensor],
    least_seconds: float,
    check: Callable[[Contestant, Tensor], None],
) -> list[Sample]:
    """Captures each contestant, checks what its graph computes, then times all of them in turn.

    Args:
        contestants: to be compared.
        outs: output buffers; they are poisoned before the checked replay.
        least_seconds: that a launch can take, to size the graphs.
        check: called with each contestant and its output; raises if that is wrong.

    Raises:
        AssertionError: two launches of one graph gave different results.
    """
    graphs = []
    for contestant in contestants:
        graph = Graph.of(contestant, outs, least_seconds)
        for result in graph.results:
            result.fill_(math.nan)
        graph.graph.replay()
        first, *others = graph.results
        check(contestant, first)
        assert all(torch.equal(first, other) for other in others), f"{contestant.name}: two launches differ"
        graphs.append(graph)
    return interleave([graph.seconds for graph in graphs], ROUNDS)


def eager_seconds(contestant: Contestant, out: Tensor) -> float:
    """Host seconds of one eager call, the GPU left to work behind."""
    call = functools.partial(contestant.launch, 0, out)

    def queue() -> float:
        seconds = wall_time(call, _EAGER_CALLS)
        torch.cuda.synchronize()
        return seconds

    (sample,) = interleave([queue], rounds=5)
    return sample.median
