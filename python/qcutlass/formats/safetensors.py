"""Safetensors files with float weights: matrices named `*.weight`, read one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from torch import Tensor

from qcutlass.errors import CheckpointError

_FLOATS: Final = frozenset({"F32", "F16", "BF16"})
_NOT_LINEAR: Final = ("embed", "wte", "wpe", "norm")


class SafetensorsCheckpoint:
    """An open safetensors file; `qcutlass.formats.Checkpoint` describes the members.

    Args:
        path: of the file, which is mapped into memory.

    Raises:
        CheckpointError: the file is truncated or its header contradicts itself.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _open(path)
        self.linears: list[str] = []
        self.skipped: dict[str, str] = {}
        for name in self._file.keys():  # noqa: SIM118 -- a file handle, not a mapping
            part = self._file.get_slice(name)
            if not name.endswith(".weight") or len(part.get_shape()) != 2 or any(word in name for word in _NOT_LINEAR):
                continue
            kind = part.get_dtype()
            if kind in _FLOATS:
                self.linears.append(name)
            else:
                self.skipped[name] = f"{kind} weights are not read, only {', '.join(sorted(_FLOATS))}"

    def load(self, name: str) -> Tensor:
        """See `qcutlass.formats.Checkpoint`; KeyError for a name that is not in `linears`."""
        if name not in self.linears:
            raise KeyError(name)
        weight: Tensor = self._file.get_tensor(name)
        if not bool(weight.isfinite().all()):
            raise CheckpointError(f"{self._path}: {name} holds NaN or infinity")
        return weight


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, ValueError, MemoryError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error})") from error
