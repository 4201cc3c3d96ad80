"""Exceptions of the package; wrong arguments raise TypeError and ValueError."""

from qcutlass._C import UnsupportedError

__all__ = ["CheckpointError", "UnsupportedError"]

UnsupportedError.__module__ = "qcutlass"  # where callers find it, and what tracebacks say


class CheckpointError(ValueError):
    """A checkpoint file is damaged, inconsistent, or not what it claims to be."""
