"""The operators on packed weights, `torch.ops.qcutlass.{pack, unpack, dequantize}`, and rules of their arguments."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from qcutlass import _C
from qcutlass.products.checks import (
    FLOATING,
    check_device,
    check_dtype,
    check_integer,
    check_memory,
    check_tensor,
    names_of,
    shape_of,
    tensors_of,
)
from qcutlass.products.extension import DTYPES, backend, current_device
from qcutlass.products.kind import Size, schema_of
from qcutlass.products.library import register
from qcutlass.products.memory import aligned, as_separate_rows
from qcutlass.products.packing import (
    PACKINGS,
    TILE_N,
    PackedWeights,
    WeightShape,
    check_contiguous,
    check_weights,
    packed_shape,
    weight_arguments,
)

_EIGHT_BIT: Final = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Types of weights by what activations they will meet."""


class DequantizeCall(NamedTuple):
    """The arguments of a dequantisation, in the order of the schema; `qcutlass.dequantize` describes them."""

    w_packed: Tensor
    scales: Tensor
    zeros: Tensor | None
    k: Size
    group_size: int | None = None
    bits: int | None = None
    dtype: torch.dtype | None = None
    row_begin: Size = 0
    row_end: Size | None = None
    weight_dtype: str | None = None
    global_scale: Tensor | None = None
    minimums: Tensor | None = None
    super_scales: Tensor | None = None
    super_minimums: Tensor | None = None


def _packing(bits: int, activations: str) -> _C.Packing:
    check_integer("bits", bits, PACKINGS)
    if not isinstance(activations, str):
        raise TypeError(f"activations: expected '16bit', 'int8' or 'fp8', got {type(activations).__name__}")
    if activations == "16bit":
        return PACKINGS[bits]
    if activations not in _EIGHT_BIT:
        raise ValueError(f"activations: expected '16bit', 'int8' or 'fp8', got {activations!r}")
    return _C.Packing.W8A8 if bits == 8 else PACKINGS[bits]  # codes of 4 bits have one order for all


def check_pack(codes: Tensor, bits: int, activations: str) -> _C.Packing:
    """Checks the arguments of `qcutlass.preprocess_weights`."""
    packing = _packing(bits, activations)
    expected = (_EIGHT_BIT[activations],) if packing == _C.Packing.W8A8 else _codes_of(bits)
    check_tensor("codes", codes, expected, f" for bits={bits}, activations={activations!r}")
    check_device("codes", codes)
    if codes.dim() not in (2, 3):
        raise ValueError(f"codes: expected shape [N, K] or [E, N, K], got {shape_of(codes)}")
    return packing


def _codes_of(bits: int) -> tuple[torch.dtype, ...]:
    """Types of codes for 16-bit activations."""
    return (torch.uint8, torch.float8_e4m3fn) if bits == 8 else (torch.uint8,)


def check_unpack(w_packed: Tensor, bits: int, n: int, k: int) -> _C.Packing:
    """Checks the arguments of `qcutlass.unpack_weights`."""
    check_tensor("w_packed", w_packed, (torch.uint8, *_EIGHT_BIT.values()))
    check_device("w_packed", w_packed)
    meets = {dtype: activations for activations, dtype in _EIGHT_BIT.items()}
    packing = _packing(bits, meets.get(w_packed.dtype, "16bit"))
    if packing != _C.Packing.W8A8 and w_packed.dtype != torch.uint8:
        raise ValueError(f"bits: {names_of([w_packed.dtype])} weights have 8 bits, got {bits}")
    check_integer("shape[0]", n, minimum=0)
    check_integer("shape[1]", k, minimum=0)
    expected = packed_shape(n, k, packing)
    if w_packed.dim() not in (4, 5) or w_packed.shape[-4:] != expected:
        raise ValueError(
            f"w_packed: {bits}-bit weights of shape {[n, k]} are packed as {list(expected)}, those of experts with "
            f"their number before it, got {shape_of(w_packed)}"
        )
    check_contiguous("w_packed", w_packed)
    return packing


def check_dequantize(call: DequantizeCall) -> tuple[WeightShape, torch.dtype, int]:
    """Checks the arguments of `qcutlass.dequantize`; returns the shape, the type of the result and its last row."""
    w_packed, dtype, begin, end = call.w_packed, call.dtype, call.row_begin, call.row_end
    check_tensor("w_packed", w_packed, (torch.uint8, torch.int8))
    check_device("w_packed", w_packed)
    check_integer("k", call.k, minimum=1)
    shape = check_weights(PackedWeights.of(call), call.k, w_packed.device, "w_packed")
    if dtype is None:
        dtype = call.scales.dtype if call.scales.dtype in FLOATING else torch.float32
    check_dtype("dtype", dtype, FLOATING)
    end = shape.n if end is None else end
    if not 0 <= begin <= end <= shape.n:
        raise ValueError(f"rows: expected 0 <= begin <= end <= N = {shape.n}, got ({begin}, {end})")
    return shape, dtype, end


def pack(codes: Tensor, bits: int, activations: str) -> Tensor:
    """The packed weights of codes `[N, K]`, or `[E, N, K]`."""
    packing = check_pack(codes, bits, activations)
    check_memory({"codes": codes})
    *experts, n, k = codes.shape
    packed = _new_packed(codes, (*experts, *packed_shape(n, k, packing)), packing)
    if packed.numel():
        with current_device(codes):
            for matrix, to in zip(codes, packed, strict=True) if experts else ((codes, packed),):
                matrix = as_separate_rows(matrix)
                _C.pack(packing, n, k, matrix.data_ptr(), matrix.stride(0), to.data_ptr(), **backend(matrix))
    return packed


def _new_packed(codes: Tensor, shape: tuple[int, ...], packing: _C.Packing) -> Tensor:
    """An empty packed weight. Its type says which order it has, so that of floats for 16-bit activations is uint8."""
    return codes.new_empty(shape, dtype=codes.dtype if packing == _C.Packing.W8A8 else torch.uint8)


def _check_padding(name: str, w_packed: Tensor, packing: _C.Packing, k: int) -> None:
    """Raises ValueError if columns past `k`, which packing fills with zeros, hold other codes: K was larger.

    On the CPU only, as no other device is waited for. `name` is that of the argument which says K.
    """
    tile_k = _C.tile_k(packing)
    used = k % tile_k
    if not w_packed.is_cpu or used == 0:
        return
    last = w_packed[..., -1:, :, :].flatten(0, -4).contiguous()
    n = last.shape[0] * TILE_N
    codes = last.new_empty((n, tile_k))
    _C.unpack(packing, n, tile_k, codes.data_ptr(), tile_k, last.data_ptr(), **backend(last))
    beyond = codes[:, used:].view(torch.uint8).count_nonzero(0).nonzero()
    if len(beyond):
        column = k + int(beyond[0])
        raise ValueError(
            f"{name}: K = {k}, but w_packed holds codes in column {column}: it was packed from a matrix with more "
            "columns; pass the K of that matrix"
        )


def unpack(w_packed: Tensor, bits: int, n: int, k: int) -> Tensor:
    """The codes `[n, k]` of packed weights, or `[E, n, k]`."""
    packing = check_unpack(w_packed, bits, n, k)
    check_memory({"w_packed": w_packed})
    experts = w_packed.shape[:-4]
    codes = w_packed.new_empty((*experts, n, k))
    if codes.numel():
        _check_padding("shape[1]", w_packed, packing, k)
        with current_device(codes):
            w_packed = aligned(w_packed)
            for matrix, packed in zip(codes, w_packed, strict=True) if experts else ((codes, w_packed),):
                _C.unpack(packing, n, k, matrix.data_ptr(), k, packed.data_ptr(), **backend(codes))
    return codes


def dequantize(call: DequantizeCall) -> Tensor:
    """Rows of the matrix that packed weights stand for."""
    shape, dtype, end = check_dequantize(call)
    check_memory(tensors_of(call))
    out = call.w_packed.new_empty((end - call.row_begin, shape.k), dtype=dtype)
    if out.numel():
        _check_padding("k", call.w_packed, PACKINGS[shape.bits], shape.k)
        with current_device(out):
            weights, operands = weight_arguments(shape, PackedWeights.of(call))
            _C.dequantize(weights, call.row_begin, end, DTYPES[dtype], out.data_ptr(), shape.k, **backend(out))
            del operands  # alive until the kernel is enqueued
    return out


# Implementations under the operators' schemas.


def _pack_fake(codes: Tensor, bits: int, activations: str) -> Tensor:
    packing = check_pack(codes, bits, activations)
    *experts, n, k = codes.shape
    return _new_packed(codes, (*experts, *packed_shape(n, k, packing)), packing)


def _unpack_fake(w_packed: Tensor, bits: int, n: int, k: int) -> Tensor:
    check_unpack(w_packed, bits, n, k)
    return w_packed.new_empty((*w_packed.shape[:-4], n, k))


def _dequantize(*arguments: Any) -> Tensor:
    return dequantize(DequantizeCall(*arguments))


def _dequantize_fake(*arguments: Any) -> Tensor:
    call = DequantizeCall(*arguments)
    shape, dtype, end = check_dequantize(call)
    return call.w_packed.new_empty((end - call.row_begin, shape.k), dtype=dtype)


register("pack(Tensor codes, int bits, str activations) -> Tensor", pack, _pack_fake)
register("unpack(Tensor w_packed, int bits, SymInt n, SymInt k) -> Tensor", unpack, _unpack_fake)
register(f"dequantize({schema_of(DequantizeCall)}) -> Tensor", _dequantize, _dequantize_fake)
