"""The canonical form of quantised weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from qcutlass.products.checks import FLOATING, ceil_div
from qcutlass.products.packing import check_super_blocks, check_weight_dtype, expand_scales, one_level

_MISSING: Final = {"zeros": "zero points", "minimums": "minimums"}


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A quantised weight matrix in canonical form.

    `w[n, k] = (codes[n, k] - zeros[g, n]) * scales[g, n]` with g = k // group_size, or, where there are minimums,
    `codes[n, k] * scales[g, n] - minimums[g, n]`: a group may then be flat, with a scale of 0. Of codes that are
    floating numbers, `w[n, k] = number[n, k] * RN32(scales[g, n] * global_scale)`.

    Attributes:
        codes: uint8 `[N, K]`, values in `[0, 2**bits)`.
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
        ValueError: integer zeros lie outside `[0, 2**bits]`; there are zeros and minimums, or one of them beside
            floating codes; codes of `weight_dtype` have other bits, or there is no such type; levels of scales and
            minimums do not go together.
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
        for name, part in (("zeros", self.zeros), ("minimums", self.minimums)):
            if self.weight_dtype is not None and part is not None:
                raise ValueError(f"{name}: {self.weight_dtype} codes have signs and no {_MISSING[name]}; pass None")
        check_zeros(self.zeros, self.bits)
        if self.zeros is not None and self.minimums is not None:
            raise ValueError("minimums: expected zeros or minimums, got both")
        check_super_blocks(self)

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
        """The matrix with its rows in another order, or some of them."""
        cut: dict[str, Any] = {name: part[:, index] for name, part in self._of_groups.items()}
        return replace(self, codes=self.codes[index], **cut)

    def columns(self, part: slice) -> QuantizedTensor:
        """Some columns, of whole groups, or of the only one. Super-blocks that are cut through become shorter ones."""
        size, step, groups = part.stop - part.start, self.group_size, len(self.scales)
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

    @property
    def _of_groups(self) -> dict[str, Tensor]:
        """The parts with a row for each group, or for each super-block."""
        names = "scales", "zeros", "minimums", "super_scales", "super_minimums"
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weights `[N, K]`, computed in fp32 and rounded once to `dtype`.

        None: the type of the scales, or float32 where these have 8 bits.
        """
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
        return weight.to(dtype or (self.scales.dtype if self.scales.dtype in FLOATING else torch.float32))


_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def numbers_of(codes: Tensor, weight_dtype: str | None) -> Tensor:
    """The numbers that codes, uint8, are before zeros and scales, as float32."""
    if weight_dtype == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    if weight_dtype == "e2m1":
        return torch.tensor(_E2M1, device=codes.device)[codes.int()]
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
