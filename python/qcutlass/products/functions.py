"""The products."""

from __future__ import annotations

import torch
from torch import Tensor

from qcutlass.products.checks import check_memory
from qcutlass.products.float8 import FLOAT8, Float8Call
from qcutlass.products.grouped import GROUPED, GroupedCall
from qcutlass.products.int4 import INT4, Int4Call
from qcutlass.products.int8 import INT8, Int8Call, check_weight_sums, sums_call
from qcutlass.products.kind import computes
from qcutlass.products.library import is_eager
from qcutlass.products.multiplying import compute
from qcutlass.products.weight_only import WEIGHT_ONLY, GemmCall


@computes(WEIGHT_ONLY)
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
    activations: str | None = None,
    weight_dtype: str | None = None,
    global_scale: Tensor | None = None,
    minimums: Tensor | None = None,
    batch_invariant: bool = False,
    super_scales: Tensor | None = None,
    super_minimums: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Multiplies activations by quantised weights: `activation(a' @ w.T + bias) + residual`, fp32 sums, rounded once.

    `w[n, k] = (code[n, k] - zero[g, n]) * scale[g, n]` with g = k // group_size, or, with minimums,
    `code[n, k] * scale[g, n] - minimum[g, n]`; and
    `a'[m, k] = round_to_dtype_of_a(a[m, p] * act_scale[p])` with p = perm[k], or k without `perm`.
    On CUDA, kernels for many rows round `w` to the type of `a`. Some kernels for few rows round nothing: they multiply
    the sum of a group's exact products by its scale. `plan(...).rounds_weights` tells which kind runs. The CPU keeps
    `w` in fp32.

    With `weight_dtype` the codes are floating numbers, without zeros: `w[n, k] = code[n, k] * scale[g, n]`. With a
    `global_scale`, the scale is `scale * global_scale`, rounded to float32. NaN codes give NaN.

    With `activations="int8"`, on the CPU, `a'` is quantised first, in blocks of 32 columns, as
    `blockwise.act_quant(a', 32)` does it: int8 codes, and a float32 scale for each row and block, its largest magnitude
    / 127. Sums of products of codes are exact integers, which are scaled in fp32. llama.cpp does the same with its
    4-bit weights. It is faster. The error is 0.5 % of the output's size for normally distributed activations, and
    larger with outliers.

    The activations "silu_mul" and "gelu_tanh_mul" are those of gated MLPs (Shazeer, "GLU variants improve transformer",
    2020): channels are gate and up in turns of 16, as `interleave_gate_up` puts them, and the output has a column for
    each pair, `silu(gate) * up`. On CUDA sums are rounded before a gate, and values before a residual is added: the
    bits are those of separate operators (`torch.ops.qcutlass.silu_mul`, a sum).

    From sm_90 on, a product may start to read its weights while the kernel before it in the stream is still running,
    unless a kernel of qcutlass has just written them. Weights may be rewritten in place between products, except by a
    kernel that lets its successor start early (programmatic dependent launch); torch's kernels do not.

    Args:
        a: `[..., K]`. float16 or bfloat16 on CUDA; these or float32 on the CPU. Unit stride along K avoids a copy.
        w_packed: uint8 `[ceil(N/16), ceil(K/kt), 32, 16]` from `preprocess_weights`, kt = 64 (4 bits) or 32 (8 bits).
            It does not store K. Weights packed from a matrix with another K but as many tiles are not detected, and
            4-bit weights of 2 K columns pass for 8-bit ones of K unless `bits` is passed.
        scales: float16, bfloat16 or float32 `[G, N]`, or `[N]`: one a channel. Of "e2m1" codes also float8_e8m0fnu
            (MXFP4, with groups of 32) and float8_e4m3fn (NVFP4, with groups of 16).
        zeros: shaped as `scales`; uint8, int8 or int32: exact zero points, uint8 ones in [0, 2**bits]; floating:
            real-valued zeros; None: 2**(bits - 1) everywhere. None with `weight_dtype`.
        bias: float16, bfloat16 or float32 `[N]`.
        activation: None, "relu", "gelu" (erf), "gelu_tanh", "silu"; or "silu_mul" or "gelu_tanh_mul", gates, for which
            N is a multiple of 32, and the output has N / 2 columns.
        act_scale: float16, bfloat16 or float32 `[K]`, in the order of the columns of `a` (AWQ's pre-quant scale).
        perm: int32 `[K]`, values in [0, K), not checked on CUDA: column k of the codes meets column perm[k] of `a`
            (GPTQ's act-order).
        group_size: columns that share a scale; needed where G does not divide K (a shorter last group). -1: one group.
            On CUDA a multiple of 16, or one group.
        bits: 4 or 8. None: taken from the shape of `w_packed`. Pass it for K <= 32, where both have the same shape.
        out: `[..., N]`, or `[..., N / 2]` with a gate, with the type of `a`, to be written; must not share memory with
            an operand.
        tactic: name of a kernel configuration to use (see `tactics`); CUDA only.
        split_k: number of blocks that share the K extent of an output tile; of several waves of wgmma tiles only the
            last one's are shared. 0: chosen. CUDA only.
        activations: None: as they are; "int8": quantised. CPU only, for integer codes in groups of a multiple of 16
            columns, or one.
        weight_dtype: None: codes are integers; "e2m1": 4-bit floats, a sign in bit 3 and 0, 0.5, 1, 1.5, 2, 3, 4 or 6;
            "e4m3": the bytes of float8_e4m3fn.
        global_scale: float32 `[1]`, beside scales of float8_e4m3fn; None: 1.
        minimums: float16, bfloat16 or float32, shaped as `scales`: subtracted from scaled codes, instead of zeros.
            Scales may be negative or 0. GGUF's K-quants are stored so.
        batch_invariant: a row of the result is the same bits whatever M is, and whatever the other rows are, on one
            machine and GPU model: one order of sums serves every M, which costs time. Every call has it where the
            environment says `QCUTLASS_BATCH_INVARIANT=1`.
        super_scales: float16 `[B, N]`, B a divisor of G: the second level of scales, which are uint8 or int8 then. A
            group's scale is the exact product of its integer and the number of its super-block, one of G / B
            neighbouring groups, on CUDA of a multiple of 128 columns, or of all. `expand_scales` makes scales of one
            level. GGUF's K-quants are stored so.
        super_minimums: float16, shaped as `super_scales`: the second level of minimums; passed if and only if there are
            `super_scales` and `minimums`.
        residual: of the shape and type of the output; added after bias and activation, before the output is rounded.

    Returns:
        `[..., N]` with the type of `a`, or `[..., N / 2]` with a gate; `out` if it was given. Bitwise repeatable.

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
    operands = a, w_packed, scales, zeros, bias, activation, act_scale, perm
    options = group_size, bits, tactic, split_k, activations, weight_dtype
    numbers = global_scale, minimums, batch_invariant, super_scales, super_minimums, residual
    return compute(WEIGHT_ONLY, GemmCall(*operands, *options, *numbers), out)


@computes(INT8)
def gemm_w8a8(
    a_q: Tensor,
    w_packed: Tensor,
    a_scale: Tensor | None,
    w_scale: Tensor | None,
    bias: Tensor | None = None,
    azp: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype = torch.float16,
    out: Tensor | None = None,
    *,
    n: int | None = None,
    w_sums: Tensor | None = None,
    tactic: str | None = None,
    split_k: int = 0,
    batch_invariant: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Multiplies int8 activations by int8 weights: `activation(sum * a_scale * w_scale + bias) + residual`.

    `sum[m, n] = sum over k of (a_q[m, k] - azp[m]) * w[n, k]`, exact; what follows is computed in fp32 from left to
    right, then rounded once. This is the product of SmoothQuant (Xiao et al., 2022) and other W8A8 schemes.

    Args:
        a_q: int8 `[..., K]`, M rows in all; K at most 131071. Unit stride along K avoids a copy.
        w_packed: int8 `[ceil(N/16), ceil(K/32), 32, 16]` from `preprocess_weights(codes, 8, activations="int8")`. It
            does not store K: weights packed from another K, but as many tiles, are not detected.
        a_scale: float32, one element, or one for each row: `[M]`, `[M, 1]`, `[...]` or `[..., 1]`. None with int32
            outputs.
        w_scale: float32, one element, or one for each channel: `[N]` or `[N, 1]`. None with int32 outputs.
        bias, activation, tactic, split_k, batch_invariant, residual: as for `gemm`.
        azp: int32, zero points of the activations, shaped as `a_scale` may be.
        out_dtype: float16, bfloat16 or float32; or int32: the sums themselves (modulo 2^32), without scales, bias and
            activation.
        out: `[..., N]` of type `out_dtype`, to be written; must not share memory with an operand.
        n: N. None: what `w_scale`, `bias` or `w_sums` of N elements tell; where none does, every channel that was
            packed, a multiple of 16.
        w_sums: int32 `[N]`, `weight_sums(w_packed)`, used with `azp`. None: computed at each call, which takes about as
            long as a product of one row.

    Returns:
        `[..., N]` of type `out_dtype`, or `[..., N / 2]` with a gate; `out` if it was given. Bitwise repeatable.

    Raises:
        TypeError, ValueError, RuntimeError, UnsupportedError: as for `gemm`; K is too large.

    Example:
        >>> import torch, qcutlass
        >>> a_q, w_q = (torch.randint(-127, 128, size, dtype=torch.int8) for size in ((2, 3, 256), (48, 256)))
        >>> w_packed = qcutlass.preprocess_weights(w_q, bits=8, activations="int8")
        >>> a_scale, w_scale = torch.rand(2, 3), torch.rand(48)
        >>> qcutlass.gemm_w8a8(a_q, w_packed, a_scale, w_scale, out_dtype=torch.bfloat16).shape
        torch.Size([2, 3, 48])
    """
    operands = a_q, w_packed, a_scale, w_scale, bias, azp
    call = Int8Call(*operands, activation, out_dtype, n, w_sums, tactic, split_k, batch_invariant, residual)
    return compute(INT8, call, out)


@computes(INT4)
def gemm_w4a8(
    a_q: Tensor,
    w_packed: Tensor,
    a_scale: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    group_size: int | None = None,
    n: int | None = None,
    out: Tensor | None = None,
    tactic: str | None = None,
    split_k: int = 0,
    batch_invariant: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Multiplies int8 or fp8 activations by 4-bit weights: `activation(a_scale * sum + bias) + residual`.

    `sum[m, n] = sum over g of scales[g, n] * (sum over k in g of a_q[m, k] * (code[n, k] - zero[g, n]))` in fp32, with
    g = k // group_size; the rest is computed in fp32 from left to right, then rounded once. Inner sums of int8 over up
    to 512 columns are exact integers where groups are multiples of 16 columns, or one a channel, and zeros lie in
    [0, 16]; other groups, and fp8, are summed in fp32 of weights `(code - zero) * scale`, which are exact with scales
    of 16 bits. NaN propagates. This is the product of QServe and other W4A8 schemes (Lin et al., 2024).

    On a GPU (for fp8, of compute capability 8.9 or newer) the MMAs multiply `code - zero` as 8-bit numbers, and sums of
    up to 128 columns are scaled. Sums of int8 are exact there, too. Of fp8 sums the MMAs of compute capability 9.0 keep
    some 14 bits, relative to the largest product or sum. A channel becomes NaN if its zero lies outside [-1, 16] (fp8)
    or [-112, 128] (int8), where `code - zero` is not exact in 8 bits.

    Args:
        a_q: int8 or float8_e4m3fn `[..., K]`, M rows in all. Unit stride along K avoids a copy.
        w_packed: uint8 `[ceil(N/16), ceil(K/64), 32, 16]` from `preprocess_weights(codes, 4, "int8")`, "fp8" or
            "16bit", which are the same bytes. It does not store K: weights packed from another K, but as many tiles,
            are not detected.
        a_scale: float32, one element, or one for each row: `[M]`, `[M, 1]`, `[...]` or `[..., 1]`.
        scales: float16, bfloat16 or float32 `[G, N]`, or `[N]`: one a channel.
        zeros: uint8, int8 or int32, shaped as `scales`; None: 8 everywhere.
        bias, activation, group_size, batch_invariant, residual: as for `gemm`; groups may have any size, on a GPU
            multiples of 32, or one a channel.
        out_dtype: float16, bfloat16 or float32.
        n: None, or N, as `scales` tell it.
        out: `[..., N]` of type `out_dtype`, to be written; must not share memory with an operand.
        tactic, split_k: as for `gemm`.

    Returns:
        `[..., N]` of type `out_dtype`, or `[..., N / 2]` with a gate; `out` if it was given. Bitwise repeatable.

    Raises:
        TypeError, ValueError, RuntimeError: as for `gemm`.
        UnsupportedError: the GPU has no fp8 instructions, no kernel was built for it, or its kernels do not take groups
            of this size: use `gemm` with 16-bit activations there.

    Example:
        >>> import torch, qcutlass
        >>> q = qcutlass.quantize(torch.randn(48, 256), bits=4, group_size=64)
        >>> w_packed = qcutlass.preprocess_weights(q.codes, bits=4, activations="int8")
        >>> a_q, a_scale = qcutlass.quantize_activations(torch.randn(2, 3, 256))
        >>> qcutlass.gemm_w4a8(a_q, w_packed, a_scale, q.scales, q.zeros).shape
        torch.Size([2, 3, 48])
    """
    operands = a_q, w_packed, a_scale, scales, zeros, bias
    call = Int4Call(*operands, activation, out_dtype, group_size, n, tactic, split_k, batch_invariant, residual)
    return compute(INT4, call, out)


@computes(FLOAT8)
def gemm_fp8(
    a: Tensor,
    w: Tensor,
    a_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    *,
    n: int | None = None,
    tactic: str | None = None,
    split_k: int = 0,
    batch_invariant: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Multiplies fp8 activations by fp8 weights: `activation(sum * a_scale * w_scale + bias) + residual`.

    `sum[m, n] = sum over k of a[m, k] * w[n, k]` in fp32; what follows is computed in fp32 from left to right, then
    rounded once. On H100 and H200 most kernels add sums of 128 columns that have some 14 bits. `sm89` kernels
    (`tactic="w8a8_e4m3_sm89_..."`), which other GPUs have, add in fp32 throughout; on H100 and H200 they take up to
    four times as long. NaN propagates. The formats are those of Micikevicius et al., "FP8 formats for deep learning"
    (2022).

    Args:
        a: float8_e4m3fn or float8_e5m2 `[..., K]`, M rows in all. Unit stride along K avoids a copy.
        w: float8_e4m3fn, packed, `[ceil(N/16), ceil(K/32), 32, 16]` from `preprocess_weights(w, 8, "fp8")`; or plain,
            `[N, K]`, which is packed at each call: pack weights that are used more than once.
        a_scale: float32, one element, or one for each row: `[M]`, `[M, 1]`, `[...]` or `[..., 1]`.
        w_scale: float32, one element, or one for each channel: `[N]` or `[N, 1]`.
        bias, activation, tactic, split_k, batch_invariant, residual: as for `gemm`.
        out_dtype: float16, bfloat16 or float32.
        out: `[..., N]` of type `out_dtype`, to be written; must not share memory with an operand.
        n: N. None: that of plain weights; of packed ones what `w_scale` or `bias` of N elements tell, else every
            channel that was packed, a multiple of 16.

    Returns:
        `[..., N]` of type `out_dtype`, or `[..., N / 2]` with a gate; `out` if it was given. Bitwise repeatable.

    Raises:
        TypeError, ValueError, RuntimeError: as for `gemm`.
        UnsupportedError: the GPU has no fp8 instructions (they came with compute capability 8.9), or no kernel was
            built for it.

    Example:
        >>> import torch, qcutlass
        >>> a, w = (torch.randn(size).to(torch.float8_e4m3fn) for size in ((2, 3, 256), (48, 256)))
        >>> w_packed = qcutlass.preprocess_weights(w, bits=8, activations="fp8")
        >>> qcutlass.gemm_fp8(a, w_packed, torch.rand(2, 3), torch.rand(48)).shape
        torch.Size([2, 3, 48])
    """
    call = Float8Call(
        a, w, a_scale, w_scale, bias, activation, out_dtype, n, tactic, split_k, batch_invariant, residual
    )
    return compute(FLOAT8, call, out)


@computes(GROUPED)
def gemm_grouped(
    a: Tensor,
    w_packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    offsets: Tensor,
    rows: Tensor | None = None,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    group_size: int | None = None,
    bits: int | None = None,
    out: Tensor | None = None,
    tactic: str | None = None,
    weight_dtype: str | None = None,
    global_scale: Tensor | None = None,
    minimums: Tensor | None = None,
    batch_invariant: bool = False,
    super_scales: Tensor | None = None,
    super_minimums: Tensor | None = None,
    perm: Tensor | None = None,
) -> Tensor:
    """Multiplies each row by the quantised weights of its expert: the product of a mixture of experts.

    Result row r belongs to the expert e with `offsets[e] <= r < offsets[e + 1]`, and is
    `activation(a[rows[r]] @ w[e].T + bias[e]) * row_scale[r]`, sums in fp32, rounded once; `w` as in `gemm`. Rows that
    belong to no expert, before `offsets[0]` and from `offsets[E]` on, are zeros. A row's bits do not depend on other
    rows, their number, order or experts; on CUDA, as long as the tactic is the same, or with `batch_invariant`.

    No host code reads `offsets` and `rows` of CUDA tensors: nothing waits for the GPU, and a captured graph multiplies
    what they say when it runs. There, offsets are clamped to [0, R] and rows to those of `a`, so that wrong ones give
    wrong results, but touch no other memory; on the CPU they are errors.

    Args:
        a: `[T, K]`. float16 or bfloat16 on CUDA; these or float32 on the CPU. Unit stride along K avoids a copy.
        w_packed: uint8 `[E, ceil(N/16), ceil(K/kt), 32, 16]`: `preprocess_weights` of codes `[E, N, K]`.
        scales: `[E, G, N]`, or `[E, N]`: one a channel; types as for `gemm`.
        zeros, minimums: shaped as `scales`; types and meaning as for `gemm`.
        super_scales, super_minimums: `[E, B, N]`, as for `gemm`.
        offsets: int32 `[E + 1]`, not decreasing, in [0, R].
        rows: int32 `[R]`, in [0, T): the row of `a` that each result row multiplies, gathered by the kernel, or in a
            copy before it (`wgmma`, with many rows an expert). None: r, and R = T.
        row_scale: float32 `[R]`: multiplies finished rows, in fp32 before they are rounded (the router's weights).
        bias: float16, bfloat16 or float32 `[E, N]`.
        activation: as for `gemm`. With "silu_mul" and "gelu_tanh_mul" the N = 2 I channels are I of gate, then I of up,
            as those of `moe.ExpertWeights`, I is a multiple of 16, the output `[R, I]`, and there is no `row_scale`.
        group_size, bits, tactic, weight_dtype, batch_invariant: as for `gemm`.
        global_scale: float32 `[E]` or `[E, 1]`, beside scales of float8_e4m3fn; None: 1.
        perm: int32 `[E, K]`, values in [0, K): column k of an expert's codes meets column perm[e, k] of `a` (GPTQ's
            act-order). On CUDA torch gathers rows and columns before the product, which takes 12 bytes for each of
            R * K activations; there, values are clamped as rows are.
        out: `[R, N]`, or `[R, I]`, with the type of `a`, to be written; must not share memory with an operand.

    Returns:
        `[R, N]`, or `[R, I]`, with the type of `a`; `out` if it was given. Bitwise repeatable.

    Raises:
        TypeError, ValueError, RuntimeError, UnsupportedError: as for `gemm`; on the CPU also ValueError for an offset,
            a row or a column out of range.

    Example:
        >>> import torch, qcutlass
        >>> experts = [qcutlass.quantize(torch.randn(48, 256), bits=4, group_size=64) for _ in range(3)]
        >>> w_packed = qcutlass.preprocess_weights(torch.stack([q.codes for q in experts]), bits=4)
        >>> scales, zeros = (torch.stack([getattr(q, name) for q in experts]) for name in ("scales", "zeros"))
        >>> a = torch.randn(2, 256)  # both tokens go to expert 0, one to expert 2 besides
        >>> offsets = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
        >>> rows = torch.tensor([0, 1, 1], dtype=torch.int32)
        >>> qcutlass.gemm_grouped(a, w_packed, scales, zeros, offsets=offsets, rows=rows).shape
        torch.Size([3, 48])
    """
    operands = a, w_packed, scales, offsets, zeros, rows, row_scale, bias
    numbers = weight_dtype, global_scale, minimums, batch_invariant, super_scales, super_minimums, perm
    return compute(GROUPED, GroupedCall(*operands, activation, group_size, bits, tactic, *numbers), out)


def weight_sums(w: Tensor, n: int | None = None) -> Tensor:
    """The sum of each channel's int8 weights, which `gemm_w8a8` needs where activations have zero points.

    Args:
        w: int8 `[ceil(N/16), ceil(K/32), 32, 16]` from `preprocess_weights`, or codes `[N, K]`; K at most 131071.
        n: N, where packed weights have channels of padding. None: all that were packed.

    Returns:
        int32 `[N]`.

    Raises:
        TypeError: `w` is not an int8 tensor.
        ValueError: it has neither shape, or not as many tiles as N needs.

    Example:
        >>> import torch, qcutlass
        >>> w_q = torch.randint(-127, 128, (40, 256), dtype=torch.int8)
        >>> w_packed = qcutlass.preprocess_weights(w_q, bits=8, activations="int8")
        >>> bool((qcutlass.weight_sums(w_packed, n=40) == w_q.sum(1)).all())
        True
    """
    check_weight_sums(w, n)
    if w.dim() == 2:
        if is_eager(w):
            check_memory({"w": w})
        return w.sum(1, dtype=torch.int32)
    return compute(INT8, sums_call(w, n), None).view(-1)
