"""A sweep over layers that nobody tuned for: those of models, fused, separate and sharded, and random ones."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from bench import gpu_report, shapes
from bench.gpu import Bench
from bench.gpu_report import YARDSTICKS, Cell, cell_of
from bench.report import Report, Row, markdown_table
from bench.schemes import Scheme
from bench.shapes import Shape

SHARDS: Final = (1, 2, 4, 8)
RANDOM: Final = 100
MS: Final = (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
RANGES: Final = ((1, 64), (65, 512), (513, 1 << 30))
"""Ranges of M whose means are shown: decoding, small batches, prompts."""

WORST: Final = 20
_STEP: Final = 64  # of random extents
_LEAST: Final = 512  # random extents are spread evenly on a logarithmic scale from here
_MOST: Final = 32768  # to here
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
        logarithm = generator.uniform(math.log(_LEAST), math.log(_MOST))
        return round(math.exp(logarithm) / _STEP) * _STEP

    found: dict[Shape, None] = {}
    while len(found) < count:
        shape = extent(), extent()
        if shape[0] * shape[1] <= _MOST_WEIGHTS:
            found[shape] = None
    return list(found)


def layers(count: int = RANDOM, seed: int = 0) -> list[Shape]:
    """All layers of the sweep in an order of chance, so that a part of it is a sample of the whole."""
    found = list(dict.fromkeys([*model_layers(), *random_layers(count, seed)]))
    random.Random(seed).shuffle(found)
    return found


def run(
    bench: Bench, schemes: Sequence[Scheme], of: Sequence[Shape], ms: Sequence[int], done: Iterable[Row], seconds: float
) -> Iterator[list[Row]]:
    """The rows of each cell that is not among `done`; begins no layer when `seconds` have passed."""
    known = {cell_of(row) for row in done}
    end = time.monotonic() + seconds
    for n, k in of:
        for scheme in schemes:
            missing = [m for m in ms if (scheme.name, f"{n}x{k}", m) not in known]
            if missing and time.monotonic() < end:
                yield from bench.rows([scheme], [(n, k)], missing)


def read(path: Path) -> list[Row]:
    """The rows of a sweep that was begun; none if there is no such file.

    Raises:
        ValueError: the file is something else.
    """
    return list(gpu_report.read(path)["rows"]) if path.exists() else []


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


def _mean_words(ratios: Sequence[float]) -> str:
    return f"{mean(ratios):.2f} (worst {min(ratios):.2f})" if ratios else ""


def _means(rows: Sequence[Row]) -> str:
    """Geometric means of the peers' times over ours, by range of M."""
    keys = peers_of(rows)
    body = []
    for least, most in (*RANGES, (1, RANGES[-1][1])):
        here = [row for row in rows if least <= row["m"] <= most]
        ratios = {key: [found for row in here if (found := ratio(row, key)) is not None] for key in keys}
        best = [float(row["ratio"]) for row in here if row.get("ratio")]
        body.append([_range_words(least, most), str(len(here)), *map(_mean_words, (best, *ratios.values()))])
    heads = ["M", "cells", "best peer", *(YARDSTICKS.get(key, gpu_report.LABELS[key]) for key in keys)]
    return markdown_table(heads, body, [False, True, *(False for _ in heads[2:])])


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


def report(facts: Row, rows: Sequence[Row], whole: int) -> Report:
    """The report of a sweep: means, worst cells, how good the choices were.

    Args:
        whole: cells of the sweep; `rows` may be those of a part of it.
    """
    chosen = [row for row in rows if row["selected"]]
    cells: set[Cell] = {cell_of(row) for row in chosen}
    summary = [f"{len(cells)} of {whole} cells of the sweep.", *gpu_report.choice_summary(gpu_report.choices(rows))[:6]]
    tables = []
    for scheme, group in groupby(sorted(chosen, key=lambda row: str(row["scheme"])), lambda row: str(row["scheme"])):
        here = list(group)
        tables += [
            f"{scheme}: geometric mean of a peer's time over that of qcutlass\n\n{_means(here)}",
            f"{scheme}: the {min(WORST, len(here))} cells with the lowest ratio\n\n{_worst(here)}",
        ]
    return Report(gpu_report.TITLE, facts, gpu_report.COLUMNS, list(rows), summary, tables, lists_rows=False)
