"""Rows of results: printed with rich, written as JSON or as a Markdown table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table

Row: TypeAlias = dict[str, Any]


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


@dataclass(frozen=True)
class Report:
    """Rows under common facts (device, versions, method)."""

    title: str
    facts: Row
    columns: Sequence[Column]
    rows: list[Row]

    def used_columns(self) -> list[Column]:
        return [column for column in self.columns if any(row.get(column.key) is not None for row in self.rows)]

    def print(self, console: Console) -> None:
        """Prints the table; failures in red."""
        table = Table(title=self.title, caption=self.caption(), caption_justify="left")
        columns = self.used_columns()
        for column in columns:
            table.add_column(column.heading, justify="right" if ":" in column.form else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*(column.cell(row).replace("FAIL", "[red]FAIL[/red]") for column in columns))
        console.print(table)

    def caption(self) -> str:
        return "; ".join(f"{key}: {value}" for key, value in self.facts.items())

    def markdown(self) -> str:
        columns = self.used_columns()
        lines = [f"### {self.title}", "", self.caption(), ""]
        lines.append("| " + " | ".join(column.heading for column in columns) + " |")
        lines.append("|" + "|".join("---:" if ":" in column.form else "---" for column in columns) + "|")
        lines += ["| " + " | ".join(column.cell(row) for column in columns) + " |" for row in self.rows]
        return "\n".join(lines) + "\n"

    def write(self, json_path: Path | None, markdown_path: Path | None) -> None:
        """Writes the files asked for."""
        if json_path is not None:
            content = {"title": self.title, "facts": self.facts, "rows": self.rows}
            json_path.write_text(json.dumps(content, indent=1) + "\n")
        if markdown_path is not None:
            markdown_path.write_text(self.markdown())
