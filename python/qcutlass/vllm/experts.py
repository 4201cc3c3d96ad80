"""The share of a block of experts that one rank multiplies by; plain functions on canonical layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats import CanonicalLinear, Layer
from qcutlass.layers import QuantExperts, WeightOnlyLinear
from qcutlass.layers.base import from_layer
from qcutlass.layers.experts import Expert, Gate
from qcutlass.vllm.cutting import cut_columns
from qcutlass.vllm.stored import with_scales


class ExpertLayers(NamedTuple):
    """The layers of one expert: `down(activation(gate(x)) * up(x))`, with I channels between."""

    gate: CanonicalLinear
    up: CanonicalLinear
    down: CanonicalLinear


def of_weights_alone(layer: Layer, name: str) -> CanonicalLinear:
    """A layer as experts' products take it; UnsupportedError for one whose activations are quantised, or in floats."""
    if type(layer) is not CanonicalLinear:
        raise UnsupportedError(f"{name}: expected weights that are quantised alone, as experts have, got {layer.words}")
    return layer


def cut_expert(expert: ExpertLayers, begin: int, size: int) -> ExpertLayers:
    """The `size` channels between the products from `begin` on; the sum of all ranks' outputs is the whole one's.

    Which channels these are is the expert's own affair. So they are counted in the order in which `down` has its
    columns (act-order), which needs no order of its own then, and has whole groups on each rank. Where a cut goes
    through groups, columns of weight 0 may fill them, as `cut_columns` says; their channels are others again.

    Args:
        expert: the whole layers; with a bias in `down`, which the rank whose `begin` is 0 keeps.

    Raises:
        UnsupportedError: as for `cut_columns`.

    Example:
        >>> import torch, qcutlass
        >>> from qcutlass.formats import CanonicalLinear
        >>> from qcutlass.vllm.experts import ExpertLayers, cut_expert
        >>> def layer(n, k):
        ...     return CanonicalLinear(qcutlass.quantize(torch.randn(n, k), bits=4, group_size=32))
        >>> part = cut_expert(ExpertLayers(layer(128, 64), layer(128, 64), layer(64, 128)), 64, 64)
        >>> part.gate.shape, part.up.shape, part.down.shape
        ((64, 64), (64, 64), (64, 64))
    """
    gate, up, down = expert
    whole = down.shape[1]
    if (begin, size) == (0, whole) and down.perm is None:
        return expert
    channels = torch.arange(whole, device=down.weight.codes.device) if down.perm is None else down.perm.long()
    bias = down.bias if begin == 0 else None
    share = cut_columns(replace(down, perm=None, bias=bias), begin, size)
    channels = channels[begin : begin + size]
    if share.columns is not None:
        channels = channels[share.columns]
    return ExpertLayers(gate.rows(channels), up.rows(channels), of_weights_alone(share.layer, "down"))


def experts_of(experts: Iterable[ExpertLayers], count: int, gate: Gate, dtype: torch.dtype, name: str) -> QuantExperts:
    """The module of the experts of a rank, which are read one at a time.

    Args:
        experts: this rank's share of each.
        count: how many they are.
        gate: what is computed between the products.
        dtype: of the activations.
        name: of the block, for errors.

    Raises:
        UnsupportedError: the experts differ in shape or scheme, or have what their product does not take.
    """

    def layers() -> Iterator[Expert]:
        for expert in experts:
            yield Expert(*(_packed(layer, dtype, name) for layer in expert))

    try:
        return QuantExperts.from_layers(layers(), count, gate)
    except (CheckpointError, UnsupportedError):  # which are ValueErrors, too
        raise
    except ValueError as error:
        raise UnsupportedError(f"{name}: {error}") from error


def _packed(layer: CanonicalLinear, dtype: torch.dtype, name: str) -> WeightOnlyLinear:
    packed = from_layer(with_scales(layer, dtype), name)
    assert isinstance(packed, WeightOnlyLinear)
    return packed
