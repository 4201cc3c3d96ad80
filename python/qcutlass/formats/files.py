"""Opens files that others wrote: regular ones alone, without waiting, and not past a limit."""

from __future__ import annotations

import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qcutlass.errors import CheckpointError

_POINTER: Final = b"version https://git-lfs"
_DEEPEST: Final = 64  # lists and objects in each other: what reads them may call itself for each
MOST_BRACKETS: Final = 1 << 19  # of a JSON file: a list costs the parser 30 times its two bytes
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # opening a FIFO does not wait for its writer


class Stamp(NamedTuple):
    """A file's size and the time of its last change, which tell that it was written."""

    size: int
    modified: int

    @staticmethod
    def of(file: BufferedReader) -> Stamp:
        status = os.fstat(file.fileno())
        return Stamp(status.st_size, status.st_mtime_ns)


def open_regular(path: Path) -> BufferedReader:
    """A regular file, open for reading; what is checked is what was opened, whatever the path names later.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is a folder, a FIFO, a device, or cannot be opened.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise FileNotFoundError(error.errno, os.strerror(error.errno), str(path)) from error
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path}: the file cannot be opened ({reason})") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{path}: expected a file, got a folder, a FIFO or a device; remove it")
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")  # which closes it itself where it fails: twice could close another's


def as_path(name: str, value: object, others: str = "") -> Path:
    """The path that an argument is.

    Args:
        name: of the argument.
        others: what else it might have been, for the message.

    Raises:
        TypeError: it is neither a text nor a path.
        ValueError: it is an empty text, which would be the current folder.
    """
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise TypeError(f"{name}: expected a path, as a text or a pathlib.Path{others}, got {type(value).__name__}")
    if not text:
        raise ValueError(f"{name}: expected a path, got an empty text; '.' is the current folder")
    return Path(text)


def check_no_pointer(path: Path, begin: bytes) -> None:
    """Raises CheckpointError for the first bytes, at least four, of what git leaves where git-lfs is not installed."""
    if begin[: len(_POINTER)] == _POINTER[: len(begin)]:
        raise CheckpointError(f"{path}: a git-lfs pointer, not the file itself; run git lfs pull in its folder")


def read_whole(path: Path, most: int) -> bytes:
    """All bytes of a file; errors as for `open_regular`, and CheckpointError where there are more than `most`."""
    with open_regular(path) as file:
        size = Stamp.of(file).size
        data = file.read(min(size, most) + 1)  # no buffer for the longest where the file is short
        if len(data) > size:  # it grows
            data += file.read(most + 1 - len(data))
        if len(data) > most:
            raise CheckpointError(f"{path}: expected at most {most} bytes, got {max(Stamp.of(file).size, len(data))}")
        return data


def parsed_json(text: bytes) -> Any:
    """The value in JSON, whose nesting and number of lists and objects are bounded.

    Raises:
        ValueError: it is no JSON, or beyond these bounds.
    """
    brackets = text.count(b"[") + text.count(b"{")
    if brackets > MOST_BRACKETS:
        raise ValueError(f"expected at most {MOST_BRACKETS} lists and objects, got {brackets}")
    try:
        value = json.loads(text.decode())
    except (RecursionError, MemoryError) as error:
        raise ValueError(str(error) or type(error).__name__) from error
    if brackets > _DEEPEST:
        level = [value]
        for _ in range(_DEEPEST):
            parts = (part.values() if isinstance(part, dict) else part for part in level)
            level = [part for inner in parts for part in inner if isinstance(part, dict | list)]
            if not level:
                break
        else:
            raise ValueError(f"expected at most {_DEEPEST} lists and objects in each other")
    return value


def read_span(path: Path, stamp: Stamp, begin: int, size: int, name: str) -> Tensor:
    """Bytes [begin, begin + size) of a file as uint8 `[size]`, in memory of their own.

    The file is read, not mapped: a mapped one that another process cuts short ends this process.

    Args:
        path, stamp: of the file, when its header was read.
        begin, size: that lie in a file with this stamp.
        name: of the tensor, for messages.

    Raises:
        CheckpointError: the file has changed since, or the memory does not suffice.
    """
    changed = f"{path}: {name}: the file changed after it was opened; open the checkpoint again"
    try:
        file = open_regular(path)
    except FileNotFoundError as error:
        raise CheckpointError(changed) from error
    with file:
        if Stamp.of(file) != stamp:
            raise CheckpointError(changed)
        try:
            data = torch.empty(size, dtype=torch.uint8, device="cpu")  # whatever the default is
        except (RuntimeError, MemoryError) as error:
            raise CheckpointError(f"{path}: {name}: no memory for its {size} bytes") from error
        buffer: Any = data.numpy()
        file.seek(begin)
        if file.readinto(buffer) != size or Stamp.of(file) != stamp:
            raise CheckpointError(changed)
        return data


def inside(folder: Path, name: str, where: str) -> Path:
    """The path of a file in `folder`, which a link must not leave but for the blobs of a hub's cache."""
    path = folder / name
    try:
        root, target = folder.resolve(), path.resolve()
        exists = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{where}: {name!r:.80} is no readable path ({error})") from error
    roots = [root]
    if root.parent.name == "snapshots":  # <model>/snapshots/<revision>/file -> <model>/blobs/<hash>
        roots.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(allowed) for allowed in roots):
        raise CheckpointError(f"{where}: {name!r} is a link out of the folder, to {target}; copy the file into it")
    if not exists:
        raise CheckpointError(f"{where}: expected the file {name!r}; it is absent, download it")
    return path
