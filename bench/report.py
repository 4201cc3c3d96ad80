"""Rows of results: printed with rich, written as JSON or as Markdown."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Row: TypeAlias = dict[str, Any]

_NAMED: Final = 8  # elements of a list that are told among facts, which are read at a glance; JSON has all


@dataclass(frozen=True)
class Column:
    """A column of the printed table: a key of the rows, its heading, and how to print its values."""

    key: str
    heading: str
    form: str = "{}"

    def cell(self, row: Row) -> str:
        value = row.get(self.key)
        if isinstance(value, bool):
            return "PASS" if value else "FAIL"
        return "" if value is None else self.form.format(value)


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """A table in Markdown; `right` says which columns are aligned so."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "|".join("---:" if r else "---" for r in right) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _text(value: object) -> str:
    """A fact in words: lists and dictionaries too."""
    if isinstance(value, dict):
        return ", ".join(f"{key} ({_text(inner)})" for key, inner in value.items())
    if isinstance(value, list):
        rest = [f"and {len(value) - _NAMED} more"] if len(value) > _NAMED else []
        return "; ".join([*map(_text, value[:_NAMED]), *rest])
    return str(value)


def is_compressed(path: Path) -> bool:
    return path.suffix == ".gz"


@dataclass(frozen=True)
class Report:
    """Rows under common facts (device, versions, method).

    Attributes:
        summary: what the rows come to, lines of plain text.
        tables: extracts of the rows in Markdown.
        lists_rows: whether the table of all rows is printed and written, too; JSON has them anyway.
    """

    title: str
    facts: Row
    columns: Sequence[Column]
    rows: list[Row]
    summary: Sequence[str] = ()
    tables: Sequence[str] = ()
    lists_rows: bool = True

    def used_columns(self) -> list[Column]:
        return [column for column in self.columns if any(row.get(column.key) is not None for row in self.rows)]

    def print(self, console: Console) -> None:
        """Prints the table, failures in red, and the summary; without the table, the extracts."""
        if not self.lists_rows:
            console.print("\n\n".join([*self.summary, *self.tables]), highlight=False, markup=False)
            return
        table = Table(title=self.title, caption=escape("\n".join(self._facts())), caption_justify="left")
        columns = self.used_columns()
        for column in columns:
            table.add_column(column.heading, justify="right" if ":" in column.form else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*(column.cell(row).replace("FAIL", "[red]FAIL[/red]") for column in columns))
        console.print(table)
        for line in self.summary:
            console.print(line, highlight=False, markup=False)

    def _facts(self) -> list[str]:
        return [f"{key}: {_text(value)}" for key, value in self.facts.items() if value not in ({}, [])]

    def markdown(self) -> str:
        """Facts, summary, extracts, and all rows."""
        facts = "\n".join(f"- {fact}" for fact in self._facts())
        parts = [f"### {self.title}", facts, *self.summary, *self.tables]
        if not self.lists_rows:
            return "\n\n".join(parts) + "\n"
        columns = self.used_columns()
        rows = [[column.cell(row) for column in columns] for row in self.rows]
        everything = markdown_table([c.heading for c in columns], rows, [":" in c.form for c in columns])
        return "\n\n".join([*parts, everything]) + "\n"

    def write(self, json_path: Path | None, markdown_path: Path | None) -> None:
        """Writes the files asked for, compressed where a name ends with .gz; makes their folders."""
        for path in filter(None, (json_path, markdown_path)):
            path.parent.mkdir(parents=True, exist_ok=True)
        if json_path is not None:
            content = {"title": self.title, "facts": self.facts, "rows": self.rows}
            text = json.dumps(content, indent=1) + "\n"
            json_path.write_bytes(gzip.compress(text.encode(), mtime=0) if is_compressed(json_path) else text.encode())
        if markdown_path is not None:
            markdown_path.write_text(self.markdown())
