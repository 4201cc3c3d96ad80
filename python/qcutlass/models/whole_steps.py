"""All blocks of a model as one, for one token of each sequence on the CPU: one call of the extension.

From block to block Python and its data would leave the processor's caches for weights, and come back.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import sys
import weakref
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import Cache

from qcutlass.models.block_steps import PLAIN, BlockStep, Held, is_exact, step_of
from qcutlass.models.cache_argument import pop_cache
from qcutlass.models.families import FAMILIES
from qcutlass.models.growing_cache import GrowingLayer, Room
from qcutlass.products.decoder_block import PlacedBlocks
from qcutlass.products.library import is_eager


class _Rooms:
    """The rooms of a cache's layers, and blocks that write there. It keeps no room alive."""

    def __init__(self, rooms: Sequence[Room], blocks: PlacedBlocks) -> None:
        self.blocks = blocks
        self._rooms = [(weakref.ref(room), room.addresses) for room in rooms]
        self._rows = len(rooms[0].keys)

    def used_by(self, layers: Sequence[Any], rows: int) -> int | None:
        """Tokens of all layers; None where they are not in these rooms, or have no place there for so many rows."""
        used: int = layers[0].get_seq_length()
        for layer, (reference, addresses) in zip(layers, self._rooms, strict=True):
            room = reference()
            if room is None or type(layer) is not GrowingLayer or not layer.has_place_in(room):
                return None
            if room.used != used or room.addresses != addresses:
                return None
        return used if rows == self._rows else None


class _Steps:
    """The steps of blocks that follow one another, as they were when they were prepared."""

    def __init__(self, blocks: Sequence[Any], steps: Sequence[BlockStep], held: Held) -> None:
        self._blocks, self._steps, self._held = blocks, steps, held
        self._places = [block.self_attn.layer_idx for block in blocks]
        self._rooms: weakref.WeakKeyDictionary[Room, _Rooms] = weakref.WeakKeyDictionary()  # by that of the first block

    @staticmethod
    def of_one(block: Any, residual: Tensor, angles: tuple[Tensor, Tensor]) -> _Steps | None:
        """A block's own; None where a step would not do what its modules do."""
        step = step_of(block, residual, *angles)
        return None if step is None else _Steps([block], [step], step.held)

    @staticmethod
    def of_all(layers: BlockList, residual: Tensor, angles: tuple[Tensor, Tensor]) -> _Steps | None:
        """Those of a model; None where something is called between them, or one of them cannot take a step."""
        blocks: list[Any] = list(layers._modules.values())
        if len(set(map(id, blocks))) < len(blocks) or any(map(_has_hooks, blocks)) or not all(map(is_exact, blocks)):
            return None
        for before, after in itertools.pairwise(blocks):
            if before.following[0] is not after._modules.get("input_layernorm"):
                return None
        steps = [step_of(block, residual, *angles) for block in blocks]
        known = [step for step in steps if step is not None]
        if len(known) < len(blocks) or len({step.kind for step in known}) > 1:
            return None
        return _Steps(blocks, known, Held.joined([step.held for step in known], blocks))

    def are_of(self, layers: BlockList, residual: Tensor, angles: tuple[Tensor, Tensor]) -> bool:
        """Whether the blocks of a model are these, and as they were, and these tensors are what they take."""
        blocks = list(layers._modules.values())
        if len(blocks) != len(self._blocks) or not all(map(operator.is_, blocks, self._blocks)):
            return False
        return self._steps[0].fits(residual, *angles) and self._held.is_unchanged()

    def take(self, hidden_states: Tensor, angles: tuple[Tensor, Tensor], cache: Any) -> Tensor | None:
        """The residual stream behind the blocks, whose norm is handed out; None where a cache layer does not serve."""
        if not isinstance(cache, Cache) or max(self._places) >= len(cache.layers):
            return None
        layers = [cache.layers[place] for place in self._places]
        room = layers[0].room if type(layers[0]) is GrowingLayer else None
        found = None if room is None else self._rooms.get(room)
        used = None if found is None else found.used_by(layers, len(hidden_states))
        if found is None or used is None:
            rooms = self._rooms_for(layers, len(hidden_states))
            if rooms is None:
                return None
            places = [step.place(room) for step, room in zip(self._steps, rooms, strict=True)]
            found = _Rooms(rooms, PlacedBlocks([step.block for step in self._steps], places))
            used = found.used_by(layers, len(hidden_states))
            if used is None:
                return None
            self._rooms[rooms[0]] = found
        normed = self._blocks[0].input_layernorm.forward(hidden_states)
        total, normed = found.blocks.run(used, normed, hidden_states, angles)
        for layer in layers:
            layer.append_written()
        self._blocks[-1].following[0].hand_out(total, normed)
        return total

    def _rooms_for(self, layers: Sequence[Any], rows: int) -> list[Room] | None:
        """Rooms with a place for one more token of so many sequences; None where a layer has none."""
        if len(set(map(id, layers))) < len(layers):  # the place for a token of one would be another's
            return None
        if not all(type(layer) is GrowingLayer and layer.is_initialized for layer in layers):
            return None
        if not all(step.takes(rows, layer) for step, layer in zip(self._steps, layers, strict=True)):
            return None
        return [layer.room_for_one() for layer in layers]


def _loops() -> Iterator[CodeType]:
    """The code of the models' loops over their blocks, where it is transformers' own."""
    for family, file in FAMILIES.items():
        code: CodeType = inspect.unwrap(getattr(file, f"{family}Model").forward).__code__
        if code.co_filename == file.__file__:
            yield code


_LOOPS: Final = frozenset(_loops())


class BlockList(nn.ModuleList):
    """The blocks of a model, whose loop over all of them finds one, which stands for them.

    Only transformers' own loop does, which calls what it finds, and nothing else: who asks is told by the frame of the
    call. Hooks, loops of others and everybody behind an interrupted call find the blocks.
    """

    _steps: _Steps | None = None

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice) and not torch.compiler.is_compiling():
            caller = sys._getframe(1)
            if caller.f_code in _LOOPS and self._is_looped_over(caller.f_locals.get("self"), index):
                return (_AllBlocks(self),)
        return super().__getitem__(index)

    def __setitem__(self, index: int, module: nn.Module) -> None:
        self._steps = None  # which keep the blocks alive
        super().__setitem__(index, module)

    def __delitem__(self, index: int | slice) -> None:
        self._steps = None
        super().__delitem__(index)

    def _is_looped_over(self, stack: Any, index: slice) -> bool:
        """Whether these are all the blocks, and get one mask."""
        begin, end, step = index.indices(len(self))
        if (begin, step) != (0, 1) or not 0 < end == len(self) or stack._modules.get("layers") is not self:
            return False
        return len(set(getattr(stack.config, "layer_types", None) or ())) <= 1

    def step(self, hidden_states: Tensor, angles: tuple[Tensor, Tensor], cache: Any) -> Tensor | None:
        """The output of the last block for one token of each sequence; None where a step would not do what they do."""
        if not _is_one_token(hidden_states):
            return None
        steps = self._steps
        if steps is None or not steps.are_of(self, hidden_states, angles):
            self._steps = steps = _Steps.of_all(self, hidden_states, angles)
        return None if steps is None else steps.take(hidden_states, angles, cache)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_steps"}


class _AllBlocks:
    """What a model's loop finds in place of its blocks."""

    def __init__(self, layers: BlockList) -> None:
        self._layers = layers

    def __call__(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """The output of the last block; `options`: what the loop gives to each."""
        mask, angles = options.get("attention_mask"), options.get("position_embeddings")
        rest = {name: value for name, value in options.items() if name not in ("attention_mask", "position_embeddings")}
        cache = pop_cache(rest)
        if mask is None and angles is not None and rest.keys() <= PLAIN:
            out = self._layers.step(hidden_states, angles, cache)
            if out is not None:
                return out
        blocks: list[Any] = list(self._layers._modules.values())
        for block in blocks:
            hidden_states = block(hidden_states, **options)
        return hidden_states

    def __getattr__(self, name: str) -> Any:
        """What the loop asks a block for, as the kind of its mask: that of the first."""
        return getattr(self._layers[0], name)


def run_as_one(stack: nn.Module) -> None:
    """Lets all blocks of a model on the CPU be one in its loop."""
    layers: Any = stack.layers
    if type(layers) is nn.ModuleList:
        layers.__class__ = BlockList


def stepped(block: Any, hidden_states: Tensor, angles: tuple[Tensor, Tensor], cache: Any) -> Tensor | None:
    """The output of a block for one token of each sequence; None where a step would not do what its modules do."""
    if not _is_one_token(hidden_states):
        return None
    steps = _Steps.of_one(block, hidden_states, angles)
    return None if steps is None else steps.take(hidden_states, angles, cache)


def _is_one_token(hidden_states: Tensor) -> bool:
    """Whether one token of each sequence comes to a block in an ordinary call on the CPU."""
    if hidden_states.shape[1] != 1 or not hidden_states.is_cpu or not is_eager(hidden_states):
        return False
    if torch.is_autocast_enabled("cpu"):  # tensors of several types meet
        return False
    return not torch.is_grad_enabled() and torch.autograd.forward_ad._current_level < 0


def _has_hooks(module: Any) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
