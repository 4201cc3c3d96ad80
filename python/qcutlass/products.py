"""The weight-only product."""

from __future__ import annotations

import torch
from torch import Tensor

from qcutlass import _launch, _ops
from qcutlass._validation import GemmCall, check_inference


def gemm(
    a: Tensor,
    w_packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    act_scale: Tensor | None = None,
    perm: Tensor | None = None,
    group_size: int | None = None,
    bits: int | None = None,
    out: Tensor | None = None,
    tactic: str | None = None,
    split_k: int = 0,
) -> Tensor:
    """Multiplies activations by quantised weights: `activation(a' @ w.T + bias)`, sums in fp32, rounded once.

    `w[n, k] = (code[n, k] - zero[g, n]) * scale[g, n]` with g = k // group_size, and
    `a'[m, k] = round_to_dtype_of_a(a[m, p] * act_scale[p])` with p = perm[k], or k without `perm`.
    On CUDA, `w` is rounded to the type of `a`, except by the kernels for few rows where a group has 64 columns or more:
    those scale sums of exact products (`plan(...).rounds_weights` tells). The CPU keeps `w` in fp32.

    From sm_90 on, weights that were multiplied before are read while the kernel just before in the stream ends.
    Rewriting them in place is fine, except by a kernel that itself lets its successor start early; torch's do not.

    Args:
        a: `[..., K]`. float16 or bfloat16 on CUDA; these or float32 on the CPU. Unit stride along K avoids a copy.
        w_packed: uint8 `[ceil(N/16), ceil(K/kt), 32, 16]` from `preprocess_weights`, kt = 64 (4 bits) or 32 (8 bits).
        scales: float16, bfloat16 or float32 `[G, N]`, or `[N]`: one a channel.
        zeros: shaped as `scales`; uint8, int8 or int32: exact zero points, uint8 ones in [0, 2**bits]; floating:
            real-valued zeros; None: 2**(bits - 1) everywhere.
        bias: float16, bfloat16 or float32 `[N]`.
        activation: None, "relu", "gelu" (erf), "gelu_tanh" or "silu".
        act_scale: float16, bfloat16 or float32 `[K]`, in the order of the columns of `a` (AWQ's pre-quant scale).
        perm: int32 `[K]`, values in [0, K), not checked on CUDA: column k of the codes meets column perm[k] of `a`
            (GPTQ's act-order).
        group_size: columns that share a scale; needed where G does not divide K (a shorter last group). -1: one group.
            On CUDA a multiple of 16, or one group.
        bits: 4 or 8; needed for K <= 32 only, where the shape of `w_packed` does not tell.
        out: `[..., N]` with the type of `a`, to be written; must not share memory with an operand.
        tactic: name of a kernel configuration to use (see `tactics`); CUDA only.
        split_k: number of blocks that share the K extent of an output tile; 0: chosen. CUDA only.

    Returns:
        `[..., N]` with the type of `a`; `out` if it was given. Bitwise repeatable.

    Raises:
        TypeError: an operand is not a tensor, or not of an allowed type.
        ValueError: shapes disagree, devices are mixed, the weights were packed for other activations, or `out` shares
            memory with an operand.
        RuntimeError: an operand requires grad and grad mode is on; qcutlass is for inference.
        UnsupportedError: valid, but this build or this GPU has no kernel for it.

    Example:
        >>> import torch, qcutlass
        >>> q = qcutlass.quantize(torch.randn(48, 256), bits=4, group_size=64)
        >>> w_packed = qcutlass.preprocess_weights(q.codes, bits=4)
        >>> qcutlass.gemm(torch.randn(2, 3, 256), w_packed, q.scales, q.zeros, activation="silu").shape
        torch.Size([2, 3, 48])
    """
    call = GemmCall(a, w_packed, scales, zeros, bias, activation, act_scale, perm, group_size, bits, tactic, split_k)
    forward = torch.autograd.forward_ad._current_level >= 0  # derivatives are pushed forward, whatever grad mode
    repeated = None if forward or _ops.is_traced() else _launch.repeat(call, out)
    if repeated is not None:
        return repeated
    if forward or torch.is_grad_enabled():
        check_inference(a=a, scales=scales, zeros=zeros, bias=bias, act_scale=act_scale, out=out)
    if out is not None:
        if _ops.is_eager(*call, out):
            _ops.gemm_out(call, out)
        else:
            torch.ops.qcutlass.gemm_out(*call, out=out)
        return out
    if _ops.is_eager(*call):
        return _ops.gemm(call)
    result: Tensor = torch.ops.qcutlass.gemm(*call)
    return result
