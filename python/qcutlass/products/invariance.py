"""Whether all products are batch-invariant: a row's bits do not depend on how many rows there are, nor on the others.

Calls say so for themselves by `batch_invariant=True`; the environment, or what serves a model, for all of them.
"""

from __future__ import annotations

import os
from typing import Final

from qcutlass import _C

VARIABLE: Final = "QCUTLASS_BATCH_INVARIANT"

_MEANINGS: Final = {"": False, "0": False, "1": True}


class _Setting:
    """The setting of this process; None until it is first asked for."""

    value: bool | None = None


def is_on() -> bool:
    """Whether all products are batch-invariant: `QCUTLASS_BATCH_INVARIANT=1`, read once, or `switch` said so.

    Raises:
        ValueError: the variable is neither 0 nor 1.

    Example:
        >>> from qcutlass.products import invariance
        >>> invariance.is_on()
        False
    """
    if _Setting.value is None:
        written = os.environ.get(VARIABLE, "")
        if written not in _MEANINGS:
            raise ValueError(f"{VARIABLE}: expected 0 or 1 in the environment, got {written!r}; unset it or write 1")
        _Setting.value = _MEANINGS[written]
    return _Setting.value


def switch(on: bool | None) -> None:
    """Makes all products of this process batch-invariant, or not; None: as the environment says.

    CUDA graphs that were captured before stay as they are.
    """
    _Setting.value = on
    _C.forget_launches()
