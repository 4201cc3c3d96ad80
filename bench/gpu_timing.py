"""Timing GPU launches inside CUDA graphs, with weights that are cold in L2."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from bench.timing import Sample, interleave, wall_time

ROTATION_BYTES: Final = 256 << 20  # weights that pass between two uses of the same copy: more than any L2 holds
ROUNDS: Final = 9  # replays of each contestant
FAR_ROUNDS: Final = 3  # of one that is more than this many times slower than the fastest
_FAR: Final = 2.0
_MOST_COPIES: Final = 1024
_OUTPUTS: Final = 4
# A pause before each replay, in replays and at most in seconds: it keeps the GPU under its power limit, at which the
# times of large products depend on what ran before (they spread by 10 to 20 % on an H200, with the pause by 1 %).
_REST: Final = 5.0
_MOST_REST: Final = 0.02
_LEAST_SECONDS: Final = 1e-3  # a replay lasts about this long or more
_MOST_SECONDS: Final = 4e-3  # and stops short of a whole rotation, if a kernel at its limit would take longer
_EAGER_CALLS: Final = 200  # fewer than the launch queue holds


def copies_for(weight_bytes: int) -> int:
    """How many copies of a weight matrix make a rotation."""
    return min(_MOST_COPIES, math.ceil(ROTATION_BYTES / weight_bytes) + 1)


def rotation(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Copies of the tensors, so many that each is cold in L2 when its turn comes."""
    return [[t.clone() for t in tensors] for _ in range(copies_for(sum(t.nbytes for t in tensors)))]


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
        weight_dtype: the type it rounds the weights to; None: that of the activations.
        complete: what its output lacks to be the product, to be added before the output is checked; None: nothing.
        splits: number of partial sums that it adds at the end, where the bound depends on it.
    """

    name: str
    launch: Callable[[int, Tensor], Tensor]
    copies: int
    weight_dtype: torch.dtype | None = None
    complete: Callable[[Tensor], Tensor] | None = None
    splits: int = 1

    def completed(self, out: Tensor) -> Tensor:
        return out if self.complete is None else self.complete(out)


@dataclass(frozen=True)
class Graph:
    """Many launches of a contestant, each with the next copy of the weights.

    Attributes:
        graph: to be replayed.
        launches: in one replay.
        results: outputs of the first launches.
        contestant: whose launches these are; it keeps alive what they point into.
    """

    graph: torch.cuda.CUDAGraph
    launches: int
    results: list[Tensor]
    contestant: Contestant

    @classmethod
    def of(
        cls,
        contestant: Contestant,
        outs: Sequence[Tensor],
        least_seconds: float,
        between: Callable[[], object] = lambda: None,
        warm: bool = True,
    ) -> Graph:
        """Captures; `least_seconds`, what a launch takes at least, sizes the graph; `between` comes before each.

        `warm`: every copy is launched before, as what first calls set up, or treat with care, must not be captured.
        """
        launches = contestant.copies * max(1, round(_LEAST_SECONDS / (contestant.copies * least_seconds)))
        launches = min(launches, max(_OUTPUTS, round(_MOST_SECONDS / least_seconds)))
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for copy in range(contestant.copies if warm else 0):
                contestant.launch(copy, outs[0])
        stream.synchronize()
        graph, results = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph, stream=stream):
            for index in range(launches):
                between()
                result = contestant.launch(index % contestant.copies, outs[index % len(outs)])
                if index < len(outs):
                    results.append(result)
        return cls(graph, launches, results, contestant)

    def run(self) -> list[Tensor]:
        """Outputs of the first launches of one replay, which are poisoned before it."""
        for result in self.results:
            result.fill_(math.nan if result.is_floating_point() else torch.iinfo(result.dtype).min)
        self.graph.replay()
        return self.results

    def seconds(self) -> float:
        """Seconds a launch takes, from events around one replay."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / self.launches


def measure(graphs: Sequence[Graph], far: float = _FAR, rounds: int = ROUNDS) -> list[Sample]:
    """Replays all of them in turn, each after a pause; those that take `far` times the fastest's time less often."""
    once = [graph.seconds() for graph in graphs]
    each = [min(FAR_ROUNDS, rounds) if seconds > far * min(once) else rounds for seconds in once]

    def rested(graph: Graph, pause: float) -> float:
        time.sleep(pause)
        return graph.seconds()

    pauses = [min(_MOST_REST, _REST * seconds * graph.launches) for graph, seconds in zip(graphs, once, strict=True)]
    pairs = zip(graphs, pauses, strict=True)
    return interleave([functools.partial(rested, graph, pause) for graph, pause in pairs], each)


def in_situ(contestants: Sequence[Contestant], a: Tensor, outs: Sequence[Tensor], least_seconds: float) -> list[float]:
    """Seconds of a launch of each where an ordinary kernel stands before it, as in a model; that one's time taken off.

    Back to back, a product follows a product, whose early launch hides its start. The kernel between reads and writes
    as much as the activations `a`.
    """
    copy = torch.empty_like(a)

    def between() -> None:
        torch.add(a, a, out=copy)

    alone = Contestant("between", lambda index, out: out, max(one.copies for one in contestants))
    graphs = [Graph.of(one, outs, least_seconds, between) for one in (alone, *contestants)]
    own, *whole = (sample.median for sample in measure(graphs, far=math.inf))
    return [seconds - own for seconds in whole]


def eager_seconds(contestant: Contestant, out: Tensor) -> float:
    """Host seconds of one eager call, the GPU left to work behind."""
    call = functools.partial(contestant.launch, 0, out)

    def queue() -> float:
        seconds = wall_time(call, _EAGER_CALLS)
        torch.cuda.synchronize()
        return seconds

    (sample,) = interleave([queue], rounds=5)
    return sample.median
