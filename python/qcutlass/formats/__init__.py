"""Checkpoint files: each format yields linear layers in canonical form, or as floats that are still to be quantised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Final, Protocol

from torch import Tensor

from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.quantization import QuantizedTensor

__all__ = ["FORMATS", "Checkpoint", "open_checkpoint"]


class Checkpoint(Protocol):
    """An open file. Tensors are read when asked for."""

    @property
    def linears(self) -> Sequence[str]:
        """Names of the weights of linear layers that can be loaded, in the order of the file."""

    @property
    def skipped(self) -> Mapping[str, str]:
        """Names of weights of linear layers that cannot be loaded, and why."""

    def load(self, name: str) -> QuantizedTensor | Tensor:
        """One weight `[N, K]`: quantised if the file holds it so, else float16, bfloat16 or float32.

        Raises:
            CheckpointError: it is damaged.
        """


def _gguf(path: Path) -> Checkpoint:
    from qcutlass.formats.gguf import GGUFCheckpoint

    return GGUFCheckpoint(path)


def _safetensors(path: Path) -> Checkpoint:
    from qcutlass.formats.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(path)


FORMATS: Final[dict[str, Callable[[Path], Checkpoint]]] = {".gguf": _gguf, ".safetensors": _safetensors}
"""What opens a file, by its suffix."""

_PICKLES: Final = frozenset({".pt", ".pth", ".bin", ".ckpt", ".pkl"})


def open_checkpoint(path: str | PathLike[str]) -> Checkpoint:
    """Opens a checkpoint file.

    Args:
        path: a `.gguf` file, or a `.safetensors` file with float weights.

    Raises:
        FileNotFoundError: there is no such file.
        UnsupportedError: the format is not one of `FORMATS`. Pickles are never read.
        CheckpointError: the file is damaged.

    Example:
        >>> from qcutlass.formats import open_checkpoint
        >>> checkpoint = open_checkpoint("model.gguf")  # doctest: +SKIP
        >>> weight = checkpoint.load(checkpoint.linears[0])  # doctest: +SKIP
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix in _PICKLES:
        raise UnsupportedError(
            f"{path}: pickled checkpoints can run code and are not read; convert to safetensors first"
        )
    if suffix not in FORMATS:
        raise UnsupportedError(f"{path}: expected a file named *{' or *'.join(FORMATS)}")
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if not path.is_file():
        raise CheckpointError(f"{path}: expected a file")
    return FORMATS[suffix](path)
