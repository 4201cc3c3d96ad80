"""The folder in which a run keeps its work: whose files it may hold, a full disk, kills at its end, long names."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from qcutlass import UnsupportedError, WeightOnly, models
from qcutlass.cli import app
from qcutlass.models import marks, replacing
from qcutlass.models.marks import MARK, mark
from qcutlass.models.quantizing import run, work
from qcutlass.models.quantizing.decoder import Decoder

pytest.importorskip("transformers", reason="needs transformers")
from tests.python.models.conversions import contents, killed_at_every_line
from tests.python.models.quantizations import calibration, make


class _Killed(BaseException):
    pass


def killed(*_: Any, **__: Any) -> None:
    raise _Killed


@pytest.fixture
def source(tmp_path: Path, seed: int) -> Path:
    make("llama", seed).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def quantize(source: Path, name: str = "new", bits: int = 4, **options: Any) -> models.Quantization:
    method = models.Method("rtn", WeightOnly(bits, 32))
    return models.quantize_model(source, source.parent / name, method, **options)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    "files",
    [
        {"manifest.json": "{}", "thesis": "x"},
        {"manifest.json": '{"layout": 2}', "inner/block-00000.json": "x"},
        {"block-00000.json": "{}"},
        {MARK: "of another program", "manifest.json": "{}"},
        {f"{MARK}/manifest.json": "{}"},
    ],
)
def test_folders_of_others_stay(files: dict[str, str], restart: bool, source: Path, tmp_path: Path) -> None:
    for name, text in files.items():
        path = tmp_path / "new.work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with pytest.raises(FileExistsError, match=r"new\.work: .* holds files that no run has left \(.*\); move them away"):
        quantize(source, restart=restart)
    found = {name: (tmp_path / "new.work" / name).read_text() for name in files}
    assert found == files
    arguments = ["quantize", str(source), str(tmp_path / "new"), "--method", "rtn", *(["--restart"] if restart else [])]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "holds files that no run has left" in result.stderr
    assert "Traceback" not in result.output


def test_files_of_others_in_a_folder_of_ours_stay(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setattr(run, "write_folder", killed)
        with pytest.raises(_Killed):
            quantize(source)
    (tmp_path / "new.work" / "inner").mkdir()
    (tmp_path / "new.work" / "inner" / "thesis").write_text("x")
    before = contents(source) | {"left": "".join(names(tmp_path / "new.work")).encode()}
    for restart in (False, True):
        with pytest.raises(FileExistsError, match=r"no run has left \('inner'\)"):
            quantize(source, restart=restart)
    assert contents(source) | {"left": "".join(names(tmp_path / "new.work")).encode()} == before
    (tmp_path / "new.work" / "inner").rename(tmp_path / "inner")

    def progress(what: str, done: int, total: int) -> None:
        if what.startswith("writing"):
            (tmp_path / "new.work" / "late").write_text("y")

    assert quantize(source, progress=progress).resumed == 3
    assert contents(tmp_path / "new.work") == {"late": b"y"}


@pytest.mark.parametrize("state", ["empty", "mark begun", "manifest begun"])
def test_a_run_that_was_killed_at_its_begin_is_begun_again(state: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "new.work").mkdir()
    if state != "empty":
        mark(tmp_path / "new.work")
    if state == "mark begun":
        os.truncate(tmp_path / "new.work" / MARK, 10)
    if state == "manifest begun":
        (tmp_path / "new.work" / "manifest.json.partial").write_text("{")
    assert quantize(source).resumed == 0
    assert names(tmp_path) == ["new", "source"]


def test_another_run_that_has_ended_since_the_checks(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before any work, not after all of it; what the other has made stays, and no folder of work."""
    checked = run.open_model

    def meanwhile(*args: Any, **options: Any) -> Any:
        opened = checked(*args, **options)
        monkeypatch.setattr(run, "open_model", checked)
        quantize(source)
        return opened

    monkeypatch.setattr(run, "open_model", meanwhile)
    with pytest.raises(FileExistsError, match="new: exists"):
        quantize(source)
    made = contents(tmp_path / "new")
    assert names(tmp_path) == ["new", "source"]
    assert quantize(source, overwrite=True).resumed == 0
    assert contents(tmp_path / "new") == made
    assert names(tmp_path) == ["new", "source"]


def test_records_that_are_not_as_they_were_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole JSON with another layer's name, another bit, a file elsewhere: such a block is done again."""
    expected = quantize(source, "reference")
    for change in (("mlp.up_proj", "mlp.no_proj"), ('"bits": 4', '"bits": 8'), ("block-00001.saf", "/dev/zero.saf")):
        with monkeypatch.context() as context:
            context.setattr(run, "write_folder", killed)
            with pytest.raises(_Killed):
                quantize(source)
        record = tmp_path / "new.work" / "block-00001.json"
        assert change[0] in record.read_text()
        record.write_text(record.read_text().replace(*change))
        found = quantize(source)
        assert (found.resumed, found.files) == (1, expected.files)
        assert contents(tmp_path / "new") == contents(tmp_path / "reference")
        shutil.rmtree(tmp_path / "new")


@pytest.mark.parametrize("change", [("{", ""), ('"bits": 4', '"bits": 8'), ('"run"', '"ran"'), (": {", ": [{")])
def test_a_manifest_that_is_not_as_it_was_written(
    change: tuple[str, str], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setattr(run, "write_folder", killed)
        with pytest.raises(_Killed):
            quantize(source)
    manifest = tmp_path / "new.work" / "manifest.json"
    assert change[0] in manifest.read_text()
    manifest.write_text(manifest.read_text().replace(*change))
    with pytest.raises(FileExistsError, match=r"manifest\.json: damaged, .*pass restart=True \(--restart\)"):
        quantize(source)
    assert quantize(source, restart=True).resumed == 0


def test_a_full_disk(process: Any, seed: int) -> None:
    found = process("quantizations", "fill_disk", seed)
    assert set(found["outcomes"].values()) == {"File too large"}
    assert len(found["outcomes"]) == 5
    code, kind, shown = found["command"]
    assert (code, kind) == (2, "SystemExit")
    assert shown.strip().startswith("error: [Errno 27] File too large: ")
    assert "\n" not in shown.strip()
    assert found["resumed"] == 3
    assert found["same"]
    assert found["left"] == []


@pytest.mark.parametrize("removed", [0, 1, 3, 6])
@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_after_the_destination_has_appeared(
    removed: int, overwrite: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same call, or command, removes the rest of its work and tells what was made."""
    expected = quantize(source, "reference")
    arguments = ["quantize", str(source), "--method", "rtn", "--group-size", "32", *(["--overwrite"] * overwrite)]
    if overwrite:
        quantize(source, bits=8)

    def remove_some(folder: Path) -> None:
        for path in work._own_files(folder)[:removed]:
            path.unlink()
        raise _Killed

    with monkeypatch.context() as context:
        context.setattr(work, "_remove", remove_some)
        context.setattr("qcutlass.models.replacing._remove", lambda _: None)  # of the temporary folder
        with pytest.raises(_Killed):
            quantize(source, overwrite=overwrite)
    made = contents(tmp_path / "new")
    assert made == contents(tmp_path / "reference")
    assert len(names(tmp_path / "new.work")) == 8 - removed

    monkeypatch.setattr(run, "write_folder", killed)
    with pytest.raises(FileExistsError, match=r"left by a run with another method\.scheme\.bits"):
        quantize(source, bits=8, overwrite=overwrite)
    if not overwrite:
        with pytest.raises(FileExistsError, match="new: exists"):
            quantize(source, restart=True)
    if removed == 1:
        result = CliRunner().invoke(app, [*arguments, str(tmp_path / "new")])
        assert result.exit_code == 0, result.output
        assert "rtn: 21 layers" in result.output
    else:
        found = quantize(source, overwrite=overwrite)
        assert found.resumed == 3
        assert (found.layers, found.weights, found.size, found.files, found.notes) == (
            (expected.layers, expected.weights, expected.size, expected.files, expected.notes)
        )
    assert contents(tmp_path / "new") == made
    assert names(tmp_path) == ["new", "reference", "source"]


def test_killed_at_every_line(tmp_path: Path) -> None:
    """Of what keeps the work of a run, and makes its destination."""
    destination, outcomes = tmp_path / "new", set()

    def act() -> str:
        with work.work_folder(destination, {"bits": 4}) as found:
            if found.made(destination) is not None:
                replacing.remove_leftovers(destination)
                return "made"
            resumed = found.finished()
            if not resumed:
                found.add(0, {}, {"norm": torch.ones(3)}, None, {})
            with replacing.new_folder(destination, False, lambda: None) as folder:
                (folder / "file").write_text("x")
                found.set_made(folder, {"layers": 1})
            return "resumed" if resumed else "begun"

    for _ in killed_at_every_line(act, [work, marks, replacing]):
        there = destination.exists()
        try:
            outcome = act()
        except FileExistsError:  # killed with nothing left to do but to remove an empty folder
            outcome = "exists"
            assert set(names(tmp_path)) <= {"new", "new.work"}
            if "new.work" in names(tmp_path):
                assert set(names(tmp_path / "new.work")) <= {MARK}
                shutil.rmtree(tmp_path / "new.work")
        outcomes.add((there, outcome))
        assert names(tmp_path) == ["new"]
        shutil.rmtree(destination)
    assert outcomes == {(False, "begun"), (False, "resumed"), (True, "made"), (True, "exists")}


def test_a_destination_that_is_not_that_of_the_run_is_not_taken_for_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setattr("qcutlass.models.replacing._move", killed)  # the work says that it is about to appear
        with pytest.raises(_Killed):
            quantize(source)
    assert json.loads((tmp_path / "new.work" / "manifest.json").read_text())["made"]["files"]
    models.convert(source, tmp_path / "new")
    with pytest.raises(FileExistsError, match="new: exists"):
        quantize(source)
    assert quantize(source, overwrite=True).resumed == 3
    quantize(source, "reference")
    assert contents(tmp_path / "new") == contents(tmp_path / "reference")
    assert names(tmp_path) == ["new", "reference", "source"]


def test_a_run_that_ends_meanwhile_removes_the_folder(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the making of its folder and the lock on it, by a run that was first to lock it."""
    lock, moments = work.fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        if operation & work.fcntl.LOCK_NB and len(moments) < 2 and (tmp_path / "new.work").exists():
            moments.append(names(tmp_path / "new.work"))
            (tmp_path / "new.work").rmdir()
        lock(descriptor, operation)

    monkeypatch.setattr(work.fcntl, "flock", flock)
    assert quantize(source).layers == 21
    assert moments == [[], []]
    assert names(tmp_path) == ["new", "source"]


@pytest.mark.parametrize("where", ["inputs", "_record", "block"])
@pytest.mark.parametrize("error", [RuntimeError, UnsupportedError, _Killed])
def test_errors_before_a_block_is_finished_leave_nothing(
    where: str, error: type[BaseException], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While activations are recorded, for example: nothing is there from which another run could go on."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as context:
        context.setattr(Decoder, where, fail)
        with pytest.raises(error):
            models.quantize_model(source, tmp_path / "new", "gptq", calibration=calibration(0))
    assert names(tmp_path) == ["source"]


def test_a_disk_that_is_full_from_the_begin(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    for writer in ("mark", "_write_whole"):
        with monkeypatch.context() as context:
            context.setattr(work, writer, fail)
            with pytest.raises(OSError, match="full"):
                quantize(source)
        assert names(tmp_path) == ["source"]


@pytest.mark.parametrize("length", [245, 251, 255])
def test_names_of_any_legal_length(length: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "w" * length
    with monkeypatch.context() as context:
        context.setattr(run, "write_folder", killed)
        with pytest.raises(_Killed):
            quantize(source, name)
    (folder,) = (path for path in tmp_path.iterdir() if path != source)
    assert folder.name.endswith(".work")
    assert quantize(source, name).resumed == 3
    assert names(tmp_path) == ["source", name]
    with pytest.raises(OSError, match="too long"):
        quantize(source, "w" * 256)
    assert names(tmp_path) == ["source", name]
