"""GGUF models in several files, as the gguf package writes them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import torch

from qcutlass import CheckpointError, formats, models

pytest.importorskip("transformers", reason="needs transformers")
from tests.python.models.test_commands import command
from tests.python.models.test_gguf_models import write_gguf

FILES: Final = 3
TENSORS: Final = 8  # of a file at most


@pytest.fixture
def first(tmp_path: Path, seed: int) -> Path:
    """The first file of three, in a folder of their own."""
    (tmp_path / "split").mkdir()
    path = write_gguf(tmp_path / "split" / "tiny.gguf", "llama", seed, split=TENSORS)
    assert len(list(path.parent.iterdir())) == FILES
    return path


def test_all_files_are_read(first: Path, tmp_path: Path, seed: int) -> None:
    whole = formats.load(write_gguf(tmp_path / "tiny.gguf", "llama", seed))
    for place in (first, first.parent):
        found = formats.load(place)
        assert len(found.files) == FILES
        assert set(found) == set(whole)
        assert found.tensors.keys() == whole.tensors.keys()
        for name in whole:
            assert torch.equal(found[name].dequantize(torch.float32), whole[name].dequantize(torch.float32))


def test_the_commands(first: Path, tmp_path: Path, seed: int) -> None:
    folders = [tmp_path / name for name in ("of the whole", "of the first", "of the folder")]
    for place, folder in zip(
        (write_gguf(tmp_path / "tiny.gguf", "llama", seed), first, first.parent), folders, strict=True
    ):
        made = command("convert", place, folder, "--verify")
        assert made.exit_code == 0, made.output
    files = [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders]
    assert files[1:] == files[:1] * 2
    text = command("generate", first.parent, "--prompt", "567", "--max-new-tokens", 2)
    assert text.exit_code == 0, text.output


def remove_last(first: Path) -> Path:
    max(first.parent.iterdir()).unlink()
    return first


def remove_first(first: Path) -> Path:
    first.unlink()
    return first.parent


def name_second(first: Path) -> Path:
    return sorted(first.parent.iterdir())[1]


def rename(first: Path) -> Path:
    return first.rename(first.with_name("model.gguf"))


def replace_second(first: Path) -> Path:
    files = sorted(first.parent.iterdir())
    shutil.copyfile(files[2], files[1])
    return first


def repeat_first(first: Path) -> Path:
    """As the second file, with its number."""
    data = first.read_bytes()
    begin = data.index(b"split.no") + len("split.no") + 4
    name_second(first).write_bytes(data[:begin] + b"\1" + data[begin + 1 :])
    return first


REFUSED: Final[dict[str, tuple[Callable[[Path], Path], str]]] = {
    "no last": (remove_last, r"expected the file 'tiny-00003-of-00003\.gguf'; it is absent, download it"),
    "no first": (remove_first, r"expected the file 'tiny-00001-of-00003\.gguf'; it is absent, download it"),
    "second": (
        name_second,
        r"00002-of-00003\.gguf: one of 3 files of a model; pass the first, tiny-00001-of-00003\.gguf",
    ),
    "renamed": (rename, r"one of 3 files .* expected the name NAME-00001-of-00003\.gguf; give all of them"),
    "replaced": (
        replace_second,
        r"00002-of-00003\.gguf: expected split\.no 1 and split\.count 3, got 2 and 3; it is of",
    ),
    "repeated": (repeat_first, r"00002-of-00003\.gguf: the tensor '\S+' is also in \S+-00001-of-00003\.gguf"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sets_that_are_not_whole(name: str, first: Path, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message):
        models.convert(change(first), tmp_path / "new")
    assert not (tmp_path / "new").exists()
