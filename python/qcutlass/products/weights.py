"""Packed weights: from codes, back to codes, and to the numbers they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from qcutlass.products import weight_operators
from qcutlass.products.checks import check_pair
from qcutlass.products.library import is_eager
from qcutlass.products.weight_operators import DequantizeCall


def preprocess_weights(codes: Tensor, bits: int, activations: str = "16bit") -> Tensor:
    """Packs codes into the order in which the kernels read them (`cpp/include/qcutlass/layout.h`).

    The result stores neither K nor N nor the number of bits: its shape says how many tiles there are, the last of which
    zeros fill up, and every function that takes it is told the rest. Keep K and `bits` beside it, as layers do.
    `unpack_weights` and `dequantize` refuse a K that is too small for the codes in the last tile; the products do not
    look.

    Args:
        codes: `[N, K]`, or `[E, N, K]` of E experts, on the CPU or a GPU. uint8 with values in [0, 2**bits) for
            activations="16bit" and bits=4 (larger 4-bit codes are refused on the CPU; CUDA takes their low four bits);
            with bits=8 also float8_e4m3fn, as its bytes, for products with `weight_dtype="e4m3"`; int8 for
            activations="int8", and float8_e4m3fn for activations="fp8", with bits=8.
        bits: 4 or 8.
        activations: type of the activations the weights will meet: "16bit" (float16, bfloat16; also float32 on the
            CPU), "int8" or "fp8". With bits=8 the last two have an order of their own, and the type of the result tells
            all three apart; codes of 4 bits have one order for all: the result serves `gemm` and `gemm_w4a8`.

    Returns:
        `[ceil(N/16), ceil(K/kt), 32, 16]`, kt = 64 for 4 bits and 32 for 8; `[E, ...]` of experts: uint8 for
        activations="16bit" or bits=4, else of the type of `codes`.

    Raises:
        TypeError: `codes` is not a tensor of the type named above.
        ValueError: `codes` is no matrix or several, holds a code out of range, or an option has no such value.

    Example:
        >>> import torch, qcutlass
        >>> qcutlass.preprocess_weights(torch.zeros(40, 130, dtype=torch.uint8), bits=4).shape
        torch.Size([3, 3, 32, 16])
    """
    if is_eager(codes):
        return weight_operators.pack(codes, bits, activations)
    packed: Tensor = torch.ops.qcutlass.pack(codes, bits, activations)
    return packed


def unpack_weights(w_packed: Tensor, bits: int, shape: tuple[int, int]) -> Tensor:
    """The exact inverse of `preprocess_weights`.

    Args:
        w_packed: uint8, int8 or float8_e4m3fn `[ceil(N/16), ceil(K/kt), 32, 16]`, or `[E, ...]`.
        bits: 4 or 8.
        shape: (N, K), those of the matrix that was packed.

    Returns:
        Codes `[N, K]`, or `[E, N, K]`, with the type of `w_packed`.

    Raises:
        TypeError: `w_packed` is not a tensor of such a type.
        ValueError: its shape is not that of a packed `[N, K]` matrix; on the CPU also: columns from K on hold codes.

    Example:
        >>> import torch, qcutlass
        >>> codes = torch.randint(0, 16, (40, 130), dtype=torch.uint8)
        >>> packed = qcutlass.preprocess_weights(codes, bits=4)
        >>> bool((qcutlass.unpack_weights(packed, bits=4, shape=(40, 130)) == codes).all())
        True
    """
    n, k = check_pair("shape", shape, "(N, K)")
    if is_eager(w_packed):
        return weight_operators.unpack(w_packed, bits, n, k)
    codes: Tensor = torch.ops.qcutlass.unpack(w_packed, bits, n, k)
    return codes


def dequantize(
    w_packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    k: int,
    group_size: int | None = None,
    bits: int | None = None,
    dtype: torch.dtype | None = None,
    rows: tuple[int, int] | None = None,
    weight_dtype: str | None = None,
    global_scale: Tensor | None = None,
    minimums: Tensor | None = None,
    super_scales: Tensor | None = None,
    super_minimums: Tensor | None = None,
) -> Tensor:
    """The weights that packed codes stand for, computed as the products compute them.

    `w[n, k] = RN(RN32(RN32(code - zero) * scale))`: in fp32, then rounded once to `dtype`; with minimums
    `RN(RN32(code * scale - minimum))`, of the exact difference; for floating codes, `weight_dtype`, without zero, and
    the scale is `RN32(scale * global_scale)`.

    Args:
        w_packed: uint8 `[ceil(N/16), ceil(K/kt), 32, 16]`, packed for 16-bit activations.
        scales: `[G, N]` or `[N]`, of a type as for `gemm`.
        zeros: shaped as `scales`, integer or floating; None: 2**(bits - 1) everywhere.
        k: number of columns K of the matrix that was packed.
        group_size, bits: as for `gemm`; needed only where shapes do not tell.
        dtype: float16, bfloat16 or float32; None: the type of `scales`, or float32 where they have 8 bits.
        rows: (begin, end): only these rows.
        weight_dtype, global_scale: as for `gemm`.
        minimums: float16, bfloat16 or float32, shaped as `scales`, instead of zeros.
        super_scales, super_minimums: as for `gemm`.

    Returns:
        `[N, K]`, or `[end - begin, K]`.

    Raises:
        TypeError, ValueError: as for `gemm`; on the CPU also: columns from K on hold codes, so that `k` is too small.

    Example:
        >>> import torch, qcutlass
        >>> q = qcutlass.quantize(torch.randn(48, 256), bits=8)
        >>> w = qcutlass.dequantize(qcutlass.preprocess_weights(q.codes, bits=8), q.scales, q.zeros, k=256)
        >>> bool((w == q.dequantize()).all())
        True
    """
    begin, end = (0, None) if rows is None else check_pair("rows", rows, "(begin, end)")
    numbers = weight_dtype, global_scale, minimums, super_scales, super_minimums
    call = DequantizeCall(w_packed, scales, zeros, k, group_size, bits, dtype, begin, end, *numbers)
    if is_eager(*call):
        return weight_operators.dequantize(call)
    weight: Tensor = torch.ops.qcutlass.dequantize(*call)
    return weight
