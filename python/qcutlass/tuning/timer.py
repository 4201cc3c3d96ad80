"""Timing plans on a GPU: launches in CUDA graphs, with weights that are cold in L2."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass.errors import UnsupportedError
from qcutlass.products.kind import Call, Kind
from qcutlass.products.multiplying import compute
from qcutlass.tuning.layer import Layer

_ROTATION_BYTES: Final = 256 << 20  # weights that pass between two uses of the same copy: more than any L2 holds
_MOST_COPIES: Final = 256
_FEWEST_LAUNCHES: Final = 4
_GRAPH_SECONDS: Final = 5e-4  # long enough for what starting a graph takes not to matter
# Speeds of the fastest GPUs, to size the graphs: operations on 16 bits, twice as many on 8, and bytes a second; seconds
# a launch.
_FLOPS: Final = 8e14
_BANDWIDTH: Final = 4e12
_LAUNCH_SECONDS: Final = 2e-6
_ROUNDS: Final = 7

Operands = dict[str, Tensor]


class GraphTimer:
    """Callable: microseconds of each plan for m rows of a layer, the median of replays in turn; None: cannot run.

    Every launch of a graph reads the next copy of the weights, as the layers of a model do, and those of other experts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._layer: Layer | None = None
        self._copies: list[Operands] = []

    def __call__(self, layer: Layer, m: int, plans: Sequence[_C.Plan]) -> list[float | None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.no_grad():
            if layer != self._layer:
                self._layer = None
                self._copies.clear()  # before the next ones take their memory
            call = layer.call(m, self._device)
            if self._layer is None:
                self._copies, self._layer = _copies(layer.kind.weights(call)), layer
            out = torch.empty(m, layer.n, dtype=call.out_dtype, device=self._device)
            turns = _turns(layer, m, self._copies)
            launches = _launches(call, out, layer.share_read(m) * _nbytes(self._copies[0]))
            graphs = [self._capture(layer.kind, _forced(call, plan), turns, out, launches) for plan in plans]
            samples: list[list[float]] = [[] for _ in plans]
            for _ in range(1 + _ROUNDS):
                for graph, times in zip(graphs, samples, strict=True):
                    if graph is not None:
                        times.append(_replay(graph) / launches)
            self._stream.synchronize()
        return [statistics.median(times[1:]) if times else None for times in samples]

    def _capture(
        self, kind: Kind, call: Call, turns: Sequence[Operands], out: Tensor, launches: int
    ) -> torch.cuda.CUDAGraph | None:
        def launch(index: int) -> None:
            compute(kind, call._replace(**turns[index % len(turns)]), out)

        try:
            for index in range(len(turns)):  # weights seen before are read earlier
                launch(index)
        except (UnsupportedError, torch.cuda.OutOfMemoryError):
            return None
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()  # torch.cuda.graph would collect garbage every time
        try:
            for index in range(launches):
                launch(index)
        finally:
            graph.capture_end()
        return graph


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * float(begin.elapsed_time(end))


def _forced(call: Call, plan: _C.Plan) -> Call:
    """The call by this plan; those of experts, which do not share K, take the tactic alone."""
    chosen = {"tactic": plan.tactic, "split_k": plan.split_k}
    return call._replace(**{name: value for name, value in chosen.items() if name in call._asdict()})


def _turns(layer: Layer, m: int, copies: Sequence[Operands]) -> Sequence[Operands]:
    """What launches read in turn: copies of the weights; of experts also others, until as many bytes have passed."""
    if not layer.experts:
        return copies
    read = layer.share_read(m) * _nbytes(copies[0])
    count = max(len(copies), min(_MOST_COPIES, math.ceil(_ROTATION_BYTES / read) + 1))
    device = copies[0]["w_packed"].device
    return [copies[number % len(copies)] | {"offsets": layer.offsets(m, device)} for number in range(count)]


def _launches(call: Call, out: Tensor, weight_bytes: float) -> int:
    """Launches that take long enough."""
    multiplications = out.numel() * call.a.shape[-1]
    arithmetic, loads = multiplications * call.a.element_size() / _FLOPS, weight_bytes / _BANDWIDTH
    return max(_FEWEST_LAUNCHES, math.ceil(_GRAPH_SECONDS / max(arithmetic, loads, _LAUNCH_SECONDS)))


def _nbytes(operands: Operands) -> int:
    return sum(operand.nbytes for operand in operands.values())


def _copies(operands: Operands) -> list[Operands]:
    """So many that none is in L2 when it is read again."""
    count = min(_MOST_COPIES, math.ceil(_ROTATION_BYTES / _nbytes(operands)) + 1)
    return [{name: operand.clone() for name, operand in operands.items()} for _ in range(count)]
