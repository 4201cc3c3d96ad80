"""Safetensors files with float weights: matrices named `*.weight`, which are still to be quantised."""

from __future__ import annotations

from typing import Final

from qcutlass.formats.layers import FloatLinear
from qcutlass.formats.tensors import FLOATS, LayerTensors

SUFFIXES: Final = ("weight", "bias")
_NOT_LINEAR: Final = ("embed", "wte", "wpe", "norm")


def matches(layer: LayerTensors) -> bool:
    """Whether there is a matrix whose name is not that of an embedding or a norm."""
    return len(layer.info("weight").shape) == 2 and not any(word in layer.name for word in _NOT_LINEAR)


def obstacle(layer: LayerTensors) -> str | None:
    """The reason why a layer cannot be loaded; None if it can."""
    kind = layer.info("weight").dtype
    return None if kind in FLOATS else f"{kind} weights are not read, only {', '.join(sorted(FLOATS))}"


def load(layer: LayerTensors) -> FloatLinear:
    """See `qcutlass.formats.load`."""
    n, _ = layer.matrix("weight", FLOATS)
    return FloatLinear(layer.finite("weight"), layer.bias(n))
