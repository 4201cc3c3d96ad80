"""The tensors of a layer that wait until all of them are there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from qcutlass.errors import UnsupportedError

Shard = int | str | tuple[int, ...] | None
"""Which part of a fused layer a tensor belongs to: a number, a name, several that are fused in the file; None: all."""
_PLACES: Final = {"q": 0, "k": 1, "v": 2}


class Waiting:
    """Tensors as the checkpoint holds them, whole on each rank: safetensors files are mapped, so they take no memory.

    Attributes:
        parts: by the places of the parts that they belong to, then by suffix.

    Example:
        >>> import torch
        >>> from qcutlass.vllm.waiting import Waiting
        >>> waiting = Waiting()
        >>> waiting.loader("scales")(None, torch.ones(1, 32), "k")
        >>> [(places, list(tensors)) for places, tensors in waiting.parts.items()]
        [((1,), ['scales'])]
    """

    def __init__(self) -> None:
        self.parts: dict[tuple[int, ...] | None, dict[str, Tensor]] = {}
        self._is_done = False

    def loader(self, suffix: str) -> Callable[..., None]:
        """The function by which an engine hands over the tensors of one name."""

        def load(parameter: Any, tensor: Tensor, shard: Shard = None) -> None:
            if self._is_done:
                raise UnsupportedError(
                    f"{suffix}: layers of qcutlass take no weights after loading; start the engine anew"
                )
            self.parts.setdefault(_places(shard), {})[suffix] = tensor

        return load

    def take(self) -> dict[tuple[int, ...] | None, dict[str, Tensor]]:
        """The tensors, which are not kept."""
        parts, self.parts, self._is_done = self.parts, {}, True
        return parts


def _places(shard: Shard) -> tuple[int, ...] | None:
    if shard is None or isinstance(shard, tuple):
        return shard
    return (_PLACES[shard] if isinstance(shard, str) else shard,)
