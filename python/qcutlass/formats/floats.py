"""Safetensors files with float weights: matrices named `*.weight`, which are still to be quantised."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from qcutlass.formats.layers import FloatLinear
from qcutlass.formats.tensors import FLOATS, LayerTensors

SUFFIXES: Final = ("weight", "bias")
_NOT_LINEAR: Final = ("embed", "wte", "wpe", "norm")
_CONV1D_MODELS: Final = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")
"""Types of the models of transformers that have `Conv1D` layers, whose weights lie transposed."""
_CONV1D: Final = ("c_attn", "q_attn", "c_fc", "c_proj")  # their names, which no other layers of these models have


def matches(layer: LayerTensors) -> bool:
    """Whether there is a matrix whose name is not that of an embedding or a norm."""
    return len(layer.info("weight").shape) == 2 and not any(word in layer.name for word in _NOT_LINEAR)


def obstacle(layer: LayerTensors) -> str | None:
    """The reason why a layer cannot be loaded; None if it can."""
    kind = layer.info("weight").dtype
    return None if kind in FLOATS else f"{kind} weights are not read, only {', '.join(sorted(FLOATS))}"


def has_conv1d(model_types: Iterable[str]) -> bool:
    """Whether a model of these types has `Conv1D` layers."""
    return any(name in _CONV1D_MODELS for name in model_types)


def load(layer: LayerTensors) -> FloatLinear:
    """See `qcutlass.formats.load`."""
    n, k = layer.matrix("weight", FLOATS)
    if layer.name.rpartition(".")[2] in _CONV1D and has_conv1d(layer.config.model_types):
        return FloatLinear(layer.finite("weight").T.contiguous(), layer.bias(k), is_transposed=True)
    return FloatLinear(layer.finite("weight"), layer.bias(n))
