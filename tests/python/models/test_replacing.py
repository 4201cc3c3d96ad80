"""Temporary folders beside a destination: which are removed, their names, what two processes do to each other."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tests.python.models.conversions import killed_at_every_line

from qcutlass.models import marks, replacing
from qcutlass.models.marks import MARK, is_marked, mark, short_name
from qcutlass.models.replacing import new_folder

OURS = ".new.qcutlass-a1b2c3_d.partial"


def write(destination: Path, text: str = "whole", *, overwrite: bool = False) -> None:
    with new_folder(destination, overwrite, lambda: None) as folder:
        (folder / "file").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    "name",
    [
        ".new.my-download.partial",
        ".new.left.partial",
        ".new.a1b2c3_d.partial",
        ".new.qcutlass-long9long9.partial",
        OURS,
    ],
)
def test_folders_of_others_stay(name: str, tmp_path: Path) -> None:
    foreign = tmp_path / name
    (foreign / "inner").mkdir(parents=True)
    (foreign / "inner" / "thesis").write_text("x")
    (foreign / "new").mkdir()
    (foreign / "new" / "draft").write_text("y")
    write(tmp_path / "new")
    for other in ("mark of another program", "qcutlass made this folder, or not"):
        (foreign / MARK).write_text(other)
        write(tmp_path / "new", overwrite=True)
    assert names(tmp_path) == [name, "new"]
    assert (foreign / "inner" / "thesis").read_text() == "x"
    assert (foreign / "new" / "draft").read_text() == "y"


def test_a_mark_counts_under_a_name_of_ours_alone(tmp_path: Path) -> None:
    others = [tmp_path / ".new.a1b2c3_d.partial", tmp_path / ".newer.qcutlass-a1b2c3_d.partial"]
    for folder in others:
        folder.mkdir()
        mark(folder)
    (tmp_path / "elsewhere").mkdir()
    mark(tmp_path / "elsewhere")
    (tmp_path / OURS).symlink_to(tmp_path / "elsewhere")
    write(tmp_path / "new")
    assert all(is_marked(folder) for folder in [*others, tmp_path / OURS])


@pytest.mark.parametrize(
    "state", ["empty", "mark begun", "mark", "half", "with an older folder in it", "with a file of others"]
)
def test_what_a_killed_process_left_is_removed(state: str, tmp_path: Path) -> None:
    left = tmp_path / OURS
    left.mkdir()
    if state != "empty":
        mark(left)
    if state == "mark begun":
        os.truncate(left / MARK, 0)
    if state in ("half", "with an older folder in it"):
        (left / "new").mkdir()
        (left / "new" / "part-0.safetensors").write_text("x")
    if state == "with an older folder in it":
        (left / "new" / "folder").mkdir()
        (left / "new" / "folder" / "file").write_text("x")
    if state == "with a file of others":
        (left / "precious").write_text("x")
    write(tmp_path / "new")
    if state == "with a file of others":
        assert (left / "precious").read_text() == "x"
    else:
        assert names(tmp_path) == ["new"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_at_every_line(overwrite: bool, tmp_path: Path) -> None:
    destination = tmp_path / "new"
    seen = set()
    if overwrite:
        write(destination, "old")
    for _ in killed_at_every_line(lambda: write(destination, overwrite=overwrite), [replacing, marks]):
        before = (destination / "file").read_text() if destination.exists() else "absent"
        seen.add((before, len(names(tmp_path)) - destination.exists()))
        write(destination, "old", overwrite=True)
        assert names(tmp_path) == ["new"]
        if not overwrite:
            (destination / "file").unlink()
            destination.rmdir()
    old = "old" if overwrite else "absent"
    assert seen == {(old, 0), (old, 1), ("whole", 1), ("whole", 0)}


def test_a_folder_in_use_stays(tmp_path: Path) -> None:
    with new_folder(tmp_path / "new", True, lambda: None) as folder:
        (folder / "file").write_text("first")
        write(tmp_path / "new", "second")
        assert (tmp_path / "new" / "file").read_text() == "second"
    assert (tmp_path / "new" / "file").read_text() == "first"
    assert names(tmp_path) == ["new"]


@pytest.mark.parametrize("moment", ["before it is opened", "before it is locked"])
def test_another_process_may_come_between_making_and_locking(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the folder, still empty, for a leftover."""
    make, lock, taken = tempfile.mkdtemp, fcntl.flock, []

    def rival() -> None:
        if len(taken) < 3:
            taken.append(names(tmp_path))
            replacing.remove_leftovers(tmp_path / "new")
            assert names(tmp_path) == []

    def mkdtemp(**options: Any) -> str:
        found = make(**options)
        rival()
        return found

    def flock(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX:
            monkeypatch.setattr(fcntl, "flock", lock)
            rival()
            monkeypatch.setattr(fcntl, "flock", flock)
        lock(descriptor, operation)

    if moment == "before it is opened":
        monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    else:
        monkeypatch.setattr(fcntl, "flock", flock)
    write(tmp_path / "new")
    assert [len(each) for each in taken] == [1, 1, 1]
    assert (tmp_path / "new" / "file").read_text() == "whole"
    assert names(tmp_path) == ["new"]


@pytest.mark.parametrize("letter", ["w", "ü", "語"])
@pytest.mark.parametrize("length", [228, 229, 238, 240, 250, 255])
def test_names_of_any_legal_length(length: int, letter: str, tmp_path: Path) -> None:
    width = len(letter.encode())
    name = letter * (length // width) + "x" * (length % width)
    left = tmp_path / f"{replacing._prefix(tmp_path / name)}a1b2c3_d.partial"
    left.mkdir()
    mark(left)
    write(tmp_path / name)
    write(tmp_path / name, "anew", overwrite=True)
    assert names(tmp_path) == [name]
    assert (tmp_path / name / "file").read_text() == "anew"


def test_long_names_that_end_differently_have_temporary_folders_of_their_own(tmp_path: Path) -> None:
    first, second = (tmp_path / ("w" * 254 + end) for end in "ab")
    assert replacing._prefix(first) != replacing._prefix(second)
    for name in ("w" * 255, "語" * 85, os.fsdecode(b"\xff" * 255)):
        assert len(os.fsencode(short_name(name, 27))) <= 255 - 27
        assert short_name(name, 0) == name


def test_names_that_are_too_long_are_refused_first(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="too long") as caught, new_folder(tmp_path / ("w" * 256), False, lambda: None):
        pytest.fail("the block is entered")
    assert caught.value.errno == errno.ENAMETOOLONG
    assert names(tmp_path) == []


def test_where_folders_cannot_be_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())
    for name in ("new", "w" * 255):
        write(tmp_path / name)
        write(tmp_path / name, "anew", overwrite=True)
        assert (tmp_path / name / "file").read_text() == "anew"
    assert names(tmp_path) == ["new", "w" * 255]


def test_what_appears_meanwhile_is_asked_about(tmp_path: Path) -> None:
    def check() -> None:
        raise ValueError("not ours")

    def make_while_another_comes() -> None:
        with new_folder(destination, True, check) as folder:
            (folder / "file").write_text("new")
            destination.mkdir()
            (destination / "precious").write_text("x")

    destination = tmp_path / "new"
    with pytest.raises(ValueError, match="not ours"):
        make_while_another_comes()
    assert (destination / "precious").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_the_old_folder_comes_back_where_the_new_one_cannot_be_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destination, rename = tmp_path / "new", Path.rename
    destination.mkdir()
    (destination / "old").write_text("x")

    def fails(self: Path, target: Path) -> Path:
        if self.name == "new" and self.parent != tmp_path:
            raise OSError(errno.EIO, "the disk is damaged")
        return rename(self, target)

    monkeypatch.setattr(replacing.ctypes, "CDLL", lambda *arguments, **options: object())  # no renameat2
    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="damaged"), new_folder(destination, True, lambda: None) as folder:
        (folder / "file").write_text("new")
    assert (destination / "old").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
