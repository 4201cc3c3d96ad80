"""Layers whose tensors accelerate keeps elsewhere, on a disk or in the memory of the host, until they are called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor, nn

from qcutlass.layers.stored_form import STORED, from_stored

HOOK: Final = "_hf_hook"
"""The attribute that accelerate gives to modules whose tensors it moves."""


class AsBuffers(Mapping[str, Tensor]):
    """The tensors of a weight-only layer's state, as its buffers: by their names, in their shapes.

    accelerate puts what a state has into the buffers of the same name.

    Args:
        state: by names within the layer, which are read when they are asked for.
        layer: whose buffers may be on the meta device.
    """

    def __init__(self, state: Mapping[str, Tensor], layer: Any) -> None:
        self._state, self._layer = state, layer

    def __getitem__(self, name: str) -> Tensor:
        if name != "w_packed" and (found := self._read(name)) is not None:
            return found
        names = [each for each in (*self._layer._buffers, *STORED) if each != "w_packed" or each == name]
        stored = {each: self._read(each) for each in names}
        buffer = from_stored(stored, self._layer.bits, self._layer.weight_dtype).get(name)
        if buffer is None:
            raise KeyError(name)
        return buffer

    def _read(self, name: str) -> Tensor | None:
        try:
            return self._state[name]
        except KeyError:  # not asked before: one that accelerate has on a disk would be read for that
            return None

    def __iter__(self) -> Iterator[str]:
        return (name for name, buffer in self._layer._buffers.items() if buffer is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def adapt(hook: Any, layer: Any) -> None:
    """Has a hook of accelerate that keeps buffers of a weight-only layer elsewhere bring them as buffers.

    Raises:
        ValueError: they are not in the state by the layer's name.
    """
    for each in getattr(hook, "hooks", (hook,)):  # several, one after the other
        state = getattr(each, "weights_map", None)
        if state is None or not getattr(each, "offload_buffers", False) or isinstance(state, AsBuffers):
            continue
        if not layer.is_stored:
            raise ValueError(
                "offload_buffers: accelerate can't keep the weights of fused layers elsewhere, which are in one tensor "
                "here and in several in the state; pass offload_buffers=False, or load the model anew and call "
                "fuse_projections or fuse_block after accelerate, which leaves such layers as they are"
            )
        each.weights_map = AsBuffers(state, layer)


@contextmanager
def present(*modules: nn.Module) -> Iterator[None]:
    """The tensors of modules that others compute with, which do not call them, are where they compute."""
    hooked: list[Any] = [module for module in modules if hasattr(module, HOOK)]
    for module in hooked:
        module._hf_hook.pre_forward(module)
    try:
        yield
    finally:
        for module in hooked:
            module._hf_hook.post_forward(module, None)


def is_offloaded(*modules: nn.Module) -> bool:
    """Whether `present` has something to do."""
    return any(hasattr(module, HOOK) for module in modules)
