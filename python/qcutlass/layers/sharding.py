"""Parts of a layer, for tensor and expert parallelism."""

from __future__ import annotations

from typing import Literal, overload

from qcutlass.layers.base import QuantLinear
from qcutlass.layers.experts import QuantExperts
from qcutlass.products.checks import ceil_div, check_integer
from qcutlass.products.packing import GROUP_STEP


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
    """One of `world_size` parts of a layer, for tensor or expert parallelism; `layer` is not changed.

    Args:
        layer: of any kind in `qcutlass.layers`, on any device.
        rank: of the part, in [0, world_size).
        axis: "out": an equal part of the output channels; outputs are concatenated ("column parallel"). "in": an equal
            part of the input columns, for that part of the activations; outputs are added up ("row parallel"), and the
            part of rank 0 alone has the bias. Of `QuantExperts` `[E, 2 I, H]` and `[E, H, I]`, whose outputs are added
            up either way, "intermediate": some of the I channels between gate and up and down, `[E, 2 I', H]` and
            `[E, H, I']`; "experts": E / `world_size` of the experts, rounded up or down, which keep their numbers.

    Returns:
        The part, with the same weights to the bit. Where a cut goes through groups of columns, these become smaller
        ones, of a multiple of 16 columns (of W4A8: of 32), with scales of one level. Parts along "intermediate" begin
        at such multiples: they are equal where that allows it (I = 768 with groups of 128 on 4 ranks: 192 each, in
        groups of 64), else some are larger. Where activations are quantised, static scales and zero points are those of
        the whole layer; with "in", dynamic ones come from the part's own columns, so that the sum is as exact as the
        whole layer's output, but not the same.

    Raises:
        TypeError: `layer` is neither a QuantLinear nor a QuantExperts, or a number is not an integer.
        ValueError: the channels of a QuantLinear are no multiple of `world_size`; experts have fewer of them, or fewer
            steps of 16 channels, than there are ranks; a cut goes through a block of a `BlockwiseLinear`; or, with
            "in", parts have no whole number of such smaller groups, columns are reordered (act-order), so that a
            group's columns belong to several parts, or an activation is fused, which must come after the sum.
        UnsupportedError: a layer of another kind.

    Example:
        >>> import torch, qcutlass
        >>> from qcutlass.layers import shard
        >>> layer = qcutlass.QuantLinear.from_linear(torch.nn.Linear(256, 48), bits=4, group_size=64)
        >>> x = torch.randn(3, 256)
        >>> parts = [shard(layer, rank, 2, "out")(x) for rank in range(2)]
        >>> torch.equal(torch.cat(parts, dim=1), layer(x))
        True
        >>> gate_up, down = torch.randn(6, 2 * 192, 64), torch.randn(6, 64, 192)
        >>> experts = qcutlass.layers.QuantExperts.from_weights(gate_up, down, qcutlass.WeightOnly(4, 128))
        >>> [shard(experts, rank, 2, "intermediate").down.group_size for rank in range(2)]  # 96 channels each
        [96, 32]
        >>> [shard(experts, rank, 4, "experts").down.experts for rank in range(4)]
        [1, 2, 1, 2]
    """
    if not isinstance(layer, QuantLinear | QuantExperts):
        raise TypeError(f"layer: expected a QuantLinear or a QuantExperts, got {type(layer).__name__}")
    check_integer("world_size", world_size, minimum=1)
    check_integer("rank", rank, range(world_size))
    if isinstance(layer, QuantExperts):
        if axis not in ("intermediate", "experts"):
            raise ValueError(f"axis: expected 'intermediate' or 'experts', got {axis!r}")
        if axis == "experts":
            return layer._shard(_dealt(rank, world_size, layer.gate_up.experts, 1, "experts, E"), axis)
        size = layer.down.in_features
        step = _step(size, layer.down.group_size, world_size)
        return layer._shard(_dealt(rank, world_size, size, step, f"steps of {step} channels, I"), axis)
    if axis not in ("out", "in"):
        raise ValueError(f"axis: expected 'out' or 'in', got {axis!r}")
    part = _equal(rank, world_size, *((layer.out_features, "N") if axis == "out" else (layer.in_features, "K")))
    if axis == "in" and layer.activation is not None:
        raise ValueError(f"layer: {layer.activation!r} is fused, but must follow the sum of all parts")
    return layer._shard(part, axis)


def _equal(rank: int, world_size: int, count: int, name: str) -> slice:
    size = count // world_size
    if size * world_size != count:
        raise ValueError(f"world_size: expected a divisor of {name} = {count}, got {world_size}")
    return slice(rank * size, (rank + 1) * size)


def _dealt(rank: int, world_size: int, count: int, step: int, name: str) -> slice:
    """The part of a rank of `count` things that are dealt out in steps: as many of these as the others, or one more."""
    steps = ceil_div(count, step)
    if steps < world_size:
        raise ValueError(
            f"world_size: expected at most {steps}, the number of {name} = {count}, got {world_size}; use fewer ranks "
            "or the other axis of experts"
        )
    begin, end = (each * steps // world_size * step for each in (rank, rank + 1))
    return slice(begin, min(end, count))


def _step(size: int, group_size: int, world_size: int) -> int:
    """Channels in steps of which the largest part is smallest; of several such steps the one that cuts least groups."""
    whole = GROUP_STEP if group_size >= size else group_size
    steps = [step for step in range(GROUP_STEP, whole + 1, GROUP_STEP) if whole % step == 0] or [whole]
    enough = [step for step in steps if ceil_div(size, step) >= world_size] or steps[:1]
    return min(enough, key=lambda step: (ceil_div(ceil_div(size, step), world_size) * step, -step))
