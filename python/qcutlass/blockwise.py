"""Blockwise int8 and fp8: a scale for each 1 x 128 block of activations and each 128 x 128 block of weights.

Where one scale a token is too coarse, a scale for each block keeps accuracy: Xi et al., "Jetfire: Efficient and
Accurate Transformer Pretraining with INT8 Data Flow and Per-Block Quantization" (2024) trains with int8 in blocks of
32 x 32, and DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 3.3, has the granularity here, 1 x 128 by
128 x 128, and the promotion of each block's sums to fp32. Blocks of 32 and 64 work the same way (`block_size=`); the
last block along each dimension may be short.

    x_q, x_s = act_quant(x)             # int8 [..., K], float32 [..., ceil(K / 128)]
    w_q, w_s = weight_quant(w)          # int8 [N, K],   float32 [ceil(N / 128), ceil(K / 128)]
    y = int8_addmm(x_q, x_s, w_q, w_s, bias)            # [..., N]
    y_q, y_s = int8_addmm_quant(x_q, x_s, w_q, w_s, bias)       # int8 [..., N], float32 [..., ceil(N / 128)]
    z_q, z_s = int8_gelu(y_q, y_s)

The products take the weights plain, `[N, K]`, or packed by `preprocess_weights(w_q, bits=8, activations="int8")`, with
the same bits as result. Plain weights are packed at each call, which costs more than a product of few rows: pack once.

Differences from the Triton kernels of the same names and shapes, on purpose:

* codes are rounded to nearest, ties to even, not truncated;
* a block of zeros gets scale 1 and codes 0, where amax / 127 = 0 would make NaN of them;
* K and N need not be multiples of the block, nor M of a tile;
* tensors that are not contiguous are accepted: rows at any stride as they are, others copied;
* wrong arguments raise exceptions with the values, nothing is asserted.

A block with NaN or infinity gets a scale of NaN or infinity and codes of 0, so that a product with it shows it.

The same in float8_e4m3fn:

    x_q, x_s = fp8_act_quant(x)         # float8_e4m3fn [..., K], float32 [..., ceil(K / 128)]
    w_q, w_s = fp8_weight_quant(w)      # float8_e4m3fn [N, K],   float32 [ceil(N / 128), ceil(K / 128)]
    y = fp8_gemm(x_q, x_s, w_q, w_s)    # [..., N]
    z_q, z_s = fp8_silu_mul_quant(y)    # float8_e4m3fn [..., N / 2], float32 [..., ceil(N / 256)]
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from qcutlass.algorithms.blocks import (
    act_dequant,
    act_quant,
    fp8_act_quant,
    fp8_silu_mul_quant,
    fp8_weight_dequant,
    fp8_weight_quant,
    weight_dequant,
    weight_quant,
)
from qcutlass.products import block_operators
from qcutlass.products.block_operators import QuantizedBlocks
from qcutlass.products.blockwise import BLOCKWISE, BlockwiseCall, multiply_quantized
from qcutlass.products.checks import check_inference, tensors_of
from qcutlass.products.kind import computes
from qcutlass.products.library import is_eager
from qcutlass.products.multiplying import compute

__all__ = [
    "act_dequant",
    "act_quant",
    "fp8_act_quant",
    "fp8_gemm",
    "fp8_silu_mul_quant",
    "fp8_weight_dequant",
    "fp8_weight_quant",
    "int8_addmm",
    "int8_addmm_quant",
    "int8_gelu",
    "int8_gemm",
    "int8_gemm_quant",
    "weight_dequant",
    "weight_quant",
]

_INT8: Final = torch.int8
_FP8: Final = torch.float8_e4m3fn


@computes(BLOCKWISE, dtype=_INT8)
def int8_gemm(
    a: Tensor,
    a_s: Tensor,
    b: Tensor,
    b_s: Tensor,
    out_dtype: torch.dtype = torch.float16,
    *,
    block_size: int = 128,
    n: int | None = None,
    out: Tensor | None = None,
    tactic: str | None = None,
    split_k: int = 0,
    batch_invariant: bool = False,
) -> Tensor:
    """`int8_addmm` without a bias: `sum over k blocks kb of (a . b^T)[kb] * a_s[m, kb] * b_s[n // block_size, kb]`.

    Args:
        a, a_s, b, b_s, out_dtype, block_size, n, out, tactic, split_k, batch_invariant: as for `int8_addmm`.

    Returns:
        `[..., N]` of type `out_dtype`; `out` if it was given.

    Raises:
        TypeError, ValueError, RuntimeError, UnsupportedError: as for `int8_addmm`.

    Example:
        >>> import torch
        >>> from qcutlass.blockwise import act_quant, int8_gemm, weight_quant
        >>> int8_gemm(*act_quant(torch.randn(2, 3, 256)), *weight_quant(torch.randn(48, 256))).shape
        torch.Size([2, 3, 48])
    """
    options = _INT8, n, block_size, None, tactic, split_k, batch_invariant
    call = BlockwiseCall(a, a_s, b, b_s, None, None, out_dtype, *options)
    return compute(BLOCKWISE, call, out)


@computes(BLOCKWISE, dtype=_INT8)
def int8_addmm(
    a: Tensor,
    a_s: Tensor,
    b: Tensor,
    b_s: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float16,
    *,
    activation: str | None = None,
    block_size: int = 128,
    n: int | None = None,
    out: Tensor | None = None,
    tactic: str | None = None,
    split_k: int = 0,
    batch_invariant: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Multiplies int8 activations by int8 weights whose blocks have scales of their own, and adds a bias.

    `activation(sum + bias[n]) + residual` with `sum = sum over kb of (sum over k in block kb of a[m, k] * b[n, k]) *
    a_s[m, kb] * b_s[n // block_size, kb]`: inner sums exact in int32, the outer one in fp32, rounded once.

    Args:
        a: int8 `[..., K]`, M rows in all. Unit stride along K avoids a copy.
        a_s: float32 `[..., ceil(K / block_size)]`, or with one leading dimension of M.
        b: int8 `[N, K]`, which is packed at each call; or packed, `[ceil(N/16), ceil(K/32), 32, 16]`, by
            `preprocess_weights(b, 8, activations="int8")`, which is much faster for weights that are used again.
        b_s: float32 `[ceil(N / block_size), ceil(K / block_size)]`. If `interleave_gate_up` has put the channels of
            gate and up into turns of 16 (N is a multiple of 32): `[2, ceil(N / 2 / block_size), ceil(K / block_size)]`,
            the gate's scales, then up's.
        bias, tactic, split_k, batch_invariant, residual: as for `qcutlass.gemm`.
        activation: as for `qcutlass.gemm`. With a gate, pass `b, b_s = interleave_gate_up(gate, up)` of two matrices
            that are quantised separately, or interleave the float weights and quantise the result.
        out_dtype: float16, bfloat16 or float32.
        block_size: 32, 64 or 128, of both operands.
        n: N of packed weights. None: that of `bias`, else every channel that was packed, a multiple of 16.
        out: `[..., N]` of type `out_dtype`, to be written; must not share memory with an operand.

    Returns:
        `[..., N]` of type `out_dtype`, or `[..., N / 2]` with a gate; `out` if it was given. Bitwise repeatable.

    Raises:
        TypeError, ValueError, RuntimeError, UnsupportedError: as for `qcutlass.gemm`.

    Example:
        >>> import torch, qcutlass
        >>> from qcutlass.blockwise import act_quant, int8_addmm, weight_quant
        >>> w_q, w_s = weight_quant(torch.randn(48, 256))
        >>> w_packed = qcutlass.preprocess_weights(w_q, bits=8, activations="int8")
        >>> int8_addmm(*act_quant(torch.randn(3, 256)), w_packed, w_s, torch.zeros(48), torch.bfloat16).dtype
        torch.bfloat16
    """
    options = _INT8, n, block_size, None, tactic, split_k, batch_invariant, residual
    call = BlockwiseCall(a, a_s, b, b_s, bias, activation, out_dtype, *options)
    return compute(BLOCKWISE, call, out)


@computes(BLOCKWISE, dtype=_FP8)
def fp8_gemm(
    a: Tensor,
    a_s: Tensor,
    b: Tensor,
    b_s: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    n: int | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    block_size: int = 128,
    out: Tensor | None = None,
    tactic: str | None = None,
    split_k: int = 0,
    batch_invariant: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Multiplies e4m3 activations by e4m3 weights whose blocks have scales of their own: fp8 as DeepSeek-V3 has it.

    The formula of `int8_addmm`, with inner sums (of the products of a block of columns) in fp32, where products of two
    e4m3 numbers are exact. Each block's sum is scaled and added to the blocks before it. The CPU sums a block in runs
    of 32 columns, one run after the other; the order inside a run depends on the number of rows. Kernels for compute
    capability 9.0 keep some 14 bits of a block's sum, relative to its largest product; those for 8.9 add in fp32.

    Args:
        a: float8_e4m3fn `[..., K]`, M rows in all, from `fp8_act_quant`. Unit stride along K avoids a copy.
        a_s: float32 `[..., ceil(K / block_size)]`, or with one leading dimension of M.
        b: float8_e4m3fn `[N, K]`, which is packed at each call; or packed, `[ceil(N/16), ceil(K/32), 32, 16]`, by
            `preprocess_weights(b, 8, activations="fp8")`.
        b_s: float32 `[ceil(N / block_size), ceil(K / block_size)]`: `weight_scale_inv` of checkpoints, as float32; or
            those of gate and up, as for `int8_addmm`.
        out_dtype: float16, bfloat16 or float32.
        n, bias, activation, block_size, out, tactic, split_k, batch_invariant, residual: as for `int8_addmm`.

    Returns:
        `[..., N]` of type `out_dtype`, or `[..., N / 2]` with a gate; `out` if it was given. Bitwise repeatable.

    Raises:
        TypeError, ValueError, RuntimeError: as for `int8_addmm`.
        UnsupportedError: the GPU has no fp8 instructions (they came with compute capability 8.9), or blocks are not of
            128: there `gemm` with `weight_dtype="e4m3"` multiplies the same weights by 16-bit activations.

    Example:
        >>> import torch
        >>> from qcutlass.blockwise import fp8_act_quant, fp8_gemm, fp8_weight_quant
        >>> w, s = fp8_weight_quant(torch.randn(576, 256))
        >>> fp8_gemm(*fp8_act_quant(torch.randn(2, 3, 256)), w, s, bias=torch.zeros(576)).shape
        torch.Size([2, 3, 576])
        >>> import qcutlass
        >>> gate, up = (fp8_weight_quant(torch.randn(576, 256)) for _ in range(2))
        >>> b, b_s = qcutlass.interleave_gate_up(gate, up)  # codes [1152, 256], scales [2, 5, 2]
        >>> fp8_gemm(*fp8_act_quant(torch.randn(3, 256)), b, b_s, activation="silu_mul").shape
        torch.Size([3, 576])
    """
    options = _FP8, n, block_size, None, tactic, split_k, batch_invariant, residual
    call = BlockwiseCall(a, a_s, b, b_s, bias, activation, out_dtype, *options)
    return compute(BLOCKWISE, call, out)


@computes(BLOCKWISE, out_dtype=_INT8, dtype=_INT8)
def int8_gemm_quant(
    a: Tensor,
    a_s: Tensor,
    b: Tensor,
    b_s: Tensor,
    out_block_size: int = 128,
    *,
    block_size: int = 128,
    n: int | None = None,
    tactic: str | None = None,
    split_k: int = 0,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """`int8_addmm_quant` without a bias.

    Args:
        a, a_s, b, b_s, out_block_size, block_size, n, tactic, split_k, batch_invariant: as for `int8_addmm_quant`.

    Returns:
        int8 `[..., N]` and float32 `[..., ceil(N / out_block_size)]`.

    Raises:
        TypeError, ValueError, RuntimeError, UnsupportedError: as for `int8_addmm`.

    Example:
        >>> import torch
        >>> from qcutlass.blockwise import act_quant, int8_gemm_quant, weight_quant
        >>> q, s = int8_gemm_quant(*act_quant(torch.randn(3, 256)), *weight_quant(torch.randn(300, 256)))
        >>> q.shape, s.shape
        (torch.Size([3, 300]), torch.Size([3, 3]))
    """
    return int8_addmm_quant(
        a,
        a_s,
        b,
        b_s,
        None,
        out_block_size,
        block_size=block_size,
        n=n,
        tactic=tactic,
        split_k=split_k,
        batch_invariant=batch_invariant,
    )


@computes(BLOCKWISE, out_dtype=_INT8, dtype=_INT8)
def int8_addmm_quant(
    a: Tensor,
    a_s: Tensor,
    b: Tensor,
    b_s: Tensor,
    bias: Tensor | None = None,
    out_block_size: int = 128,
    *,
    activation: str | None = None,
    block_size: int = 128,
    n: int | None = None,
    tactic: str | None = None,
    split_k: int = 0,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """`int8_addmm` whose output is quantised where it is computed, and never written in floating point.

    The result is that of `act_quant(int8_addmm(..., out_dtype=torch.float32), out_block_size)`, except for codes whose
    quotient lies so close to the middle of two codes that the error of the fp32 sums decides.

    Args:
        a, a_s, b, b_s, bias, activation, block_size, n, tactic, split_k, batch_invariant: as for `int8_addmm`, but that
            there are no gates.
        out_block_size: 32, 64 or 128 channels that share a scale in each row of the output.

    Returns:
        int8 `[..., N]` and float32 `[..., ceil(N / out_block_size)]`. Bitwise repeatable.

    Raises:
        TypeError, ValueError, RuntimeError, UnsupportedError: as for `int8_addmm`.

    Example:
        >>> import torch
        >>> from qcutlass.blockwise import act_quant, int8_addmm_quant, weight_quant
        >>> a, b = act_quant(torch.randn(3, 256)), weight_quant(torch.randn(64, 256))
        >>> q, s = int8_addmm_quant(*a, *b, torch.ones(64), out_block_size=32)
        >>> q.dtype, s.shape
        (torch.int8, torch.Size([3, 2]))
    """
    if out_block_size is None:  # in a call it means an output that is not quantised
        raise TypeError("out_block_size: expected an int, got NoneType")
    options = _INT8, n, block_size, out_block_size, tactic, split_k, batch_invariant
    call = BlockwiseCall(a, a_s, b, b_s, bias, activation, torch.int8, *options)
    check_inference(**tensors_of(call))
    if is_eager(*call):
        return multiply_quantized(call)
    result: QuantizedBlocks = torch.ops.qcutlass.blockwise_gemm_quant(*BLOCKWISE.arguments(call))
    return result


def int8_gelu(x: Tensor, s_x: Tensor, block_size: int = 128) -> tuple[Tensor, Tensor]:
    """GELU (the erf form) of quantised activations, quantised again in the same blocks, in one pass.

    `act_quant(gelu(act_dequant(x, s_x)))` with fp32 in between. On CUDA, GELU of v errs by up to 2**-20 |v|: another
    code comes out only where the exact quotient lies so close to the middle of two. A block whose scale is not finite
    gets a scale of NaN and codes of 0.

    Args:
        x: int8 `[..., K]`. Unit stride along K avoids a copy.
        s_x: float32 `[..., ceil(K / block_size)]`.
        block_size: 32, 64 or 128.

    Returns:
        int8 `[..., K]` and float32 `[..., ceil(K / block_size)]`.

    Raises:
        TypeError, ValueError, RuntimeError, UnsupportedError: as for `act_quant`; shapes or devices disagree.

    Example:
        >>> import torch
        >>> from qcutlass.blockwise import act_dequant, act_quant, int8_gelu
        >>> x = torch.linspace(-4, 4, 128)
        >>> y = act_dequant(*int8_gelu(*act_quant(x)), output_dtype=torch.float32)
        >>> bool((y - torch.nn.functional.gelu(x)).abs().max() < 4 / 127)
        True
    """
    check_inference(s_x=s_x)
    if is_eager(x, s_x):
        return block_operators.gelu_blocks(x, s_x, block_size)
    result: QuantizedBlocks = torch.ops.qcutlass.gelu_blocks(x, s_x, block_size)
    return result
