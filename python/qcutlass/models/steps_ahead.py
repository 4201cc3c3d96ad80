"""All blocks of a model as one, for one token of each sequence on the CPU: one call of the extension.

From block to block Python and its data would leave the processor's caches for weights, and come back.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from qcutlass.models.block_steps import PLAIN, BlockStep, Held, step_of
from qcutlass.models.cache_argument import cache_layer, pop_cache
from qcutlass.models.growing_cache import GrowingLayer
from qcutlass.products.decoder_block import run_blocks
from qcutlass.products.library import is_eager


class _Steps:
    """The steps of blocks that follow one another, as they were when they were prepared."""

    def __init__(self, blocks: Sequence[Any], steps: Sequence[BlockStep], held: Held) -> None:
        self._blocks, self._steps, self._held = blocks, steps, held

    @staticmethod
    def of_one(block: Any, residual: Tensor, angles: tuple[Tensor, Tensor]) -> _Steps | None:
        """A block's own; None where a step would not do what its modules do."""
        step = step_of(block, residual, *angles)
        return None if step is None else _Steps([block], [step], step.held)

    @staticmethod
    def of_all(layers: BlockList, residual: Tensor, angles: tuple[Tensor, Tensor]) -> _Steps | None:
        """Those of a model; None where something is called between them, or one of them cannot take a step."""
        blocks: list[Any] = list(layers._modules.values())
        if not blocks or len(set(map(id, blocks))) < len(blocks) or any(map(_has_hooks, blocks)):
            return None
        for before, after in itertools.pairwise(blocks):
            if not hasattr(before, "following") or before.following[0] is not after._modules.get("input_layernorm"):
                return None
        steps = [step_of(block, residual, *angles) if hasattr(block, "following") else None for block in blocks]
        known = [step for step in steps if step is not None]
        if len(known) < len(blocks) or len({step.kind for step in known}) > 1:
            return None
        order = [(layers._modules, name, block) for name, block in layers._modules.items()]
        return _Steps(blocks, known, Held.joined([step.held for step in known], order, blocks))

    def are_of(self, layers: BlockList, residual: Tensor, angles: tuple[Tensor, Tensor]) -> bool:
        """Whether the blocks of a model are these, and as they were, and these tensors are what they take."""
        if len(layers._modules) != len(self._blocks) or not self._steps[0].fits(residual, *angles):
            return False
        return self._held.is_unchanged()

    def take(self, hidden_states: Tensor, angles: tuple[Tensor, Tensor], cache: Any) -> Tensor | None:
        """The residual stream behind the blocks, whose norm is handed out; None where a cache layer does not serve."""
        layers: list[GrowingLayer] = []
        for block, step in zip(self._blocks, self._steps, strict=True):
            layer = cache_layer(cache, block.self_attn.layer_idx, GrowingLayer)
            if layer is None or not step.takes(len(hidden_states), layer):
                return None
            layers.append(layer)
        if len(set(map(id, layers))) < len(layers):  # the room for a token of one would be another's
            return None
        rooms = [layer.room_for_one() for layer in layers]
        places = [step.place(room) for step, room in zip(self._steps, rooms, strict=True)]
        normed = self._blocks[0].input_layernorm.forward(hidden_states)
        prepared = [step.block for step in self._steps]
        total, normed = run_blocks(prepared, places, normed, hidden_states, angles)
        for layer, room in zip(layers, rooms, strict=True):
            layer.append_written(room)
        self._blocks[-1].following[0].hand_out(total, normed)
        return total


class BlockList(nn.ModuleList):
    """The blocks of a model. While the model runs, its loop over all of them finds one, which stands for them."""

    _steps: _Steps | None = None

    def __getitem__(self, index: Any) -> Any:
        if not torch.compiler.is_compiling() and isinstance(index, slice) and _runs.has_begun(self):
            first, behind, step = index.indices(len(self))
            if (first, step) == (0, 1) and behind == len(self) > 0:
                _runs.all.pop()
                return (_AllBlocks(self),)
        return super().__getitem__(index)

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


class _Runs(threading.local):
    """Models of this thread whose loops over their blocks are still to come, the innermost last."""

    def __init__(self) -> None:
        self.all: list[nn.Module] = []

    def has_begun(self, layers: BlockList) -> bool:
        return bool(self.all) and self.all[-1]._modules.get("layers") is layers

    def end(self, stack: nn.Module) -> None:
        """Forgets a model, and those within it, which Ctrl-C may have ended without a word."""
        for index, each in enumerate(self.all):
            if each is stack:
                del self.all[index:]
                return


_runs: Final = _Runs()


def run_as_one(stack: nn.Module) -> None:
    """Lets all blocks of a model on the CPU be one in its loop, where that gives each of them the same mask."""
    layers: Any = stack.layers
    if type(layers) is not nn.ModuleList or len(set(getattr(stack.config, "layer_types", None) or ())) > 1:
        return
    layers.__class__ = BlockList
    stack.register_forward_pre_hook(_begin)
    stack.register_forward_hook(_end, always_call=True)


def _begin(stack: Any, arguments: Any) -> None:
    if not torch.compiler.is_compiling():
        _runs.end(stack)
        _runs.all.append(stack)


def _end(stack: Any, arguments: Any, output: Any) -> None:
    _runs.end(stack)


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
    return not torch.is_grad_enabled() and torch.autograd.forward_ad._current_level < 0


def _has_hooks(module: Any) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
