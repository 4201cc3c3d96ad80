"""Results of the GPU bench: what their columns are, what they come to, and how several files become one report."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from bench import peers
from bench.report import Column, Report, Row, is_compressed, markdown_table
from bench.timing import Sample

TITLE: Final = "GPU kernels"
CLOSE: Final = 0.05
"""The chosen tactic should be no slower than the best measured one by more than this share."""

LABELS: Final = {peer.key: peer.label for peer in peers.CLASSES}
YARDSTICKS: Final = {
    "cublas": "cuBLAS",
    "cutlass": "CUTLASS",
    "cutlass_int8": "CUTLASS int8",
    "int_mm": "_int_mm",
    "scaled_mm": "_scaled_mm",
    "scaled_mm_promoted": "_scaled_mm promoted",
    "triton_blockwise": "Triton",
}
"""Peers whose times are also shown as multiples of ours."""

COLUMNS: Final = [
    Column("scheme", "scheme"),
    Column("shape", "N x K"),
    Column("m", "M", "{:d}"),
    Column("qcutlass_us", "qcutlass us", "{:.2f}"),
    Column("spread", "spread", "{:.0%}"),
    *(Column(f"{key}_us", f"{label} us", "{:.2f}") for key, label in LABELS.items()),
    Column("best_peer", "best peer"),
    Column("ratio", "best peer / qcutlass", "{:.2f}"),
    *(Column(f"{key}_ratio", f"{name} / qcutlass", "{:.2f}") for key, name in YARDSTICKS.items()),
    Column("with_quantizer_us", "with quantiser us", "{:.2f}"),
    Column("with_quantizer_ratio", "with quantiser / product", "{:.2f}"),
    Column("limit_share", "of limit", "{:.0%}"),
    Column("bandwidth_share", "of bandwidth", "{:.0%}"),
    Column("error", "error / bound", "{:.3f}"),
    Column("in_situ_us", "in situ us", "{:.2f}"),
    *(Column(f"{key}_in_situ_us", f"{label} in situ us", "{:.2f}") for key, label in LABELS.items()),
    Column("eager_us", "eager us", "{:.1f}"),
    Column("cublas_eager_us", "torch.mm eager us", "{:.1f}"),
    Column("to_chosen", "/ chosen", "{:.2f}"),
    Column("tactic", "tactic"),
]

Cell: TypeAlias = tuple[str, str, int]


def cell_of(row: Row) -> Cell:
    """(scheme, shape, M): the rows of a cell were measured together."""
    return row["scheme"], row["shape"], row["m"]


def comparison(row: Row, keys: Iterable[str]) -> Row:
    """The best of these peers, and times as multiples of ours."""
    times = {key: row[f"{key}_us"] for key in keys}
    if not times:
        return {}
    best = min(times, key=lambda key: times[key])
    ratios = {f"{key}_ratio": times[key] / row["qcutlass_us"] for key in YARDSTICKS if key in times}
    return {"best_peer": best, "best_peer_us": times[best], "ratio": times[best] / row["qcutlass_us"]} | ratios


def with_quantizer(row: Row, sample: Sample) -> Row:
    """The time of the product of a row behind its quantiser, and as a multiple of that of the product alone."""
    microseconds = 1e6 * sample.median
    return {
        "with_quantizer_us": microseconds,
        "with_quantizer_spread": sample.spread,
        "with_quantizer_ratio": microseconds / row["qcutlass_us"],
    }


@dataclass(frozen=True)
class Choice:
    """How the chosen tactic of a cell compares with the fastest one measured beside it.

    Attributes:
        excess: by what share the chosen one is slower; 0 if it is the fastest.
    """

    cell: Cell
    chosen: str
    best: str
    excess: float


def choices(rows: Sequence[Row]) -> list[Choice]:
    """One for each cell where other tactics were timed than the chosen one."""
    cells: dict[Cell, list[Row]] = {}
    for row in rows:
        cells.setdefault(cell_of(row), []).append(row)
    found = []
    for cell, beside in cells.items():
        chosen = next((row for row in beside if row["selected"]), None)
        if chosen is not None and len(beside) > 1:
            best = min(beside, key=lambda row: float(row["qcutlass_us"]))
            excess = chosen["qcutlass_us"] / best["qcutlass_us"] - 1
            found.append(Choice(cell, chosen["tactic"], best["tactic"], excess))
    return found


def mean_loss(found: Sequence[Choice]) -> float | None:
    """By what share chosen tactics are slower than the best ones in the mean; None of no cell."""
    return sum(one.excess for one in found) / len(found) if found else None


def choice_summary(found: Sequence[Choice]) -> list[str]:
    """In words: how often the chosen tactic is close to the best one, where it is not, what it loses in the mean."""
    loss = mean_loss(found)
    if loss is None:
        return []

    def line(choice: Choice) -> str:
        scheme, shape, m = choice.cell
        return f"{scheme} {shape} M={m}: +{choice.excess:.1%}, chosen {choice.chosen}, best {choice.best}"

    far = sorted((choice for choice in found if choice.excess > CLOSE), key=lambda choice: -choice.excess)
    worst = max(found, key=lambda choice: choice.excess)
    count = f"{len(found) - len(far)} of {len(found)}"
    head = (
        f"The chosen tactic is within {CLOSE:.0%} of the best measured one in {count} cells; in the mean it takes "
        f"{loss:.1%} longer."
    )
    return [head, *(f"Farther: {line(choice)}" for choice in far)] if far else [head, f"Worst: {line(worst)}"]


def _by_m(rows: Sequence[Row], scheme: str, heading: str, text: dict[Cell, str]) -> str:
    """A table of a scheme with M down and shapes across."""
    here = [row for row in rows if row["scheme"] == scheme and cell_of(row) in text]
    shapes, ms = list(dict.fromkeys(row["shape"] for row in here)), sorted({row["m"] for row in here})
    body = [[str(m), *(text.get((scheme, shape, m), "") for shape in shapes)] for m in ms]
    table = markdown_table(["M", *shapes], body, [True, *(False for _ in shapes)])
    return f"{heading}\n\n{table}"


def _tables(rows: Sequence[Row]) -> list[str]:
    """Extracts for each scheme: times beside the best peer, and how good the choices were."""
    times: dict[Cell, str] = {}
    for row in rows:
        if row["selected"]:
            parts = [f"**{row['qcutlass_us']:.1f}**"]
            if row.get("best_peer"):
                parts.append(f"{row['best_peer_us']:.1f} {row['best_peer']} ({row['ratio']:.2f}x)")
            if row.get("limit_share"):
                parts.append(f"{row['limit_share']:.0%}")
            times[cell_of(row)] = " / ".join(parts)
    excess = {choice.cell: f"+{choice.excess:.1%}" for choice in choices(rows)}
    tables = []
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        heading = f"{scheme}: microseconds of qcutlass / of the best peer (as a multiple) / share of the limit"
        tables.append(_by_m(rows, scheme, heading, times))
        if any(cell[0] == scheme for cell in excess):
            heading = f"{scheme}: the chosen tactic's time above the best measured one's"
            tables.append(_by_m(rows, scheme, heading, excess))
    return tables


def report(facts: Row, rows: list[Row]) -> Report:
    """The report of these rows, with its summary."""
    return Report(TITLE, facts, COLUMNS, rows, choice_summary(choices(rows)), _tables(rows))


def _joined(a: object, b: object) -> object:
    """Two files' values of a fact."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a | {key: _joined(a[key], value) if key in a else value for key, value in b.items()}
    if isinstance(a, list) and isinstance(b, list):
        return list(dict.fromkeys([*a, *b]))
    known = str(a).split(" | ")
    new = [value for value in str(b).split(" | ") if value not in known]  # either may be of several runs already
    return " | ".join([*known, *new]) if new else a


def joined(facts: Row, more: Row) -> Row:
    """The facts of two runs as those of one: where they differ, it has both values."""
    return {key: _joined(facts.get(key, value), value) for key, value in (facts | more).items()}


def read(path: Path) -> Row:
    """What `python -m bench gpu --json` wrote, compressed or not: the facts and the rows.

    Raises:
        ValueError: the file is something else.
    """
    try:
        content = json.loads(gzip.decompress(path.read_bytes()) if is_compressed(path) else path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{path}: expected JSON from `python -m bench gpu --json`: {error}") from error
    if not isinstance(content, dict) or content.get("title") != TITLE or "rows" not in content:
        raise ValueError(f"{path}: expected a file that `python -m bench gpu --json` wrote")
    facts, rows = content.get("facts"), content["rows"]
    if not isinstance(facts, dict) or not isinstance(facts.get("GPU"), str):
        raise ValueError(f"{path}: facts: expected the name of a GPU among them, got {facts!r:.80}")
    for place, row in enumerate(rows if isinstance(rows, list) else [rows]):
        _check_row(row, f"{path}: row {place}")
    return content


def _check_row(row: object, name: str) -> None:
    """Raises ValueError unless the row names a cell and a tactic with its time."""
    if not isinstance(row, dict):
        raise ValueError(f"{name}: expected an object, got {row!r:.80}")
    for key in ("scheme", "shape", "tactic"):
        if not isinstance(row.get(key), str):
            raise ValueError(f"{name}: {key}: expected a text, got {row.get(key)!r:.80}")
    m, time = row.get("m"), row.get("qcutlass_us")
    if not isinstance(m, int) or isinstance(m, bool) or m < 1:
        raise ValueError(f"{name}: m: expected a positive whole number, got {m!r:.80}")
    if not isinstance(time, int | float) or isinstance(time, bool) or not 0 < time < math.inf:
        raise ValueError(f"{name}: qcutlass_us: expected a positive number of microseconds, got {time!r:.80}")


def merge(paths: Sequence[Path]) -> Report:
    """One report from the JSON files of several runs on one GPU.

    A cell comes whole from the last file that has it, since only times of one run can be compared. Cells are ordered by
    scheme and shape as they first appear, then by M.

    Raises:
        ValueError: a file is not a result of the GPU bench, or is about another GPU.
    """
    facts: Row = {}
    cells: dict[Cell, list[Row]] = {}
    for path in paths:
        content = read(path)
        gpu = content["facts"]["GPU"]
        if facts.get("GPU", gpu) != gpu:
            raise ValueError(f"{path} was measured on {gpu}, {paths[0]} on {facts['GPU']}: one report is about one GPU")
        facts = joined(facts, content["facts"])
        fresh: dict[Cell, list[Row]] = {}
        for row in content["rows"]:
            fresh.setdefault(cell_of(row), []).append(row)
        cells |= fresh
    layers = list(dict.fromkeys(cell[:2] for cell in cells))
    order = sorted(cells, key=lambda cell: (layers.index(cell[:2]), cell[2]))
    return report(facts, [row for cell in order for row in cells[cell]])
