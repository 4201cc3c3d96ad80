"""Damaged files of all kinds: a layer comes out as it must be, or CheckpointError or UnsupportedError does.

QCUTLASS_FUZZ_INPUTS: how many folders are tried, 6000 by default, and how many headers and configurations;
QCUTLASS_FUZZ_SEED: which, 1 by default. `fuzzing.py` tries as many as one likes.
"""

from __future__ import annotations

import colorsys
import importlib
import json
import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.python.formats import fuzzing
from tests.python.formats.chunks import Chunk, Tally, in_children
from tests.python.formats.fuzz_corpus import subjects
from tests.python.formats.fuzzing import (
    attempt,
    chunks,
    folder_in_memory,
    little_time_and_memory,
    load_all,
    try_chunk,
    write_files,
)
from tests.python.formats.readers import Reader, readers, refusals

from qcutlass import CheckpointError, UnsupportedError
from qcutlass.formats.gguf_blocks import DEQUANTIZED, QUANTIZED

INPUTS = int(os.environ.get("QCUTLASS_FUZZ_INPUTS", "6000"))
SEED = int(os.environ.get("QCUTLASS_FUZZ_SEED", "1"))
IGNORED = ("tuned plans", "work: record")  # where they are damaged, without an error
LAYERS = {
    "gguf": len(QUANTIZED) + len(DEQUANTIZED) + 2,
    "converted shards": 2,
    "mxfp4 experts": 6,
    "stacked floats": 6,
    "fp8 experts": 6,
}


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="needs /proc, to know how much memory is in use"
)


@needs_proc
@pytest.mark.parametrize("subject", subjects())
def test_damaged_checkpoints(subject: str, tmp_path: Path) -> None:
    write_files(tmp_path, subjects()[subject])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert load_all(tmp_path) == LAYERS.get(subject, 1)
        count = -(-INPUTS // len(subjects()))
        with little_time_and_memory():
            survived = sum(attempt(subject, SEED, index, tmp_path) > 0 for index in range(count))
    assert 0 < survived < count


@needs_proc
@pytest.mark.parametrize("name", readers())
def test_damaged_files(name: str) -> None:
    reader = readers()[name]
    with folder_in_memory() as folder:
        write_files(folder, reader.files)
        assert reader.read(folder)
    tally = try_chunk(Chunk(name, SEED, 0, -(-INPUTS // len(readers()))), lambda _: None, limit=True)
    assert tally.messages == []
    assert tally.inputs >= INPUTS // len(readers())
    assert tally.survived < tally.inputs or name in IGNORED


def open_link_out(folder: Path) -> None:
    (folder / "link").symlink_to(os.devnull)
    try:
        (folder / "link").read_bytes()
    finally:
        (folder / "link").unlink()


def open_absent(folder: Path) -> None:
    with suppress(FileNotFoundError):
        os.open(folder.parent / "absent", os.O_RDONLY)
    raise CheckpointError(f"{folder}: refused")


def refuse_layer(folder: Path) -> None:
    with refusals(folder, "up"):
        raise UnsupportedError("groups are not read")  # which has "up" in it


def refuse_namelessly(folder: Path) -> None:
    raise CheckpointError(f"{folder.name}: refused")


@pytest.mark.parametrize(
    ("read", "told"),
    [
        (lambda folder: Path(os.devnull).read_bytes(), f"opened outside of the folder: {os.devnull}"),
        (open_link_out, f"opened outside of the folder: {os.devnull}"),
        (open_absent, "opened outside of the folder: /.*/absent'"),
        (lambda folder: Path("pyproject.toml").read_bytes(), "opened outside of the folder: /.*/pyproject.toml"),
        (refuse_layer, "names neither up nor a file: UnsupportedError"),
        (refuse_namelessly, "names no file: CheckpointError"),
    ],
)
def test_what_is_opened_elsewhere_or_names_nothing_is_found(
    read: Callable[[Path], object], told: str, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    reader = Reader("a.json", {"a.json": b'{"a": 1}'}, read)
    monkeypatch.setattr(fuzzing, "readers", lambda: {"it": reader})
    tally = try_chunk(Chunk("it", 1, 0, 2), lambda _: None, limit=False)
    assert tally.failures == 2
    assert re.search(told, tally.messages[0]), tally.messages


def test_what_is_opened_in_the_folder_or_imported_is_no_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(folder: Path) -> int:
        importlib.reload(colorsys)
        os.close(os.open(folder, os.O_RDONLY))
        with refusals(folder, "up"):
            raise UnsupportedError("up.weight: not read")
        with open(os.open(folder / "a.json", os.O_RDONLY), "rb") as file:
            return len(file.read())

    monkeypatch.setattr(fuzzing, "readers", lambda: {"it": Reader("a.json", {"a.json": b'{"a": 1}'}, read)})
    assert try_chunk(Chunk("it", 1, 0, 2), lambda _: None, limit=False).messages == []


def test_inputs_are_shared_out() -> None:
    wanted = chunks(50_000_000, 1, None)
    names = {chunk.name for chunk in wanted}
    assert names == {*subjects(), *readers()}
    assert abs(sum(chunk.count for chunk in wanted) - 50_000_000) < len(names)
    folders = sum(chunk.count for chunk in wanted if chunk.name in subjects())
    assert abs(folders - 500_000) < len(names)


def test_every_format_is_among_the_damaged() -> None:
    from qcutlass.formats import FORMATS, load
    from qcutlass.formats.converted import is_converted
    from qcutlass.formats.specs import LAYER_KINDS
    from qcutlass.models import ConvertedFolder

    formats, kinds = set(), set()
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for files in subjects().values():
            write_files(Path(name), files)
            if is_converted(name):
                kinds |= {layer.spec.kind for layer in ConvertedFolder(name).values()}
            else:
                formats.add(load(name).format)
    assert formats == set(FORMATS)
    assert kinds == set(LAYER_KINDS)


def test_crashes_and_hangs_are_told_and_finished_chunks_are_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(chunk: Chunk, reached: Callable[[int], None]) -> Tally:
        for index in range(chunk.first, chunk.first + chunk.count):
            reached(index)
            if (chunk.name, index) == ("crash", 7):
                os.abort()
            if (chunk.name, index) == ("hang", 12):
                time.sleep(100)
        (tmp_path / f"{chunk.name}-{chunk.first}").write_text("")
        return Tally(chunk.name, chunk.count, slowest=0.5, which=chunk.first)

    wanted = [Chunk(name, 3, first, 10) for name in ("crash", "fine", "hang") for first in (0, 10)]
    assert in_children(wanted, work, 2, 1.0, tmp_path / "state.json") == 2
    shown = capsys.readouterr().out
    assert "crash, input 7 of seed 3: the process ended with -6" in shown
    assert "hang, input 12 of seed 3: the process ended with -9" in shown
    done = {f"{name}-{first}" for name in ("crash", "fine", "hang") for first in (0, 10)} - {"crash-0", "hang-10"}
    assert {path.name for path in tmp_path.iterdir()} == done | {"state.json"}
    assert len(json.loads((tmp_path / "state.json").read_text())) == 6
    (tmp_path / "fine-0").unlink()
    assert in_children(wanted, work, 2, 1.0, tmp_path / "state.json") == 2
    assert not (tmp_path / "fine-0").exists()
