"""Models for these tests: two blocks of SmolLM2, quantised and written as other programs do."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.python.models.folders import SmolCut

from qcutlass.quickstart import default_model


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" not in config.getoption("-m"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="takes half a minute or more: python -m pytest -m slow"))


@pytest.fixture(scope="session")
def smol_file() -> Path:
    """SmolLM2's GGUF file."""
    pytest.importorskip("transformers", reason="needs transformers")
    try:
        return default_model()
    except FileNotFoundError as error:
        pytest.skip(f"needs the model: {error}")


@pytest.fixture(scope="session")
def smol(smol_file: Path, tmp_path_factory: pytest.TempPathFactory) -> SmolCut:
    return SmolCut(smol_file, tmp_path_factory.mktemp("smol"))
