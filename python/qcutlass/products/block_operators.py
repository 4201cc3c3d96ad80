"""The quantisers of blocks, `torch.ops.qcutlass.*_blocks`: operators, and rules that blockwise products share."""

from __future__ import annotations

from typing import Final, TypeAlias

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass.products.checks import (
    FLOATING,
    ceil_div,
    check_device,
    check_integer,
    check_matrix,
    check_memory,
    check_operand,
    check_tensor,
    shape_of,
)
from qcutlass.products.extension import DTYPES, backend, current_device
from qcutlass.products.library import register
from qcutlass.products.memory import as_rows

BLOCK_SIZES: Final = (32, 64, 128)
_CODES: Final = (torch.int8,)
_SCALES: Final = (torch.float32,)

QuantizedBlocks: TypeAlias = tuple[Tensor, Tensor]
"""Codes, and the scales of their blocks."""


def check_block_size(name: str, value: object) -> None:
    check_integer(name, value, BLOCK_SIZES)


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
        check_matrix("x", x, _CODES)
    check_tensor("x", x, _CODES)
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


def quantize_blocks(x: Tensor, size: int, square: bool) -> QuantizedBlocks:
    """The codes of `x`, in blocks of `size` columns, and of as many rows if `square`."""
    codes, scales = _quantize_fake(x, size, square)
    check_memory({"x": x})
    if codes.numel():
        with current_device(codes):
            rows = as_rows(x)
            _C.quantize_blocks(
                rows.shape[0],
                rows.shape[1],
                size,
                DTYPES[rows.dtype],
                rows.data_ptr(),
                rows.stride(0),
                codes.data_ptr(),
                scales.data_ptr(),
                square=square,
                **backend(codes),
            )
    return codes, scales


def dequantize_blocks(x: Tensor, s: Tensor, size: int, square: bool, dtype: torch.dtype) -> Tensor:
    """The numbers that codes stand for."""
    out = _dequantize_fake(x, s, size, square, dtype)
    check_memory({"x": x, "s": s})
    if out.numel():
        with current_device(out):
            rows, scales = as_rows(x), s.contiguous()
            _C.dequantize_blocks(
                rows.shape[0],
                rows.shape[1],
                size,
                rows.data_ptr(),
                rows.stride(0),
                scales.data_ptr(),
                DTYPES[dtype],
                out.data_ptr(),
                square=square,
                **backend(out),
            )
    return out


def gelu_blocks(x: Tensor, s: Tensor, size: int) -> QuantizedBlocks:
    """GELU of what codes stand for, quantised."""
    codes, scales = _gelu_fake(x, s, size)
    check_memory({"x": x, "s_x": s})
    if codes.numel():
        with current_device(codes):
            rows, given = as_rows(x), s.contiguous()
            _C.gelu_blocks(
                rows.shape[0],
                rows.shape[1],
                size,
                rows.data_ptr(),
                rows.stride(0),
                given.data_ptr(),
                codes.data_ptr(),
                scales.data_ptr(),
                **backend(codes),
            )
    return codes, scales


def _quantize_fake(x: Tensor, size: int, square: bool) -> QuantizedBlocks:
    shape = check_quantize_blocks(x, size, square)
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(shape, dtype=torch.float32)


def _dequantize_fake(x: Tensor, s: Tensor, size: int, square: bool, dtype: torch.dtype) -> Tensor:
    check_codes(x, s, size, square)
    check_output_dtype(dtype)
    return x.new_empty(x.shape, dtype=dtype)


def _gelu_fake(x: Tensor, s: Tensor, size: int) -> QuantizedBlocks:
    check_codes(x, s, size, False, "s_x")
    return x.new_empty(x.shape), s.new_empty(scales_shape(x, size, False))


register("quantize_blocks(Tensor x, int size, bool square) -> (Tensor, Tensor)", quantize_blocks, _quantize_fake)
register(
    "dequantize_blocks(Tensor x, Tensor s, int size, bool square, ScalarType dtype) -> Tensor",
    dequantize_blocks,
    _dequantize_fake,
)
register("gelu_blocks(Tensor x, Tensor s, int size) -> (Tensor, Tensor)", gelu_blocks, _gelu_fake)
