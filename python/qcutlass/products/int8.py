"""Products of int8 activations by int8 weights, with scales of rows and channels: `qcutlass.gemm_w8a8`."""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass._C import Operand
from qcutlass.products.checks import (
    DEVICES,
    FLOATING,
    check_activations,
    check_device,
    check_integer,
    check_operand,
    check_out,
    check_tensor,
    check_vector,
    names_of,
)
from qcutlass.products.eight_bit import (
    TILE_K,
    check_out_dtype,
    check_packed,
    check_per_row,
    check_scaled,
    fill_scaled,
)
from qcutlass.products.epilogue import check_epilogue
from qcutlass.products.kind import Description, Kind, Size
from qcutlass.products.multiplying import multiply
from qcutlass.products.packing import WeightShape, check_channels, check_packed_form

_INT8: Final = (torch.int8,)
_INTEGERS: Final = (torch.int32,)
_SUMS: Final = torch.int32  # as out_dtype: the sums themselves
MAX_INT8_K: Final = 2**31 // 128**2 - 1
"""Largest K of int8 products, `kMaxInt8K` in cpp/include/qcutlass/gemm.h: sums stay below 2^31."""


class Int8Call(NamedTuple):
    """The arguments of one int8 product, in the order of the schema; `qcutlass.gemm_w8a8` describes them."""

    a_q: Annotated[Tensor, Operand.A]
    w_packed: Annotated[Tensor, Operand.WEIGHTS]
    a_scale: Annotated[Tensor | None, Operand.A_SCALE]
    w_scale: Annotated[Tensor | None, Operand.W_SCALE]
    bias: Annotated[Tensor | None, Operand.BIAS] = None
    azp: Annotated[Tensor | None, Operand.AZP] = None
    activation: str | None = None
    out_dtype: torch.dtype = torch.float16
    n: Size | None = None
    w_sums: Annotated[Tensor | None, Operand.W_SUMS] = None
    tactic: str | None = None
    split_k: int = 0
    batch_invariant: bool = False
    residual: Annotated[Tensor | None, Operand.RESIDUAL] = None

    @property
    def a(self) -> Tensor:
        return self.a_q

    def check(self, out: Tensor | None) -> WeightShape:
        """Checks every argument but what needs memory addresses."""
        a, w_packed, azp, w_sums, out_dtype = self.a_q, self.w_packed, self.azp, self.w_sums, self.out_dtype
        device = check_activations("a_q", a, dict.fromkeys(DEVICES, _INT8))
        if isinstance(w_packed, Tensor) and w_packed.dtype == torch.uint8:
            raise ValueError(
                "w_packed was packed for 16-bit activations (dtype uint8), but this product takes weights packed for "
                "int8 activations (dtype int8): pack int8 codes with preprocess_weights(codes, bits=8, "
                "activations='int8')"
            )
        check_operand("w_packed", w_packed, _INT8, device, "a_q")
        k = a.shape[-1]
        check_packed("w_packed", w_packed, k)
        if k > MAX_INT8_K:
            raise ValueError(f"a_q: K = {k} is more than {MAX_INT8_K}, where sums no longer fit int32: split K")
        check_out_dtype(out_dtype, (*FLOATING, _SUMS))
        is_scaled = out_dtype != _SUMS
        if not is_scaled:
            for name in ("a_scale", "w_scale", "bias", "activation", "residual"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}: expected None with out_dtype=torch.int32, which gives the sums themselves"
                    )
        n = check_scaled(self, w_packed, "a_q", "w_packed", is_scaled, w_sums)
        if azp is not None:
            check_operand("azp", azp, _INTEGERS, device, "a_q")
            check_per_row("azp", azp, "a_q", a)
        if w_sums is not None:
            check_operand("w_sums", w_sums, _INTEGERS, device, "a_q")
            check_vector("w_sums", w_sums, n, "N")
        columns = check_epilogue(self, n, "a_q")
        if out is not None:
            check_out("a_q", a, out, columns, out_dtype, " (out_dtype)")
        return WeightShape(n, k, 8, k)

    def prepared(self, shape: WeightShape) -> Int8Call:
        """With sums of channels where there are zero points."""
        if self.azp is None or self.w_sums is not None:
            return self
        return self._replace(w_sums=channel_sums(self.w_packed, shape.n))

    def fill(self, arguments: _C.GemmArguments, shape: WeightShape) -> list[Tensor]:
        alive = fill_scaled(self, arguments, shape, self.w_packed, azp=self.azp)
        if self.w_sums is not None:
            w_sums = self.w_sums.contiguous()
            arguments.sums.channel_sums = w_sums.data_ptr()
            alive.append(w_sums)
        return alive

    def describe(self, shape: WeightShape) -> Description:
        parts = [f"{names_of([self.out_dtype])} out"]
        parts += [name for name, operand in {"bias": self.bias, "azp": self.azp}.items() if operand is not None]
        return Description("int8 weights", parts)


INT8: Final = Kind("gemm_w8a8", Int8Call, activations=_INT8)


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
        k = (w.shape[1] - 1) * TILE_K + 1  # at least
        if n is not None:
            check_integer("n", n, minimum=0)
            check_channels(f"n: {n}", n, "w", w)
    if k > MAX_INT8_K:
        raise ValueError(f"w: expected K of at most {MAX_INT8_K}, where sums of products fit int32, got {k} or more")


def sums_call(w_packed: Tensor, n: int | None) -> Int8Call:
    """The product whose only row holds the sum of each channel's weights: that with a row of ones."""
    k = min(w_packed.shape[1] * TILE_K, MAX_INT8_K)  # columns of padding are zero
    ones = torch.ones((1, k), dtype=torch.int8, device=w_packed.device)
    return Int8Call(ones, w_packed, None, None, out_dtype=_SUMS, n=n)


def channel_sums(w_packed: Tensor, n: int) -> Tensor:
    """The sum of each channel's weights, int32 `[n]`."""
    return multiply(INT8, sums_call(w_packed, n)).view(-1)
