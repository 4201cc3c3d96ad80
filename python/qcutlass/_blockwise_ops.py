"""The operators of blockwise int8, `torch.ops.qcutlass.{blockwise_*, *_blocks}`."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from qcutlass import _C, _launch, _ops
from qcutlass._arguments import DTYPES, as_rows, backend, current_device
from qcutlass._blockwise import (
    BlockwiseCall,
    QuantizedCall,
    check_codes,
    check_output_dtype,
    check_quantize_blocks,
    scales_shape,
)
from qcutlass._ops import _register, _register_product
from qcutlass._validation import ceil_div, check_memory, tensors_of

Quantized: TypeAlias = tuple[Tensor, Tensor]
"""Codes, and the scales of their blocks."""


def multiply_quantized(call: BlockwiseCall) -> Quantized:
    """The product, quantised, and its scales."""
    n = call.check(None).n
    check_memory(tensors_of(call))
    if call.b.dim() == 2:
        call = call._replace(b=_ops.pack(call.b, 8, "int8"), n=n)
    call = QuantizedCall.of(call, _scales(call, n))
    out = _launch.repeat(call, None)
    return (_ops.multiply(call) if out is None else out), call.out_s


def _scales(call: BlockwiseCall, n: int) -> Tensor:
    assert call.out_block_size is not None
    return call.a.new_empty((*call.a.shape[:-1], ceil_div(n, call.out_block_size)), dtype=torch.float32)


def quantize_blocks(x: Tensor, size: int, square: bool) -> Quantized:
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


def gelu_blocks(x: Tensor, s: Tensor, size: int) -> Quantized:
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


def _quantize_fake(x: Tensor, size: int, square: bool) -> Quantized:
    shape = check_quantize_blocks(x, size, square)
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(shape, dtype=torch.float32)


def _dequantize_fake(x: Tensor, s: Tensor, size: int, square: bool, dtype: torch.dtype) -> Tensor:
    check_codes(x, s, size, square)
    check_output_dtype(dtype)
    return x.new_empty(x.shape, dtype=dtype)


def _gelu_fake(x: Tensor, s: Tensor, size: int) -> Quantized:
    check_codes(x, s, size, False, "s_x")
    return x.new_empty(x.shape), s.new_empty(scales_shape(x, size, False))


def _quantized(*arguments: Any) -> Quantized:
    return multiply_quantized(BlockwiseCall(*arguments))


def _quantized_fake(*arguments: Any) -> Quantized:
    call = BlockwiseCall(*arguments)
    n = call.check(None).n
    return call.a.new_empty((*call.a.shape[:-1], n)), _scales(call, n)


_PRODUCT: Final = (
    "Tensor a, Tensor a_s, Tensor b, Tensor b_s, Tensor? bias, str? activation, ScalarType out_dtype, SymInt? n=None, "
    "int block_size=128, int? out_block_size=None, str? tactic=None, int split_k=0"
)

_register_product("blockwise_gemm", _PRODUCT, BlockwiseCall)
_register(f"blockwise_gemm_quant({_PRODUCT}) -> (Tensor, Tensor)", _quantized, _quantized_fake)
_register("quantize_blocks(Tensor x, int size, bool square) -> (Tensor, Tensor)", quantize_blocks, _quantize_fake)
_register(
    "dequantize_blocks(Tensor x, Tensor s, int size, bool square, ScalarType dtype) -> Tensor",
    dequantize_blocks,
    _dequantize_fake,
)
_register("gelu_blocks(Tensor x, Tensor s, int size) -> (Tensor, Tensor)", gelu_blocks, _gelu_fake)
