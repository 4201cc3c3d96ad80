"""The rules of blockwise int8, as `_eight_bit` has them for scales of rows and channels."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qcutlass._eight_bit import _check_k, _check_out_dtype, _check_packed
from qcutlass._validation import (
    FLOATING,
    TILE_N,
    WeightShape,
    ceil_div,
    check_activations,
    check_channels,
    check_device,
    check_integer,
    check_matrix,
    check_operand,
    check_options,
    check_out,
    check_tensor,
    check_vector,
    shape_of,
)

BLOCK_SIZES: Final = (32, 64, 128)
_INT8: Final = (torch.int8,)
_SCALES: Final = (torch.float32,)
_DEVICES: Final = ("cpu", "meta", "cuda")


class BlockwiseCall(NamedTuple):
    """The arguments of one blockwise product, in the order of the schemas; `qcutlass.blockwise` describes them.

    With `out_block_size` the output is quantised, and `out_dtype` is int8.
    """

    a: Tensor
    a_s: Tensor
    b: Tensor
    b_s: Tensor
    bias: Tensor | None = None
    activation: str | None = None
    out_dtype: torch.dtype = torch.float16
    n: int | None = None
    block_size: int = 128
    out_block_size: int | None = None
    tactic: str | None = None
    split_k: int = 0

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        return self.a, self.b, self.a_s, self.b_s, self.bias, None

    @property
    def options(self) -> tuple[Any, ...]:
        integers = self.n, self.block_size, self.out_block_size, self.split_k
        return self.activation, self.out_dtype, self.tactic, *integers, tuple(map(type, integers))

    def check(self, out: Tensor | None) -> WeightShape:
        return check_product(self, out)


class QuantizedCall(BlockwiseCall):
    """The same with `out_s`, which the scales of a quantised output are written into."""

    out_s: Tensor

    @classmethod
    def of(cls, call: BlockwiseCall, out_s: Tensor) -> QuantizedCall:
        result = cls(*call)
        result.out_s = out_s
        return result

    @property
    def operands(self) -> tuple[Tensor | None, ...]:
        return *super().operands[:-1], self.out_s


def check_block_size(name: str, value: object) -> None:
    check_integer(name, value, BLOCK_SIZES)


def check_product(call: BlockwiseCall, out: Tensor | None) -> WeightShape:
    """Checks every argument of a blockwise product but what needs memory addresses."""
    a, b, bias, size = call.a, call.b, call.bias, call.block_size
    device = check_activations("a", a, dict.fromkeys(_DEVICES, _INT8))
    check_block_size("block_size", size)
    check_operand("a_s", call.a_s, _SCALES, device, "a")
    if isinstance(b, Tensor) and b.dtype == torch.uint8:
        raise ValueError(
            "b was packed for 16-bit activations (dtype uint8), but this product takes int8 weights, plain [N, K] or "
            "packed for int8 activations: preprocess_weights(b, bits=8, activations='int8')"
        )
    check_operand("b", b, _INT8, device, "a")
    check_operand("b_s", call.b_s, _SCALES, device, "a")
    if bias is not None:
        check_operand("bias", bias, FLOATING, device, "a")
    k = a.shape[-1]
    n = _channels(call, k)
    blocks = ceil_div(k, size)
    _check_row_scales(call.a_s, a.shape[:-1], blocks, size)
    check_weight_scales("b_s", call.b_s, n, k, size)
    if bias is not None:
        check_vector("bias", bias, n, "N")
    check_options(call.activation, call.tactic, call.split_k)
    if call.out_block_size is None:
        _check_out_dtype(call.out_dtype, FLOATING)
    else:
        check_block_size("out_block_size", call.out_block_size)
    if out is not None:
        check_out("a", a, out, n, call.out_dtype, " (out_dtype)")
    return WeightShape(n, k, 8, k)


def _check_row_scales(scales: Tensor, leading: torch.Size, blocks: int, size: int) -> None:
    """Raises ValueError unless there is one for each block of each row of the activations."""
    if scales.shape == (*leading, blocks):
        return
    if scales.shape != (leading.numel(), blocks):  # which makes torch compile for this number of rows alone
        expected = [*leading, blocks]
        raise ValueError(f"a_s: expected shape [..., ceil(K / {size})] = {expected}, got {shape_of(scales)}")


def _channels(call: BlockwiseCall, k: int) -> int:
    """N, after a check of the weights' form."""
    b, n = call.b, call.n
    if n is not None:
        check_integer("n", n, minimum=0)
    if b.dim() != 2:
        _check_packed("b", b, k)
        if n is None:
            n = call.bias.shape[0] if call.bias is not None and call.bias.dim() == 1 else b.shape[0] * TILE_N
        check_channels(f"n: N = {n}", n, "b", b)
        return n
    if b.shape[1] != k:
        raise ValueError(f"b: expected shape [N, K] with K = {k} as a has, got {shape_of(b)}")
    _check_k(k)
    if n is not None and n != b.shape[0]:
        raise ValueError(f"n: expected None or N = {b.shape[0]} of b, got {n}")
    return b.shape[0]


def check_weight_scales(name: str, scales: Tensor, n: int, k: int, size: int) -> None:
    """Raises ValueError unless there is one for each block of a weight `[n, k]`."""
    expected = (ceil_div(n, size), ceil_div(k, size))
    if scales.shape != expected:
        raise ValueError(
            f"{name}: expected shape [ceil(N / {size}), ceil(K / {size})] = {list(expected)}, got {shape_of(scales)}"
        )


def _check_columns(x: Tensor, size: int) -> None:
    if x.dim() == 0:
        raise ValueError("x: expected shape [..., K], got a tensor without dimensions")
    if x.shape[-1] < 1:
        raise ValueError(f"x: K must be at least 1, got shape {shape_of(x)}")
    check_block_size("block_size", size)


def check_quantize_blocks(x: Tensor, size: int, square: bool) -> tuple[int, ...]:
    """Checks the arguments of `act_quant`, or if `square` of `weight_quant`; returns the shape of the scales."""
    if square:
        check_matrix("x", x, FLOATING)
    check_tensor("x", x, FLOATING)
    check_device("x", x)
    _check_columns(x, size)
    return scales_shape(x, size, square)


def scales_shape(x: Tensor, size: int, square: bool) -> tuple[int, ...]:
    """Shape of the scales of codes shaped as `x`."""
    blocks = ceil_div(x.shape[-1], size)
    return (ceil_div(x.shape[0], size), blocks) if square else (*x.shape[:-1], blocks)


def check_codes(x: Tensor, s: Tensor, size: int, square: bool, name: str = "s") -> None:
    """Checks codes with the scales of their blocks; `name` is that of the scales."""
    if square:
        check_matrix("x", x, _INT8)
    check_tensor("x", x, _INT8)
    check_device("x", x)
    check_operand(name, s, _SCALES, x.device, "x")
    _check_columns(x, size)
    if square:
        return check_weight_scales(name, s, x.shape[0], x.shape[1], size)
    expected = scales_shape(x, size, square)
    if s.shape != expected:
        raise ValueError(f"{name}: expected shape [..., ceil(K / {size})] = {list(expected)}, got {shape_of(s)}")
    return None


def check_output_dtype(dtype: torch.dtype) -> None:
    if dtype not in FLOATING:
        raise TypeError(f"output_dtype: expected float16, bfloat16 or float32, got {dtype}")
