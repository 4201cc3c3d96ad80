"""One error for a shortage of memory, whoever met it: Python, torch's allocators, a map of a file."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_SIGNS: Final = (  # in torch's RuntimeErrors
    "unable to mmap", "allocate memory", "not enough memory", "out of memory", "bad_alloc"
)  # fmt: skip


@contextmanager
def memory_told(source: Path) -> Iterator[None]:
    """Raises MemoryError, which names what is read, where the block was left for want of memory.

    Example:
        >>> from pathlib import Path
        >>> from qcutlass.models.memory import memory_told
        >>> with memory_told(Path("model")):
        ...     raise RuntimeError("unable to mmap 4096 bytes: Cannot allocate memory (12)")
        Traceback (most recent call last):
            ...
        MemoryError: model: the memory does not suffice (unable to mmap 4096 bytes: Cannot allocate memory (12)); ...
    """
    try:
        yield
    except Exception as error:
        found = memory_shortage(error)
        if found is None:
            raise
        reason = (str(found) or "an allocation failed").partition("\n")[0]
        raise MemoryError(
            f"{source}: the memory does not suffice ({reason}); end other programs, or raise this process's limit"
        ) from error


def memory_shortage(error: BaseException | None) -> BaseException | None:
    """The error, or the one that it comes from, that tells of too little memory."""
    while error is not None:
        short = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        if short or (isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)):
            return error
        error = error.__cause__
    return None
