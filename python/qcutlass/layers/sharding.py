"""Parts of a layer, for tensor parallelism."""

from __future__ import annotations

from typing import Literal

from qcutlass.layers.base import QuantLinear
from qcutlass.products.checks import check_integer


def shard(layer: QuantLinear, rank: int, world_size: int, axis: Literal["out", "in"]) -> QuantLinear:
    """One of `world_size` equal parts of a layer, for tensor parallelism; `layer` is not changed.

    Args:
        layer: of any kind in `qcutlass.layers`, on any device.
        rank: of the part, in [0, world_size).
        axis: "out": the part of the output channels; outputs are concatenated ("column parallel"). "in": the part of
            the input columns, for that part of the activations; outputs are added up ("row parallel"), and the part of
            rank 0 alone has the bias.

    Returns:
        The part, with the same weights to the bit. Where activations are quantised, static scales and zero points are
        those of the whole layer; with "in", dynamic ones come from the part's own columns, so that the sum is as exact
        as the whole layer's output, but not the same.

    Raises:
        TypeError: `layer` is not a QuantLinear, or a number is not an integer.
        ValueError: the channels are no multiple of `world_size`; a cut goes through a block of a `BlockwiseLinear`; or,
            with "in", a cut goes through a group of columns, columns are reordered (act-order), so that a group's
            columns belong to several parts, or an activation is fused, which must come after the sum.
        UnsupportedError: a layer of another kind.

    Example:
        >>> import torch, qcutlass
        >>> from qcutlass.layers import shard
        >>> layer = qcutlass.QuantLinear.from_linear(torch.nn.Linear(256, 48), bits=4, group_size=64)
        >>> x = torch.randn(3, 256)
        >>> parts = [shard(layer, rank, 2, "out")(x) for rank in range(2)]
        >>> torch.equal(torch.cat(parts, dim=1), layer(x))
        True
    """
    if not isinstance(layer, QuantLinear):
        raise TypeError(f"layer: expected a QuantLinear, got {type(layer).__name__}")
    check_integer("world_size", world_size, minimum=1)
    check_integer("rank", rank, range(world_size))
    if axis not in ("out", "in"):
        raise ValueError(f"axis: expected 'out' or 'in', got {axis!r}")
    features, name = (layer.out_features, "N") if axis == "out" else (layer.in_features, "K")
    size = features // world_size
    if size * world_size != features:
        raise ValueError(f"world_size: expected a divisor of {name} = {features}, got {world_size}")
    if axis == "in" and layer.activation is not None:
        raise ValueError(f"layer: {layer.activation!r} is fused, but must follow the sum of all parts")
    return layer._shard(slice(rank * size, (rank + 1) * size), axis)
