"""Figures of a report: times, times over cuBLAS's and share of the limit against M for each shape, and a roofline."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench import limits, schemes
from bench.gpu_report import LABELS, YARDSTICKS
from bench.report import Report, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI: Final = 110
# Okabe and Ito's palette, which the colour-blind can tell apart; markers say the same once more.
# The eighth and those after it are of Tol's muted palette, for figures with more lines.
_COLORS: Final = (
    "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255", "#999933",
    "#332288", "#117733", "#44AA99", "#AA4499", "#CC6677", "#661100",
)  # fmt: skip
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "<", "*", ">", "p", "h", "d", "H", "8")
_OURS: Final = "qcutlass"
_STYLE: Final[dict[Any, Any]] = {
    "font.size": 9.0,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.0,
}


def style() -> AbstractContextManager[None]:
    """The look of all figures while it is entered; no display is needed."""
    import matplotlib

    matplotlib.use("Agg")
    return matplotlib.rc_context(_STYLE)


def draw(report: Report, folder: Path) -> list[Path]:
    """Draws every scheme and shape of the report, and a roofline for each scheme, as PNG.

    Args:
        report: of the GPU bench (`bench.gpu_report.merge`).
        folder: where the files go; made if it is not there.

    Returns:
        The files: `<scheme>_<N>x<K>.png` and `<scheme>_roofline.png`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (`pip install "qcutlass[bench]"`).
        ValueError: the report has no row of a selected tactic.
    """
    rows = [row for row in report.rows if row["selected"]]
    if not rows:
        raise ValueError("there is nothing to draw: no row of a selected tactic")
    gpu, files = str(report.facts["GPU"]), []
    folder.mkdir(parents=True, exist_ok=True)
    with style():
        for scheme in dict.fromkeys(row["scheme"] for row in rows):
            layers = [row for row in rows if row["scheme"] == scheme]
            contestants = _contestants(layers)
            for shape in dict.fromkeys(row["shape"] for row in layers):
                here = sorted((row for row in layers if row["shape"] == shape), key=lambda row: int(row["m"]))
                title = f"{schemes.parse(scheme).words}, {schemes.shape_words(shape)}; {gpu}"
                figure = _shape_figure(here, contestants, title)
                files.append(_save(figure, folder / f"{scheme}_{shape}.png"))
            files.append(_save(_roofline(layers, scheme, gpu), folder / f"{scheme}_roofline.png"))
    return files


_NARROW: Final = 6.5  # bits that 4-bit weights stay below, and 8-bit weights above
_METHODS: Final = {"imported": "imported (the 4-bit groups of the source file, untouched)"}


def draw_quality(rows: Sequence[Row], path: Path) -> None:
    """Draws the loss of perplexity against bits a weight, a line for each method; `rows` of `bench.quality.compared`.

    4-bit and 8-bit weights have a panel each: nothing lies between them, and their losses differ a hundredfold.
    """
    with style():
        exact = next(row["perplexity"] for row in rows if row["method"] == "float")
        quantized = [row for row in rows if row["method"] != "float"]
        methods = list(dict.fromkeys(row["method"] for row in quantized))
        widths = ("4-bit weights", quantized), ("8-bit weights", quantized)
        panels = [
            (title, [row for row in rows if (row["bits_per_weight"] < _NARROW) == (i == 0)])
            for i, (title, rows) in enumerate(widths)
        ]
        panels = [(title, here) for title, here in panels if here]
        figure, all_axes = _figure(9, 4.9, max(1, len(panels)))
        for axes, (title, here) in zip(all_axes, panels, strict=False):
            for index, method in enumerate(methods):
                _draw_method(axes, [row for row in here if row["method"] == method], index, exact)
            axes.axhline(0, color="#888888", linestyle="--", linewidth=1)
            axes.margins(0.12)
            axes.set_title(title, fontsize=9)
            axes.set_xlabel("bits a weight, scales and zero points included")
        all_axes[0].set_ylabel("perplexity over float's, %; lower is better")
        handles = [_handle(method, index) for index, method in enumerate(methods)]
        figure.legend(
            handles=handles, loc="outside lower center", ncols=3, fontsize=8,
            title="full: asymmetric, hollow: symmetric; dashed: float", title_fontsize=8,
        )  # fmt: skip
        figure.suptitle("SmolLM2-135M-Instruct, quantised: loss of perplexity on held-out text", fontsize=10)
        path.parent.mkdir(parents=True, exist_ok=True)
        _save(figure, path)


def draw_serving(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draws tokens a second and the time of a step against the batch, a line for each contestant; `rows` of
    `bench.serving`. Tokens a second are over the first contestant's, whose own they are beside its points."""
    with style():
        names = list(dict.fromkeys(row["contestant"] for row in rows))
        batches = sorted({row["batch"] for row in rows})
        figure, (speeds, steps) = _figure(9, 3.6, 2)
        base = {row["batch"]: row["tokens_per_s"] for row in rows if row["contestant"] == names[0]}
        most = 1.0
        for index, name in enumerate(names):
            here = sorted((row for row in rows if row["contestant"] == name), key=lambda row: int(row["batch"]))
            x = [batches.index(row["batch"]) for row in here]
            relative = [row["tokens_per_s"] / base[row["batch"]] for row in here]
            speeds.plot(x, relative, label=name, **_style(index))
            most = max(most, *relative)
            steps.plot(x, [row["decode_ms"] for row in here], label=name, **_style(index))
        for place, batch in enumerate(batches):
            speeds.annotate(
                f"{base[batch]:.0f}", (place, 1), textcoords="offset points", xytext=(0, 6), ha="center", fontsize=8
            )
        speeds.set_ylim(0, 1.15 * most)
        speeds.set_ylabel(f"tokens/s over {names[0]}'s; higher is better")
        steps.set_ylim(bottom=0)
        steps.set_ylabel("ms a step; lower is better")
        for axes in (speeds, steps):
            axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
            axes.set_xlabel("sequences at once")
        steps.legend(fontsize=8)
        figure.suptitle(title, fontsize=10)
        path.parent.mkdir(parents=True, exist_ok=True)
        _save(figure, path)


def _draw_method(axes: Axes, rows: Sequence[Row], index: int, exact: float) -> None:
    lines: dict[bool, list[tuple[float, float]]] = {}
    for row in rows:
        point = row["bits_per_weight"], 100 * (row["perplexity"] / exact - 1)
        lines.setdefault(" sym" in row["weights"], []).append(point)
    for symmetric, points in lines.items():
        face: dict[str, Any] = {"markerfacecolor": "none"} if symmetric else {}
        axes.plot(*zip(*sorted(points), strict=True), **_style(index), **face)


def _style(index: int) -> dict[str, Any]:
    turn, place = divmod(index, len(_COLORS))
    return {"color": _COLORS[place], "marker": _MARKERS[(place + turn) % len(_MARKERS)]}


def _handle(method: str, index: int) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=_METHODS.get(method, method), **_style(index))


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=_DPI)
    return path


def _figure(width: float, height: float, columns: int) -> tuple[Figure, list[Axes]]:
    """A figure of its own, which no global state keeps alive."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, [figure.add_subplot(1, columns, column + 1) for column in range(columns)]


def _contestants(rows: Sequence[Row]) -> dict[str, str]:
    """Keys and labels of us and of the peers that these rows have: those of one scheme, so that colours last."""
    return {_OURS: _OURS} | {key: label for key, label in LABELS.items() if _series(rows, key)}


def _series(rows: Sequence[Row], key: str, in_situ: bool = False) -> list[tuple[int, float]]:
    """(M, microseconds) of a contestant, where it was measured: back to back, or behind an ordinary kernel."""
    name = f"{key}_in_situ_us".removeprefix(f"{_OURS}_") if in_situ else f"{key}_us"
    return [(row["m"], row[name]) for row in rows if row.get(name) is not None]


def _powers(axes: Axes, ms: Sequence[int]) -> None:
    """M in powers of two, with the numbers of those that leave each other room; M + 1 beside M is called so."""
    room = 1.45  # by which numbers differ that do not touch at this size
    numbered = [m for m in ms if m & (m - 1) == 0]
    for m in ms:
        if all(max(m / other, other / m) >= room for other in numbered):
            numbered.append(m)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ms, [str(m) if m in numbered else "" for m in ms], rotation=45)
    axes.minorticks_off()
    axes.set_xlabel("M (rows of activations)")
    for m in ms:
        if m > room / (room - 1) and m - 1 in ms:  # smaller ones have room
            axes.annotate("one row more", (m, 0.02), xycoords=("data", "axes fraction"), fontsize=6.5, color="#666666",
                          rotation=90, ha="left", va="bottom")  # fmt: skip


def _logarithmic(axes: Axes) -> None:
    """A logarithmic y axis with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _shape_figure(rows: Sequence[Row], contestants: dict[str, str], title: str) -> Figure:
    """Microseconds, the yardstick's time over one's own, and share of the limit, of everybody against M.

    Dashed: the same in situ, where it was measured; the yardstick's time is then that in situ, too.
    """
    limit = {row["m"]: row["limit_us"] for row in rows if row.get("limit_us")}
    yardstick = next((key for key in contestants if key != _OURS and _series(rows, key)), None)
    panels = ["times", *(["ratios"] if yardstick else []), *(["shares"] if limit else [])]
    figure, all_axes = _figure(10.8 if len(panels) > 2 else 9, 4.2, len(panels))
    axes_of = dict(zip(panels, all_axes, strict=True))
    times = axes_of["times"]
    ms = [row["m"] for row in rows]
    for in_situ in (False, True):
        base = dict(_series(rows, yardstick, in_situ)) if yardstick is not None else {}
        for index, (key, label) in enumerate(contestants.items()):
            points = _series(rows, key, in_situ)
            width = 2.2 if key == _OURS else 1.3
            style: dict[str, Any] = _style(index) | {"linewidth": width, "zorder": 5 if key == _OURS else 2}
            style |= {"linestyle": "--", "linewidth": width / 2, "markersize": 2} if in_situ else {"label": label}
            for panel, values in (
                ("times", points),
                ("ratios", [(m, base[m] / us) for m, us in points if m in base]),
                ("shares", [(m, 100 * limit[m] / us) for m, us in points if m in limit]),
            ):
                if values:
                    axes_of[panel].plot(*zip(*values, strict=True), **style)
    dots: dict[str, Any] = {"color": "#888888", "linestyle": ":", "linewidth": 1.5}
    if any(_series(rows, key, in_situ=True) for key in contestants):
        times.plot([], [], "--", color="#444444", linewidth=1, label="dashed: in situ, behind an ordinary kernel")
    if limit:
        times.plot(list(limit), list(limit.values()), label="limit: measured bandwidth, data sheet's peak", **dots)
        axes_of["shares"].axhline(100, **dots)
        axes_of["shares"].set_title("share of the limit, % (higher is better)", fontsize=9)
    if yardstick is not None:
        name = YARDSTICKS.get(yardstick, contestants[yardstick])
        axes_of["ratios"].set_title(f"times as fast as {name} (higher is better)", fontsize=9)
    times.set_title("microseconds a call (lower is better)", fontsize=9)
    _logarithmic(times)
    for panel, axes in axes_of.items():
        if panel != "times":
            axes.set_ylim(bottom=0)
        _powers(axes, ms)
    figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def _roofline(rows: Sequence[Row], scheme: str, gpu: str) -> Figure:
    """Rate against arithmetic intensity: ours with full markers, the best peer's with hollow ones, a colour a shape."""
    figure, (axes,) = _figure(6.5, 4.4, 1)
    operands, intensities = schemes.parse(scheme).operands, []
    unit = "TOP/s" if operands == "int8" else "TFLOP/s"
    for index, shape in enumerate(dict.fromkeys(row["shape"] for row in rows)):
        n, k = map(int, shape.split("x"))
        here = sorted((row for row in rows if row["shape"] == shape), key=lambda row: int(row["m"]))
        color, marker = _COLORS[index % len(_COLORS)], _MARKERS[index % len(_MARKERS)]
        flop = [2 * row["m"] * n * k for row in here]
        x = [work / row["moved_bytes"] for work, row in zip(flop, here, strict=True)]
        y = [1e-6 * work / row["qcutlass_us"] for work, row in zip(flop, here, strict=True)]
        axes.plot(x, y, color=color, marker=marker, label=shape)
        theirs = [
            (intensity, 1e-6 * work / row["best_peer_us"])
            for intensity, work, row in zip(x, flop, here, strict=True)
            if row.get("best_peer_us")
        ]
        if theirs:
            axes.plot(*zip(*theirs, strict=True), color=color, marker=marker, linestyle="none", markerfacecolor="none")
        intensities += x
    machine = limits.machine(gpu)
    if machine is not None:
        rates = machine.rates[operands]
        # Where other instructions do more it is no roof: on sm_90 an mma.sync on fp8 runs as one on fp16.
        mma = "mma.sync" if rates.dense is None or rates.mma >= rates.dense else "mma.sync; wgmma does more"
        for rate, name, line in (
            (rates.peak, "data sheet", "-"),
            (rates.mma, mma, "--"),
            (rates.dense, "cuBLAS at best", ":"),
        ):
            if rate is None:
                continue
            ridge = rate / machine.bandwidth
            ends = sorted({min(intensities) / 1.3, ridge, max(*intensities, ridge) * 1.3})
            roof = [1e-12 * min(rate, machine.bandwidth * intensity) for intensity in ends]
            label = f"{1e-12 * machine.bandwidth:.2f} TB/s, {1e-12 * rate:.0f} {unit} ({name})"
            axes.plot(ends, roof, color="#777777", linestyle=line, linewidth=1.2, label=label)
    axes.set_xscale("log")
    _logarithmic(axes)
    axes.set_xlabel("arithmetic intensity, operations per byte moved")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylabel(unit)
    axes.legend(fontsize=8, title="qcutlass; hollow: best peer", title_fontsize=8)
    figure.suptitle(f"{schemes.parse(scheme).words}; {gpu}", fontsize=10)
    return figure
