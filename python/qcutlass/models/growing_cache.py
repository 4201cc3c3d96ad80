"""A cache of keys and values that is written in place: transformers' dynamic one copies all of it for every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from qcutlass.models.block_modules import FusedBlock

_STEP: Final = 256  # tokens that there is room for at least; then half as many again as there are


@dataclass
class _Room:
    """Memory for keys and values, `[B, heads, capacity, size]`; `used`: tokens that are in it."""

    keys: Tensor
    values: Tensor
    used: int = 0

    def append(self, keys: Tensor, values: Tensor) -> None:
        count = keys.shape[-2]
        self.keys.narrow(-2, self.used, count).copy_(keys)
        self.values.narrow(-2, self.used, count).copy_(values)
        self.used += count


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of a layer: `keys` and `values` are the used part of a room that grows by half when it is full.

    All else is `DynamicLayer`'s. Where something replaces `keys` (cropping, reordering), or another copy of the layer
    wrote into the room, the next update takes a new room.
    """

    keys: Any
    values: Any
    _room: _Room | None = None
    _shown: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *arguments: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends `[B, heads, tokens, size]`; all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length, count = self.get_seq_length(), key_states.shape[-2]
        room = self._room
        if room is None or self.keys is not self._shown or room.used != length or length + count > room.keys.shape[-2]:
            room = self._room = _new_room(key_states, value_states, length + count)
            if length:
                room.append(self.keys, self.values)
        room.append(key_states, value_states)
        self.keys = self._shown = room.keys.narrow(-2, 0, room.used)
        self.values = room.values.narrow(-2, 0, room.used)
        return self.keys, self.values


def _new_room(keys: Tensor, values: Tensor, length: int) -> _Room:
    capacity = max(_STEP, length + length // 2)
    first, second = (part.new_empty((*part.shape[:-2], capacity, part.shape[-1])) for part in (keys, values))
    return _Room(first, second)


def growing_cache(config: Any) -> DynamicCache:
    """A cache for a model of this configuration, to be passed as `past_key_values`; layers with a sliding window keep
    transformers' own kind.

    Example:
        >>> from qcutlass.models.growing_cache import growing_cache
        >>> def continued(model, ids):
        ...     return model.generate(ids, past_key_values=growing_cache(model.config))
    """
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def cache_for(model: Any) -> DynamicCache | None:
    """The cache with which a model on the CPU whose blocks are fused decodes; None: its own kind serves better."""
    if model.device.type != "cpu" or not any(isinstance(module, FusedBlock) for module in model.modules()):
        return None
    return growing_cache(model.config)
