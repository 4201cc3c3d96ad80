"""Models for these tests: SmolLM2, or two blocks of it, quantised and written as other programs do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.python.models.folders import RandomCut, SmolCut
from tests.python.models.mixtures import KINDS, MixtureCut


@pytest.fixture(scope="session")
def smol(smol_file: Path, tmp_path_factory: pytest.TempPathFactory) -> SmolCut:
    return SmolCut(smol_file, tmp_path_factory.mktemp("smol"))


@pytest.fixture(scope="session")
def whole_smol(smol_file: Path, tmp_path_factory: pytest.TempPathFactory) -> SmolCut:
    return SmolCut(smol_file, tmp_path_factory.mktemp("whole_smol"), blocks=30)


@pytest.fixture(scope="session")
def random_cut(tmp_path_factory: pytest.TempPathFactory) -> RandomCut:
    pytest.importorskip("transformers", reason="needs transformers")
    return RandomCut(tmp_path_factory.mktemp("random"), seed=0)


@pytest.fixture(scope="session")
def cuts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MixtureCut]:
    """Mixtures of experts, by their kind."""
    pytest.importorskip("transformers", reason="needs transformers")
    return {kind: MixtureCut(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture
def process(repository: Path, tmp_path: Path) -> Any:
    """process(module, action, *numbers): what a module of this folder prints, run in a process of its own."""

    def call(module: str, action: str, *numbers: int) -> dict[str, Any]:
        command = [sys.executable, "-m", f"tests.python.models.{module}", action, str(tmp_path), *map(str, numbers)]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is given back, so that it shows
        result = subprocess.run(command, capture_output=True, text=True, cwd=repository, env=environment, check=False)
        assert result.returncode == 0, result.stderr
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    return call
