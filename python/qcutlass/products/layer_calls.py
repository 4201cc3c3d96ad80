"""Eager calls of layers: the extension knows what tensors a layer always passes, and runs a call like an earlier one.

It quantises the input, where the layer does, and multiplies it, in one call that looks at nothing but the input: a
layer's buffers are those of before if they are the same objects, of the same layout, with their memory where it was.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass.products.block_operators import BlocksCall
from qcutlass.products.kind import Call, Kind
from qcutlass.products.library import is_eager
from qcutlass.products.quantizer_operators import QuantizeCall

CALLS: Final = "_calls"
"""The attribute of a layer that has its `_C.LayerCalls`; neither copied nor pickled with it."""

_SIZES: Final = ("in_features", "out_features", "bits", "group_size", "weight_dtype")
"""Attributes of all layers that their calls depend on."""

_MOST: Final = 64
"""Calls of a layer that are remembered, some 1 KB each."""


class Steps(NamedTuple):
    """What a layer computes of its input.

    Attributes:
        kind, call: of the product.
        quantizer: what its activations were made by; None: they are the input.
        outputs: of the quantiser.
    """

    kind: Kind
    call: Call
    quantizer: QuantizeCall | BlocksCall | None = None
    outputs: tuple[Tensor | None, ...] = ()


def repeat(layer: dict[str, Any], a: Tensor, activation: str | None) -> Tensor | None:
    """The output of a layer with these attributes, where a call like it has been remembered; None: to be checked."""
    calls: _C.LayerCalls | None = layer.get(CALLS)
    return None if calls is None else calls.repeat(a, layer, activation)


def begin(layer: dict[str, Any], settings: Sequence[str], a: Tensor, activation: str | None) -> _C.LayerState | None:
    """What a call depends on, for `remember`: a layer with these attributes, of which it depends on `settings`.

    It is taken before the layer's buffers and options are read, as another thread may change them during the call.
    """
    if not is_eager(a) or not isinstance(a, Tensor) or a.is_nested or not a.numel():
        return None
    calls: _C.LayerCalls | None = layer.get(CALLS)
    if calls is None:
        calls = layer.setdefault(CALLS, _C.LayerCalls((*settings, *_SIZES), _MOST))
    return calls.begin(a, layer, activation)


def remember(begin: _C.LayerState, layer: dict[str, Any], a: Tensor, steps: Steps) -> None:
    """Remembers a call of `a` that was just run, unless the layer is another than at its `begin`."""
    quantizer: Any = steps.quantizer
    if not (quantizer is None or quantizer.is_direct):
        return
    calls: _C.LayerCalls = layer[CALLS]
    arguments = None if quantizer is None else quantizer.fill(*steps.outputs)[0]
    new_scratch = functools.partial(torch.empty, dtype=torch.uint8, device=a.device)
    calls.remember(begin, steps.kind.launches, tuple(steps.call), arguments, new_scratch)
