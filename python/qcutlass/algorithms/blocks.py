"""Codes with a scale for each block, int8 and fp8, for `qcutlass.blockwise`."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from qcutlass.products import block_operators
from qcutlass.products.block_operators import BlocksCall, QuantizedBlocks
from qcutlass.products.checks import check_dense, check_inference, check_matrix
from qcutlass.products.library import is_eager

_FP8: Final = torch.float8_e4m3fn


def quantized(call: BlocksCall) -> QuantizedBlocks:
    """Codes, and the scales of their blocks."""
    name = "gate_up" if call.gated else "x"
    check_inference(**{name: call.x})
    if is_eager(call.x):
        return block_operators.quantize_blocks(call)
    check_dense({name: call.x})
    result: QuantizedBlocks = torch.ops.qcutlass.quantize_blocks(*call)
    return result


def _dequantize(x: Tensor, s: Tensor, block_size: int, output_dtype: torch.dtype, square: bool) -> Tensor:
    check_inference(s=s)
    if is_eager(x, s):
        return block_operators.dequantize_blocks(x, s, block_size, square, output_dtype)
    result: Tensor = torch.ops.qcutlass.dequantize_blocks(x, s, block_size, square, output_dtype)
    return result


def act_quant(x: Tensor, block_size: int = 128) -> tuple[Tensor, Tensor]:
    """Quantises activations to int8, each block of `block_size` columns of a row with its own scale.

    s = max|x| / 127 over a block, 1 for zeros and at least 2**-126; q = round(x / s), to nearest even, within +-127;
    all in fp32, each operation rounded to nearest even. CPU and CUDA agree bit for bit.

    Args:
        x: float16, bfloat16 or float32 `[..., K]`. Unit stride along K avoids a copy.
        block_size: 32, 64 or 128 columns; the last block may be short.

    Returns:
        int8 `[..., K]` and float32 `[..., ceil(K / block_size)]`.

    Raises:
        TypeError, ValueError: `x` is no such tensor, or `block_size` another.
        RuntimeError: `x` requires grad and grad mode is on.
        UnsupportedError: this build or this GPU has no kernel for it.

    Example:
        >>> import torch
        >>> from qcutlass.blockwise import act_quant
        >>> q, s = act_quant(torch.cat([torch.tensor([127.0, 2.5]), torch.zeros(62)]), block_size=32)
        >>> q[:3], s
        (tensor([127,   2,   0], dtype=torch.int8), tensor([1., 1.]))
    """
    return quantized(BlocksCall(x, block_size))


def act_dequant(x: Tensor, s: Tensor, block_size: int = 128, output_dtype: torch.dtype = torch.float16) -> Tensor:
    """The activations that codes stand for: `x * s` of its block, rounded to fp32, then to `output_dtype`.

    Args:
        x: int8 or float8_e4m3fn `[..., K]`.
        s: float32 `[..., ceil(K / block_size)]`.
        block_size: 32, 64 or 128.
        output_dtype: float16, bfloat16 or float32.

    Returns:
        `[..., K]` of type `output_dtype`.

    Raises:
        TypeError, ValueError, RuntimeError, UnsupportedError: as for `act_quant`; shapes or devices disagree.

    Example:
        >>> import torch
        >>> from qcutlass.blockwise import act_dequant
        >>> act_dequant(torch.tensor([[3, -4]], dtype=torch.int8), torch.tensor([[0.5]]))
        tensor([[ 1.5000, -2.0000]], dtype=torch.float16)
    """
    return _dequantize(x, s, block_size, output_dtype, False)


def weight_quant(x: Tensor, block_size: int = 128) -> tuple[Tensor, Tensor]:
    """Quantises a weight matrix to int8, each block of `block_size` x `block_size` with its own scale.

    The arithmetic is that of `act_quant`.

    Args:
        x: float16, bfloat16 or float32 `[N, K]`.
        block_size: 32, 64 or 128; the last blocks may be short.

    Returns:
        int8 `[N, K]` and float32 `[ceil(N / block_size), ceil(K / block_size)]`.

    Raises:
        TypeError, ValueError, RuntimeError, UnsupportedError: as for `act_quant`.

    Example:
        >>> import torch
        >>> from qcutlass.blockwise import weight_quant
        >>> q, s = weight_quant(torch.tensor([[254.0, 1.0], [-3.0, 5.0]]))
        >>> q, s
        (tensor([[127,   0],
                [ -2,   2]], dtype=torch.int8), tensor([[2.]]))
    """
    return quantized(BlocksCall(x, block_size, square=True))


def weight_dequant(x: Tensor, s: Tensor, block_size: int = 128, output_dtype: torch.dtype = torch.float16) -> Tensor:
    """The weights that codes stand for: `x * s` of its block, rounded to fp32, then to `output_dtype`.

    Args:
        x: int8 or float8_e4m3fn `[N, K]`.
        s: float32 `[ceil(N / block_size), ceil(K / block_size)]`.
        block_size: 32, 64 or 128.
        output_dtype: float16, bfloat16 or float32.

    Returns:
        `[N, K]` of type `output_dtype`.

    Raises:
        TypeError, ValueError, RuntimeError, UnsupportedError: as for `act_quant`; shapes or devices disagree.

    Example:
        >>> import torch
        >>> from qcutlass.blockwise import weight_dequant, weight_quant
        >>> w = torch.randn(300, 200)
        >>> q, s = weight_quant(w)
        >>> bool((weight_dequant(q, s, output_dtype=torch.float32) - w).abs().max() <= 0.501 * s.max())
        True
    """
    return _dequantize(x, s, block_size, output_dtype, True)


def fp8_act_quant(x: Tensor, block_size: int = 128, scale_fmt: str | None = None) -> tuple[Tensor, Tensor]:
    """Quantises activations to float8_e4m3fn, each block of `block_size` columns of a row with its own scale.

    s = max|x| / 448 over a block, 1 for zeros and at least 2**-126; q = x / s, to nearest even, saturating; all fp32.
    The granularity of DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 3.3.

    Args:
        x: float16, bfloat16 or float32 `[..., K]`. Unit stride along K avoids a copy.
        block_size: 32, 64 or 128 columns; the last block may be short.
        scale_fmt: "ue8m0": scales are rounded up to powers of two; None: they are what they are.

    Returns:
        float8_e4m3fn `[..., K]` and float32 `[..., ceil(K / block_size)]`.

    Raises:
        TypeError, ValueError: `x` is no such tensor, or `block_size` or `scale_fmt` another.
        RuntimeError: `x` requires grad and grad mode is on.
        UnsupportedError: this build or this GPU has no kernel for it.

    Example:
        >>> import torch
        >>> from qcutlass.blockwise import fp8_act_quant
        >>> q, s = fp8_act_quant(torch.cat([torch.tensor([448.0, 1.06]), torch.zeros(62)]), block_size=32)
        >>> q[:3].float(), s
        (tensor([448.,   1.,   0.]), tensor([1., 1.]))
    """
    return quantized(BlocksCall(x, block_size, dtype=_FP8, scale_fmt=scale_fmt))


def fp8_silu_mul_quant(gate_up: Tensor, block_size: int = 128) -> tuple[Tensor, Tensor]:
    """SwiGLU and `fp8_act_quant` in one pass: quantises `silu(gate) * up`, which is computed in fp32 and not rounded.

    On a GPU silu(x) has an error of up to 2**-20 |x|.

    Args:
        gate_up: float16, bfloat16 or float32 `[..., 2 I]`: gate, then up.
        block_size: 32, 64 or 128 columns; the last block may be short.

    Returns:
        float8_e4m3fn `[..., I]` and float32 `[..., ceil(I / block_size)]`.

    Raises:
        TypeError, ValueError, RuntimeError, UnsupportedError: as for `fp8_act_quant`; the last dimension is odd.

    Example:
        >>> import torch
        >>> from qcutlass.blockwise import fp8_silu_mul_quant
        >>> q, s = fp8_silu_mul_quant(torch.randn(3, 512))
        >>> q.shape, s.shape
        (torch.Size([3, 256]), torch.Size([3, 2]))
    """
    return quantized(BlocksCall(gate_up, block_size, dtype=_FP8, gated=True))


def fp8_weight_quant(w: Tensor, block_size: int = 128) -> tuple[Tensor, Tensor]:
    """Quantises a weight matrix to float8_e4m3fn, each block of `block_size` x `block_size` with its own scale.

    The arithmetic is that of `fp8_act_quant`.

    Args:
        w: float16, bfloat16 or float32 `[N, K]`.
        block_size: 32, 64 or 128; the last blocks may be short.

    Returns:
        float8_e4m3fn `[N, K]` and float32 `[ceil(N / block_size), ceil(K / block_size)]`.

    Raises:
        TypeError, ValueError, RuntimeError, UnsupportedError: as for `fp8_act_quant`.

    Example:
        >>> import torch
        >>> from qcutlass.blockwise import fp8_weight_quant
        >>> q, s = fp8_weight_quant(torch.tensor([[896.0, 1.0], [-3.0, 5.0]]))
        >>> q.float(), s
        (tensor([[448.0000,   0.5000],
                [ -1.5000,   2.5000]]), tensor([[2.]]))
    """
    return quantized(BlocksCall(w, block_size, square=True, dtype=_FP8))


def fp8_weight_dequant(
    w: Tensor, s: Tensor, block_size: int = 128, output_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """The weights that fp8 codes stand for: `w * s` of its block, rounded to fp32, then to `output_dtype`.

    Args:
        w: float8_e4m3fn `[N, K]`.
        s: float32 `[ceil(N / block_size), ceil(K / block_size)]`: `weight_scale_inv` of checkpoints, as float32.
        block_size: 32, 64 or 128.
        output_dtype: float16, bfloat16 or float32.

    Returns:
        `[N, K]` of type `output_dtype`.

    Raises:
        TypeError, ValueError, RuntimeError, UnsupportedError: as for `fp8_act_quant`; shapes or devices disagree.

    Example:
        >>> import torch
        >>> from qcutlass.blockwise import fp8_weight_dequant, fp8_weight_quant
        >>> w = torch.randn(300, 200)
        >>> q, s = fp8_weight_quant(w)
        >>> error = (fp8_weight_dequant(q, s, output_dtype=torch.float32) - w).abs()
        >>> bool((error <= w.abs() / 15 + s.max() / 1000).all())
        True
    """
    check_matrix("w", w, (_FP8,))
    return _dequantize(w, s, block_size, output_dtype, True)
