"""The rules of products of 8-bit activations by weights of 8 bits, as `_validation` has them for weight-only ones."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass._validation import (
    FLOATING,
    TILE_N,
    WeightShape,
    ceil_div,
    check_activations,
    check_channels,
    check_device,
    check_integer,
    check_operand,
    check_options,
    check_out,
    check_packed_form,
    check_tensor,
    check_vector,
    shape_of,
)

_INT8: Final = (torch.int8,)
_FLOAT8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOAT8_WEIGHTS: Final = (torch.float8_e4m3fn,)
_SCALES: Final = (torch.float32,)
_INTEGERS: Final = (torch.int32,)
_DEVICES: Final = ("cpu", "meta", "cuda")
_SUMS: Final = torch.int32  # as out_dtype: the sums themselves
_TILE_K: Final = _C.tile_k(_C.Packing.W8A8)
MAX_INT8_K: Final = 2**31 // 128**2 - 1
"""Largest K of int8 products, `kMaxInt8K` in cpp/include/qcutlass/gemm.h: sums stay below 2^31."""


class Int8Call(NamedTuple):
    """The arguments of one int8 product, in the order of the schema; `qcutlass.gemm_w8a8` describes them."""

    a_q: Tensor
    w_packed: Tensor
    a_scale: Tensor | None
    w_scale: Tensor | None
    bias: Tensor | None = None
    azp: Tensor | None = None
    activation: str | None = None
    out_dtype: torch.dtype = torch.float16
    n: int | None = None
    w_sums: Tensor | None = None
    tactic: str | None = None
    split_k: int = 0

    @property
    def a(self) -> Tensor:
        return self.a_q

    @property
    def weights(self) -> Tensor:
        return self.w_packed

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        return self.a_q, self.w_packed, self.a_scale, self.w_scale, self.azp, self.w_sums, self.bias

    @property
    def options(self) -> tuple[Any, ...]:
        return self.activation, self.out_dtype, self.tactic, self.n, self.split_k, (type(self.n), type(self.split_k))

    def check(self, out: Tensor | None) -> WeightShape:
        return check_int8(self, out)


class Float8Call(NamedTuple):
    """The arguments of one fp8 product, in the order of the schema; `qcutlass.gemm_fp8` describes them."""

    a: Tensor
    w: Tensor
    a_scale: Tensor
    w_scale: Tensor
    bias: Tensor | None = None
    activation: str | None = None
    out_dtype: torch.dtype = torch.bfloat16
    n: int | None = None
    tactic: str | None = None
    split_k: int = 0

    @property
    def weights(self) -> Tensor:
        return self.w

    @property
    def azp(self) -> None:
        return None

    @property
    def w_sums(self) -> None:
        return None

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        return self.a, self.w, self.a_scale, self.w_scale, None, None, self.bias

    @property
    def options(self) -> tuple[Any, ...]:
        return self.activation, self.out_dtype, self.tactic, self.n, self.split_k, (type(self.n), type(self.split_k))

    def check(self, out: Tensor | None) -> WeightShape:
        return check_float8(self, out)


def check_int8(call: Int8Call, out: Tensor | None) -> WeightShape:
    """Checks every argument of `qcutlass.gemm_w8a8` but what needs memory addresses."""
    a, w_packed, azp, w_sums, out_dtype = call.a_q, call.w_packed, call.azp, call.w_sums, call.out_dtype
    device = check_activations("a_q", a, dict.fromkeys(_DEVICES, _INT8))
    if isinstance(w_packed, Tensor) and w_packed.dtype == torch.uint8:
        raise ValueError(
            "w_packed was packed for 16-bit activations (dtype uint8), but this product takes weights packed for int8 "
            "activations (dtype int8): pack int8 codes with preprocess_weights(codes, bits=8, activations='int8')"
        )
    check_operand("w_packed", w_packed, _INT8, device, "a_q")
    k = _check_packed("w_packed", w_packed, a.shape[-1])
    if k > MAX_INT8_K:
        raise ValueError(f"a_q: K = {k} is more than {MAX_INT8_K}, where sums no longer fit int32: split K")
    _check_out_dtype(out_dtype, (*FLOATING, _SUMS))
    if out_dtype == _SUMS:
        for name in ("a_scale", "w_scale", "bias", "activation"):
            if getattr(call, name) is not None:
                raise ValueError(f"{name}: expected None with out_dtype=torch.int32, which gives the sums themselves")
    n = _check_epilogue("a_q", "w_packed", call)
    if azp is not None:
        check_operand("azp", azp, _INTEGERS, device, "a_q")
        _check_per_row("azp", azp, "a_q", a)
    if w_sums is not None:
        check_operand("w_sums", w_sums, _INTEGERS, device, "a_q")
        check_vector("w_sums", w_sums, n, "N")
    if out is not None:
        check_out("a_q", a, out, n, out_dtype, " (out_dtype)")
    return WeightShape(n, k, 8, k)


def check_float8(call: Float8Call, out: Tensor | None) -> WeightShape:
    """Checks every argument of `qcutlass.gemm_fp8` but what needs memory addresses."""
    a, w, n = call.a, call.w, call.n
    device = check_activations("a", a, dict.fromkeys(_DEVICES, _FLOAT8))
    check_operand("w", w, _FLOAT8_WEIGHTS, device, "a")
    if w.dim() == 2:
        k = a.shape[-1]
        if w.shape[1] != k:
            raise ValueError(f"w: expected shape [N, K] with K = {k} as a has, got {shape_of(w)}")
        _check_k(k)
    else:
        k = _check_packed("w", w, a.shape[-1])
    _check_out_dtype(call.out_dtype, FLOATING)
    n = _check_epilogue("a", "w", call)
    if out is not None:
        check_out("a", a, out, n, call.out_dtype, " (out_dtype)")
    return WeightShape(n, k, 8, k)


def _check_k(k: int) -> None:
    if k < 1:
        raise ValueError(f"K must be at least 1, got {k}")


def _check_packed(name: str, w_packed: Tensor, k: int) -> int:
    """Checks the form of a packed weight of `k` columns; returns `k`."""
    check_packed_form(name, w_packed)
    _check_k(k)
    tiles = ceil_div(k, _TILE_K)
    if w_packed.shape[1] != tiles:
        raise ValueError(
            f"{name}: for K = {k} its second dimension must be {tiles}, got shape {shape_of(w_packed)}; "
            "was it packed from a matrix with another number of columns?"
        )
    return k


def _check_out_dtype(dtype: object, allowed: tuple[torch.dtype, ...]) -> None:
    if dtype not in allowed:
        names = ", ".join(str(one).removeprefix("torch.") for one in allowed)
        raise TypeError(f"out_dtype: expected one of {names}, got {dtype}")


def _check_epilogue(first: str, weights: str, call: Int8Call | Float8Call) -> int:
    """Checks the scales, the bias and what is no tensor; returns N."""
    a, w, a_scale, w_scale, bias = call.a, call.weights, call.a_scale, call.w_scale, call.bias
    if call.out_dtype != _SUMS:
        check_operand("a_scale", a_scale, _SCALES, a.device, first)
        check_operand("w_scale", w_scale, _SCALES, a.device, first)
    if bias is not None:
        check_operand("bias", bias, FLOATING, a.device, first)
    n = _channels(weights, w, w_scale, call)
    if a_scale is not None:
        _check_per_row("a_scale", a_scale, first, a)
    if w_scale is not None and w_scale.numel() != 1 and w_scale.shape not in ((n,), (n, 1)):
        raise ValueError(f"w_scale: expected shape [N] = [{n}], or one element, got {shape_of(w_scale)}")
    if bias is not None:
        check_vector("bias", bias, n, "N")
    check_options(call.activation, call.tactic, call.split_k)
    return n


def _check_per_row(name: str, value: Tensor, first: str, a: Tensor) -> None:
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


def _channels(name: str, w: Tensor, w_scale: Tensor | None, call: Int8Call | Float8Call) -> int:
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
    for source, vector in (("w_scale", w_scale), ("bias", call.bias), ("w_sums", call.w_sums)):
        if vector is not None and vector.dim() > 0 and (source != "w_scale" or vector.numel() != 1):
            n = vector.shape[0]
            if vector.shape not in ((n,), (n, 1)):
                raise ValueError(f"{source}: expected shape [N] (w_scale: or [N, 1]), got {shape_of(vector)}")
            check_channels(f"{source}: N = {n} from shape {shape_of(vector)}", n, name, w)
            return n
    tiles = w.shape[0]
    if tiles == 1 and w_scale is not None and w_scale.dim() > 0:
        raise ValueError("n: a w_scale of one element may be that of the only channel or of all 16: pass n=")
    return tiles * TILE_N


def check_weight_sums(w: Tensor, n: int | None) -> None:
    """Checks the arguments of `qcutlass.weight_sums`."""
    check_tensor("w", w, _INT8)
    check_device("w", w)
    if w.dim() == 2:
        k = w.shape[1]
        if n is not None and n != w.shape[0]:
            raise ValueError(f"n: expected None or N = {w.shape[0]} of w, got {n}")
    else:
        check_packed_form("w", w)
        k = (w.shape[1] - 1) * _TILE_K + 1  # at least
        if n is not None:
            check_integer("n", n, minimum=0)
            check_channels(f"n: {n}", n, "w", w)
    if k > MAX_INT8_K:
        raise ValueError(f"w: expected K of at most {MAX_INT8_K}, where sums of products fit int32, got {k} or more")


def sums_call(w_packed: Tensor, n: int | None) -> Int8Call:
    """The product whose only row holds the sum of each channel's weights: that with a row of ones."""
    k = min(w_packed.shape[1] * _TILE_K, MAX_INT8_K)  # columns of padding are zero
    ones = torch.ones((1, k), dtype=torch.int8, device=w_packed.device)
    return Int8Call(ones, w_packed, None, None, out_dtype=_SUMS, n=n)
