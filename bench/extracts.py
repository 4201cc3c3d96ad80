"""Tables of the documentation that are extracts of the pages in bench/results, between comments that say of what.

``<!-- table int4: w4a16_g128.qcutlass / w4a16_g128.cublas; m 1 8 -->`` and ``<!-- /table -->`` hold a table of
microseconds: rows of M, all of the page unless some are named, a column for each shape, in a cell the times of what is
named, as the keys of rows have them without `_us`; the least of a cell is bold.

``<!-- experts moe: humming / grouped_mm -->`` and ``<!-- /experts -->`` hold blocks of mixtures of experts, these peers
beside them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from bench.command_line import console, parsed
from bench.pages import RESULTS
from bench.report import Row, markdown_table

_PLACE: Final = re.compile(
    r"(?P<begin><!-- (?P<kind>table|experts) (?P<page>\w+)(?:: (?P<of>[^>]+?))? -->\n)"
    r"(?:(?!<!-- /?(?:table|experts)\b).)*?(?P<end><!-- /(?P=kind) -->)",
    re.DOTALL,
)
_MARK: Final = re.compile(r"<!-- */?(?:table|experts)\b[^>]*>")


def microseconds(value: float | None) -> str:
    """A time with one digit behind the point, without one from 1000 on; a dash for none.

    Example:
        >>> microseconds(9.96), microseconds(999.94), microseconds(1238.6), microseconds(None)
        ('10.0', '999.9', '1239', '-')
    """
    return "-" if value is None else f"{value:.1f}" if float(f"{value:.1f}") < 1000 else f"{value:.0f}"


def bold(words: Sequence[str]) -> list[str]:
    """The same, those of the least number in bold.

    Example:
        >>> bold(["3.0", "-", "2.5"])
        ['3.0', '-', '**2.5**']
    """
    least = min((float(word) for word in words if word != "-"), default=None)
    return [f"**{word}**" if word != "-" and float(word) == least else word for word in words]


def table(rows: Sequence[Row], of: str) -> str:
    """Times of products; `of`: `SCHEME.KEY / SCHEME.KEY; m M M`.

    Raises:
        ValueError: no row has one of them.
    """
    named, _, wanted = of.partition("; m ")
    columns = [tuple(column.split(".")) for column in named.split(" / ")]
    chosen = [row for row in rows if row.get("selected")]
    for scheme, key in columns:
        if not any(row["scheme"] == scheme and f"{key}_us" in row for row in chosen):
            raise ValueError(f"no row has {key}_us of {scheme}")
    cells = {(row["scheme"], row["shape"], row["m"]): row for row in chosen}
    shapes = list(dict.fromkeys(row["shape"] for row in chosen))
    known = sorted({row["m"] for row in chosen})
    ms = [int(m) for m in wanted.split()] or known
    if missing := sorted({*ms} - {*known}):
        raise ValueError(f"no row has M of {', '.join(map(str, missing))}")
    body = []
    for m in ms:
        times = [[cells.get((scheme, shape, m), {}).get(f"{key}_us") for scheme, key in columns] for shape in shapes]
        body.append([str(m), *(" / ".join(bold(list(map(microseconds, each)))) for each in times)])
    return markdown_table(["M", *shapes], body, [True] * (1 + len(shapes)))


def experts(rows: Sequence[Row], of: str) -> str:
    """Blocks: with routing, the share of it that its bound takes, then both products and their sum, and with those of
    peers (`of`: their keys) in their place. A row for each model and number of tokens, a column for each kind of ids.

    Raises:
        ValueError: no row is of a block, has its bound, or one of the peers.
    """
    peers = of.split(" / ") if of else []
    chosen = [row for row in rows if "whole_us" in row]
    for key in ("limit_us", *(f"{peer}_block_us" for peer in peers)):
        if not any(key in row for row in chosen):
            raise ValueError(f"no row of a block has {key}")

    def cell(row: Row) -> str:
        alone = f"{microseconds(row['whole_us'])} ({row['limit_us'] / row['whole_us']:.0%})"
        beside = " / ".join(bold([microseconds(row.get(f"{key}_block_us")) for key in ("qcutlass", *peers)]))
        return f"{alone}, {beside}" if peers else alone

    skews = list(dict.fromkeys(row["skew"] for row in chosen))
    cells = {(row["shape"], row["m"], row["skew"]): cell(row) for row in chosen}
    places = list(dict.fromkeys((row["shape"], row["m"]) for row in chosen))
    body = [[model, str(m), *(cells.get((model, m, skew), "-") for skew in skews)] for model, m in places]
    return markdown_table(["model", "tokens", *skews], body, [False, True, *(False for _ in skews)])


_KINDS: Final[dict[str, Callable[[Sequence[Row], str], str]]] = {"table": table, "experts": experts}


def filled(text: str, folder: Path) -> str:
    """The text with its extracts as the pages in the folder have them.

    Raises:
        ValueError: there is no such page, or it has no such times.
    """

    def fill(place: re.Match[str]) -> str:
        path = folder / f"{place['page']}.json"
        if not path.exists():
            raise ValueError(f"{place['begin'].strip()}: expected a page {path}")
        try:
            found = _KINDS[place["kind"]](json.loads(path.read_text())["rows"], place["of"] or "")
        except ValueError as error:
            raise ValueError(f"{place['begin'].strip()}: {path}: {error}") from error
        return f"{place['begin']}{found}\n{place['end']}"

    found = _PLACE.sub(fill, text)
    marks = len(_MARK.findall(text))
    if marks != 2 * len(_PLACE.findall(text)):
        raise ValueError(f"{marks} comments like `<!-- table PAGE: ... -->` and `<!-- /table -->`: expected pairs")
    return found


def extracts_command(
    files: Annotated[list[Path] | None, typer.Argument(exists=True, dir_okay=False, help="Default: docs/*.md.")] = None,
    folder: Annotated[Path, typer.Option(file_okay=False, help="Where pages lie.")] = RESULTS,
) -> None:
    """Brings the tables of the documentation up to the pages that they are extracts of."""
    found = files or sorted(Path("docs").glob("*.md"))
    if not found:
        raise typer.BadParameter(f"docs/*.md: expected the documentation's pages in {Path.cwd()}, found none")
    for file in found:
        before = file.read_text()
        after = parsed(lambda before=before: filled(before, folder))  # type: ignore[misc]
        if after != before:
            file.write_text(after)
            console.print(f"{file}: brought up to date", highlight=False)
