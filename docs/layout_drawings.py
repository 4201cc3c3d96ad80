"""Drawings of the packed layout, made from the map of `layout.h` itself (`qcutlass._C.position`).

`python docs/layout_drawings.py` writes those of `docs/layout`; a test compares them with the map.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from qcutlass import _C

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TILE_BYTES: Final = 512
LANE_BYTES: Final = 16
TILE_N: Final = 16
PACKINGS: Final = {_C.Packing.W4A16: 4, _C.Packing.W8A16: 8, _C.Packing.W8A8: 8}
"""Every packing and the bits of its codes. Those for 16-bit activations have an order of lanes, W8A8 one of rows."""

LANE: Final = 5  # the one whose bytes are drawn: g = 1, t = 1
MASKS: Final = ((0, 0x000F000F), (0, 0x00F000F0), (8, 0x000F000F), (8, 0x00F000F0))  # shift, mask: see dequantize.h

_WORDS: Final = ("#9AD2F2", "#F2C463", "#A5DCC6", "#E9C4D9")  # Okabe and Ito's palette, light enough to write on
_INK: Final = "#222222"
_STYLE: Final[dict[Any, Any]] = {
    "font.size": 8.0,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "qcutlass",  # the same drawing is the same file
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
}


def lane_of(packing: _C.Packing, row: int, k: int) -> int:
    """The lane of a warp that loads the code of (row, k) of a tile."""
    return _C.position(packing, _C.tile_k(packing), row, k)[0] // LANE_BYTES


def stored(packing: _C.Packing, lane: int) -> list[tuple[int, int]]:
    """(row, k) of the codes in a lane's 16 bytes of a tile, the `lane`-th ones, in the order of their bits."""
    width = _C.tile_k(packing)
    places = {_C.position(packing, width, row, k): (row, k) for row in range(TILE_N) for k in range(width)}
    return [places[place] for place in sorted(places) if place[0] // LANE_BYTES == lane]


def masked(packing: _C.Packing, lane: int, shift: int, mask: int) -> list[tuple[int, int]]:
    """(row, k) of the codes that `word >> shift & mask` keeps of a lane's first word, from low to high."""
    bits = PACKINGS[packing]
    first = stored(packing, lane)[: 32 // bits]
    kept = [bit for bit in range(0, 32 - shift, bits) if mask >> bit & (2**bits - 1)]
    return [first[(bit + shift) // bits] for bit in kept]


def write(folder: Path, packings: Iterable[_C.Packing] = tuple(PACKINGS)) -> list[Path]:
    """Draws the order of tiles, a tile and (where there are) a lane of each packing, and the masks, as SVG.

    Returns the files.
    """
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with matplotlib.rc_context(_STYLE):
        drawings = {"tiles": draw_tiles(_C.Packing.W4A16, 40, 150), "masks": draw_masks(LANE)}
        for packing in packings:
            if packing == _C.Packing.W8A8:
                drawings["tile_w8a8"] = draw_rows(packing)
                continue
            drawings[f"tile_{packing.name.lower()}"] = draw_tile(packing)
            drawings[f"lane_{packing.name.lower()}"] = draw_lane(packing, LANE)
        for name, figure in drawings.items():
            files.append(folder / f"{name}.svg")
            figure.savefig(files[-1], metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
            files[-1].write_text(compact(files[-1].read_text()))
    return files


def compact(svg: str) -> str:
    """The same drawing in a third of the bytes: an element a line, tenths of points, nothing that has no effect."""
    svg = re.sub(r"\s*\n\s*|\s{2,}", " ", svg)
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg)
    svg = re.sub(r'<g id="(?:patch|text)_\d+"> *((?:<(?:path|text)[^>]*>[^<]*(?:</text>)?)) *</g>', r"\1", svg)
    svg = re.sub(r' (?:clip-path="[^"]*"|transform="rotate\(-0 [^"]*")', "", svg)
    svg = re.sub(r"(\d+\.\d)\d+", r"\1", svg)
    return re.sub("> +<", ">\n<", svg.replace("; stroke-linejoin: miter", "").replace(' z "', ' z"')).strip() + "\n"


def draw_tiles(packing: _C.Packing, n: int, k: int) -> Figure:
    """The tiles of an [n, k] matrix with their places in the packed tensor; what is padding is hatched."""
    width = _C.tile_k(packing)
    rows, columns = -(-n // TILE_N) * TILE_N, -(-k // width) * width
    figure, axes = _axes(columns, rows, 7.0, 2.6)
    _box(axes, 0, 0, columns, rows, "white", hatch="////", edgecolor="#bbbbbb")
    _box(axes, 0, 0, k, n, "#dceefb", linewidth=0)
    for row in range(0, n, TILE_N):
        for column in range(0, k, width):
            byte, _ = _C.position(packing, k, row, column)
            _box(axes, column, row, width, TILE_N, "none")
            text = f"tile {byte // TILE_BYTES}\nfrom byte {byte}"
            _label(axes, column + width / 2, row + TILE_N / 2, text, backgroundcolor="white")
    _ticks(axes, [*range(0, k, width), k, columns], [*range(0, n, TILE_N), n, rows])
    axes.set(xlabel="column k", ylabel="channel n")
    return figure


def draw_tile(packing: _C.Packing) -> Figure:
    """The lane of every code of a tile; colours are the words of its 16 bytes, and the codes of LANE are framed."""
    width = _C.tile_k(packing)
    figure, axes = _axes(width, TILE_N, 8.6, 3.1 if width == 64 else 4.4)
    for row in range(TILE_N):
        for k in range(width):
            byte, _ = _C.position(packing, width, row, k)
            _box(axes, k, row, 1, 1, _WORDS[byte % LANE_BYTES // 4])
            lane = lane_of(packing, row, k)
            if lane == LANE:
                _box(axes, k, row, 1, 1, "none", linewidth=1.4, zorder=2)
            _label(axes, k + 0.5, row + 0.5, str(lane), fontsize=5.5)
    _ticks(axes, range(0, width + 1, 8), range(0, TILE_N + 1, 8))
    axes.set(xlabel="column k", ylabel="channel n")
    handles = [axes.scatter([], [], marker="s", color=color, label=f"word {i}") for i, color in enumerate(_WORDS)]
    axes.legend(handles=handles, ncol=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return figure


def draw_rows(packing: _C.Packing) -> Figure:
    """The bytes of a tile, a channel's in a row, with the column of the code in each; colours are halves of columns."""
    width = _C.tile_k(packing)
    figure, axes = _axes(width, TILE_N, 8.6, 4.4)
    codes = [code for lane in range(TILE_BYTES // LANE_BYTES) for code in stored(packing, lane)]
    for byte, (_, k) in enumerate(codes):
        y, x = divmod(byte, width)
        _box(axes, x, y, 1, 1, _WORDS[k // LANE_BYTES])
        _label(axes, x + 0.5, y + 0.5, str(k), fontsize=5.5)
    _ticks(axes, range(0, width + 1, 8), range(0, TILE_N + 1, 4))
    axes.set(xlabel="byte of the row", ylabel="channel n")
    names = [f"columns {k} to {k + LANE_BYTES - 1}" for k in range(0, width, LANE_BYTES)]
    handles = [
        axes.scatter([], [], marker="s", color=color, label=name) for name, color in zip(names, _WORDS, strict=False)
    ]
    axes.legend(handles=handles, ncol=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return figure


def draw_lane(packing: _C.Packing, lane: int) -> Figure:
    """A lane's 16 bytes, a word a row, its codes from high bits to low ones."""
    codes, bits = stored(packing, lane), PACKINGS[packing]
    per_word = 32 // bits
    figure, axes = _axes(per_word, 4, 7.0, 2.3)
    for i, (row, k) in enumerate(codes):
        word, place = divmod(i, per_word)
        x = per_word - 1 - place
        _box(axes, x, word, 1, 1, _WORDS[word])
        _label(axes, x + 0.5, word + 0.5, f"({row}, {k})")
    axes.set_xticks([x + 0.5 for x in range(per_word)], [_bits(per_word - 1 - x, bits) for x in range(per_word)])
    axes.set_yticks([word + 0.5 for word in range(4)], [f"word {word}" for word in range(4)])
    axes.set_xlabel("bits")
    axes.set_title(f"lane {lane}: (row, k) of its codes", fontsize=9)
    return figure


def draw_masks(lane: int) -> Figure:
    """The codes that two masks keep of a 4-bit word, and of the word shifted by a byte: the pairs of four registers."""
    codes = stored(_C.Packing.W4A16, lane)[:8]
    figure, axes = _axes(8, len(MASKS), 7.0, 2.3)
    for y, (shift, mask) in enumerate(MASKS):
        kept = masked(_C.Packing.W4A16, lane, shift, mask)
        for i, (row, k) in enumerate(codes):
            inside = (row, k) in kept
            _box(axes, 7 - i, y, 1, 1, _WORDS[y] if inside else "white")
            color = _INK if inside else "#aaaaaa"
            _label(axes, 7.5 - i, y + 0.5, f"({row}, {k})", color=color)
    axes.set_xticks([x + 0.5 for x in range(8)], [_bits(7 - x, 4) for x in range(8)])
    names = [f"{'word' if shift == 0 else f'(word >> {shift})'} & {mask:#010x}" for shift, mask in MASKS]
    axes.set_yticks([y + 0.5 for y in range(len(MASKS))], names, family="monospace")
    axes.set_xlabel("bits of the word")
    return figure


def _bits(place: int, bits: int) -> str:
    return f"{bits * place + bits - 1}..{bits * place}"


def _axes(width: float, height: float, inches: float, high: float) -> tuple[Figure, Axes]:
    """An empty figure whose rows count downwards."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(inches, high), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure, axes


def _box(axes: Axes, x: float, y: float, width: float, height: float, color: str, **style: Any) -> None:
    from matplotlib.patches import Rectangle

    axes.add_artist(Rectangle((x, y), width, height, facecolor=color, **{"edgecolor": _INK, "linewidth": 0.4, **style}))


def _label(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    axes.text(x, y, text, ha="center", va="center", **style).set_in_layout(False)  # inside the axes: nothing to measure


def _ticks(axes: Axes, x: Sequence[int], y: Sequence[int]) -> None:
    axes.set_xticks(x, list(map(str, x)))
    axes.set_yticks(y, list(map(str, y)))


if __name__ == "__main__":
    write(Path(__file__).resolve().parent / "layout")
