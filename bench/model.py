"""A step of decoding through all linear layers of a large model, against dense ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from bench import llama, origin
from bench.gpu_timing import ROUNDS, Contestant, Graph, measure
from bench.report import Column, Report, Row
from bench.schemes import WeightOnly
from bench.timing import Sample, interleave, wall_time
from qcutlass.layers import FusedProjection
from qcutlass.layers.fusing import GROUPS
from qcutlass.models import weights_of

GOAL: Final = 2.5  # times as fast as dense layers, up to GOAL_BATCH, of GOAL_SIZE on a GPU
GOAL_BATCH: Final = 16
GOAL_SIZE: Final = llama.SIZES["llama3-8b"]

COLUMNS: Final = [
    Column("m", "batch", "{:d}"),
    Column("dense_ms", "dense ms", "{:.3f}"),
    Column("qcutlass_ms", "qcutlass ms", "{:.3f}"),
    Column("speedup", "speedup", "{:.2f}"),
    Column("dense_fused_ms", "dense, fused ms", "{:.3f}"),
    Column("fused_ms", "qcutlass, fused ms", "{:.3f}"),
    Column("fused_speedup", "speedup, fused", "{:.2f}"),
    Column("goal_ok", f">= {GOAL}"),
    Column("lm_head_ms", "lm_head, dense ms", "{:.3f}"),
    Column("whole_speedup", "with lm_head, fused", "{:.2f}"),
    Column("spread", "spread", "{:.0%}"),
    Column("error", "error / bound", "{:.3f}"),
]

_PARTS: Final = (*GROUPS[0], "o_proj", *GROUPS[1], "down_proj")  # in the order in which a block calls them
_Layers = Sequence[nn.Module]


class Model:
    """The linear layers of a model in every form that is measured.

    Attributes:
        size, scheme, dtype, device: what it is.
        weights: how many, lm_head's aside.
        lm_head: dense in all forms.
    """

    def __init__(self, size: llama.Size, scheme: WeightOnly, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.scheme, self.dtype, self.device = size, scheme, dtype, device
        separate = llama.quantized_model(size, scheme, device, dtype)
        fused = llama.fused(separate)
        self.lm_head: nn.Linear = separate.lm_head
        self._blocks = [_layers(block) for block in separate.model.layers]
        self._fused = [_layers(block) for block in fused.model.layers]
        dense, dense_fused = zip(*(_dense(block, dtype) for block in self._blocks), strict=True)
        self.forms: dict[str, list[nn.Module]] = {
            "qcutlass": [layer for block in self._blocks for layer in block.values()],
            "fused": [layer for block in self._fused for layer in block.values()],
            "dense": [layer for block in dense for layer in block],
            "dense_fused": [layer for block in dense_fused for layer in block],
            "lm_head": [self.lm_head],
        }
        self.weights = sum(layer.weight.numel() for layer in self.forms["dense"])  # type: ignore[operator,misc]

    def inputs(self, m: int) -> dict[int, Tensor]:
        """Activations `[m, K]` by K."""
        generator = torch.Generator(self.device).manual_seed(m)
        sizes = (self.size.hidden, self.size.intermediate)
        return {k: torch.randn(m, k, generator=generator, device=self.device).to(self.dtype) for k in sizes}

    def check(self, inputs: dict[int, Tensor]) -> float:
        """The largest error of the layers of one block, as a share of its bound."""
        block, fused, errors = self._blocks[0], self._fused[0], []
        for name, layer in block.items():
            a = inputs[layer.in_features]
            errors.append(llama.check(layer, a, layer(a), name))
            twin = fused[name]
            if isinstance(twin, FusedProjection):
                errors.append(llama.check(layer, a, twin(a), f"{name}, fused", twin.product))
        return max(errors)


def _layers(block: Any) -> dict[str, Any]:
    found = dict(block.self_attn.named_children()) | dict(block.mlp.named_children())
    return {name: found[name] for name in _PARTS}


def _dense(block: dict[str, Any], dtype: torch.dtype) -> tuple[list[nn.Linear], list[nn.Linear]]:
    """A block's dequantised layers, and the same with fused projections; both in the same memory."""
    weights = {name: weights_of(layer).to(dtype) for name, layer in block.items()}
    fused = {group: torch.cat([weights[name] for name in group]) for group in GROUPS}
    for group, weight in fused.items():
        weights |= dict(zip(group, torch.split(weight, [len(weights[name]) for name in group]), strict=True))
    attention, mlp = (fused[group] for group in GROUPS)
    together = attention, weights["o_proj"], mlp, weights["down_proj"]
    return [llama.linear_of(weights[name]) for name in _PARTS], [llama.linear_of(weight) for weight in together]


def _step(layers: _Layers, inputs: dict[int, Tensor]) -> Tensor:
    """One call of every layer; layers that read the same input get the same tensor."""
    out = next(iter(inputs.values()))
    for layer in layers:
        out = layer(inputs[layer.in_features])  # type: ignore[index]
    return out


def _graph(name: str, step: Callable[[], Tensor]) -> Graph:
    """One step."""
    contestant = Contestant(name, lambda copy, out: step(), copies=1)
    return Graph.of(contestant, [torch.empty(0)], least_seconds=1)


def _samples(steps: Mapping[str, Callable[[], Tensor]], device: torch.device) -> dict[str, Sample]:
    """Times of a step of each: in CUDA graphs, or of calls on the CPU."""
    if device.type == "cuda":
        samples = measure([_graph(name, step) for name, step in steps.items()], far=math.inf)
    else:
        samples = interleave([functools.partial(wall_time, step) for step in steps.values()], ROUNDS)
    return dict(zip(steps, samples, strict=True))


@torch.inference_mode()
def _row(model: Model, m: int) -> Row:
    inputs = model.inputs(m)
    steps = {name: functools.partial(_step, layers, inputs) for name, layers in model.forms.items()}
    error = model.check(inputs)
    times = _samples(steps, model.device)
    ms = {name: 1e3 * sample.median for name, sample in times.items()}
    speedups = ms["dense"] / ms["qcutlass"], ms["dense_fused"] / ms["fused"]
    promised = model.device.type == "cuda" and model.size == GOAL_SIZE and m <= GOAL_BATCH
    return {
        "m": m,
        **{f"{name}_ms": milliseconds for name, milliseconds in ms.items()},
        "speedup": speedups[0],
        "fused_speedup": speedups[1],
        "goal_ok": min(speedups) >= GOAL if promised else None,
        "whole_speedup": (ms["dense_fused"] + ms["lm_head"]) / (ms["fused"] + ms["lm_head"]),
        "spread": max(sample.spread for sample in times.values()),
        "error": error,
    }


def run(model: Model, ms: Sequence[int]) -> Iterator[Row]:
    """A row for each batch.

    Raises:
        AssertionError: a result is out of its bound.
    """
    for m in ms:
        yield _row(model, m)


def report(model: Model, rows: list[Row]) -> Report:
    size, on_gpu = model.size, model.device.type == "cuda"
    how = "of one CUDA graph with all layers" if on_gpu else "of eager calls of all layers"
    dtype = str(model.dtype).removeprefix("torch.")
    facts = {
        "device": torch.cuda.get_device_name(model.device) if on_gpu else f"CPU, {torch.get_num_threads()} threads",
        **origin.facts(),
        "model": f"{size.blocks} blocks of {', '.join(_PARTS)}; hidden {size.hidden}, intermediate "
        f"{size.intermediate}, {size.heads} heads, {size.kv_heads} of keys and values, vocabulary {size.vocabulary}",
        "weights": f"{model.weights / 1e9:.3g} G without embedding and lm_head; random, {model.scheme.name}; dense: "
        f"the same, dequantised to {dtype}",
        "fused": "q, k, v and gate, up as one product each",
        "method": f"milliseconds {how}, nothing else of the model; median of {ROUNDS} interleaved rounds, each after a "
        "pause; spread = (max - min) / median; every layer of one block, and every fused product, checked before",
    }
    return Report("A step of decoding through all linear layers", facts, COLUMNS, rows)
