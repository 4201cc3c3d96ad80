"""A sweep over layers that nobody tuned for: those of models, fused, separate and sharded, and random ones."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from bench import gpu_report, gpu_timing, peers, shapes
from bench.gpu import Bench, layer_of
from bench.gpu_report import YARDSTICKS, Cell, cell_of
from bench.report import Report, Row, markdown_table
from bench.schemes import Scheme
from bench.shapes import Shape

SHARDS: Final = (1, 2, 4, 8)
RANDOM: Final = 100
MS: Final = (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
RANGES: Final = ((1, 64), (65, 512), (513, 1 << 30))
"""Ranges of M whose means are shown: decoding, small batches, prompts."""

LARGE: Final = 1024
"""From so many channels and columns on, a layer has work for all SMs: more is asked of it."""
LEAST_LARGE: Final = 0.95
"""What cuBLAS's time over ours should not be below in any cell of large layers."""
LEAST: Final = 0.85
"""The same of all layers."""

ROUNDS: Final = 5  # replays of each contestant: fewer than elsewhere, of many more cells
SAVE_SECONDS: Final = 10.0
WORST: Final = 20
_STEP: Final = 64  # of random extents
_SMALLEST: Final = 512  # random extents are spread evenly on a logarithmic scale from here
_LARGEST: Final = 32768  # to here
_MOST_WEIGHTS: Final = 1 << 28


def model_layers() -> list[Shape]:
    """The layers of models, whole and as their shards: column-parallel ones split N, the others K."""
    found: list[Shape] = []
    for layers in (*shapes.MODELS.values(), *shapes.SEPARATE.values()):
        for n, k in layers:
            for parts in SHARDS:
                if n % parts == 0:
                    found.append((n // parts, k))
                if k % parts == 0:
                    found.append((n, k // parts))
    return list(dict.fromkeys(found))


def random_layers(count: int = RANDOM, seed: int = 0) -> list[Shape]:
    """Layers of random extents, multiples of 64 from 512 to 32768, of at most 2^28 weights.

    Example:
        >>> random_layers(2) == random_layers(3)[:2]
        True
    """
    generator = random.Random(seed)

    def extent() -> int:
        logarithm = generator.uniform(math.log(_SMALLEST), math.log(_LARGEST))
        return round(math.exp(logarithm) / _STEP) * _STEP

    found: dict[Shape, None] = {}
    while len(found) < count:
        shape = extent(), extent()
        if shape[0] * shape[1] <= _MOST_WEIGHTS:
            found[shape] = None
    return list(found)


def held_out(count: int = RANDOM, seed: int = 0) -> set[str]:
    """Every second random layer, as rows name it: they judge what `bench fit --hold-out sweep` fits to the others."""
    return {f"{n}x{k}" for n, k in random_layers(count, seed)[1::2]}


def layers(count: int = RANDOM, seed: int = 0, part: tuple[int, int] = (0, 1), models: bool = True) -> list[Shape]:
    """All layers of the sweep in an order of chance, so that a part of it is a sample of the whole.

    Args:
        part: (i, n): every n-th layer from the i-th on, so that n GPUs share a sweep.
        models: whether layers of models are among them, or random ones alone.

    Raises:
        ValueError: there is no such part.

    Example:
        >>> len(layers(part=(0, 2))) + len(layers(part=(1, 2))) == len(layers())
        True
    """
    number, parts = part
    if not 0 <= number < parts:
        raise ValueError(f"part: expected I N with 0 <= I < N, got {number} {parts}")
    found = list(dict.fromkeys([*(model_layers() if models else ()), *random_layers(count, seed)]))
    random.Random(seed).shuffle(found)
    return found[number::parts]


def run(
    bench: Bench, schemes: Sequence[Scheme], of: Sequence[Shape], ms: Sequence[int], done: Iterable[Row], seconds: float
) -> Iterator[list[Row]]:
    """The rows of each cell that is not among `done`; begins no layer when `seconds` have passed."""
    known = {cell_of(row) for row in done}
    end = time.monotonic() + seconds
    for shape in of:
        for scheme in schemes:
            missing = _missing(scheme, shape, ms, known)
            if missing and time.monotonic() < end:
                yield from bench.rows([scheme], [shape], missing)


def _missing(scheme: Scheme, shape: Shape, ms: Sequence[int], known: Collection[Cell]) -> list[int]:
    n, k = shape
    return [m for m in ms if (scheme.name, f"{n}x{k}", m) not in known]


def unfinished(schemes: Sequence[Scheme], of: Sequence[Shape], ms: Sequence[int], done: Iterable[Row]) -> list[Shape]:
    """Layers with cells that are not among `done`."""
    known = {cell_of(row) for row in done}
    return [shape for shape in of if any(_missing(scheme, shape, ms, known) for scheme in schemes)]


def compile_kernels(
    names: Sequence[str],
    schemes: Sequence[Scheme],
    of: Sequence[Shape],
    ms: Sequence[int],
    processes: int,
    seconds: float = math.inf,
) -> None:
    """Multiplies once by every layer and M, in so many processes, as some peers compile kernels when they first do.

    What they compile must outlast the process that asked for it: humming's kernels lie in files. One that fails does so
    again when it is to be timed, and the reason is reported then.

    Args:
        names: of peers.
        of: in the order in which they are to be timed.
        seconds: when so many have passed, the layers that are left are not compiled for.
    """
    end = time.monotonic() + seconds
    work = [(tuple(names), scheme, shape, tuple(ms)) for shape in of for scheme in schemes]
    with get_context("spawn").Pool(processes) as pool:
        for _ in pool.imap_unordered(_compile_for, work):
            if time.monotonic() >= end:
                return  # which ends the processes


def _compile_for(work: tuple[Sequence[str], Scheme, Shape, Sequence[int]]) -> None:
    names, scheme, shape, ms = work
    gpu_timing.ROTATION_BYTES = 0  # type: ignore[misc]  # of this process: one copy of the weights is enough
    layer = layer_of(scheme, shape, max(ms))
    for peer in peers.select(list(names)):
        with contextlib.suppress(Exception):  # of any kind: the libraries are others'
            peer.load()
            product = peer.prepare(layer)
            for m in ms:
                with contextlib.suppress(Exception):
                    product(m)[0].launch(0, gpu_timing.outputs(m, layer.n, layer.dtype)[0])


def read(path: Path, gpu: str | None = None) -> Row:
    """Facts and rows of a sweep that was begun; none if there is no such file.

    Args:
        gpu: on which it is to go on; None: on none.

    Raises:
        ValueError: the file is something else, or of another GPU.
    """
    if not path.exists():
        return {"facts": {}, "rows": []}
    content = gpu_report.read(path)
    before = content["facts"]["GPU"]
    if gpu not in (None, before):
        raise ValueError(f"{path} was measured on {before}, this is {gpu}: one sweep is of one GPU")
    return content


def read_all(paths: Sequence[Path], gpu: str | None = None) -> Row:
    """The same of several files, parts of one sweep; of a cell that two have, the later one's rows.

    Raises:
        ValueError: a file is something else, or of another GPU.
    """
    for path in paths:
        read(path, gpu)
    report = gpu_report.merge([path for path in paths if path.exists()])
    return {"facts": report.facts, "rows": report.rows}


def continued(before: Row, fresh: Report) -> Report:
    """The report of a sweep's next part, with facts and rows of those before it, as `read` gives them."""
    return replace(fresh, facts=gpu_report.joined(before["facts"], fresh.facts), rows=[*before["rows"], *fresh.rows])


def mean(values: Iterable[float]) -> float:
    """The geometric mean; NaN of none.

    Example:
        >>> mean([1, 4])
        2.0
    """
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else math.nan


def peers_of(rows: Sequence[Row]) -> list[str]:
    """The peers that were timed, by key."""
    return [key for key in gpu_report.LABELS if any(f"{key}_us" in row for row in rows)]


def ratio(row: Row, key: str) -> float | None:
    """A peer's time over ours; None where it did not take part."""
    theirs = row.get(f"{key}_us")
    return None if theirs is None else float(theirs) / float(row["qcutlass_us"])


def _range_words(least: int, most: int) -> str:
    return f"{least} to {most}" if most < RANGES[-1][1] else f"from {least}"


def _mean_words(ratios: Sequence[float], cells: int) -> str:
    """The mean; of how many cells, if not of all."""
    part = f", {len(ratios)} of {cells}" if len(ratios) < cells else ""
    return f"{mean(ratios):.3f} (worst {min(ratios):.2f}{part})" if ratios else ""


def _means(rows: Sequence[Row], keys: Sequence[str]) -> str:
    """Geometric means of the times of peers, and of the best of them, over ours, by range of M."""
    body = []
    for least, most in (*RANGES, (1, RANGES[-1][1])):
        here = [row for row in rows if least <= row["m"] <= most]
        ratios = [[found for row in here if (found := ratio(row, key)) is not None] for key in keys]
        compared = [row for row in here if row.get("ratio")]
        best = [float(row["ratio"]) for row in compared]
        beside_all = [float(row["ratio"]) for row in compared if all(ratio(row, key) is not None for key in keys)]
        words = (_mean_words(found, len(here)) for found in (best, beside_all, *ratios))
        body.append([_range_words(least, most), str(len(here)), *words])
    names = (YARDSTICKS.get(key, gpu_report.LABELS[key]) for key in keys)
    heads = ["M", "cells", "best peer", "best peer, where all ran", *names]
    return markdown_table(heads, body, [False, True, *(False for _ in heads[2:])])


def _count(ratios: Sequence[float], least: float) -> str:
    return f"{sum(one < least for one in ratios)} of {len(ratios)}"


def _far_behind(parts: Mapping[str, Sequence[Row]]) -> str:
    """How many cells of these layers are slower beside cuBLAS than they should be."""
    body = []
    for part, rows in parts.items():
        compared = [(row["shape"], found) for row in rows if (found := ratio(row, "cublas")) is not None]
        large = [found for shape, found in compared if min(*shapes.parse([shape])[0]) >= LARGE]
        body.append([part, _count(large, LEAST_LARGE), _count([found for _, found in compared], LEAST)])
    heads = ["layers", f"N and K from {LARGE}: below {LEAST_LARGE}", f"all: below {LEAST}"]
    return markdown_table(heads, body, [False, True, True])


def _worst(rows: Sequence[Row]) -> str:
    """The cells in which the best peer is farthest ahead, or least behind."""
    found = sorted((row for row in rows if row.get("ratio")), key=lambda row: float(row["ratio"]))[:WORST]
    body = [
        [row["shape"], str(row["m"]), f"{row['qcutlass_us']:.1f}", f"{row['best_peer_us']:.1f}", row["best_peer"],
         f"{row['ratio']:.2f}", row["tactic"]]
        for row in found
    ]  # fmt: skip
    return markdown_table(
        ["N x K", "M", "us", "best peer us", "best peer", "ratio", "tactic"],
        body,
        [False, True, True, True, False, True, False],
    )


def report(facts: Row, rows: Sequence[Row], whole: int, kept: Collection[str] = ()) -> Report:
    """The report of a sweep: means, counts of slow cells, worst cells, how good the choices were.

    Args:
        whole: cells of the sweep; `rows` may be those of a part of it.
        kept: layers whose means and counts stand alone, too: those of `held_out`.
    """
    chosen = [row for row in rows if row["selected"]]
    cells: set[Cell] = {cell_of(row) for row in chosen}
    summary = [f"{len(cells)} of {whole} cells of the sweep.", *gpu_report.choice_summary(gpu_report.choices(rows))[:6]]
    tables = []
    for scheme, group in groupby(sorted(chosen, key=lambda row: str(row["scheme"])), lambda row: str(row["scheme"])):
        here = list(group)
        keys = peers_of(here)
        parts = {"all layers": here}
        if judging := [row for row in here if row["shape"] in kept]:
            parts["the held-out half of the random layers"] = judging
        tables += [
            f"{scheme}, {part}: geometric mean of a peer's time over that of qcutlass\n\n{_means(some, keys)}"
            for part, some in parts.items()
        ]
        if "cublas" in keys:
            tables.append(f"{scheme}: cells by cuBLAS's time over that of qcutlass\n\n{_far_behind(parts)}")
        tables.append(f"{scheme}: the {min(WORST, len(here))} cells with the lowest ratio\n\n{_worst(here)}")
    return Report(gpu_report.TITLE, facts, gpu_report.COLUMNS, list(rows), summary, tables, lists_rows=False)
