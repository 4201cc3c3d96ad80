"""The fenced blocks of README.md and of the pages of `docs`, and the mark on the line before each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Snippet:
    """A fenced block of a page.

    Attributes:
        language: the word behind the fence.
        mark: the comment on the line before it, empty if there is none: the name of the CI step that runs it,
            `run by FILE` (a test), or `not run: REASON`.
        output: the text block that follows at once, what the snippet prints.
    """

    page: str
    language: str
    mark: str
    text: str
    output: str


def pages(repository: Path) -> list[Path]:
    """README.md and the pages of `docs`, without those generated from the tree."""
    return [repository / "README.md", *sorted((repository / "docs").glob("*.md"))]


def snippets(page: Path) -> list[Snippet]:
    """The blocks of a page, in their order."""
    block = r"(?:^<!-- (.*) -->\n)?^```([\w{}-]*)[^\n]*\n((?s:.*?))^```\n"
    found = re.findall(
        block + r"(?=(?:(?:<!-- /.* -->)?\n*^```text\n((?s:.*?))^```\n)?)", page.read_text(), re.MULTILINE
    )
    return [Snippet(page.name, language, mark, text, output) for mark, language, text, output in found]


def snippet(page: Path, mark: str) -> Snippet:
    """The one block of a page with this mark."""
    (found,) = (snippet for snippet in snippets(page) if snippet.mark == mark)
    return found


def run_by(page: Path, test: str) -> Snippet:
    """The one block of a page that the test file `test`, a path below the repository, is said to run."""
    return snippet(page, f"run by {test}")
