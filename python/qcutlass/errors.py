"""Exceptions of the package; wrong arguments raise TypeError and ValueError."""

from qcutlass._C import UnsupportedError

__all__ = ["CheckpointError", "UnsupportedError"]

UnsupportedError.__module__ = "qcutlass"  # where callers find it, and what tracebacks say
UnsupportedError.__doc__ = """A valid product or operand for which this build or this GPU has no kernel.

It is a NotImplementedError. The message names the argument; `qcutlass info` shows what was built, and for which GPUs.
"""


class CheckpointError(ValueError):
    """A checkpoint file is damaged, inconsistent, or not what it claims to be."""
