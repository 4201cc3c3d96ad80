"""Whole models with random weights: prompts and steps of decoding, dense models beside them."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from bench import llama, origin
from bench.limits import machine
from bench.report import Column, Report, Row
from bench.schemes import WeightOnly
from bench.timing import Sample, interleave
from qcutlass.models.cache_argument import CACHE
from qcutlass.models.stepping import Decoder

ROUNDS: Final = 9
STEPS: Final[int] = 4  # of a round
_PAUSE: Final = 0.02  # seconds before each: the GPU stays under its power limit
_ROOM: Final = (ROUNDS + 4) * STEPS  # tokens behind the prompt

KERNELS: Final = (
    ("norms and gates", ("add_rms_norm", "gate_rows")),
    ("products", ("qcutlass", "PackedGemm")),
    ("attention", ("flex", "attention", "fmha", "flash", "sdpa")),
    ("dense products", ("gemm", "gemv", "nvjet", "cutlass", "splitK", "dot_kernel")),
)
"""Kinds of kernels, by parts of their names; the first that fits counts, others are "between"."""

COLUMNS: Final = [
    Column("model", "model"),
    Column("weights", "weights"),
    Column("mode", "mode"),
    Column("batch", "batch", "{:d}"),
    Column("context", "context", "{:d}"),
    Column("prefill_ms", "prompt ms", "{:.1f}"),
    Column("prefill_to_dense", "prompt, of dense's", "{:.2f}"),
    Column("step_ms", "step ms", "{:.3f}"),
    Column("tokens", "tokens/s", "{:.0f}"),
    Column("to_dense", "of dense's", "{:.2f}"),
    Column("limit_share", "share of the limit", "{:.0%}"),
    *(Column(f"{name} us", f"{name} us", "{:.0f}") for name in (*(name for name, _ in KERNELS), "between")),
    Column("kernels", "kernels", "{:d}"),
    Column("compile_s", "first step s", "{:.0f}"),
    Column("spread", "spread", "{:.0%}"),
]


@dataclass(frozen=True)
class Mode:
    """A way to run steps.

    Attributes:
        compiled, graph: as for `Decoder`; neither: transformers' own forward pass with a cache that grows.
    """

    name: str
    compiled: bool = False
    graph: bool = False

    def label(self, on_gpu: bool) -> str:
        """Its name in rows; on the CPU there is no graph."""
        return f"{self.name}, without a CUDA graph" if self.graph and not on_gpu else self.name


MODES: Final = {
    mode.name: mode
    for mode in (
        Mode("eager"),
        Mode("graph", graph=True),
        Mode("compiled", compiled=True),
        Mode("default", compiled=True, graph=True),
    )
}
"""`default` is what `qcutlass generate` does on a GPU."""


@dataclass(frozen=True)
class _Contestant:
    """A model in a mode, behind a prompt.

    Attributes:
        prefill, step: calls.
        compile_seconds: of the first step.
    """

    prefill: Callable[[], object]
    step: Callable[[], object]
    compile_seconds: float


def _eager(model: Any, ids: torch.Tensor) -> _Contestant:
    state: list[Any] = []

    def prefill() -> None:
        state[:] = [DynamicCache(config=model.config)]
        model(ids, use_cache=True, logits_to_keep=1, **{CACHE: state[0]})

    def step() -> None:
        logits = model(ids[:, :1], use_cache=True, logits_to_keep=1, **{CACHE: state[0]}).logits
        logits[:, -1].argmax(-1)

    prefill()
    return _Contestant(prefill, step, _seconds(step))


def _stop(line: str) -> None:
    raise RuntimeError(line)


def _contestant(model: Any, mode: Mode, ids: torch.Tensor) -> _Contestant:
    if not (mode.compiled or mode.graph):
        return _eager(model, ids)
    torch._dynamo.reset()
    length = ids.shape[1] + _ROOM
    decoder = Decoder(model, len(ids), length, compiled=mode.compiled, graph=mode.graph, on_failure=_stop)
    decoder.prefill(ids)
    return _Contestant(lambda: decoder.prefill(ids), decoder.step, _seconds(decoder.step))


def _seconds(call: Callable[[], object], repeats: int = 1) -> float:
    time.sleep(_PAUSE)
    _wait()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    _wait()
    return (time.perf_counter() - begin) / repeats


def _wait() -> None:
    """Until the GPU has done everything, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _kernels(step: Callable[[], object]) -> Row:
    """Microseconds by kind of kernel, and how many kernels there are, of one step."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    found: Row = dict.fromkeys([f"{name} us" for name, _ in KERNELS] + ["between us"], 0.0)
    count = 0
    for event in trace.events() or []:
        if event.device_type.name != "CUDA":
            continue
        kind = next((name for name, parts in KERNELS if any(part in event.name for part in parts)), "between")
        found[f"{kind} us"] += event.device_time
        count += 1
    return found | {"kernels": count}


def _bytes(model: Any, batch: int, context: int) -> int:
    """What a step reads at least: every weight but the embedding's, and keys and values."""
    config, embedding = model.config, model.get_input_embeddings().weight
    tensors = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    experts = getattr(config, "num_experts", 0)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()) if experts else ():
        if ".experts." in name:
            read = min(experts, batch * config.num_experts_per_tok)
            tensors[tensor.data_ptr()] = tensor.nbytes * read // experts
    head = model.get_output_embeddings()
    if getattr(head, "weight", None) is not embedding:
        tensors.pop(embedding.data_ptr(), None)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = 2 * batch * context * config.num_hidden_layers * config.num_key_value_heads * width * 2
    return int(sum(tensors.values()) + cache)


@torch.inference_mode()
def run(
    name: str,
    size: llama.Size,
    scheme: WeightOnly,
    modes: Sequence[Mode],
    batches: Sequence[int],
    contexts: Sequence[int],
    head: int | None = None,
    projections: bool = False,
    device: torch.device = torch.device("cuda"),  # noqa: B008
) -> Iterator[Row]:
    """A row for each model, mode, batch and context; dense and quantised ones are measured in turn.

    Args:
        head: bits of the output head of one more quantised model; None: there is none.
        device: where; on the CPU activations are float32, and no kernels are told apart.
        projections: whether one more has fused projections, and norms and gates that are left to the compiler.

    Raises:
        ValueError: the head cannot be quantised.
    """
    on_gpu = device.type == "cuda"
    dtype = size.dtype if on_gpu else torch.float32
    quantized = llama.quantized_model(size, scheme, device, dtype)
    forms = {"dense": llama.dense(quantized, dtype), scheme.name: llama.fused_blocks(quantized)}
    if head is not None:
        forms[f"{scheme.name}, head of {head} bits"] = llama.with_head(forms[scheme.name], head)
    if projections:
        forms[f"{scheme.name}, projections alone"] = llama.fused(quantized)
    bandwidth = getattr(machine(torch.cuda.get_device_name()), "bandwidth", None) if on_gpu else None
    for context in contexts:
        for batch in batches:
            generator = torch.Generator(device).manual_seed(batch)
            ids = torch.randint(0, size.vocabulary, (batch, context), generator=generator, device=device)
            for mode in modes:
                contestants = {form: _contestant(model, mode, ids) for form, model in forms.items()}
                prompts = _measured({form: each.prefill for form, each in contestants.items()}, 1)
                steps = _measured({form: each.step for form, each in contestants.items()}, STEPS)
                for form, model in forms.items():
                    seconds = steps[form].median
                    moved = _bytes(model, batch, context)
                    yield {
                        "model": name,
                        "weights": form,
                        "mode": mode.label(on_gpu),
                        "batch": batch,
                        "context": context,
                        "prefill_ms": 1e3 * prompts[form].median,
                        "prefill_to_dense": prompts["dense"].median / prompts[form].median,
                        "step_ms": 1e3 * seconds,
                        "tokens": batch / seconds,
                        "to_dense": steps["dense"].median / seconds,
                        "limit_share": moved / bandwidth / seconds if bandwidth else None,
                        **(_kernels(contestants[form].step) if on_gpu and mode.name != "eager" else {}),
                        "compile_s": contestants[form].compile_seconds,
                        "spread": max(prompts[form].spread, steps[form].spread),
                    }
                del contestants
                gc.collect()
                torch.cuda.empty_cache()


def _measured(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Sample]:
    rounds = 3 if repeats == 1 else ROUNDS
    samples = interleave([functools.partial(_seconds, call, repeats) for call in calls.values()], rounds)
    return dict(zip(calls, samples, strict=True))


def report(rows: list[Row]) -> Report:
    facts = {
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        **origin.facts(),
        "dense": "the same model with its dequantised weights in torch.nn.Linear layers and transformers' own experts",
        "modes": "eager: transformers as it is; graph: static cache and a CUDA graph; default: the same compiled, with "
        "flex_attention, as qcutlass generate runs; compiled: that without a graph",
        "limit": "bytes of all weights but the embedding (of experts, as many as a step's tokens go to at most), and "
        "of keys and values, at the GPU's bandwidth",
        "method": f"fp16 (mixtures bf16, on the CPU fp32), random weights; host's time included; median of {ROUNDS} "
        f"interleaved rounds of {STEPS} steps "
        "(prompts: 3 of 1), each after a pause; spread = (max - min) / median; kernels of one step by torch's profiler",
    }
    return Report("Steps of whole models", facts, COLUMNS, rows)
