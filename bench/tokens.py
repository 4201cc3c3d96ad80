"""Tokens a second and memory of a whole model, quantised and dense: eager calls, and CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import StaticCache
from transformers.utils.logging import disable_progress_bar

from bench import llama, origin
from bench.report import Column, Report, Row
from bench.schemes import WeightOnly
from bench.timing import interleave, wall_time
from qcutlass import models
from qcutlass.layers import QuantEmbedding, WeightOnlyLinear
from qcutlass.models.cache_argument import CACHE
from qcutlass.models.transformers import load_model

PROMPT: Final[int] = 64  # tokens before the first that counts
STEPS: Final[int] = 16  # of a round
ROUNDS: Final = 5

COLUMNS: Final = [
    Column("model", "model"),
    Column("dtype", "activations"),
    Column("batch", "batch", "{:d}"),
    Column("phase", "phase"),
    Column("mode", "mode"),
    Column("dense_ms", "dense ms", "{:.2f}"),
    Column("qcutlass_ms", "qcutlass ms", "{:.2f}"),
    Column("fused_ms", "fused ms", "{:.2f}"),
    Column("dense_tokens", "dense tokens/s", "{:.0f}"),
    Column("qcutlass_tokens", "qcutlass tokens/s", "{:.0f}"),
    Column("fused_tokens", "fused tokens/s", "{:.0f}"),
    Column("ratio", "best / dense", "{:.2f}"),
    Column("dense_mb", "dense MB", "{:.0f}"),
    Column("qcutlass_mb", "qcutlass MB", "{:.0f}"),
    Column("spread", "spread", "{:.0%}"),
    Column("same_text", "graph = eager"),
    Column("differ", "other text in graphs"),
    Column("error", "error / bound", "{:.3f}"),
]

Load = Callable[[torch.dtype], Any]


@dataclass(frozen=True)
class Source:
    """A model to be loaded with activations of a type.

    Attributes:
        name: what it is.
        load: the quantised model, on the device.
    """

    name: str
    load: Load


def of_folder(path: Path, device: torch.device, scratch: Path) -> Source:
    """A folder that transformers loads, or a GGUF file, which is converted into `scratch` first."""
    disable_progress_bar()
    folder = path
    if path.is_file():
        folder = scratch / path.stem
        models.convert(path, folder)
    schemes = sorted({group.scheme for group in models.inspect(folder).groups})
    return Source(f"{path.name}, {' and '.join(schemes)}", lambda dtype: load_model(folder, device, dtype)[0])


def of_size(name: str, size: llama.Size, scheme: WeightOnly, device: torch.device) -> Source:
    """A model with random weights."""
    load = functools.partial(llama.quantized_model, size, scheme, device)
    return Source(f"{name}, random weights, {scheme.name}", load)


class _Decoding:
    """Greedy decoding after a random prompt, all of whose state stays in place, so that a graph can hold a step.

    Attributes:
        token: `[batch, 1]`, the last that was made.
        prefill: reads the prompt and makes the first token of each sequence, from whatever state.
        step: makes one more.
    """

    def __init__(self, model: Any, batch: int, prompt: int, steps: int) -> None:
        self._model, device = model, model.device
        length = prompt + steps
        generator = torch.Generator(device).manual_seed(batch)
        self._prompt = torch.randint(0, model.config.vocab_size, (batch, prompt), generator=generator, device=device)
        self._cache = StaticCache(config=model.config, max_cache_len=length)
        self._places = torch.arange(length, device=device)[None]
        self._position = torch.empty(1, 1, dtype=torch.int64, device=device)
        self.token = torch.empty(batch, 1, dtype=torch.int64, device=device)
        self.prefill: Callable[[], None] = self._prefill
        self.step: Callable[[], None] = self._step

    def capture(self) -> None:
        """From now on both are replays; first calls set things up, so each must have been called before."""
        self.prefill, self.step = _graph(self._prefill), _graph(self._step)

    def _prefill(self) -> None:
        self._cache.reset()
        self._compute(self._prompt, self._places[:, : self._prompt.shape[1]])
        self._position.fill_(self._prompt.shape[1])

    def _step(self) -> None:
        self._compute(self.token, self._position)
        self._position.add_(1)

    def _compute(self, ids: Tensor, positions: Tensor) -> None:
        logits = self._model(
            ids,
            attention_mask=(self._places <= positions.T)[None, None],
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{CACHE: self._cache},
        ).logits
        self.token.copy_(logits.argmax(-1))


def _graph(call: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@dataclass(frozen=True)
class _Contestant:
    """Decoding in one of its modes.

    Attributes:
        decoding: what is decoded; graphs point into its tensors, so it has to live as long as they do.
        seconds: by phase: of a prompt, and of a step, measured over a round; prompts are measured first.
    """

    decoding: _Decoding
    seconds: Mapping[str, Callable[[], float]]


def _decoding(model: Any, batch: int, prompt: int, graph: bool) -> _Decoding:
    decoding = _Decoding(model, batch, prompt, (ROUNDS + 2) * STEPS)
    for call in (decoding.prefill, decoding.step, decoding.step):
        call()
    if graph:
        decoding.capture()
    return decoding


def _text(model: Any, batch: int, prompt: int, graph: bool) -> Tensor:
    """`[STEPS, batch]`, the first tokens, with attention by plain matrix products: PyTorch's fused kernels need not
    give the same bits twice (on an H200 they do not at batch 32), and greedy choices hang by a bit."""
    with sdpa_kernel(SDPBackend.MATH):
        decoding = _decoding(model, batch, prompt, graph)
        decoding.prefill()
        text = [decoding.token.clone()]
        while len(text) < STEPS:
            decoding.step()
            text.append(decoding.token.clone())
    return torch.cat(text, dim=1).T


def _contestant(model: Any, batch: int, prompt: int, graph: bool) -> _Contestant:
    decoding = _decoding(model, batch, prompt, graph)
    seconds = {
        "prefill": functools.partial(_seconds, decoding.prefill, 1, model.device),
        "decode": functools.partial(_seconds, decoding.step, STEPS, model.device),
    }
    return _Contestant(decoding, seconds)


def _seconds(call: Callable[[], None], repeats: int, device: torch.device) -> float:
    """The seconds of one of `repeats` calls in a row, the host's time included."""
    _wait(device)

    def round_() -> None:
        for _ in range(repeats):
            call()
        _wait(device)

    return wall_time(round_) / repeats


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def megabytes(model: Any) -> float:
    """The size of all tensors of a model, each counted once."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(int(storage.nbytes()) for storage in storages.values()) / 1e6


def check(model: Any, batch: int, dtype: torch.dtype) -> float:
    """The largest error of a layer of each shape, as a share of its bound.

    Raises:
        AssertionError: it is out of its bound.
    """
    worst, seen = 0.0, set()
    for name, layer in model.named_modules():
        if isinstance(layer, QuantEmbedding) or not isinstance(layer, WeightOnlyLinear):
            continue
        if (layer.out_features, layer.in_features) not in seen:
            seen.add((layer.out_features, layer.in_features))
            generator = torch.Generator(model.device).manual_seed(batch)
            a = torch.randn(batch, layer.in_features, generator=generator, device=model.device).to(dtype)
            worst = max(worst, llama.check(layer, a, layer(a), name))
    return worst


@torch.inference_mode()
def run(source: Source, dtypes: Sequence[torch.dtype], batches: Sequence[int], prompt: int = PROMPT) -> Iterator[Row]:
    """Rows of one type and batch after another, a prompt's and a step's: eager, and on a GPU a CUDA graph.

    Raises:
        AssertionError: a layer's result is out of its bound.
    """
    for dtype in dtypes:
        quantized = source.load(dtype)
        forms = {"dense": llama.dense(quantized, dtype), "qcutlass": quantized, "fused": llama.fused(quantized)}
        sizes = {f"{name}_mb": megabytes(forms[name]) for name in ("dense", "qcutlass")}
        for batch in batches:
            error = max(check(forms[name], batch, dtype) for name in ("qcutlass", "fused"))
            for graph in (False, True) if quantized.device.type == "cuda" else (False,):
                differ = [
                    name
                    for name, model in forms.items()
                    if graph and not torch.equal(*(_text(model, batch, prompt, mode) for mode in (False, True)))
                ]
                contestants = {name: _contestant(model, batch, prompt, graph) for name, model in forms.items()}
                for phase, tokens in (("prefill", batch * prompt), ("decode", batch)):
                    samples = interleave([each.seconds[phase] for each in contestants.values()], ROUNDS)
                    times = {name: sample.median for name, sample in zip(forms, samples, strict=True)}
                    yield {
                        "model": source.name,
                        "dtype": str(dtype).removeprefix("torch."),
                        "batch": batch,
                        "phase": phase,
                        "mode": "CUDA graph" if graph else "eager",
                        **{f"{name}_ms": 1e3 * seconds for name, seconds in times.items()},
                        **{f"{name}_tokens": tokens / seconds for name, seconds in times.items()},
                        "ratio": times["dense"] / min(times["qcutlass"], times["fused"]),
                        **sizes,
                        "spread": max(sample.spread for sample in samples),
                        "same_text": not differ if graph else None,
                        "differ": ", ".join(differ),
                        "error": error,
                    }


def report(device: torch.device, rows: list[Row], prompt: int = PROMPT) -> Report:
    on_gpu = device.type == "cuda"
    facts = {
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads",
        **origin.facts(),
        "dense": "the same model with its dequantised weights in torch.nn.Linear layers",
        "fused": "q, k, v and gate, up as one product each",
        "method": f"milliseconds of a prompt of {prompt} tokens, and of a step of greedy decoding behind it; "
        f"whole model, static cache; median of {ROUNDS} interleaved rounds of a prompt or {STEPS} steps; spread = "
        "(max - min) / median; MB: tensors of the model, without the cache; a layer of each shape checked "
        "before, and the texts of eager calls and graphs compared, with attention by plain matrix products",
    }
    return Report("Tokens of a whole model", facts, COLUMNS, rows)
