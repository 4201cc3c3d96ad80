"""The canonical form of quantised weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from qcutlass.products.checks import (
    FLOATING,
    ceil_div,
    check_dtype,
    check_index,
    check_integer,
    check_strided,
    check_tensor,
    names_of,
    shape_of,
    span_of,
)
from qcutlass.products.epilogue import GATE_STEP
from qcutlass.products.packing import (
    CODE_TYPES,
    INTEGERS,
    PACKINGS,
    SUPERS,
    TILE,
    ZEROS,
    check_global_scale,
    check_super_blocks,
    check_weight_dtype,
    expand_scales,
    one_level,
)

DEQUANTIZED: Final = (*FLOATING, torch.float64)
"""The types of dequantised weights."""
_MISSING: Final = {"zeros": "zero points", "minimums": "minimums"}


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A quantised weight matrix in canonical form.

    `w[n, k] = (codes[n, k] - zeros[g, n]) * scales[g, n]` with g = k // group_size, or, where there are minimums,
    `codes[n, k] * scales[g, n] - minimums[g, n]`: a group may then be flat, with a scale of 0. Of codes that are
    floating numbers, `w[n, k] = number[n, k] * RN32(scales[g, n] * global_scale)`.

    Attributes:
        codes: uint8 `[N, K]`, values in `[0, 2**bits)`, not checked here; `preprocess_weights` checks them, on the CPU.
        scales: float16, bfloat16 or float32 `[G, N]`, G = ceil(K / group_size); of "e2m1" codes also float8_e8m0fnu and
            float8_e4m3fn.
        zeros: `[G, N]`, integer (exact zero points, in `[0, 2**bits]`) or floating (real-valued zeros); None:
            2**(bits - 1) everywhere. None for floating codes.
        bits: 4 or 8.
        group_size: columns that share a scale; K: one scale a channel. The last group may be shorter.
        weight_dtype: None: codes are integers; "e2m1" or "e4m3": the bits of such numbers, as for `gemm`.
        global_scale: float32 `[1]`, beside scales of float8_e4m3fn; None: 1.
        minimums: float16, bfloat16 or float32 `[G, N]`, in place of zeros, which are None then; or None.
        super_scales, super_minimums: float16 `[B, N]`, B a divisor of G, or None: the second level of scales and of
            minimums, which are uint8 or int8 then, as for `gemm`.

    Raises:
        TypeError: a part is not a tensor, or not of an allowed type.
        ValueError: `bits` is neither 4 nor 8; a shape is not the one above; integer zeros lie outside `[0, 2**bits]`;
            there are zeros and minimums, or one of them beside floating codes; codes of `weight_dtype` have other bits,
            or there is no such type; levels of scales and minimums do not go together.

    Example:
        >>> import torch, qcutlass
        >>> codes, scales = torch.tensor([[9, 7], [8, 12]], dtype=torch.uint8), torch.tensor([[0.5, 2.0]])
        >>> qcutlass.QuantizedTensor(codes, scales, zeros=None, bits=4, group_size=2).dequantize()
        tensor([[ 0.5000, -0.5000],
                [ 0.0000,  8.0000]])
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group_size: int
    weight_dtype: str | None = None
    global_scale: Tensor | None = None
    minimums: Tensor | None = None
    super_scales: Tensor | None = None
    super_minimums: Tensor | None = None

    def __post_init__(self) -> None:
        check_weight_dtype(self.weight_dtype, self.bits)
        self._check_types()
        self._check_shapes()
        for name, part in (("zeros", self.zeros), ("minimums", self.minimums)):
            if self.weight_dtype is not None and part is not None:
                raise ValueError(f"{name}: {self.weight_dtype} codes have signs and no {_MISSING[name]}; pass None")
        check_zeros(self.zeros, self.bits)
        if self.zeros is not None and self.minimums is not None:
            raise ValueError("minimums: expected zeros or minimums, got both")
        check_super_blocks(self)

    def _check_types(self) -> None:
        check_integer("bits", self.bits, PACKINGS)
        check_integer("group_size", self.group_size)
        numbers = FLOATING if self.super_scales is None else INTEGERS
        check_tensor("codes", self.codes, (torch.uint8,))
        check_tensor("scales", self.scales, CODE_TYPES[self.weight_dtype].scales if self.weight_dtype else numbers)
        for name, part, allowed in (
            ("zeros", self.zeros, ZEROS),
            ("minimums", self.minimums, numbers),
            ("super_scales", self.super_scales, SUPERS),
            ("super_minimums", self.super_minimums, SUPERS),
        ):
            if part is not None:
                check_tensor(name, part, allowed)
        if self.global_scale is not None:
            check_global_scale(self.global_scale, self.scales, self.scales.device, "scales")

    def _check_shapes(self) -> None:
        if self.codes.dim() != 2:
            raise ValueError(f"codes: expected shape [N, K], got {shape_of(self.codes)}")
        if self.group_size < 1:
            raise ValueError(f"group_size: expected at least 1, got {self.group_size}; pass K for one group a channel")
        n, k = self.codes.shape
        expected = [max(1, ceil_div(k, self.group_size)), n]
        for name, part in (("scales", self.scales), ("zeros", self.zeros), ("minimums", self.minimums)):
            if part is not None and list(part.shape) != expected:
                raise ValueError(
                    f"{name}: expected shape [G, N] = {expected} beside codes {shape_of(self.codes)} in groups of "
                    f"{self.group_size}, got {shape_of(part)}"
                )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        n, k = self.codes.shape
        return n, k

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of a weight, its share of scales, zeros and minimums included."""
        parts = self.scales, self.zeros, self.global_scale, self.minimums, self.super_scales, self.super_minimums
        stored = [tensor for tensor in parts if tensor is not None]
        extra = 8 * sum(tensor.numel() * tensor.element_size() for tensor in stored)
        return self.bits + extra / max(1, self.codes.numel())

    def rows(self, index: Tensor | slice) -> QuantizedTensor:
        """The matrix with its rows in another order, or some of them.

        Args:
            index: a slice, or int32 or int64 numbers of rows, or booleans `[N]`.

        Raises:
            TypeError: it is none of these.
            ValueError: there is no such row, or a step below 1.
        """
        check_index("index", index, self.shape[0])
        if isinstance(index, Tensor) and index.is_meta and not self.codes.is_meta:
            raise ValueError(f"index is on meta, codes is on {self.codes.device}: pass numbers, not their shape alone")
        cut: dict[str, Any] = {name: part[:, index] for name, part in self._of_groups.items()}
        return replace(self, codes=self.codes[index], **cut)

    def columns(self, part: slice) -> QuantizedTensor:
        """Some columns, with the same weights to the bit.

        Where they begin within a group, all groups become smaller ones of equal scales, zeros and minimums, which have
        one level then. Super-blocks that are cut through between groups become shorter ones.

        Raises:
            TypeError: `part` is no slice.
            ValueError: it has a step, or no column.
        """
        if not isinstance(part, slice):
            raise TypeError(f"part: expected a slice of columns, got {type(part).__name__}")
        span = span_of("part", part, self.shape[1])
        begin, end = span.start, span.stop
        if span.step != 1 or begin >= end:
            raise ValueError(f"part: expected neighbouring columns of {self.shape[1]}, at least one, got {part}")
        return self._columns(slice(begin, end))

    def _columns(self, part: slice) -> QuantizedTensor:
        size, step, groups = part.stop - part.start, self.group_size, len(self.scales)
        if step < self.shape[1] and part.start % step:
            return self._regrouped(math.gcd(step, part.start))._columns(part)
        begin, end = (0, groups) if step >= self.shape[1] else (part.start // step, ceil_div(part.stop, step))
        cut: dict[str, Any] = {}
        for name, values in self._of_groups.items():
            each = groups // len(values)  # those that a row is for
            left = math.gcd(each, begin, end)
            values = values if left == each else values.repeat_interleave(each // left, dim=0)
            cut[name] = values[begin // left : end // left]
        return replace(self, codes=self.codes[:, part], group_size=min(step, size), **cut)

    def expanded(self) -> QuantizedTensor:
        """The same weights with float32 scales and minimums where these have two levels; else itself."""
        return self if self.super_scales is None else replace(self, **one_level(vars(self)))

    def _regrouped(self, step: int) -> QuantizedTensor:
        """The same weights in groups of fewer columns, a divisor of the group size."""
        weight = self.expanded()
        groups = torch.arange(ceil_div(self.shape[1], step), device=self.codes.device) // (self.group_size // step)
        repeated: dict[str, Any] = {name: part[groups] for name, part in weight._of_groups.items()}
        return replace(weight, group_size=step, **repeated)

    @property
    def _of_groups(self) -> dict[str, Tensor]:
        """The parts with a row for each group, or for each super-block."""
        names = "scales", "zeros", "minimums", "super_scales", "super_minimums"
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weights `[N, K]`, computed in fp32 and rounded once to `dtype`.

        Args:
            dtype: float16, bfloat16, float32 or float64. None: the type of the scales, or float32 where these have 8
                bits.

        Raises:
            TypeError: it is another one.
        """
        if dtype is None:
            dtype = self.scales.dtype if self.scales.dtype in FLOATING else torch.float32
        check_dtype("dtype", dtype, DEQUANTIZED)
        k = self.codes.shape[1]
        step = max(1, min(self.group_size, k))
        weight = numbers_of(self.codes, self.weight_dtype)
        scales = expand_scales(self.scales, self.super_scales).float()
        minimums = None if self.minimums is None else expand_scales(self.minimums, self.super_minimums)
        scales = scales if self.global_scale is None else scales * self.global_scale
        for group, begin in enumerate(range(0, k, step)):
            columns = weight[:, begin : begin + step]
            if minimums is not None:  # exact in fp64 but for far more digits than files have: rounded once
                scale, minimum = (part[group].double()[:, None] for part in (scales, minimums))
                columns.copy_(columns.double().mul_(scale).sub_(minimum))
                continue
            if self.weight_dtype is None:
                columns.sub_(2.0 ** (self.bits - 1) if self.zeros is None else self.zeros[group].float()[:, None])
            columns.mul_(scales[group][:, None])
        return weight.to(dtype)


_Weights = TypeVar("_Weights", Tensor, QuantizedTensor, tuple[Tensor, Tensor])


def interleave_gate_up(gate: _Weights, up: _Weights, *, dim: int = 0) -> _Weights:
    """Gate and up of a gated MLP as one, in turns of 16 channels, for `gemm(..., activation="silu_mul")`.

    Args:
        gate, up: alike but for their values: quantised weights `[I, K]`; or one part of such, its channels along `dim`:
            float weights, codes or scales of blocks of 16 `[I, K]` and bias `[I]` along 0, scales, zeros and minimums
            `[G, I]` along -1; or packed weights `[I / 16, tiles, 32, 16]`; or codes `[I, K]` and the scales of their
            square blocks, as `qcutlass.blockwise.weight_quant` and `fp8_weight_quant` give them. I is a multiple of 16:
            a layer of another size needs channels of zeros behind its own, and the layer that reads the result as many
            columns of zeros.
        dim: of a tensor, the dimension of the channels; 0 of others.

    Returns:
        Of the type of the two, with 2 I channels: 16 of the gate, 16 of up, and so on. Scales of square blocks are the
        gate's, then up's: `[2, ceil(I / block_size), ceil(K / block_size)]`.

    Raises:
        TypeError: they are neither tensors, quantised weights nor pairs of tensors, or not of one type.
        ValueError: they differ in shape or scheme, I is no multiple of 16, or there is no such `dim`.

    Example:
        >>> import torch, qcutlass
        >>> gate, up = (qcutlass.quantize(torch.randn(48, 256)) for _ in range(2))
        >>> both = qcutlass.interleave_gate_up(gate, up)
        >>> w_packed = qcutlass.preprocess_weights(both.codes, bits=4)
        >>> qcutlass.gemm(torch.randn(2, 256), w_packed, both.scales, both.zeros, activation="silu_mul").shape
        torch.Size([2, 48])
    """
    check_integer("dim", dim)
    if dim != 0 and not isinstance(gate, Tensor):
        raise ValueError(f"dim: expected 0 for weights that are no tensor, got {dim}")
    if isinstance(gate, QuantizedTensor) and isinstance(up, QuantizedTensor):
        return _interleaved(gate, up)
    if isinstance(gate, tuple) and isinstance(up, tuple):
        return _interleaved_blocks(gate, up)
    if not isinstance(gate, Tensor) or not isinstance(up, Tensor):
        name, part = ("up", up) if isinstance(gate, Tensor | QuantizedTensor | tuple) else ("gate", gate)
        raise TypeError(
            f"{name}: expected a torch.Tensor, a QuantizedTensor or codes and scales, as the other, got "
            f"{type(part).__name__}"
        )
    if up.dtype != gate.dtype:
        raise TypeError(f"up: expected the type of gate, {gate.dtype}, got {up.dtype}")
    if up.shape != gate.shape or up.device != gate.device:
        raise ValueError(
            f"up: expected the shape and device of gate, {shape_of(gate)} on {gate.device}, got {shape_of(up)} on "
            f"{up.device}"
        )
    if not -gate.dim() <= dim < gate.dim():
        raise ValueError(f"dim: expected one of the {gate.dim()} dimensions of gate, got {dim}")
    is_packed = gate.dim() == 4 and gate.shape[2:] == TILE
    step = 1 if is_packed else GATE_STEP
    if gate.shape[dim] % step:
        raise ValueError(
            f"gate: expected a multiple of {step} channels along dim = {dim}, got {shape_of(gate)}; put channels of "
            "zeros behind those of gate and up, and as many columns of zeros behind those of the layer that reads them"
        )
    check_strided("gate", gate)
    check_strided("up", up)
    dim %= gate.dim()
    sizes = [*gate.shape[:dim], gate.shape[dim] // step, step, *gate.shape[dim + 1 :]]
    parts = [part.reshape(sizes) for part in (gate, up)]
    return torch.stack(parts, dim + 1).flatten(dim, dim + 2)


def _interleaved(gate: QuantizedTensor, up: QuantizedTensor) -> QuantizedTensor:
    for name in ("bits", "group_size", "weight_dtype"):
        if getattr(gate, name) != getattr(up, name):
            raise ValueError(f"up: expected the {name} of gate, {getattr(gate, name)}, got {getattr(up, name)}")
    parts: dict[str, Tensor | None] = {}
    of_groups = ("scales", "zeros", "minimums", "super_scales", "super_minimums")
    for name, dim in (("codes", 0), *((name, -1) for name in of_groups)):
        first, second = getattr(gate, name), getattr(up, name)
        if (first is None) != (second is None):
            raise ValueError(f"{name}: expected those of both gate and up, or of neither")
        parts[name] = None if first is None else interleave_gate_up(first, second, dim=dim)
    scales = [one.global_scale for one in (gate, up)]
    if (scales[0] is None) != (scales[1] is None) or (scales[0] is not None and not torch.equal(*scales)):  # type: ignore[arg-type]
        raise ValueError("global_scale: expected the same of gate and up: multiply the scales of one by the quotient")
    return replace(gate, **parts)  # type: ignore[arg-type]


def _interleaved_blocks(gate: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Of weights whose square blocks have scales, which stay apart: a block has channels of one of the two."""
    for name, parts in (("gate", gate), ("up", up)):
        if len(parts) != 2 or not all(isinstance(part, Tensor) for part in parts):
            found = ", ".join(type(part).__name__ for part in parts)
            raise TypeError(f"{name}: expected codes and the scales of their blocks, got {found or 'none'}")
    (codes, scales), (of_up, up_scales) = gate, up
    if scales.dim() != 2 or scales.dtype != torch.float32:
        raise ValueError(
            "gate: expected float32 scales of square blocks, [ceil(I / block_size), ceil(K / block_size)], got "
            f"{names_of([scales.dtype])} {shape_of(scales)}"
        )
    if up_scales.shape != scales.shape or up_scales.device != scales.device:
        raise ValueError(
            f"up: expected scales of the shape and device of gate's, {shape_of(scales)} on {scales.device}, got "
            f"{shape_of(up_scales)} on {up_scales.device}"
        )
    return interleave_gate_up(codes, of_up), torch.stack([scales, up_scales])


_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def numbers_of(codes: Tensor, weight_dtype: str | None) -> Tensor:
    """The numbers that codes, uint8, are before zeros and scales, as float32."""
    if weight_dtype == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    if weight_dtype == "e2m1":
        return torch.tensor(_E2M1, dtype=torch.float32, device=codes.device)[codes.int()]
    return codes.to(torch.float32)


def check_zeros(zeros: Tensor | None, bits: int) -> None:
    """Raises ValueError if integer zeros lie outside [0, 2**bits], for which products give wrong numbers.

    It waits for the device of `zeros`, so products do not call it: it stands where data enters.
    """
    if zeros is None or zeros.is_floating_point() or zeros.is_meta or not zeros.numel():
        return
    if zeros.dtype == torch.uint8 and bits == 8:
        return  # holds no others
    if bool(((zeros < 0) | (zeros > 2**bits)).any()):
        got = f"{int(zeros.min())} to {int(zeros.max())}"
        raise ValueError(f"zeros: expected integers in [0, {2**bits}] for {bits}-bit weights, got {got}")
