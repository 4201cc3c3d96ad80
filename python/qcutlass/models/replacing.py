"""Makes a folder as a whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from qcutlass.models.marks import MARK, is_marked, mark, short_name
from qcutlass.models.shards import sync

_EXCHANGE: Final = 2  # RENAME_EXCHANGE of renameat2(2)
_HERE: Final = -100  # AT_FDCWD
_TOKEN: Final = ".qcutlass-"  # before what is random in a temporary folder's name
_SUFFIX: Final = ".partial"
_OLD: Final = ".old"
_RANDOM: Final = 8  # characters of tempfile.mkdtemp
_NEW: Final = "new"  # in a temporary folder, beside its mark: what takes the destination's place


def check_new(destination: Path, overwrite: bool) -> None:
    """Raises FileExistsError if `destination` is there, and not to be overwritten; OSError if it can't be a name."""
    try:
        os.lstat(destination)
    except (FileNotFoundError, NotADirectoryError):
        return
    if not overwrite:
        raise FileExistsError(f"{destination}: exists; pass overwrite=True (--overwrite), or another destination")


@contextmanager
def new_folder(destination: Path, overwrite: bool, check: Callable[[], None]) -> Iterator[Path]:
    """A folder that takes the place of `destination` when the block ends, in one step.

    It is made in a temporary folder beside `destination`, which is removed at the end. If the block raises,
    `destination` stays as it is. What a killed process left behind is removed by the next one with the same
    destination; folders of others are not, whatever their names. On file systems that cannot exchange two folders in
    one step (those of Linux can), a folder to overwrite is moved out of the way first.

    Args:
        destination: where it appears.
        overwrite: whether it may take the place of another folder.
        check: raises unless what lies at `destination` now may be replaced; called again just before it is.

    Raises:
        FileExistsError: `destination` is there, and not to be overwritten.
        OSError: the disk is full, or the parent folder can't be written.
    """
    check_new(destination, overwrite)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(destination)
        temporary, lock = _make_temporary(destination)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(destination)) from error  # not the temporary folder's name
    folder = temporary / _NEW
    try:
        yield folder
        for path in folder.iterdir():
            sync(path)
        sync(folder)
        if overwrite and os.path.lexists(destination):
            check()  # hours may have passed
            _exchange(folder, destination)
        else:
            _move(folder, destination)
        sync(destination.parent)
    finally:
        with suppress(OSError):  # the next run tries again
            _remove(temporary)  # with half of a new folder, or the old one
        os.close(lock)


def _prefix(destination: Path) -> str:
    """Of the names of its temporary folders."""
    room = len(f".{_TOKEN}{_SUFFIX}") + _RANDOM
    return f".{short_name(destination.name, room)}{_TOKEN}"


def _make_temporary(destination: Path) -> tuple[Path, int]:
    """A marked folder and the lock on it: as long as a process holds it, no other takes the folder for a leftover."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_prefix(destination), suffix=_SUFFIX, dir=destination.parent))
        try:
            lock = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue  # another process was faster than the lock, and has removed an empty folder
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            mark(folder)
            (folder / _NEW).mkdir()
        except BaseException as error:
            with suppress(OSError):
                _remove(folder)
            os.close(lock)
            if isinstance(error, FileNotFoundError):
                continue
            raise
        return folder, lock


def _remove(temporary: Path) -> None:
    """Removes a temporary folder: what is in it if it is marked, the mark last; else only an empty one."""
    if is_marked(temporary):
        if os.path.lexists(temporary / _NEW):
            shutil.rmtree(temporary / _NEW)
        (temporary / MARK).unlink()
    temporary.rmdir()


def _move(folder: Path, destination: Path) -> None:
    try:
        folder.rename(destination)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise FileExistsError(f"{destination}: another process has made it meanwhile") from error
        raise


def _exchange(folder: Path, destination: Path) -> None:
    """Swaps two folders."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None:
        if renameat2(_HERE, os.fsencode(folder), _HERE, os.fsencode(destination), _EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code), str(destination))
    name = short_name(destination.name, len(f".{_OLD}") + _RANDOM)
    old = Path(tempfile.mkdtemp(prefix=f"{name}.", suffix=_OLD, dir=destination.parent))
    destination.rename(old)
    try:
        folder.rename(destination)
    except BaseException:
        old.rename(destination)
        raise
    old.rename(folder)


def remove_leftovers(destination: Path) -> None:
    """Removes the temporary folders of processes that are gone: theirs are no longer locked."""
    random = "[a-z0-9_]" * _RANDOM
    for folder in destination.parent.glob(f"{glob.escape(_prefix(destination))}{random}{_SUFFIX}"):
        with suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
            finally:
                os.close(lock)
