"""Parts of a layer, for tensor and expert parallelism."""

from __future__ import annotations

from typing import Literal, overload

from qcutlass.layers.base import QuantLinear
from qcutlass.layers.experts import QuantExperts
from qcutlass.products.checks import check_integer


@overload
def shard(layer: QuantLinear, rank: int, world_size: int, axis: Literal["out", "in"]) -> QuantLinear: ...


@overload
def shard(
    layer: QuantExperts, rank: int, world_size: int, axis: Literal["intermediate", "experts"]
) -> QuantExperts: ...


def shard(
    layer: QuantLinear | QuantExperts,
    rank: int,
    world_size: int,
    axis: Literal["out", "in", "intermediate", "experts"],
) -> QuantLinear | QuantExperts:
    """One of `world_size` equal parts of a layer, for tensor or expert parallelism; `layer` is not changed.

    Args:
        layer: of any kind in `qcutlass.layers`, on any device.
        rank: of the part, in [0, world_size).
        axis: "out": the part of the output channels; outputs are concatenated ("column parallel"). "in": the part of
            the input columns, for that part of the activations; outputs are added up ("row parallel"), and the part of
            rank 0 alone has the bias. Of `QuantExperts`, whose outputs are added up either way, "intermediate": the
            part of the channels between gate and up and down; "experts": some of the experts, which keep their numbers.

    Returns:
        The part, with the same weights to the bit. Where activations are quantised, static scales and zero points are
        those of the whole layer; with "in", dynamic ones come from the part's own columns, so that the sum is as exact
        as the whole layer's output, but not the same.

    Raises:
        TypeError: `layer` is neither a QuantLinear nor a QuantExperts, or a number is not an integer.
        ValueError: the channels or experts are no multiple of `world_size`; a cut goes through a block of a
            `BlockwiseLinear`; or, with "in" and "intermediate", a cut goes through a group of columns, columns are
            reordered (act-order), so that a group's columns belong to several parts, or an activation is fused, which
            must come after the sum.
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
    if not isinstance(layer, QuantLinear | QuantExperts):
        raise TypeError(f"layer: expected a QuantLinear or a QuantExperts, got {type(layer).__name__}")
    check_integer("world_size", world_size, minimum=1)
    check_integer("rank", rank, range(world_size))
    if isinstance(layer, QuantExperts):
        if axis not in ("intermediate", "experts"):
            raise ValueError(f"axis: expected 'intermediate' or 'experts', got {axis!r}")
        sizes = {"intermediate": (layer.down.in_features, "I"), "experts": (layer.gate_up.experts, "E")}
        return layer._shard(_part(rank, world_size, *sizes[axis]), axis)
    if axis not in ("out", "in"):
        raise ValueError(f"axis: expected 'out' or 'in', got {axis!r}")
    part = _part(rank, world_size, *((layer.out_features, "N") if axis == "out" else (layer.in_features, "K")))
    if axis == "in" and layer.activation is not None:
        raise ValueError(f"layer: {layer.activation!r} is fused, but must follow the sum of all parts")
    return layer._shard(part, axis)


def _part(rank: int, world_size: int, count: int, name: str) -> slice:
    size = count // world_size
    if size * world_size != count:
        raise ValueError(f"world_size: expected a divisor of {name} = {count}, got {world_size}")
    return slice(rank * size, (rank + 1) * size)
