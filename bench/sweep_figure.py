"""Heat maps of a sweep: the best peer's time over that of qcutlass, layers by rows of activations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench import schemes
from bench.plots import style
from bench.report import Row

_MOST: Final = 2.0  # ratios beyond it, or below its inverse, have the colours at the ends


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draws a heat map of each scheme as PNG; returns the files, `<scheme>_sweep.png`.

    Args:
        rows: of the sweep; only those of selected tactics beside which a peer was timed count.
        folder: made if it is not there.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (`pip install "qcutlass[bench]"`).
    """
    compared = [row for row in rows if row["selected"] and row.get("ratio")]
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with style():
        for scheme in dict.fromkeys(row["scheme"] for row in compared):
            files.append(_draw([row for row in compared if row["scheme"] == scheme], folder / f"{scheme}_sweep.png"))
    return files


def _weights(shape: str) -> int:
    n, _, k = shape.partition("x")
    return int(n) * int(k)


def _draw(rows: Sequence[Row], path: Path) -> Path:
    """One scheme: a line of the map for each layer, the smallest at the top, a column for each M."""
    from matplotlib import pyplot
    from matplotlib.colors import Normalize

    ms = sorted({row["m"] for row in rows})
    layers = sorted({row["shape"] for row in rows}, key=lambda shape: (_weights(shape), shape))
    grid = [[math.nan] * len(ms) for _ in layers]
    for row in rows:
        grid[layers.index(row["shape"])][ms.index(row["m"])] = math.log2(row["ratio"])
    limit = math.log2(_MOST)
    figure, axes = pyplot.subplots(figsize=(7.5, 1.6 + 0.13 * len(layers)), layout="constrained")
    image = axes.imshow(grid, aspect="auto", cmap="RdBu", norm=Normalize(-limit, limit), interpolation="nearest")
    axes.set_xticks(range(len(ms)), [str(m) for m in ms], rotation=60)
    axes.set_yticks(range(len(layers)), layers, fontsize=5)
    axes.grid(visible=False)
    axes.set_xlabel("rows of activations, M")
    axes.set_ylabel("N x K, fewest weights first")
    bar = figure.colorbar(image, ax=axes, ticks=[-limit, -limit / 2, 0, limit / 2, limit], shrink=0.6)
    bar.ax.set_yticklabels([f"{2**value:.2f}" for value in (-limit, -limit / 2, 0, limit / 2, limit)])
    bar.set_label("time of the best peer / qcutlass: blue is faster")
    figure.suptitle(schemes.parse(rows[0]["scheme"]).words, fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
