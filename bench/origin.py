"""What every run says of itself: the day, torch's version, and the commit of the tree that it ran from."""

from __future__ import annotations

import functools
import os
import subprocess
from datetime import date
from pathlib import Path
from typing import Final

import torch

from bench.report import Row

ENVIRONMENT_VARIABLE: Final = "QCUTLASS_COMMIT"
"""Names the commit of a tree that is no checkout: a copy on another machine, say."""

_TREE: Final = Path(__file__).resolve().parents[1]


def facts() -> Row:
    """The facts; without a commit where none is known."""
    found = os.environ.get(ENVIRONMENT_VARIABLE) or commit(_TREE)
    return {"date": date.today().isoformat(), "torch": torch.__version__} | ({"commit": found} if found else {})


@functools.cache  # a report is written after each cell
def commit(tree: Path) -> str | None:
    """The commit of a checkout, with a "+" where tracked files differ from it; None of what is no checkout."""
    alone = {
        "GIT_CEILING_DIRECTORIES": str(tree.parent),  # a copy inside another checkout is not of that one's commit
        "GIT_OPTIONAL_LOCKS": "0",  # whoever works in the tree meanwhile is not disturbed
    }
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]  # no tag, the hash alone
    try:
        run = subprocess.run(command, cwd=tree, env={**os.environ, **alone}, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()
