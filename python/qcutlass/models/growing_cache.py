"""Caches of keys and values that are written in place: transformers' dynamic one copies all of it for every token, and
its static one counts tokens anew in every layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, StaticLayer

_STEP: Final = 256  # tokens that there is room for at least; then half as many again as there are


@dataclass(eq=False)
class Room:
    """Memory for keys and values, `[B, heads, capacity, size]`.

    Attributes:
        used: tokens that are in it.
        capacity: tokens that there is memory for. Each token asks each layer, to whom a tensor's shape is slow to come.
    """

    keys: Tensor
    values: Tensor
    used: int = 0
    capacity: int = field(init=False)

    def __post_init__(self) -> None:
        self.capacity = self.keys.shape[-2]

    @property
    def addresses(self) -> tuple[int, int]:
        """Of keys and of values."""
        return self.keys.data_ptr(), self.values.data_ptr()

    def takes(self, keys: Tensor, values: Tensor) -> bool:
        """Whether it has memory for these behind its tokens, of their kind, which may be written."""
        if self.used + keys.shape[-2] > self.capacity or (self.keys.is_inference() > torch.is_inference_mode_enabled()):
            return False
        return _are_alike(keys, self.keys) and _are_alike(values, self.values)

    def append(self, keys: Tensor, values: Tensor) -> None:
        count = keys.shape[-2]
        self.keys.narrow(-2, self.used, count).copy_(keys)
        self.values.narrow(-2, self.used, count).copy_(values)
        self.used += count


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of a layer: `keys` and `values` are the used part of a room that grows by half when it is full.

    All else is `DynamicLayer`'s. Where something replaces `keys` or `values` (cropping, reordering), the next update
    takes a new room. Copies of a layer have no room until then. What has gradients, or is of another kind than the
    tokens before, is appended as `DynamicLayer` does.
    """

    _room: Room | None = None  # None: keys and values are what was put in their place
    _used: int = 0  # tokens of the room that are this layer's
    _shown: tuple[Any, Any] = (None, None)  # keys and values; of a room those that were asked for last
    _is_behind: bool = False  # the room has more than is shown

    @property
    def room(self) -> Room | None:
        """Where its tokens are; None where keys and values were put in their place."""
        return self._room

    @property
    def keys(self) -> Any:
        """`[B, heads, tokens, size]`."""
        return self._keys_and_values()[0]

    @keys.setter
    def keys(self, keys: Any) -> None:
        self._shown, self._room = (keys, self.values), None

    @property
    def values(self) -> Any:
        """`[B, heads, tokens, size]`."""
        return self._keys_and_values()[1]

    @values.setter
    def values(self, values: Any) -> None:
        self._shown, self._room = (self.keys, values), None

    def get_seq_length(self) -> int:
        """Tokens that there are."""
        return super().get_seq_length() if self._room is None else self._used

    def update(
        self, key_states: Tensor, value_states: Tensor, *arguments: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends `[B, heads, tokens, size]`; all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not self._may_write(key_states, value_states):
            return super().update(key_states, value_states, *arguments, **options)  # type: ignore[no-any-return]
        room = self._room_for(key_states, value_states)
        room.append(key_states, value_states)
        self._used, self._is_behind = room.used, True
        return self._keys_and_values()

    def has_place_in(self, room: Room) -> bool:
        """Whether its tokens are all of those in a room, which has memory for one more of each sequence."""
        return self._room is room and self._used == room.used < room.capacity

    def room_for_one(self) -> Room:
        """Memory with a place for one more token of each sequence, behind those that are there, which are some."""
        room = self._room
        if room is None or not self.has_place_in(room):
            room = self._room_for(self.keys[:, :, :1], self.values[:, :, :1])
        return room

    def append_written(self) -> None:
        """Counts one more token, whose keys and values were written behind the others of the room."""
        if self._room is not None:
            self._room.used += 1
            self._used, self._is_behind = self._room.used, True

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_shown": self._keys_and_values(), "_room": None}

    def _may_write(self, key_states: Tensor, value_states: Tensor) -> bool:
        """Whether nothing is lost when these are written behind the tokens that there are."""
        if key_states.requires_grad or value_states.requires_grad:
            return False
        keys, values = self._keys_and_values()
        return not self.get_seq_length() or (_are_alike(key_states, keys) and _are_alike(value_states, values))

    def _room_for(self, key_states: Tensor, value_states: Tensor) -> Room:
        """Memory with the tokens that there are, and places for these, which are like them."""
        room, length = self._room, self.get_seq_length()
        if room is None or room.used != self._used or not room.takes(key_states, value_states):
            shown = self._keys_and_values()
            room = _new_room(key_states, value_states, length + key_states.shape[-2])
            if length:
                room.append(*shown)
            self._room, self._used, self._shown, self._is_behind = room, length, (None, None), True
        return room

    def _keys_and_values(self) -> tuple[Any, Any]:
        room = self._room
        if room is not None and self._is_behind:
            self._shown = room.keys.narrow(-2, 0, self._used), room.values.narrow(-2, 0, self._used)
            self._is_behind = False
        return self._shown


def _are_alike(x: Tensor, others: Tensor) -> bool:
    """Whether they differ in their numbers of tokens alone."""
    shape, other = x.shape, others.shape
    return (x.dtype, x.device, shape[:-2], shape[-1:]) == (
        others.dtype,
        others.device,
        other[:-2],
        other[-1:],
    ) and not others.requires_grad


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
