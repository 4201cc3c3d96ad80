"""Common rules of products of 8-bit activations by 8-bit weights: packed weights, scales of rows and channels, N."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass.products.checks import (
    FLOATING,
    ceil_div,
    check_integer,
    check_operand,
    check_options,
    check_vector,
    names_of,
    shape_of,
)
from qcutlass.products.memory import aligned
from qcutlass.products.packing import TILE_N, WeightShape, check_channels, check_packed_form

SCALES: Final = (torch.float32,)
TILE_K: Final = _C.tile_k(_C.Packing.W8A8)


class ScaledCall(Protocol):
    """A call with scales of rows and channels."""

    @property
    def a(self) -> Tensor: ...

    @property
    def a_scale(self) -> Tensor | None: ...

    @property
    def w_scale(self) -> Tensor | None: ...

    @property
    def bias(self) -> Tensor | None: ...

    @property
    def activation(self) -> str | None: ...

    @property
    def n(self) -> int | None: ...

    @property
    def tactic(self) -> str | None: ...

    @property
    def split_k(self) -> int: ...

    @property
    def batch_invariant(self) -> bool: ...


def check_k(k: int) -> None:
    if k < 1:
        raise ValueError(f"K must be at least 1, got {k}")


def check_packed(name: str, w_packed: Tensor, k: int) -> None:
    """Checks the form of a packed weight of `k` columns."""
    check_packed_form(name, w_packed)
    check_k(k)
    tiles = ceil_div(k, TILE_K)
    if w_packed.shape[1] != tiles:
        raise ValueError(
            f"{name}: for K = {k} its second dimension must be {tiles}, got shape {shape_of(w_packed)}; "
            "was it packed from a matrix with another number of columns?"
        )


def check_plain(name: str, w: Tensor, k: int) -> None:
    """Checks the form of a weight `[N, K]` that is not packed."""
    if w.shape[1] != k:
        raise ValueError(f"{name}: expected shape [N, K] with K = {k} as a has, got {shape_of(w)}")
    check_k(k)


def check_out_dtype(dtype: object, allowed: tuple[torch.dtype, ...]) -> None:
    if dtype not in allowed:
        raise TypeError(f"out_dtype: expected one of {names_of(allowed)}, got {dtype}")


def check_scaled(
    call: ScaledCall, w: Tensor, first: str, weights: str, is_scaled: bool = True, w_sums: Tensor | None = None
) -> int:
    """Checks scales, bias and what is no tensor; returns N.

    Args:
        call: with activations and weights that were checked.
        w: the weights.
        first, weights: names of the activations and of the weights.
        is_scaled: whether there must be scales.
        w_sums: sums of channels, which tell N too.
    """
    a, a_scale, w_scale, bias = call.a, call.a_scale, call.w_scale, call.bias
    if is_scaled:
        check_operand("a_scale", a_scale, SCALES, a.device, first)
        check_operand("w_scale", w_scale, SCALES, a.device, first)
    if bias is not None:
        check_operand("bias", bias, FLOATING, a.device, first)
    n = _channels(call, w, weights, {"w_scale": w_scale, "bias": bias, "w_sums": w_sums})
    if a_scale is not None:
        check_per_row("a_scale", a_scale, first, a)
    if w_scale is not None and w_scale.numel() != 1 and w_scale.shape not in ((n,), (n, 1)):
        raise ValueError(f"w_scale: expected shape [N] = [{n}], or one element, got {shape_of(w_scale)}")
    if bias is not None:
        check_vector("bias", bias, n, "N")
    check_options(call.activation, call.tactic, call.split_k, call.batch_invariant, takes_gates=True)
    return n


def check_per_row(name: str, value: Tensor, first: str, a: Tensor) -> None:
    """Raises ValueError unless there is one element, or one for each row of the activations."""
    leading, shape = a.shape[:-1], value.shape
    if value.numel() == 1 or shape in (leading, (*leading, 1)):
        return
    rows = leading.numel()
    if shape not in ((rows,), (rows, 1)):
        shapes = f"[M] = [{rows}] or [M, 1]" + ("" if len(leading) == 1 else f" or {list(leading)}")
        raise ValueError(
            f"{name}: expected one element, or one for each row of {first}, shape {shapes}; got shape {shape_of(value)}"
        )


def _channels(call: ScaledCall, w: Tensor, name: str, vectors: Mapping[str, Tensor | None]) -> int:
    """N, from what tells it first; that the others agree is checked with their shapes."""
    if call.n is not None:
        check_integer("n", call.n, minimum=0)
    if w.dim() == 2:
        n = w.shape[0]
        if call.n is not None and call.n != n:
            raise ValueError(f"n: expected None or N = {n} of {name}, got {call.n}")
        return n
    if call.n is not None:
        check_channels(f"n: {call.n}", call.n, name, w)
        return call.n
    for source, vector in vectors.items():
        if vector is not None and vector.dim() > 0 and (source != "w_scale" or vector.numel() != 1):
            n = vector.shape[0]
            if vector.shape not in ((n,), (n, 1)):
                raise ValueError(f"{source}: expected shape [N] (w_scale: or [N, 1]), got {shape_of(vector)}")
            check_channels(f"{source}: N = {n} from shape {shape_of(vector)}", n, name, w)
            return n
    tiles, w_scale = w.shape[0], call.w_scale
    if tiles == 1 and w_scale is not None and w_scale.dim() > 0:
        raise ValueError("n: a w_scale of one element may be that of the only channel or of all 16: pass n=")
    return tiles * TILE_N


def fill_weights(arguments: _C.GemmArguments, shape: WeightShape, w_packed: Tensor) -> list[Tensor]:
    """Adds packed weights of 8 bits to `arguments`; returns the tensor that these point into."""
    w_packed, weights = aligned(w_packed), arguments.weights
    weights.packing = _C.Packing.W8A8
    weights.n, weights.k, weights.group_size = shape.n, shape.k, shape.k
    weights.packed = w_packed.data_ptr()
    return [w_packed]


def fill_scaled(
    call: ScaledCall, arguments: _C.GemmArguments, shape: WeightShape, w_packed: Tensor, **more: Tensor | None
) -> list[Tensor]:
    """Adds weights and scales to `arguments`; returns the tensors that these point into.

    Args:
        more: other vectors of `arguments.sums` by name, of one element or of one for each row or channel.
    """
    alive, sums = fill_weights(arguments, shape, w_packed), arguments.sums
    vectors: dict[str, Any] = {"a_scale": call.a_scale, "w_scale": call.w_scale, **more}
    for name, value in vectors.items():
        if value is not None:
            vector = value.reshape(-1).contiguous()
            setattr(sums, name, vector.data_ptr())
            setattr(sums, f"{name}_stride", int(vector.numel() > 1))
            alive.append(vector)
    return alive
