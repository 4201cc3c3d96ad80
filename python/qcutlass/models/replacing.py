"""Makes a folder as a whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from qcutlass.models.shards import sync

_EXCHANGE: Final = 2  # RENAME_EXCHANGE of renameat2(2)
_HERE: Final = -100  # AT_FDCWD
_SUFFIX: Final = ".partial"


def check_new(destination: Path, overwrite: bool) -> None:
    if not overwrite and os.path.lexists(destination):
        raise FileExistsError(f"{destination}: exists; pass overwrite=True (--overwrite), or another destination")


@contextmanager
def new_folder(destination: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary folder beside `destination`, which takes its place when the block ends, in one step.

    If the block raises, the temporary folder is removed and `destination` stays as it is. What a killed process left
    behind is removed by the next one with the same destination. On file systems that cannot exchange two folders in one
    step (those of Linux can), a folder to overwrite is moved out of the way first.

    Raises:
        FileExistsError: `destination` is there, and not to be overwritten.
        OSError: the disk is full, or the parent folder can't be written.
    """
    check_new(destination, overwrite)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(destination)
        folder = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", suffix=_SUFFIX, dir=destination.parent))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(destination)) from error  # not the temporary folder's name
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
        folder.chmod(0o777 & ~_umask())
        for path in folder.iterdir():
            sync(path)
        sync(folder)
        if overwrite and os.path.lexists(destination):
            _exchange(folder, destination)
        else:
            _move(folder, destination)
        sync(destination.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # half of a new one, or the old one
        os.close(lock)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


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
    old = Path(tempfile.mkdtemp(prefix=f"{destination.name}.", suffix=".old", dir=destination.parent))
    destination.rename(old)
    folder.rename(destination)
    old.rename(folder)


def _remove_leftovers(destination: Path) -> None:
    """Temporary folders of processes that are gone: theirs are no longer locked."""
    for folder in destination.parent.glob(f".{glob.escape(destination.name)}.*{_SUFFIX}"):
        with suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(lock)
