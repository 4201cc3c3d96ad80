"""Tokens a second of a whole model on the CPU beside llama.cpp, which reads the same GGUF file."""

from __future__ import annotations

import contextlib
import copy
import importlib
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Final

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

import qcutlass
from bench import origin
from bench.report import Column, Report, Row
from bench.timing import Sample
from qcutlass import models
from qcutlass.models.cache_argument import CACHE
from qcutlass.models.extras import load_tokenizer
from qcutlass.models.growing_cache import growing_cache
from qcutlass.models.transformers import load_model

INSTALL: Final = "pip install llama-cpp-python, which compiles it"
PEER: Final = "llama.cpp"

COLUMNS: Final = [
    Column("contestant", "contestant"),
    Column("threads", "threads", "{:d}"),
    Column("prompt_tokens", "prompt tokens/s", "{:.0f}"),
    Column("prompt_ratio", "/ llama.cpp", "{:.2f}"),
    Column("prompt_spread", "spread", "{:.0%}"),
    Column("decode_tokens", "decode tokens/s", "{:.1f}"),
    Column("decode_ratio", "/ llama.cpp", "{:.2f}"),
    Column("decode_spread", "spread", "{:.0%}"),
    Column("same", "same text", "{:d}"),
    Column("slower", "rounds slower", "{:d}"),
]


@dataclass(frozen=True)
class Times:
    """Seconds of one prompt, and of all tokens behind the first; the tokens."""

    prompt: float
    decode: float
    tokens: Sequence[int]


@dataclass(frozen=True)
class Contestant:
    """What reads a prompt and continues it.

    Attributes:
        name: in the table.
        run: reads these tokens and makes so many more, on so many threads, the likeliest each time.
    """

    name: str
    run: Callable[[Sequence[int], int, int], Times]


@dataclass
class _Record:
    prompt: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    tokens: Sequence[int] = ()


def ours(name: str, model: Any) -> Contestant:
    """A model of transformers with a cache that is written in place."""

    @torch.inference_mode()
    def run(prompt: Sequence[int], count: int, threads: int) -> Times:
        torch.set_num_threads(threads)
        cache = growing_cache(model.config)

        def likeliest(ids: Tensor) -> int:
            logits = model(ids, use_cache=True, logits_to_keep=1, **{CACHE: cache}).logits
            return int(logits[0, -1].argmax())

        begin = time.perf_counter()
        made = [likeliest(torch.tensor([prompt]))]
        middle = time.perf_counter()
        while len(made) < count:
            made.append(likeliest(torch.tensor([made[-1:]])))
        return Times(middle - begin, time.perf_counter() - middle, made)

    return Contestant(name, run)


def llama_cpp(path: Path, length: int) -> Contestant:
    """The model in llama.cpp, with room for so many tokens; ImportError where that is not installed."""
    library = importlib.import_module("llama_cpp")
    loaded: dict[int, Any] = {}

    def run(prompt: Sequence[int], count: int, threads: int) -> Times:
        if threads not in loaded:
            loaded[threads] = library.Llama(
                str(path), n_ctx=length, n_batch=length, n_threads=threads, n_threads_batch=threads, verbose=False
            )
        model = loaded[threads]
        model.reset()
        begin = time.perf_counter()
        model.eval(prompt)
        made = [model.sample(temp=0.0)]
        middle = time.perf_counter()
        while len(made) < count:
            model.eval(made[-1:])
            made.append(model.sample(temp=0.0))
        return Times(middle - begin, time.perf_counter() - middle, made)

    return Contestant(PEER, run)


def converted(path: Path, scratch: Path) -> Path:
    """The folder that a GGUF file is converted into."""
    disable_progress_bar()
    models.convert(path, scratch / path.stem)
    return scratch / path.stem


def text(folder: Path, count: int) -> list[int]:
    """So many tokens of the documentation of Python."""
    tokenizer = load_tokenizer(folder)
    ids: list[int] = tokenizer("".join(topics.values())[: 20 * count])["input_ids"][:count]
    if len(ids) < count:
        raise ValueError(f"prompt: expected at most {len(ids)} tokens, got {count}")
    return ids


def contestants(path: Path, folder: Path, dtypes: Sequence[torch.dtype], length: int) -> Iterator[Contestant]:
    """Ours of each type, with activations quantised where layers offer that, and not fused; llama.cpp.

    Raises:
        ImportError: llama.cpp is not installed; it comes last.
    """
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        model = load_model(folder, "cpu", dtype)[0]
        if dtype == torch.float32:
            yield ours(f"{name}, not fused", copy.deepcopy(model))
        qcutlass.fuse_block(model)
        yield ours(name, model)
    quantize_activations = getattr(qcutlass.layers, "use_activations", None)
    if quantize_activations is not None:
        model = load_model(folder, "cpu", torch.float32)[0]
        qcutlass.fuse_block(model)
        quantize_activations(model, "int8")
        yield ours("int8 activations", model)
    yield llama_cpp(path, length)


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many other processes that compute all the time, as long as this one is there."""
    code = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(subprocess.Popen([sys.executable, "-c", code]))
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(found: Sequence[Contestant], threads: Sequence[int], ids: Sequence[int], tokens: int, rounds: int) -> list[Row]:
    """A row for each number of threads and contestant; all of them take turns, in another order each round."""
    before = torch.get_num_threads()
    records = {(count, contestant.name): _Record() for count in threads for contestant in found}
    order, shuffle = [(count, contestant) for count in threads for contestant in found], random.Random(0).shuffle
    try:
        for round_ in range(rounds + 1):
            shuffle(order)
            for count, contestant in order:
                times = contestant.run(ids, tokens, count)
                record = records[count, contestant.name]
                record.tokens = times.tokens
                if round_ > 0:  # the first one warms up
                    record.prompt.append(times.prompt)
                    record.decode.append(times.decode)
    finally:
        torch.set_num_threads(before)
    return [_row(name, count, records, min(threads), found[0].name, len(ids)) for count, name in records]


def _row(name: str, threads: int, records: dict[tuple[int, str], _Record], fewest: int, first: str, prompt: int) -> Row:
    record, peer = records[threads, name], records.get((threads, PEER))
    row: Row = {"contestant": name, "threads": threads}
    for phase, count in (("prompt", prompt), ("decode", len(record.tokens) - 1)):
        sample = Sample(getattr(record, phase))
        row |= {f"{phase}_tokens": count / sample.median, f"{phase}_spread": sample.spread}
        row[f"{phase}_best"] = count / sample.best
        if peer is not None:
            row[f"{phase}_ratio"] = Sample(getattr(peer, phase)).median / sample.median
    expected = records[threads, first].tokens
    differing = (i for i, (a, b) in enumerate(zip(record.tokens, expected, strict=True)) if a != b)
    row["same"] = next(differing, len(record.tokens))
    if threads > fewest:
        pairs = zip(record.decode, records[fewest, name].decode, strict=True)
        row["slower"] = sum(seconds > of_fewest for seconds, of_fewest in pairs)
    return row


def report(name: str, rows: list[Row], prompt: int, tokens: int, rounds: int, beside: int, note: str | None) -> Report:
    """The table; `beside`: neighbours()."""
    facts = {
        "model": name,
        **origin.facts(),
        "method": f"a prompt of {prompt} tokens of English, then the {tokens - 1} likeliest behind the first new one; "
        f"all contestants take turns, median of {rounds} rounds, spread = (max - min) / median",
        "same text": "new tokens until the first that differs from those of the first contestant",
        "rounds slower": "those in which decoding took longer than with the fewest threads",
        "beside": f"so many other processes that compute all the time: {beside}",
    }
    return Report("Tokens on the CPU", facts, COLUMNS, rows, [] if note is None else [note])
