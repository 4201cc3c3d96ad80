"""Models for these tests: two blocks of SmolLM2, quantised and written as other programs do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.python.models.folders import RandomCut, SmolCut

from qcutlass.quickstart import default_model


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" not in config.getoption("-m"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="takes half a minute or more: python -m pytest -m slow"))


@pytest.fixture(scope="session")
def smol_file() -> Path:
    """SmolLM2's GGUF file: that of its package, or the one that QCUTLASS_SMOLLM2 names."""
    pytest.importorskip("transformers", reason="needs transformers")
    if named := os.environ.get("QCUTLASS_SMOLLM2"):
        return Path(named)
    try:
        return default_model()
    except FileNotFoundError as error:
        pytest.skip(f"needs the model: {error}")


@pytest.fixture(scope="session")
def smol(smol_file: Path, tmp_path_factory: pytest.TempPathFactory) -> SmolCut:
    return SmolCut(smol_file, tmp_path_factory.mktemp("smol"))


@pytest.fixture(scope="session")
def random_cut(tmp_path_factory: pytest.TempPathFactory) -> RandomCut:
    pytest.importorskip("transformers", reason="needs transformers")
    return RandomCut(tmp_path_factory.mktemp("random"), seed=0)
