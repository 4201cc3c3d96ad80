"""The quantisers of blocks, `torch.ops.qcutlass.*_blocks`: operators, and rules that blockwise products share."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, TypeAlias

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
from qcutlass.products.kind import schema_of
from qcutlass.products.library import register
from qcutlass.products.memory import are_rows, as_rows

BLOCK_SIZES: Final = (32, 64, 128)
TYPES: Final = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Types of codes by name; weights are packed for activations of the same."""
_CODES: Final = {torch.int8: _C.DType.INT8, torch.float8_e4m3fn: _C.DType.FLOAT8_E4M3}
"""Types of codes that have scales of blocks."""
_SCALE_FORMATS: Final = (None, "ue8m0")
_SCALES: Final = (torch.float32,)

QuantizedBlocks: TypeAlias = tuple[Tensor, Tensor]
"""Codes, and the scales of their blocks."""


def check_block_size(name: str, value: object) -> None:
    check_integer(name, value, BLOCK_SIZES)


def check_type(name: str, value: object) -> None:
    if not isinstance(value, str) or value not in TYPES:
        raise ValueError(f"{name}: expected {' or '.join(map(repr, TYPES))}, got {value!r}")


def check_weight_scales(name: str, scales: Tensor, n: int, k: int, size: int) -> None:
    """Raises ValueError unless there is one for each block of a weight `[n, k]`."""
    expected = (ceil_div(n, size), ceil_div(k, size))
    if scales.shape != expected:
        raise ValueError(
            f"{name}: expected shape [ceil(N / {size}), ceil(K / {size})] = {list(expected)}, got {shape_of(scales)}"
        )


def check_scale_format(scale_fmt: object) -> None:
    if scale_fmt not in _SCALE_FORMATS:
        raise ValueError(f"scale_fmt: expected None or 'ue8m0', powers of two, got {scale_fmt!r}")


def _check_columns(x: Tensor, size: int, name: str = "x") -> None:
    if x.dim() == 0:
        raise ValueError(f"{name}: expected shape [..., K], got a tensor without dimensions")
    if x.shape[-1] < 1:
        raise ValueError(f"{name}: K must be at least 1, got shape {shape_of(x)}")
    check_block_size("block_size", size)


class BlocksCall(NamedTuple):
    """The arguments of one quantisation in blocks, in the order of the schema; `qcutlass.blockwise` describes them.

    `square`: blocks have as many rows as columns, else one. `gated`: halves of `x` meet in SwiGLU first.
    """

    x: Tensor
    size: int
    square: bool = False
    dtype: torch.dtype = torch.int8
    scale_fmt: str | None = None
    gated: bool = False

    def check(self) -> QuantizedBlocks:
        """Checks the arguments; returns memory for codes and scales."""
        x, name = self.x, "gate_up" if self.gated else "x"
        if self.square:
            check_matrix(name, x, FLOATING)
        check_tensor(name, x, FLOATING)
        check_device(name, x)
        _check_columns(x, self.size, name)
        if self.gated and x.shape[-1] % 2:
            raise ValueError(f"{name}: expected shape [..., 2 I], gate beside up, got {shape_of(x)}")
        check_scale_format(self.scale_fmt)
        shape = (*x.shape[:-1], x.shape[-1] // 2) if self.gated else x.shape
        codes = x.new_empty(shape, dtype=self.dtype)
        return codes, x.new_empty(scales_shape(codes, self.size, self.square), dtype=torch.float32)

    @property
    def is_direct(self) -> bool:
        """Whether it reads `x` and no copy of it."""
        return are_rows(self.x)

    def fill(self, codes: Tensor, scales: Tensor) -> tuple[_C.QuantizeArguments, list[Tensor]]:
        """The extension's struct of a checked call with these outputs, and the tensors that it points into."""
        rows, arguments = as_rows(self.x), _C.QuantizeArguments()
        arguments.rows, arguments.columns, arguments.block = rows.shape[0], codes.shape[-1], self.size
        arguments.a_type, arguments.a, arguments.a_stride = DTYPES[rows.dtype], rows.data_ptr(), rows.stride(0)
        arguments.code_type, arguments.codes = _CODES[self.dtype], codes.data_ptr()
        arguments.scale = scales.data_ptr()
        arguments.square, arguments.gated = self.square, self.gated
        arguments.powers_of_two = self.scale_fmt is not None
        return arguments, [rows]


def scales_shape(x: Tensor, size: int, square: bool) -> tuple[int, ...]:
    """Shape of the scales of codes shaped as `x`."""
    blocks = ceil_div(x.shape[-1], size)
    return (ceil_div(x.shape[0], size), blocks) if square else (*x.shape[:-1], blocks)


def check_codes(
    x: Tensor, s: Tensor, size: int, square: bool, name: str = "s", dtypes: tuple[torch.dtype, ...] = tuple(_CODES)
) -> None:
    """Checks codes with the scales of their blocks; `name` is that of the scales."""
    if square:
        check_matrix("x", x, dtypes)
    check_tensor("x", x, dtypes)
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


def quantize_blocks(call: BlocksCall) -> QuantizedBlocks:
    """The codes of `x`, in blocks of `size` columns, and of as many rows if `square`."""
    codes, scales = call.check()
    check_memory({"gate_up" if call.gated else "x": call.x})
    if codes.numel():
        with current_device(codes):
            arguments, _alive = call.fill(codes, scales)
            _C.quantize(arguments, **backend(codes))
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
                _CODES[rows.dtype],
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


def _dequantize_fake(x: Tensor, s: Tensor, size: int, square: bool, dtype: torch.dtype) -> Tensor:
    check_codes(x, s, size, square)
    check_output_dtype(dtype)
    return x.new_empty(x.shape, dtype=dtype)


def _gelu_fake(x: Tensor, s: Tensor, size: int) -> QuantizedBlocks:
    check_codes(x, s, size, False, "s_x", (torch.int8,))
    return x.new_empty(x.shape), s.new_empty(scales_shape(x, size, False))


def _quantize(*arguments: Any) -> QuantizedBlocks:
    return quantize_blocks(BlocksCall(*arguments))


def _quantize_fake(*arguments: Any) -> QuantizedBlocks:
    return BlocksCall(*arguments).check()


register(f"quantize_blocks({schema_of(BlocksCall)}) -> (Tensor, Tensor)", _quantize, _quantize_fake)
register(
    "dequantize_blocks(Tensor x, Tensor s, int size, bool square, ScalarType dtype) -> Tensor",
    dequantize_blocks,
    _dequantize_fake,
)
register("gelu_blocks(Tensor x, Tensor s, int size) -> (Tensor, Tensor)", gelu_blocks, _gelu_fake)
