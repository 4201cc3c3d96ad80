"""Layers of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from torch import Tensor

from qcutlass import formats
from qcutlass.layers.base import QuantLinear, check_activation
from qcutlass.layers.eight_bit import Int8Linear
from qcutlass.layers.weight_only import WeightOnlyLinear

Source = str | PathLike[str] | Mapping[str, Tensor] | formats.Checkpoint


def from_layer(layer: formats.Layer, name: str, activation: str | None = None) -> QuantLinear:
    """The layer that multiplies by what a loader read; ValueError for one that is not quantised."""
    if isinstance(layer, formats.CanonicalLinear):
        return WeightOnlyLinear(
            layer.weight, bias=layer.bias, activation=activation, act_scale=layer.act_scale, perm=layer.perm
        )
    if isinstance(layer, formats.Int8Linear):
        return Int8Linear(
            layer.codes,
            layer.scales,
            bias=layer.bias,
            a_scale=layer.input_scale,
            smooth=layer.smooth,
            activation=activation,
        )
    raise ValueError(f"{name}: expected quantised weights, got {layer.weight.dtype}; use QuantLinear.from_linear")


def from_checkpoint(
    checkpoint: Source, name: str, format: str, config: Mapping[str, Any] | None, activation: str | None
) -> QuantLinear:
    """See `QuantLinear.from_checkpoint`."""
    from qcutlass.models.converted import ConvertedFolder, is_converted  # which reads what these layers save

    check_activation(activation)
    layers: Mapping[str, formats.Layer | QuantLinear]
    if isinstance(checkpoint, formats.Checkpoint):
        layers = checkpoint
    elif not isinstance(checkpoint, Mapping) and is_converted(checkpoint):
        layers = ConvertedFolder(checkpoint)
    else:
        layers = formats.load(checkpoint, format, config)
    if name not in layers:
        known = ", ".join(list(layers)[:4]) or "none"
        raise ValueError(f"name: expected one of the checkpoint's {len(layers)} layers ({known}, ...), got {name!r}")
    layer = layers[name]
    if isinstance(layer, QuantLinear):
        layer.activation = activation
        return layer
    return from_layer(layer, name, activation)
