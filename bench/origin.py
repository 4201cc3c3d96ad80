"""What every run says of itself: the day, torch's version, the commit of the tree that it ran from, and its command."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Final

import torch

from bench.report import Row

ENVIRONMENT_VARIABLE: Final = "QCUTLASS_COMMIT"
"""Names the commit of a tree that is no checkout: a copy on another machine, say."""

_TREE: Final = Path(__file__).resolve().parents[1]
_NOT_WHAT: Final = {
    **dict.fromkeys(("--json", "--markdown", "--plot", "--plots", "--seconds", "--compilers"), 1),
    "--part": 2,
}
"""Options with their numbers of values that say where rows go, or how a run is cut, not what is measured."""

_WRITTEN: Final = (":(exclude)bench/results", ":(exclude)docs")
"""What `bench pages` and `extracts` write themselves: no other numbers come of it."""


def facts() -> Row:
    """The facts; without a commit or a command where none is known."""
    known = {"commit": tree_commit(), "command": command(sys.argv)}
    found = {key: value for key, value in known.items() if value}
    return {"date": date.today().isoformat(), "torch": torch.__version__} | found


def tree_commit() -> str | None:
    """The commit of this tree, as the environment or git names it."""
    return os.environ.get(ENVIRONMENT_VARIABLE) or commit(_TREE)


def command(argv: Sequence[str]) -> str | None:
    """The command line of a bench without the files that it writes; None of another program.

    Example:
        >>> command([str(_TREE / "bench/__main__.py"), "moe", "--m", "1", "--json", "moe.json"])
        'python -m bench moe --m 1'
    """
    program = Path(argv[0]).resolve() if argv else Path()
    if program.parent != _TREE / "bench" or program.suffix != ".py":
        return None
    module, words = "bench" if program.stem == "__main__" else f"bench.{program.stem}", list(argv[1:])
    kept: list[str] = []
    while words:
        name, equals, _ = words[0].partition("=")
        if name in _NOT_WHAT:
            del words[: _NOT_WHAT[name] + (0 if equals else 1)]
        else:
            kept.append(words.pop(0))
    return shlex.join(["python", "-m", module, *kept])


@functools.cache  # a report is written after each cell
def commit(tree: Path) -> str | None:
    """The commit of a checkout, with a "+" where tracked files differ from it; None of what is no checkout."""
    alone = {
        "GIT_CEILING_DIRECTORIES": str(tree.parent),  # a copy inside another checkout is not of that one's commit
        "GIT_OPTIONAL_LOCKS": "0",  # whoever works in the tree meanwhile is not disturbed
    }

    def git(*words: str) -> str:
        command, env = ["git", *words], {**os.environ, **alone}
        return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *_WRITTEN)
        return git("describe", "--always", "--exclude=*") + ("+" if changed else "")  # no tag, the hash alone
    except (OSError, subprocess.CalledProcessError):
        return None
