"""Parts of a layer, for tensor parallelism."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from qcutlass.errors import UnsupportedError
from qcutlass.layers.base import QuantLinear
from qcutlass.layers.blockwise import BlockwiseLinear
from qcutlass.layers.eight_bit import Fp8Linear, Int8Linear
from qcutlass.layers.weight_only import WeightOnlyLinear
from qcutlass.products import unpack_weights
from qcutlass.products.checks import check_integer
from qcutlass.quantized import QuantizedTensor


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
    if not isinstance(layer, WeightOnlyLinear | Int8Linear | Fp8Linear | BlockwiseLinear):
        raise UnsupportedError(f"layer: expected a layer of qcutlass.layers, got {type(layer).__name__}")
    features, name = (layer.out_features, "N") if axis == "out" else (layer.in_features, "K")
    size = features // world_size
    if size * world_size != features:
        raise ValueError(f"world_size: expected a divisor of {name} = {features}, got {world_size}")
    if axis == "in" and layer.activation is not None:
        raise ValueError(f"layer: {layer.activation!r} is fused, but must follow the sum of all parts")
    part = slice(rank * size, (rank + 1) * size)
    codes = unpack_weights(layer.w_packed, layer.bits, (layer.out_features, layer.in_features))
    if isinstance(layer, WeightOnlyLinear):
        return _rows(layer, codes, part) if axis == "out" else _columns(layer, codes, part)
    if isinstance(layer, BlockwiseLinear):
        return _blockwise(layer, codes, part, axis)
    return _eight_bit(layer, codes, part, axis)


def _blockwise(layer: BlockwiseLinear, codes: Tensor, part: slice, axis: Literal["out", "in"]) -> BlockwiseLinear:
    size, step = part.stop - part.start, layer.block_size
    if size % step and size < (layer.out_features if axis == "out" else layer.in_features):
        raise ValueError(f"world_size: parts of {size} cut through blocks of {step}; use a smaller world_size")
    blocks = slice(part.start // step, -(-part.stop // step))
    if axis == "out":
        codes, scales, bias = codes[part], layer.w_scale[blocks], None if layer.bias is None else layer.bias[part]
    else:
        codes, scales, bias = codes[:, part], layer.w_scale[:, blocks], layer.bias if part.start == 0 else None
    scales = scales.clone(memory_format=torch.contiguous_format)
    return BlockwiseLinear(codes, scales, step, bias=_copied(bias), activation=layer.activation)


def _eight_bit(
    layer: Int8Linear | Fp8Linear, codes: Tensor, part: slice, axis: Literal["out", "in"]
) -> Int8Linear | Fp8Linear:
    w_scale, bias, smooth, activation = layer.w_scale, layer.bias, layer.smooth, layer.activation
    if axis == "out":
        codes = codes[part]
        w_scale = w_scale if w_scale.numel() == 1 else w_scale.reshape(-1)[part]  # one for all, or one a channel
        bias = None if bias is None else bias[part]
    else:
        codes = codes[:, part]
        bias = bias if part.start == 0 else None
        smooth = None if smooth is None else smooth[part]
    options: dict[str, Any] = {
        name: _copied(tensor) for name, tensor in (("bias", bias), ("a_scale", layer.a_scale), ("smooth", smooth))
    }
    if isinstance(layer, Fp8Linear):
        return Fp8Linear(codes, w_scale.clone(), activation=activation, **options)
    symmetric = layer.symmetric if layer.a_scale is None else layer.azp is None
    return Int8Linear(
        codes, w_scale.clone(), azp=_copied(layer.azp), symmetric=symmetric, activation=activation, **options
    )


def _rows(layer: WeightOnlyLinear, codes: Tensor, part: slice) -> WeightOnlyLinear:
    zeros = None if layer.zeros is None else _channels(layer.zeros)[:, part]
    weight = QuantizedTensor(codes[part], _channels(layer.scales)[:, part], zeros, layer.bits, layer.group_size)
    bias = None if layer.bias is None else layer.bias[part]
    return _copy(weight, bias, layer.activation, layer.act_scale, layer.perm)


def _columns(layer: WeightOnlyLinear, codes: Tensor, part: slice) -> WeightOnlyLinear:
    size, step = part.stop - part.start, layer.group_size
    one_group = step >= layer.in_features
    if not one_group and size % step:
        raise ValueError(
            f"world_size: parts of {size} columns cut through groups of {step}; use a smaller world_size or axis 'out'"
        )
    if layer.perm is not None:
        raise ValueError("layer: act-order mixes the columns of all parts; cut it along axis 'out'")
    groups = slice(None) if one_group else slice(part.start // step, part.stop // step)
    zeros = None if layer.zeros is None else _channels(layer.zeros)[groups]
    weight = QuantizedTensor(codes[:, part], _channels(layer.scales)[groups], zeros, layer.bits, min(step, size))
    act_scale = None if layer.act_scale is None else layer.act_scale[part]
    return _copy(weight, layer.bias if part.start == 0 else None, None, act_scale, None)


def _channels(values: Tensor) -> Tensor:
    """`[G, N]`."""
    return values[None] if values.ndim == 1 else values


def _copy(
    weight: QuantizedTensor, bias: Tensor | None, activation: str | None, act_scale: Tensor | None, perm: Tensor | None
) -> WeightOnlyLinear:
    """A layer that shares no memory with the one it is cut from."""
    scales, zeros = weight.scales.clone(memory_format=torch.contiguous_format), _copied(weight.zeros)
    return WeightOnlyLinear(
        QuantizedTensor(weight.codes, scales, zeros, weight.bits, weight.group_size),
        bias=_copied(bias),
        activation=activation,
        act_scale=_copied(act_scale),
        perm=_copied(perm),
    )


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone(memory_format=torch.contiguous_format)
