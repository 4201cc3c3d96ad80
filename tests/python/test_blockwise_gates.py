"""Blockwise products of gate and up that were quantised apart: channels in turns, scales of each one's own blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.python.blockwise import (
    DEVICES,
    FLOATS,
    SIZES,
    assert_correct,
    assert_quantized,
    multiply,
    multiply_quantized,
    pack,
)
from tests.python.eight_bit import needs_instructions
from tests.python.kinds.description import tactics_here
from torch import Tensor

import qcutlass
from qcutlass import _C, blockwise, testing
from qcutlass.products.decoder_operators import gate as gate_operator
from qcutlass.testing import BlockwiseCase, BlockwiseProblem, bounds
from qcutlass.testing.blockwise import options_of

INT8, FP8 = torch.int8, torch.float8_e4m3fn
BLOCKS = [(INT8, 128), (INT8, 64), (INT8, 32), (FP8, 128)]
"""Types, and the sizes of blocks that kernels take of them."""
GATES = tuple(bounds.GATES)
ROWS = (1, 5, 17, 70, 300)
CHANNELS = (96, 352, 576, 1120)
"""Of gate and up: both parts of blocks alone, and many of them; the last block of each is often short."""

devices = pytest.mark.parametrize("device", DEVICES)
blocks = pytest.mark.parametrize(("dtype", "size"), BLOCKS, ids=str)


def case_of(m: int, n: int, k: int, dtype: torch.dtype, size: int, **options: Any) -> BlockwiseCase:
    return BlockwiseCase(m, n, k, size, dtype=dtype, apart=True, **options)


def tactics(p: BlockwiseProblem) -> list[str | None]:
    """Those of this GPU that a problem has, but for the dense way; on the CPU the only one."""
    if not p.a.is_cuda:
        return [None]
    needs_instructions(p.b.dtype)
    product = blockwise.int8_addmm if p.b.dtype == INT8 else blockwise.fp8_gemm
    names = tactics_here(product, p.a, p.a_s, pack(p), p.b_s, **options_of(p), n=p.shape[1])
    return [name for name in names if not name.endswith("_dense")]


def halves_of(p: BlockwiseProblem) -> tuple[BlockwiseProblem, ...]:
    """The products of gate and of up, each by itself."""
    codes = p.b.view(-1, 2, 16, p.b.shape[1]).unbind(1)
    biases = (None, None) if p.bias is None else p.bias.view(-1, 2, 16).unbind(1)
    return tuple(
        replace(p, b=own.flatten(0, 1), b_s=scales, bias=None if bias is None else bias.flatten(), activation=None)
        for own, scales, bias in zip(codes, p.b_s, biases, strict=True)
    )


def run(p: BlockwiseProblem, tactic: str | None, split_k: int = 1) -> Tensor | None:
    """The product by a kernel; None if that has no tile for it on this GPU, or not so many shares of K."""
    try:
        return multiply(p, tactic=tactic, split_k=split_k)
    except qcutlass.UnsupportedError:
        return None


def is_aligned(tactic: str | None) -> bool:
    return tactic is not None and "_sm90a_" in tactic


@devices
@pytest.mark.parametrize("m", ROWS)
@blocks
def test_every_tactic_against_both_oracles(
    dtype: torch.dtype, size: int, m: int, device: str, seeds: Iterator[int]
) -> None:
    served = 0
    for index, n in enumerate(CHANNELS):
        case = case_of(m, n, (448, 200, 1056)[index % 3], dtype, size, out_dtype=FLOATS[index % 3], bias=index > 0)
        problem, expected = case.exact(device=device, seed=next(seeds))
        gated = replace(case, activation=GATES[index % 2], residual=index % 2 > 0).random(
            device=device, seed=next(seeds)
        )
        for tactic in tactics(problem):
            out = run(problem, tactic)
            if out is not None:
                testing.assert_equal(out, expected, label=f"{tactic} {problem}")
                served += 1
            out = run(gated, tactic)
            if out is not None:
                reference = gated.reference(aligned=is_aligned(tactic))
                testing.assert_close(out, reference, splits=1, label=f"{tactic} {gated}")
    assert served >= len(CHANNELS)


@devices
@pytest.mark.parametrize("m", ROWS)
@blocks
def test_bits_are_those_of_gate_and_up_by_themselves(
    dtype: torch.dtype, size: int, m: int, device: str, seeds: Iterator[int]
) -> None:
    """By the same kernel and shares of K; on a GPU those of the gate's operator, too."""
    compared = 0
    for index, n in enumerate(CHANNELS[1:]):
        case = case_of(m, n, 448, dtype, size, out_dtype=FLOATS[index], bias=index != 1)
        problem = case.random(device=device, seed=next(seeds))
        for tactic in tactics(problem):
            for split_k in (1, 3):
                both, *parts = (run(p, tactic, split_k) for p in (problem, *halves_of(problem)))
                if both is None:
                    continue
                label = f"{tactic} split_k={split_k} {problem}"
                found = [part.contiguous() for part in bounds.gate_and_up(both)]
                for part, wanted in zip(found, parts, strict=True):
                    if wanted is not None:  # half of the channels may have no such tile
                        testing.assert_equal(part, wanted, label=label)
                compared += 1
                for activation in GATES if device == "cuda" else ():
                    out = run(replace(problem, activation=activation), tactic, split_k)
                    if out is not None:
                        testing.assert_equal(out, gate_operator(activation, *found), label=f"{activation} {label}")
    assert compared >= len(CHANNELS[1:])


@devices
@pytest.mark.parametrize("size", SIZES)
def test_each_block_of_gate_and_up_has_its_own_scales(size: int, device: str) -> None:
    """Identity activations return the weights of each block times both its scales, all of them different."""
    n, k = 768, 256
    blocks_k, rows = k // size, n // 2 // size
    b = torch.randint(-127, 128, (n, k), generator=torch.Generator().manual_seed(1)).to(INT8)
    powers = torch.arange(2 * rows * blocks_k) % 19.0
    b_s = torch.exp2(-powers).view(2, rows, blocks_k)
    a, a_s = torch.eye(k).to(INT8), torch.ones(k, blocks_k)
    channels = torch.arange(n)
    scales = b_s[channels // 16 % 2, (channels // 32 * 16 + channels % 16) // size]  # [n, blocks of k]
    expected = b.float() * scales.repeat_interleave(size, 1)
    operands = (tensor.to(device) for tensor in (a, a_s, b, b_s))
    p = BlockwiseProblem(*operands, None, None, torch.float32, size)
    outs = {tactic: out for tactic in tactics(p) if (out := run(p, tactic)) is not None}
    assert outs
    for tactic, out in outs.items():
        testing.assert_equal(out, expected.T.contiguous().to(device), label=tactic)


@devices
@pytest.mark.parametrize("size", SIZES)
def test_outputs_that_are_quantised_take_them(size: int, device: str, seeds: Iterator[int]) -> None:
    for m in (3, 70):
        problem = case_of(m, 352, 448, INT8, size, out_dtype=torch.float32, bias=True)
        p = problem.random(device=device, seed=next(seeds))
        assert_quantized(multiply_quantized(p, 64), p, 64)


@blocks
def test_any_form_of_the_operands(dtype: torch.dtype, size: int, seed: int) -> None:
    """Plain and packed weights, scales that lie apart, activations of more dimensions: the same bits."""
    p = case_of(6, 160, 300, dtype, size, activation="silu_mul").random(seed=seed)
    expected = multiply(p)
    testing.assert_equal(multiply(p, p.b, n=None), expected)
    rows = -(-80 // size)
    wide = torch.full((2, rows + 1, 3 * p.b_s.shape[2]), torch.nan)
    columns = wide[:, :rows].clone()
    views = [wide[:, :rows, : p.b_s.shape[2]], wide[:, :rows, ::3], columns[..., 1 : 1 + p.b_s.shape[2]]]
    for view in views:
        view.copy_(p.b_s)
        testing.assert_equal(multiply(replace(p, b_s=view)), expected)
        view.fill_(torch.nan)
    same = replace(p, b_s=p.b_s[:1].expand(2, -1, -1))
    assert_correct(multiply(same), same)
    leading = replace(p, a=p.a.view(2, 3, -1), a_s=p.a_s.view(2, 3, -1))
    testing.assert_equal(multiply(leading).flatten(0, 1), expected)
    empty = replace(p, a=p.a[:0], a_s=p.a_s[:0])
    assert multiply(empty).shape == (0, 80)


def test_compiled_calls(seed: int) -> None:
    p = case_of(4, 96, 256, FP8, 128, activation="silu_mul").random(seed=seed)
    packed = pack(p)
    call = torch.compile(blockwise.fp8_gemm, fullgraph=True, backend="aot_eager")
    testing.assert_equal(call(p.a, p.a_s, packed, p.b_s, activation="silu_mul"), multiply(p, out_dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
def test_interleaving_weights_with_their_scales(dtype: torch.dtype, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    quantize = blockwise.weight_quant if dtype == INT8 else blockwise.fp8_weight_quant
    gate, up = (quantize(torch.randn(144, 200, generator=g) * scale) for scale in (1, 8))
    b, b_s = qcutlass.interleave_gate_up(gate, up)
    assert torch.equal(b.view(torch.uint8), qcutlass.interleave_gate_up(gate[0], up[0]).view(torch.uint8))
    assert torch.equal(b_s, torch.stack([gate[1], up[1]]))
    x = torch.randn(5, 200, generator=g)
    activations = blockwise.act_quant(x) if dtype == INT8 else blockwise.fp8_act_quant(x)
    product: Any = blockwise.int8_addmm if dtype == INT8 else blockwise.fp8_gemm
    gated = product(*activations, b, b_s, out_dtype=torch.float32, activation="silu_mul")
    one, other = (product(*activations, *part, out_dtype=torch.float32) for part in (gate, up))
    wanted = testing.activate(one.double(), "silu") * other
    assert float((gated - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


def test_what_cannot_be_interleaved() -> None:
    gate, up = (blockwise.weight_quant(torch.randn(48, 256)) for _ in "gu")
    narrow = blockwise.weight_quant(torch.randn(48, 256), 32)
    with pytest.raises(ValueError, match=r"up: expected scales of the shape.*\[1, 2\] on cpu, got \[2, 8\] on cpu"):
        qcutlass.interleave_gate_up(gate, narrow)
    with pytest.raises(TypeError, match="up: expected codes and the scales of their blocks, got Tensor, int"):
        qcutlass.interleave_gate_up(gate, (up[0], 1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="gate: expected codes and the scales of their blocks, got Tensor"):
        qcutlass.interleave_gate_up(gate[:1], up)  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"up: .*got tuple"):
        qcutlass.interleave_gate_up(gate[0], up)  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"up: expected the type of gate, torch\.int8, got torch\.float8_e4m3fn"):
        qcutlass.interleave_gate_up(gate, blockwise.fp8_weight_quant(torch.randn(48, 256)))


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
def test_wrong_scales_are_refused(dtype: torch.dtype, seed: int) -> None:
    p = case_of(3, 352, 300, dtype, 128, activation="silu_mul").random(seed=seed)
    wanted = r"b_s: expected scales of gate and of up, shape \[2, ceil\(N / 2 / 128\), ceil\(K / 128\)\] = \[2, 2, 3\]"
    wrong = {
        "a matrix for gate alone": p.b_s[:1],
        "as if they lay in no turns": p.b_s.new_ones(2, 3, 3),
        "of other columns": p.b_s[..., :2],
        "of three": p.b_s.new_ones(3, 2, 3),
    }
    for name, scales in wrong.items():
        with pytest.raises(ValueError, match=wanted):
            pytest.fail(f"{name}: {multiply(replace(p, b_s=scales))}")
    with pytest.raises(ValueError, match=r"b_s: expected shape \[ceil\(N / 128\), .*\[3, 3\], got \[1, 2, 2, 3\]"):
        multiply(replace(p, b_s=p.b_s[None]))
    odd = BlockwiseCase(3, 48, 300, dtype=dtype).random(seed=seed)
    with pytest.raises(ValueError, match=r"b_s: scales of gate and of up, shape \[2, 1, 3\].*of 32, got N = 48: see"):
        multiply(replace(odd, b_s=odd.b_s.new_ones(2, 1, 3)))


def test_the_extension_refuses_channels_without_pairs() -> None:
    arguments = _C.GemmArguments()
    arguments.m, arguments.a_type, arguments.out_type = 1, _C.DType.INT8, _C.DType.FLOAT16
    weights = arguments.weights
    weights.packing, weights.n, weights.k, weights.group_size = _C.Packing.W8A8, 48, 128, 128
    arguments.blocks.size, arguments.blocks.up_offset = 128, 1
    for refuse in (lambda: _C.gemm_host(arguments, 1), lambda: _C.tactics(arguments)):
        with pytest.raises(ValueError, match="n must be a multiple of 32 where gate and up have scales of their own"):
            refuse()


def swapped(b_s: Tensor) -> Tensor:
    return b_s.flip(0)


def gates_for_both(b_s: Tensor) -> Tensor:
    return b_s[:1].expand(2, -1, -1)


def next_block(b_s: Tensor) -> Tensor:
    return b_s.roll(-1, 1)


def as_they_lie(b_s: Tensor) -> Tensor:
    """One's rows and the other's in turns, where each has its own in order."""
    return b_s.transpose(0, 1).reshape(b_s.shape)


@pytest.mark.parametrize("fault", [swapped, gates_for_both, next_block, as_they_lie])
@pytest.mark.parametrize("activation", [None, "silu_mul"])
def test_faults_are_rejected(activation: str | None, fault: Any, seed: int) -> None:
    p = case_of(16, 512, 512, INT8, 64, activation=activation).random(seed=seed)
    assert testing.error_ratio(multiply(p), p.reference()) <= 1
    assert testing.error_ratio(multiply(replace(p, b_s=fault(p.b_s).contiguous())), p.reference()) > 1
