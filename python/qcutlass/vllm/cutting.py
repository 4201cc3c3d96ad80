"""The share of a layer that one rank of tensor parallelism multiplies by; plain functions on canonical layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from qcutlass.errors import UnsupportedError
from qcutlass.formats import CanonicalBlockwise, CanonicalFp8, CanonicalInt8, CanonicalLinear, FloatLinear, Layer
from qcutlass.products.checks import ceil_div
from qcutlass.products.packing import GROUP_STEP, group_size_of_cut
from qcutlass.quantized import QuantizedTensor

_AnyEightBit = TypeVar("_AnyEightBit", CanonicalInt8, CanonicalFp8)


@dataclass(frozen=True, eq=False)
class Share:
    """What a rank multiplies.

    Attributes:
        layer: whose columns meet those of the rank's activations.
        columns: int64 `[K']`: the columns of the rank's activations that it meets, one for each of its own, where
            these are others or more; None: as they are.
    """

    layer: Layer
    columns: Tensor | None = None


def place(rank: int, world_size: int, whole: int, size: int) -> int:
    """The first of the `size` channels that a rank has of `whole`; where there are fewer parts than ranks, they repeat.

    So it is with the heads of keys and values: with 2 of them on 4 ranks, ranks 0 and 1 both have the first.

    Example:
        >>> from qcutlass.vllm.cutting import place
        >>> [place(rank, 4, 128, 64) for rank in range(4)]
        [0, 0, 64, 64]
    """
    parts = whole // size if size else 0
    if parts < 1 or parts * size != whole or world_size % parts:
        raise ValueError(f"layer: expected {whole} channels in equal parts for {world_size} ranks, got parts of {size}")
    return rank * parts // world_size * size


def cut_rows(layer: Layer, begin: int, size: int) -> Layer:
    """Output channels from `begin` on; those past the last one have weights 0 ("column parallel").

    A cut through square blocks makes groups of columns of them, whose activations stay as they are.
    """
    return _ROWS.get(layer.kind, _rows)(layer, begin, size)


def cut_columns(layer: Layer, begin: int, size: int) -> Share:
    """Input columns `begin` to `begin + size` ("row parallel"); the bias stays, as it is the caller's.

    The weights are the same to the bit. Where the cut goes through groups of columns, groups become smaller, of a
    multiple of 16 columns, and scales of two levels become those of one. Where that is not enough, as columns of one
    group lie on several ranks (act-order), the rank's columns are sorted by group, columns with weight 0 fill each
    group to a multiple of 16, and `Share.columns` says which activations they meet. A cut through square blocks makes
    groups of columns of them.

    Raises:
        UnsupportedError: columns with weight 0 are needed, but the zeros are no whole numbers below 2**bits.
    """
    return _CUTS[layer.kind](layer, begin, size)


def joined(shares: list[Share]) -> list[Share]:
    """The shares as few products: neighbours that read the same columns in groups of one kind become one."""
    products: list[Share] = []
    for share in shares:
        alike = products and products[-1].layer.kind == share.layer.kind and _same(products[-1].columns, share.columns)
        both = _JOINS[share.layer.kind](products[-1].layer, share.layer) if alike else None
        if both is None:
            products.append(share)
        else:
            products[-1] = Share(both, share.columns)
    return products


def sorted_by_group(
    weight: QuantizedTensor, codes: Tensor, groups: Tensor, columns: Tensor, act_scale: Tensor | None
) -> tuple[CanonicalLinear, Tensor]:
    """Weights whose columns belong to groups in any order and number, as groups of 16 columns.

    Args:
        weight: whose scales and zeros `[G, N]` these are.
        codes: uint8 `[N, K]`: some of its columns, in any order.
        groups: int64 `[K]`: the group of each column.
        columns: int64 `[K]`: the column of the activations that each one meets.
        act_scale: as for `gemm`, in the order of the activations; or None.

    Returns:
        The layer, and which column of the activations each of its columns meets.
    """
    order = groups.argsort(stable=True)
    counts = groups.bincount(minlength=len(weight.scales))
    steps = (counts + GROUP_STEP - 1) // GROUP_STEP
    first = steps.cumsum(0) - steps  # the step with which a group begins
    place_in_group = torch.arange(len(order), device=groups.device) - (counts.cumsum(0) - counts)[groups[order]]
    target = first[groups[order]] * GROUP_STEP + place_in_group
    k = int(steps.sum()) * GROUP_STEP
    group_of_step = torch.arange(len(counts), device=groups.device).repeat_interleave(steps)
    filled = _zero_codes(weight, group_of_step, padded=k > len(order))
    filled[:, target] = codes[:, order]
    met = torch.zeros(k, dtype=torch.int64, device=groups.device)
    met[target] = columns[order]
    zeros = None if weight.zeros is None else weight.zeros[group_of_step]
    regrouped = replace(weight, codes=filled, scales=weight.scales[group_of_step], zeros=zeros, group_size=GROUP_STEP)
    return CanonicalLinear(regrouped, act_scale=None if act_scale is None else act_scale[met]), met


def _zero_codes(weight: QuantizedTensor, group_of_step: Tensor, padded: bool) -> Tensor:
    """Codes of weights 0, uint8 `[N, 16 * steps]`."""
    n, steps = weight.shape[0], len(group_of_step)
    if weight.zeros is None:
        zero = 0 if weight.weight_dtype is not None else 2 ** (weight.bits - 1)
        return weight.codes.new_full((n, steps * GROUP_STEP), zero)
    zeros = weight.zeros[group_of_step]
    if padded and (zeros.is_floating_point() or bool((zeros >= 2**weight.bits).any())):
        raise UnsupportedError(
            "layer: its groups lie on several ranks and its zero points are no codes, so that no weight is 0; use a "
            "tensor parallel size that does not cut through groups"
        )
    return zeros.to(torch.uint8).T.repeat_interleave(GROUP_STEP, dim=1)


def without_blocks(layer: CanonicalBlockwise) -> CanonicalLinear:
    """The same weights with a scale for each group of columns, for activations as they are."""
    (n, k), size = layer.shape, layer.block_size
    scales = layer.scales.repeat_interleave(size, 0)[:n].T.contiguous()
    codes, of_floats = layer.codes.view(torch.uint8), layer.codes.is_floating_point()
    weight = QuantizedTensor(
        codes if of_floats else codes ^ 0x80, scales, None, 8, min(size, k), "e4m3" if of_floats else None
    )
    return CanonicalLinear(weight, layer.bias)


def _rows(layer: Any, begin: int, size: int) -> Layer:
    n = layer.shape[0]
    index = torch.arange(begin, begin + size, device=_first(layer).device)
    cut: Layer = layer.rows(index.clamp(max=n - 1))
    return _without(cut, index >= n) if begin + size > n else cut


def _rows_of_blocks(layer: CanonicalBlockwise, begin: int, size: int) -> Layer:
    blocks = _whole_blocks(layer, begin, size, layer.shape[0])
    if blocks is None:
        return _rows(without_blocks(layer), begin, size)
    part = slice(begin, begin + size)
    bias = None if layer.bias is None else layer.bias[part]
    return replace(layer, codes=layer.codes[part], scales=layer.scales[blocks].contiguous(), bias=bias)


def _cut_blocks(layer: CanonicalBlockwise, begin: int, size: int) -> Share:
    blocks = _whole_blocks(layer, begin, size, layer.shape[1])
    if blocks is None:
        return _cut_weight_only(without_blocks(layer), begin, size)
    codes = layer.codes[:, begin : begin + size].contiguous()
    return Share(replace(layer, codes=codes, scales=layer.scales[:, blocks].contiguous()))


def _whole_blocks(layer: CanonicalBlockwise, begin: int, size: int, whole: int) -> slice | None:
    """The blocks that a part has along one dimension; None: it cuts through them, or has more than there is."""
    step, end = layer.block_size, begin + size
    is_whole = begin % step == 0 and (end == whole or (end < whole and end % step == 0))
    return slice(begin // step, ceil_div(end, step)) if is_whole else None


def _cut_weight_only(layer: CanonicalLinear, begin: int, size: int) -> Share:
    weight, k = layer.weight, layer.shape[1]
    if (begin, size) == (0, k):
        return Share(layer)
    device = weight.codes.device
    part = slice(begin, begin + size)
    scales_of_input = None if layer.act_scale is None else layer.act_scale[part]
    if layer.perm is None and (weight.group_size >= k or group_size_of_cut(weight.group_size, begin)):
        return Share(CanonicalLinear(weight.columns(part), layer.bias, None, scales_of_input))
    weight = weight.expanded()
    order = torch.arange(k, device=device) if layer.perm is None else layer.perm.long()
    mine = ((order >= begin) & (order < begin + size)).nonzero().view(-1)
    met, groups = order[mine] - begin, mine // weight.group_size
    codes = weight.codes[:, mine]
    step = size if weight.group_size >= k else _common_step(weight.group_size, groups)
    if not step and weight.minimums is not None:
        raise UnsupportedError(
            "layer: its groups lie on several ranks and have minimums, beside which no weight is 0; use a tensor "
            "parallel size that does not cut through groups"
        )
    if not step:
        filled, columns = sorted_by_group(weight, codes, groups, met, scales_of_input)
        return Share(replace(filled, bias=layer.bias), columns)
    kept = groups[::step]
    zeros, minimums = (part if part is None else part[kept] for part in (weight.zeros, weight.minimums))
    part_weight = replace(
        weight, codes=codes, scales=weight.scales[kept], zeros=zeros, minimums=minimums, group_size=step
    )
    perm = None if layer.perm is None else met.to(torch.int32)
    return Share(CanonicalLinear(part_weight, layer.bias, perm, scales_of_input))


def _common_step(group_size: int, groups: Tensor) -> int:
    """The group size, where every group of so many columns lies in one of the whole layer's; else 0."""
    whole = torch.arange(ceil_div(len(groups), group_size), device=groups.device).repeat_interleave(group_size)
    _, mine = torch.unique_consecutive(groups, return_inverse=True)
    return group_size if bool((mine == whole[: len(mine)]).all()) else 0


def _cut_eight_bit(layer: CanonicalInt8 | CanonicalFp8, begin: int, size: int) -> Share:
    part = slice(begin, begin + size)
    smooth = None if layer.smooth is None else layer.smooth[part]
    return Share(replace(layer, codes=layer.codes[:, part].contiguous(), smooth=smooth))


def _cut_floats(layer: FloatLinear, begin: int, size: int) -> Share:
    return Share(replace(layer, weight=layer.weight[:, begin : begin + size].contiguous()))


def _join_weight_only(one: CanonicalLinear, other: CanonicalLinear) -> CanonicalLinear | None:
    if (one.weight.zeros is None) != (other.weight.zeros is None):
        one, other = one.with_zeros(), other.with_zeros()
    v, w = one.weight, other.weight
    if (v.bits, v.group_size, v.weight_dtype) != (w.bits, w.group_size, w.weight_dtype):
        return None
    shared = (one.perm, other.perm), (one.act_scale, other.act_scale), (v.global_scale, w.global_scale)
    if not all(_same(*pair) for pair in shared):
        return None
    joined: dict[str, Any] = {}
    for name in ("scales", "zeros", "minimums", "super_scales", "super_minimums"):
        parts = getattr(v, name), getattr(w, name)
        if _kind(parts[0]) != _kind(parts[1]):
            return None
        joined[name] = None if parts[0] is None else torch.cat(parts, dim=1)
    return CanonicalLinear(replace(v, codes=torch.cat([v.codes, w.codes]), **joined), None, one.perm, one.act_scale)


def _kind(part: Tensor | None) -> tuple[torch.dtype, int] | None:
    """The type, and the number of groups or of super-blocks, of a part with a column for each channel."""
    return None if part is None else (part.dtype, len(part))


def _join_eight_bit(one: _AnyEightBit, other: _AnyEightBit) -> _AnyEightBit | None:
    if not (_same(one.smooth, other.smooth) and _same(one.input_scale, other.input_scale)):
        return None
    codes, scales = torch.cat([one.codes, other.codes]), torch.cat([one.scales, other.scales])
    return type(one)(codes, scales, one.input_scale, None, one.smooth)


def _join_blocks(one: CanonicalBlockwise, other: CanonicalBlockwise) -> CanonicalBlockwise | None:
    if (one.block_size, one.codes.dtype) != (other.block_size, other.codes.dtype) or one.shape[0] % one.block_size:
        return None
    codes, scales = torch.cat([one.codes, other.codes]), torch.cat([one.scales, other.scales])
    return CanonicalBlockwise(codes, scales, one.block_size)


def _join_floats(one: FloatLinear, other: FloatLinear) -> FloatLinear | None:
    same = one.weight.dtype == other.weight.dtype
    return FloatLinear(torch.cat([one.weight, other.weight])) if same else None


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


def _first(layer: Layer) -> Tensor:
    return next(iter(layer.tensors.values()))


def _without(layer: Layer, channels: Tensor) -> Layer:
    """The layer with weights 0 in some channels: those of `tensors` that are multiplied last become 0."""
    tensors = {name: tensor.clone() for name, tensor in layer.tensors.items()}
    if "scales" in tensors:
        for name in {"scales", "minimums"} & set(tensors):
            tensors[name][..., channels] = 0
    else:
        tensors["weight"][channels] = 0
    make: Any = type(layer).of
    zeroed: Layer = make(tensors, **layer.options)
    return zeroed


_CUTS: Final[dict[str, Callable[[Any, int, int], Share]]] = {
    CanonicalLinear.kind: _cut_weight_only,
    CanonicalInt8.kind: _cut_eight_bit,
    CanonicalFp8.kind: _cut_eight_bit,
    CanonicalBlockwise.kind: _cut_blocks,
    FloatLinear.kind: _cut_floats,
}
_ROWS: Final[dict[str, Callable[[Any, int, int], Layer]]] = {CanonicalBlockwise.kind: _rows_of_blocks}
"""Where layers cannot take rows one by one."""
_JOINS: Final[dict[str, Callable[[Any, Any], Layer | None]]] = {
    CanonicalLinear.kind: _join_weight_only,
    CanonicalInt8.kind: _join_eight_bit,
    CanonicalFp8.kind: _join_eight_bit,
    CanonicalBlockwise.kind: _join_blocks,
    FloatLinear.kind: _join_floats,
}
