"""Blocks of a model that compute those behind them, for one token of each sequence, while the model runs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from qcutlass.layers.fusing import version_of
from qcutlass.models.block_steps import step_of
from qcutlass.models.cache_argument import cache_layer
from qcutlass.models.growing_cache import GrowingLayer, Room
from qcutlass.products.decoder_block import run_blocks
from qcutlass.products.library import is_eager


class _Computed(NamedTuple):
    """What a block has made of one token, perhaps before it was called: of what, for which layer of a cache."""

    hidden_states: Tensor
    version: int | None
    angles: tuple[Tensor, Tensor]
    cache: Any
    layer: GrowingLayer
    room: Room
    used: int
    total: Tensor
    normed: Tensor

    def is_for(self, hidden_states: Tensor, angles: tuple[Tensor, Tensor], cache: Any) -> bool:
        """Whether a block that is called so would make the same."""
        return (
            self.hidden_states is hidden_states
            and self.version == version_of(hidden_states)
            and self.cache is cache
            and self.angles[0] is angles[0]
            and self.angles[1] is angles[1]
            and self.layer.is_as(self.room, self.used)
        )

    def taken(self, block: Any) -> Tensor:
        """The block's output, when it is called."""
        self.layer.append_written(self.room)
        block.following[0].hand_out(self.total, self.normed)
        return self.total


class _Run:
    """One call of the model that holds blocks. Its own code does nothing between them but call them, so that the first
    one computes the others, too, as far as they have no hooks: from block to block Python and its data would leave the
    processor's caches for weights, and come back."""

    def __init__(self, stack: Any) -> None:
        self.stack = stack
        self._found: dict[int, _Computed] = {}

    def take(self, block: Any) -> _Computed | None:
        """What an earlier block has computed for this one, once."""
        return self._found.pop(id(block), None)

    def behind(self, block: Any) -> Iterator[Any]:
        """Blocks that follow one, as far as nothing is called between them and the norm of one's output is theirs."""
        seen = {id(block)}
        for before, after in itertools.pairwise(self.stack.layers):
            if before is block:
                is_next = before.following[0] is after._modules.get("input_layernorm") and hasattr(after, "following")
                if not is_next or id(after) in seen or _has_hooks(before, after):
                    return
                seen.add(id(after))
                block = after
                yield after

    def keep(self, block: Any, computed: _Computed) -> None:
        self._found[id(block)] = computed


class _Runs(threading.local):
    """Those of this thread, the innermost last."""

    def __init__(self) -> None:
        self.all: list[_Run] = []

    def end(self, stack: Any) -> None:
        """Forgets the run of a model, and those within it, which Ctrl-C may have ended without a word."""
        for index, run in enumerate(self.all):
            if run.stack is stack:
                del self.all[index:]
                return


_runs: Final = _Runs()


def run_ahead(stack: nn.Module) -> None:
    """Lets the blocks of a model compute those that follow them, while the model runs."""
    if _begin not in stack._forward_pre_hooks.values():
        stack.register_forward_pre_hook(_begin)
        stack.register_forward_hook(_end, always_call=True)


def _begin(stack: Any, arguments: Any) -> None:
    if not torch.compiler.is_compiling():
        _runs.end(stack)
        _runs.all.append(_Run(stack))


def _end(stack: Any, arguments: Any, output: Any) -> None:
    _runs.end(stack)


def stepped(block: Any, hidden_states: Tensor, angles: tuple[Tensor, Tensor], cache: Any) -> Tensor | None:
    """The output of a block for one token of each sequence; None where a step would not do what its modules do."""
    run = _runs.all[-1] if _runs.all else None
    computed = None if run is None else run.take(block)
    if computed is not None and computed.is_for(hidden_states, angles, cache):
        return computed.taken(block)
    if not _is_one_token(hidden_states):
        return None
    blocks, steps = [], []
    layers: list[GrowingLayer] = []
    for each in (block, *(() if run is None else run.behind(block))):
        step = step_of(each, hidden_states, *angles)
        layer = None if step is None else cache_layer(cache, each.self_attn.layer_idx, GrowingLayer)
        if step is None or layer is None or not step.takes(len(hidden_states), layer):
            break
        if any(layer is other for other in layers):  # whose room for a token is that of another block
            break
        blocks.append(each)
        steps.append(step)
        layers.append(layer)
    if not blocks:
        return None
    rooms = [layer.room_for_one() for layer in layers]
    places = [step.place(room) for step, room in zip(steps, rooms, strict=True)]
    normed = block.input_layernorm.forward(hidden_states)
    results = run_blocks([step.block for step in steps], places, normed, hidden_states, angles)
    given, found = hidden_states, []
    for layer, room, (total, following) in zip(layers, rooms, results, strict=True):
        found.append(_Computed(given, version_of(given), angles, cache, layer, room, room.used, total, following))
        given = total
    if run is not None:
        for each, computed in zip(blocks[1:], found[1:], strict=True):
            run.keep(each, computed)
    return found[0].taken(block)


def _is_one_token(hidden_states: Tensor) -> bool:
    """Whether one token of each sequence comes to a block in an ordinary call on the CPU."""
    if hidden_states.shape[1] != 1 or not hidden_states.is_cpu or not is_eager(hidden_states):
        return False
    return not torch.is_grad_enabled() and torch.autograd.forward_ad._current_level < 0


def _has_hooks(*modules: nn.Module) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)
