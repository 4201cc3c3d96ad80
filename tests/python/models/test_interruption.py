"""A conversion that does not end well leaves what was there, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KILLS = int(os.environ.get("QCUTLASS_KILLS", 5))


@pytest.fixture
def run(repository: Path, tmp_path: Path) -> Any:
    """run(action, *numbers): what the process of `conversions.py` prints."""

    def call(action: str, *numbers: int) -> dict[str, Any]:
        command = [sys.executable, "-m", "tests.python.models.conversions", action, str(tmp_path), *map(str, numbers)]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is given back, so that it shows
        result = subprocess.run(command, capture_output=True, text=True, cwd=repository, env=environment, check=False)
        assert result.returncode == 0, result.stderr
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    return call


def test_killed_at_any_moment(run: Any, seed: int) -> None:
    found = run("kill", KILLS, seed)
    assert found["broken"] == 0, found
    assert sum(found[outcome] for outcome in ("absent", "old", "new")) == KILLS
    assert found["interrupted"] > 0, "no kill came while a folder was being written"
    assert found["left"] == []
    assert found["last"]


def test_a_full_disk(run: Any, seed: int) -> None:
    found = run("fill_disk", seed)
    assert found == {"errors": ["OSError", "OSError"], "intact": True, "absent": True, "left": []}


def test_memory_is_that_of_one_layer(run: Any) -> None:
    """A layer is 4 MB of floats, 1 MB packed."""
    found = run("watch_memory")
    assert len(found["used"]) == 13
    assert max(found["used"]) - found["used"][0] < 4, found
    assert found["size"] > 12
