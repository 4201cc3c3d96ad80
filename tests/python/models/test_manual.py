"""Snippets of the manual that need a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.python.manual import run_by
from tests.python.models.folders import SmolCut

from qcutlass import formats, models

THIS = "tests/python/models/test_manual.py"


def test_transformers_loads_and_saves(
    smol: SmolCut, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/gptq").symlink_to(smol.gptq().folder, target_is_directory=True)
    models.convert(smol.gptq().folder, tmp_path / "smollm2")
    monkeypatch.chdir(tmp_path)
    exec(run_by(repository / "docs/models.md", THIS).text, {})
    saved, converted = (models.ConvertedFolder(tmp_path / name) for name in ("converted", "smollm2"))
    assert list(saved) == list(converted)


def test_layers_of_a_folder(
    smol: SmolCut,
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/folder").symlink_to(smol.gptq().folder, target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    exec(run_by(repository / "docs/formats.md", THIS).text, {})
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == list(formats.load(smol.gptq().folder))
