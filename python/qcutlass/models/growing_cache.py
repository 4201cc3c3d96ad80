"""Caches of keys and values that are written in place: transformers' dynamic one copies all of it for every token, and
its static one counts tokens anew in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, StaticLayer

_STEP: Final = 256  # tokens that there is room for at least; then half as many again as there are


@dataclass
class Room:
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

    All else is `DynamicLayer`'s. Where something replaces `keys` or `values` (cropping, reordering), or another copy of
    the layer wrote into the room, the next update takes a new room.
    """

    keys: Any
    values: Any
    _room: Room | None = None
    _shown: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *arguments: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends `[B, heads, tokens, size]`; all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        room = self._room_for(key_states, value_states)
        room.append(key_states, value_states)
        return self._show(room)

    def room_for_one(self) -> Room:
        """Memory with a place for one more token of each sequence, behind those that are there, which are some."""
        room = self._room
        if room is None or not self.is_as(room, self.keys.shape[-2]) or not room.used < room.keys.shape[-2]:
            room = self._room_for(self.keys[:, :, :1], self.values[:, :, :1])
        return room

    def is_as(self, room: Room, used: int) -> bool:
        """Whether its tokens are all of those in a room, so many."""
        shown = self._shown
        return (
            self._room is room
            and room.used == used == self.keys.shape[-2]
            and shown is not None
            and self.keys is shown[0]
            and self.values is shown[1]
        )

    def append_written(self, room: Room) -> None:
        """Counts one more token, whose keys and values were written behind the others of the room."""
        room.used += 1
        self._show(room)

    def _room_for(self, key_states: Tensor, value_states: Tensor) -> Room:
        """Memory with the tokens that there are, and places for these."""
        room, length, count = self._room, self.get_seq_length(), key_states.shape[-2]
        if room is None or not self.is_as(room, length) or length + count > room.keys.shape[-2]:
            room = self._room = _new_room(key_states, value_states, length + count)
            if length:
                room.append(self.keys, self.values)
        return room

    def _show(self, room: Room) -> tuple[Tensor, Tensor]:
        self._shown = room.keys.narrow(-2, 0, room.used), room.values.narrow(-2, 0, room.used)
        self.keys, self.values = self._shown
        return self._shown


def _new_room(keys: Tensor, values: Tensor, length: int) -> Room:
    capacity = max(_STEP, length + length // 2)
    first, second = (part.new_empty((*part.shape[:-2], capacity, part.shape[-1])) for part in (keys, values))
    return Room(first, second)


def growing_cache(config: Any) -> DynamicCache:
    """A cache for a model of this configuration; layers with a sliding window keep transformers' own kind.

    Models and their `generate` take it as `cache`, before transformers 5.24 as `past_key_values`.

    Example:
        >>> from qcutlass.models.cache_argument import CACHE
        >>> from qcutlass.models.growing_cache import growing_cache
        >>> def continued(model, ids):
        ...     return model.generate(ids, **{CACHE: growing_cache(model.config)})
    """
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class PlacedLayer(StaticLayer):  # type: ignore[misc]
    """Keys and values of a layer in a static cache, `[B, heads, length, size]`, whose layers share one place.

    Attributes:
        cumulative_length: the place, int64 `[1]`: the token that the next one becomes. Whoever owns it moves it on when
            all layers have theirs.
    """

    keys: Any
    values: Any

    def __init__(self, length: int, place: Tensor) -> None:
        super().__init__(length)
        self.cumulative_length = place

    def update(
        self, key_states: Tensor, value_states: Tensor, *arguments: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes `[B, heads, tokens, size]` at the place; all keys and values, with what lies behind them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        places = self.cumulative_length + torch.arange(key_states.shape[-2], device=key_states.device)
        self.keys.index_copy_(2, places, key_states)
        self.values.index_copy_(2, places, value_states)
        return self.keys, self.values
