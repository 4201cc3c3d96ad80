"""What lies beside the weights and is copied: links that lead out of the folder are refused, as for weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.python.models.folders import random_model

from qcutlass import CheckpointError, models

SECRET = "private"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "id_rsa"
    path.write_text(SECRET)
    return path


@pytest.mark.parametrize("name", ["notes.txt", "LICENSE", "NOTICE.old", "tokenizer.model", "vocab.json", "README.md"])
@pytest.mark.parametrize("absolute", [True, False])
def test_links_out_of_the_folder_are_refused(
    name: str, absolute: bool, secret: Path, tmp_path: Path, seed: int
) -> None:
    source = random_model(tmp_path / "source", 1, seed=seed)
    models.convert(source, tmp_path / "converted")
    before = sorted(tmp_path.iterdir())
    for folder in (source, tmp_path / "converted"):
        (folder / name).symlink_to(secret if absolute else Path("..") / secret.name)
    with pytest.raises(CheckpointError, match=rf"source: '{name}' is a link out of the folder, .*copy the file into"):
        models.convert(source, tmp_path / "new")
    with pytest.raises(CheckpointError, match=rf"converted: '{name}' is a link out of the folder"):
        models.export_model(tmp_path / "converted", tmp_path / "new", "gptq")
    assert sorted(tmp_path.iterdir()) == before


def test_a_configuration_that_is_a_link_out_of_the_folder_is_refused(tmp_path: Path, seed: int) -> None:
    source = random_model(tmp_path / "source", 1, seed=seed)
    (source / "config.json").rename(tmp_path / "elsewhere.json")
    (source / "config.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(CheckpointError, match=r"'config\.json' is a link out of the folder"):
        models.convert(source, tmp_path / "new")


def test_a_link_that_appears_while_weights_are_written_is_refused(secret: Path, tmp_path: Path, seed: int) -> None:
    source = random_model(tmp_path / "source", 1, seed=seed)
    with pytest.raises(CheckpointError, match="link out of the folder"):
        models.convert(
            source,
            tmp_path / "new",
            progress=lambda what, *_: (source / "late.txt").symlink_to(secret) if "up_proj" in what else None,
        )
    assert not (tmp_path / "new").exists()


def test_links_within_the_folder_and_those_of_a_hubs_cache_are_copied(tmp_path: Path, seed: int) -> None:
    source = random_model(tmp_path / "model" / "snapshots" / "0123", 1, seed=seed)
    blobs = tmp_path / "model" / "blobs"
    blobs.mkdir()
    for name in os.listdir(source):  # as the hub's cache has it: every file is a link to a blob
        (source / name).rename(blobs / f"blob-of-{name}")
        (source / name).symlink_to(Path("../../blobs") / f"blob-of-{name}")
    (source / "LICENSE").write_text("free")
    (source / "LICENSE.txt").symlink_to("LICENSE")
    (source / "absent.txt").symlink_to("nowhere")
    models.convert(source, tmp_path / "new", verify=True)
    models.export_model(tmp_path / "new", tmp_path / "exported", "gptq")
    for folder in (tmp_path / "new", tmp_path / "exported"):
        assert (folder / "tokenizer.json").read_text() == "{}"
        assert (folder / "LICENSE.txt").read_text() == "free"
        assert not (folder / "absent.txt").exists()
        assert not any(path.is_symlink() for path in folder.iterdir())
