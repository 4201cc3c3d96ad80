"""Weights packed for the kernels: their shapes, the rules of scales and zeros beside them, and the extension's struct.

Packed weights do not store K: the number of tiles bounds it, and callers say which it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass.errors import UnsupportedError
from qcutlass.products.checks import (
    E8M0,
    FLOATING,
    ceil_div,
    check_integer,
    check_operand,
    check_strided,
    check_tensor,
    names_of,
    shape_of,
)
from qcutlass.products.extension import DTYPES
from qcutlass.products.memory import aligned, as_separate_rows

PACKINGS: Final = {4: _C.Packing.W4A16, 8: _C.Packing.W8A16}
"""Packing of integers for 16-bit activations, by bits of a weight."""


class CodeType(NamedTuple):
    """A type of codes that are floating numbers.

    Attributes:
        bits: of a code.
        packing: for 16-bit activations; the order of the codes is that of integers of so many bits.
        scales: types of scales.
    """

    bits: int
    packing: _C.Packing
    scales: tuple[torch.dtype, ...]


CODE_TYPES: Final = {
    "e2m1": CodeType(4, _C.Packing.E2M1A16, (*FLOATING, *E8M0, torch.float8_e4m3fn)),
    "e4m3": CodeType(8, _C.Packing.E4M3A16, FLOATING),
}
"""The types of weights besides integers, by the name that `weight_dtype` has for them."""

GROUP_STEP: Final = 16
"""Columns of the smallest group of kernels for GPUs, of which groups are multiples there."""
TILE_N: Final = 16
TILE: Final = (32, 16)  # lanes (or halves of rows), bytes of each
TILE_BITS: Final = 8 * TILE[0] * TILE[1] // TILE_N  # of the codes of a channel in a tile
_TILE_K: Final = {bits: _C.tile_k(packing) for bits, packing in PACKINGS.items()}
_AMBIGUOUS_K: Final = min(_TILE_K.values())  # up to here both packings have one tile along K
_CODES: Final = (torch.uint8,)
INTEGERS: Final = (torch.uint8, torch.int8)
"""Types of scales and minimums of two levels."""
SUPERS: Final = (torch.float16,)
ZEROS: Final = (torch.uint8, torch.int8, torch.int32, *FLOATING)


class PackedWeights(NamedTuple):
    """Packed codes and all that says which numbers they are; `qcutlass.gemm` describes each part.

    Whatever has weights calls these parts so: calls of products, weights of experts, layers.
    """

    w_packed: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    group_size: int | None = None
    bits: int | None = None
    weight_dtype: str | None = None
    global_scale: Tensor | None = None
    minimums: Tensor | None = None
    super_scales: Tensor | None = None
    super_minimums: Tensor | None = None

    @staticmethod
    def of(holder: Any) -> PackedWeights:
        """Those of anything that has these attributes."""
        return PackedWeights(*_PARTS(holder))


_PARTS: Final = attrgetter(*PackedWeights._fields)


class WeightShape(NamedTuple):
    """The sizes that the shapes of a packed weight and its scales give."""

    n: int
    k: int
    bits: int
    group_size: int  # k: one group
    weight_dtype: str | None = None  # None: integers

    @property
    def packing(self) -> _C.Packing:
        return PACKINGS[self.bits] if self.weight_dtype is None else CODE_TYPES[self.weight_dtype].packing


def check_weight_dtype(weight_dtype: object, bits: object = None) -> None:
    """Raises unless `weight_dtype` names a type of codes that have so many `bits` (None: whatever they have)."""
    if weight_dtype is None:
        return
    if not isinstance(weight_dtype, str):
        raise TypeError(f"weight_dtype: expected a name or None, got {type(weight_dtype).__name__}")
    if weight_dtype not in CODE_TYPES:
        expected = ", ".join(map(repr, CODE_TYPES))
        raise ValueError(f"weight_dtype: expected {expected} or None for integers, got {weight_dtype!r}")
    expected_bits = CODE_TYPES[weight_dtype].bits
    if bits is not None and bits != expected_bits:
        raise ValueError(f"bits: {weight_dtype} codes have {expected_bits} bits, got {bits}")


def check_packed_form(name: str, w_packed: Tensor) -> None:
    """Raises ValueError unless the shape is that of some packed weight, and its bytes lie together."""
    if len(w_packed.shape) != 4 or w_packed.shape[2:] != TILE:
        raise ValueError(
            f"{name}: expected shape [ceil(N/16), tiles along K, 32, 16] as preprocess_weights returns it, "
            f"got {shape_of(w_packed)}"
        )
    check_contiguous(name, w_packed)


def check_contiguous(name: str, w_packed: Tensor) -> None:
    if not w_packed.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous tensor, got strides {list(w_packed.stride())}; call .contiguous() once"
        )


def _bits(w_packed: Tensor, k: int, bits: int | None) -> int:
    """Bits of a weight, from the number of tiles along K."""
    tiles = w_packed.shape[1]
    if bits is None and k > _AMBIGUOUS_K:  # the common case, without building lists
        for candidate, tile_k in _TILE_K.items():
            if -(-k // tile_k) == tiles:
                return candidate
    fitting = [candidate for candidate, tile_k in _TILE_K.items() if ceil_div(k, tile_k) == tiles]
    if bits is not None:
        check_integer("bits", bits, _TILE_K)
        if bits in fitting:
            return bits
        raise ValueError(
            f"w_packed: {bits}-bit weights of K = {k} have shape [ceil(N/16), {ceil_div(k, _TILE_K[bits])}, 32, 16], "
            f"got {shape_of(w_packed)}"
        )
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ValueError(
            f"bits: with K = {k} the shape of w_packed, {shape_of(w_packed)}, is the same for 4-bit and 8-bit weights: "
            "pass bits=4 or bits=8"
        )
    expected = " or ".join(f"{ceil_div(k, tile_k)} ({bits} bits)" for bits, tile_k in _TILE_K.items())
    raise ValueError(
        f"w_packed: for K = {k} its second dimension must be {expected}, got shape {shape_of(w_packed)}; "
        "was it packed from a matrix with another number of columns?"
    )


def _group_size(groups: int, k: int, group_size: int | None) -> int:
    """Columns that share a scale, from the number of groups."""
    if group_size is None:
        if groups == 1:
            return k
        if groups == 0 or k % groups != 0:
            raise ValueError(
                f"group_size: scales have G = {groups} groups, which does not divide K = {k}; pass group_size= "
                "(a last group that is shorter than the others is allowed)"
            )
        return k // groups
    check_integer("group_size", group_size)
    if group_size == -1:
        group_size = k
    if group_size < 1:
        raise ValueError(f"group_size: expected at least 1, or -1 for one group a channel, got {group_size}")
    if ceil_div(k, group_size) != groups:
        raise ValueError(
            f"group_size: {group_size} with K = {k} needs scales of {ceil_div(k, group_size)} groups, got {groups}"
        )
    return k if groups == 1 else group_size


def group_size_of_cut(group_size: int, begin: int, step: int = GROUP_STEP) -> int:
    """The largest group size with which a part that begins at a column has whole groups.

    0: none that kernels for GPUs take, whose groups are multiples of `step` columns; groups that are not cut stay.
    """
    found = math.gcd(group_size, begin)
    return found if found == group_size or found % step == 0 else 0


def check_channels(source: str, n: int, name: str, w_packed: Tensor) -> None:
    """Raises ValueError unless the packed weight has as many tiles as `n` channels need; `source` says whence `n`."""
    if w_packed.shape[0] != ceil_div(n, TILE_N):
        raise ValueError(
            f"{source} needs {name} of {ceil_div(n, TILE_N)} tiles of 16 channels, got shape {shape_of(w_packed)}"
        )


def check_weights(weights: PackedWeights, k: int, device: torch.device, first: str) -> WeightShape:
    """Checks a packed weight of K = `k` columns with what belongs to it; `first` names the operand on `device`."""
    w_packed, scales, zeros, group_size, bits, weight_dtype, global_scale, minimums, *levels = weights
    check_weight_dtype(weight_dtype, bits)
    if isinstance(w_packed, Tensor) and w_packed.dtype == torch.int8:
        raise ValueError(
            "w_packed was packed for int8 activations (activations='int8', dtype int8), but this product takes weights "
            "packed for 16-bit activations (dtype uint8): pack the codes with preprocess_weights(codes, bits=8)"
        )
    check_operand("w_packed", w_packed, _CODES, device, first)
    if weights.super_scales is not None:
        check_tensor("super_scales", weights.super_scales, SUPERS)
    numbers = FLOATING if weights.super_scales is None else INTEGERS
    allowed = numbers if weight_dtype is None else CODE_TYPES[weight_dtype].scales
    check_operand("scales", scales, allowed, device, first)
    check_packed_form("w_packed", w_packed)
    if scales.dim() not in (1, 2):
        raise ValueError(f"scales: expected shape [G, N] or [N], got {shape_of(scales)}")
    if k < 1:
        raise ValueError(f"K must be at least 1, got {k}")
    n = scales.shape[-1]
    check_channels(f"scales: N = {n} from shape {shape_of(scales)}", n, "w_packed", w_packed)
    if zeros is not None:
        if weight_dtype is not None:
            raise ValueError(f"zeros: {weight_dtype} codes have signs and no zero points; pass None")
        check_operand("zeros", zeros, ZEROS, device, first)
        if zeros.shape != scales.shape:
            raise ValueError(f"zeros: expected the shape of scales, {shape_of(scales)}, got {shape_of(zeros)}")
    if global_scale is not None:
        check_global_scale(global_scale, scales, device, first)
    if minimums is not None:
        check_operand("minimums", minimums, numbers, device, first)
        if minimums.shape != scales.shape:
            raise ValueError(f"minimums: expected the shape of scales, {shape_of(scales)}, got {shape_of(minimums)}")
        if zeros is not None:
            raise ValueError("minimums: expected zeros or minimums, got both; with minimums leave zeros out")
        if weight_dtype is not None:
            raise ValueError(f"minimums: {weight_dtype} codes have none; pass None")
    if any(part is not None for part in levels):
        _check_supers(weights, device, first)
    groups = scales.shape[0] if scales.dim() == 2 else 1
    bits = bits if weight_dtype is None else CODE_TYPES[weight_dtype].bits
    shape = WeightShape(n, k, _bits(w_packed, k, bits), _group_size(groups, k, group_size), weight_dtype)
    supers = weights.super_scales
    if device.type == "cuda" and supers is not None and not fit_cuda(scales, supers, shape.group_size):
        raise UnsupportedError(
            f"super_scales: on CUDA super-blocks have a multiple of {_C.SUPER_BLOCK_STEP} columns, got "
            f"{shape_of(supers)} beside {groups} groups of {shape.group_size}: pass qcutlass.expand_scales(scales, "
            "super_scales), and likewise minimums, without them; layers do so by themselves; or use CPU tensors"
        )
    return shape


def check_global_scale(global_scale: Tensor, scales: Tensor, device: torch.device, first: str) -> None:
    if scales.dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"global_scale: stands beside scales of float8_e4m3fn, got scales of {names_of([scales.dtype])}; multiply "
            "these by it"
        )
    check_operand("global_scale", global_scale, (torch.float32,), device, first)
    if global_scale.shape != (1,):
        raise ValueError(f"global_scale: expected shape [1], got {shape_of(global_scale)}")


def _check_supers(weights: PackedWeights, device: torch.device, first: str) -> None:
    for name in ("super_scales", "super_minimums"):
        part = getattr(weights, name)
        if part is not None:
            check_operand(name, part, SUPERS, device, first)
    check_super_blocks(weights)


def check_super_blocks(weights: Any) -> None:
    """Raises ValueError unless the second levels of scales and minimums, if any, go with the first.

    `weights`: anything with these parts.
    """
    supers, scales, minimums = weights.super_scales, weights.scales, weights.minimums
    if supers is None and weights.super_minimums is None:
        return
    if supers is None or (minimums is None) != (weights.super_minimums is None):
        raise ValueError(
            "super_minimums: expected super_scales, and super_minimums just where there are minimums: both levels of "
            "both"
        )
    if weights.weight_dtype is not None or weights.zeros is not None or weights.global_scale is not None:
        raise ValueError("super_scales: stand beside integer codes without zeros and global_scale; leave these out")
    groups, n = scales.shape if scales.dim() == 2 else (0, 0)
    if supers.dim() != 2 or supers.shape[1] != n or not supers.shape[0] or groups % supers.shape[0]:
        raise ValueError(
            f"super_scales: expected shape [B, N] beside scales [G, N], B a divisor of G, got {shape_of(supers)} "
            f"beside {shape_of(scales)}"
        )
    if minimums is not None and weights.super_minimums.shape != supers.shape:
        raise ValueError(
            f"super_minimums: expected the shape of super_scales, {shape_of(supers)}, got "
            f"{shape_of(weights.super_minimums)}"
        )


def expand_scales(scales: Tensor, super_scales: Tensor | None) -> Tensor:
    """Scales, or minimums, of two levels as numbers: `scales[g, n] * super_scales[g // (G / B), n]`, exactly.

    Args:
        scales: uint8 or int8 `[G, N]`, or `[E, G, N]`.
        super_scales: float16 `[B, N]`, or `[E, B, N]`: each for G / B neighbouring groups. None: the scales have one
            level, and are returned.

    Returns:
        float32, shaped as `scales`.

    Raises:
        TypeError: an argument is not a tensor, or not of these types.
        ValueError: B does not divide G, or there are other channels or experts.

    Example:
        >>> import torch, qcutlass
        >>> scales, super_scales = torch.tensor([[1], [2], [3], [4]], dtype=torch.uint8), torch.tensor([[0.5], [2.0]])
        >>> qcutlass.expand_scales(scales, super_scales.half()).flatten()
        tensor([0.5000, 1.0000, 6.0000, 8.0000])
    """
    if super_scales is None:
        return scales
    check_tensor("scales", scales, INTEGERS)
    check_operand("super_scales", super_scales, SUPERS, scales.device, "scales")
    check_strided("scales", scales)
    check_strided("super_scales", super_scales)
    fits = scales.dim() == super_scales.dim() >= 2 and scales.shape[:-2] == super_scales.shape[:-2]
    groups, step = (scales.shape[-2], super_scales.shape[-2]) if fits else (0, 0)
    if not step or groups % step or scales.shape[-1] != super_scales.shape[-1]:
        raise ValueError(
            f"super_scales: expected shape [B, N], B a divisor of G, beside scales [G, N] = {shape_of(scales)}, got "
            f"{shape_of(super_scales)}"
        )
    return scales.float() * super_scales.float().repeat_interleave(groups // step, dim=-2)


def fit_cuda(scales: Tensor, super_scales: Tensor | None, group_size: int) -> bool:
    """Whether CUDA's kernels take these levels of scales, `[G, N]` and `[B, N]`, or a dimension of experts before."""
    blocks = 1 if super_scales is None else super_scales.shape[-2]
    return blocks == 1 or scales.shape[-2] // blocks * group_size % _C.SUPER_BLOCK_STEP == 0


def one_level(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Parts of weights by their names, with scales and minimums of one level."""
    found = dict(parts)
    for name in ("scales", "minimums"):
        supers = found.get(f"super_{name}")
        if supers is not None:
            found |= {name: expand_scales(found[name], supers), f"super_{name}": None}
    return found


def packed_shape(n: int, k: int, packing: _C.Packing) -> tuple[int, int, int, int]:
    """Shape of a packed `[n, k]` matrix."""
    return (ceil_div(n, TILE_N), ceil_div(k, _C.tile_k(packing)), *TILE)


def weight_arguments(shape: WeightShape, weights: PackedWeights) -> tuple[_C.WeightArguments, list[Tensor]]:
    """The arguments, and the tensors that they point into: they must outlive the call."""
    w_packed, scales = aligned(weights.w_packed), as_separate_rows(weights.scales)
    zeros, global_scale, minimums = weights.zeros, weights.global_scale, weights.minimums
    arguments = _C.WeightArguments()
    arguments.packing = shape.packing
    arguments.n, arguments.k, arguments.group_size = shape.n, shape.k, shape.group_size
    arguments.packed = w_packed.data_ptr()
    arguments.scale_type = DTYPES[scales.dtype]
    arguments.scales = scales.data_ptr()
    arguments.scale_stride = scales.stride(0)
    operands = [w_packed, scales]
    if zeros is not None:
        zeros = as_separate_rows(zeros)
        arguments.zero_type = DTYPES[zeros.dtype]
        arguments.zeros = zeros.data_ptr()
        arguments.zero_stride = zeros.stride(0)
        operands.append(zeros)
    if global_scale is not None:
        arguments.global_scale = global_scale.data_ptr()
        operands.append(global_scale)
    if minimums is not None:
        minimums = as_separate_rows(minimums)
        arguments.minimum_type = DTYPES[minimums.dtype]
        arguments.minimums = minimums.data_ptr()
        arguments.minimum_stride = minimums.stride(0)
        operands.append(minimums)
    if weights.super_scales is not None:
        super_scales = as_separate_rows(weights.super_scales)
        arguments.super_groups = scales.shape[0] // super_scales.shape[0]
        arguments.super_scales = super_scales.data_ptr()
        arguments.super_scale_stride = super_scales.stride(0)
        operands.append(super_scales)
    if weights.super_minimums is not None:
        super_minimums = as_separate_rows(weights.super_minimums)
        arguments.super_minimums = super_minimums.data_ptr()
        arguments.super_minimum_stride = super_minimums.stride(0)
        operands.append(super_minimums)
    return arguments, operands
