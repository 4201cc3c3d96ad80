"""The tensors of a layer, or of a block of experts, that wait until all of them are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from qcutlass.errors import UnsupportedError

Shard = int | str | tuple[int, ...] | None
"""Which part of a fused layer a tensor belongs to: a number, a name, several that are fused in the file; None: all."""
_PLACES: Final = {"q": 0, "k": 1, "v": 2}
_PARTS: Final = {"w1": "gate", "w2": "down", "w3": "up"}
"""The layers of an expert, by the names that vLLM has for them, and Mixtral's files."""
_DONE: Final = "layers of qcutlass take no weights after loading; start the engine anew"


def register(layer: Any, waiting: Waiting | WaitingExperts, suffixes: Mapping[str, str]) -> None:
    """Gives a layer parameters that hold nothing, by name, whose tensors wait under a suffix."""
    for name, suffix in suffixes.items():
        parameter: Any = nn.Parameter(torch.zeros(1, dtype=torch.uint8), requires_grad=False)
        parameter.weight_loader = waiting.loader(suffix)
        layer.register_parameter(name, parameter)


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
                raise UnsupportedError(f"{suffix}: {_DONE}")
            self.parts.setdefault(_places(shard), {})[suffix] = tensor

        return load

    def take(self) -> dict[tuple[int, ...] | None, dict[str, Tensor]]:
        """The tensors, which are not kept."""
        parts, self.parts, self._is_done = self.parts, {}, True
        return parts


class ExpertPart(NamedTuple):
    """One layer of one expert.

    Attributes:
        expert: its number among those of this rank.
        part: "gate", "up" or "down".
    """

    expert: int
    part: str


class WaitingExperts:
    """The tensors of a block of experts, as `Waiting` has those of a layer; those of other ranks are not kept.

    Args:
        local: the number on this rank of an expert of the model; negative: it is on another one.

    Attributes:
        parts: by expert and layer, then by suffix.

    Example:
        >>> import torch
        >>> from qcutlass.vllm.waiting import WaitingExperts
        >>> waiting = WaitingExperts(lambda expert: expert - 2)
        >>> load = waiting.loader("scales")
        >>> [load(None, torch.ones(1, 32), "w13_scales", "w3", expert, True) for expert in (1, 2)]
        [False, True]
        >>> list(waiting.parts)
        [ExpertPart(expert=0, part='up')]
        >>> waiting.names(0, "up")
        ['2.up_proj', '2.w3']
    """

    def __init__(self, local: Callable[[int], int]) -> None:
        self._local = local
        self._numbers: dict[int, int] = {}  # in the model, of experts of this rank
        self.parts: dict[ExpertPart, dict[str, Tensor]] = {}
        self._is_done = False

    def loader(self, suffix: str) -> Callable[..., bool | None]:
        """The function by which an engine hands over the tensors of one name, one expert's at a time."""

        def load(
            param: Any,
            loaded_weight: Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            if self._is_done:
                raise UnsupportedError(f"{weight_name}: {_DONE}")
            expert = self._local(expert_id)
            if expert >= 0:
                self._numbers[expert] = expert_id
                self.parts.setdefault(ExpertPart(expert, _PARTS[shard_id]), {})[suffix] = loaded_weight
            return expert >= 0 if return_success else None

        return load

    def names(self, expert: int, part: str) -> list[str]:
        """Names that a layer of an expert of this rank may have in a checkpoint, within its block."""
        number = self._numbers.get(expert, expert)
        return [f"{number}.{word}" for word in (f"{part}_proj", *(word for word in _PARTS if _PARTS[word] == part))]

    def take(self) -> dict[ExpertPart, dict[str, Tensor]]:
        """The tensors, which are not kept."""
        parts, self.parts, self._is_done = self.parts, {}, True
        return parts


def _places(shard: Shard) -> tuple[int, ...] | None:
    if shard is None or isinstance(shard, tuple):
        return shard
    return (_PLACES[shard] if isinstance(shard, str) else shard,)
