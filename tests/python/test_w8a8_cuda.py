"""What 8-by-8-bit products alone have on CUDA tensors: rings, largest sums, zero points, every pair of scales."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.python.eight_bit import (
    ACTIVATIONS,
    FLOAT8,
    FLOATS,
    arguments,
    is_aligned,
    multiply,
    needs_instructions,
    pack,
)
from tests.python.kinds.description import fits
from tests.python.kinds.float8 import FLOAT8_PRODUCTS
from tests.python.kinds.int8 import INT8
from tests.python.running import captured
from torch import Tensor

import qcutlass
from qcutlass import _C
from qcutlass.testing import EightBitCase, EightBitProblem, Scope

pytestmark = pytest.mark.gpu

DTYPES = (torch.int8, *FLOAT8)
SCOPES: tuple[Scope, ...] = ("one", "each")


TACTICS = range(len(_C.tactics(arguments(EightBitCase(1, 4096, 4096)))))


def tactic_of(dtype: torch.dtype, index: int, m: int = 1) -> _C.TacticTraits | None:
    """A type's configuration number `index`, None where there is none, or it and m rows need what this GPU has not."""
    of_type = _C.tactics(arguments(EightBitCase(m, 4096, 4096, dtype)))
    if index >= len(of_type):
        return None
    traits = of_type[index]
    return traits if fits(traits, "cuda") else None


def assert_correct(
    out: Tensor, p: EightBitProblem, ledger: Any, label: object = None, aligned: bool | None = None
) -> None:
    label = p if label is None else f"{label}: {p}"
    if p.out_dtype == torch.int32:
        ledger.equal(out.reshape(p.shape[:2]), p.integer_sums(), label)
    else:
        ledger.close(out, p.reference(aligned=is_aligned(p) if aligned is None else aligned), label)


@pytest.mark.parametrize("tiles", [3, 4, 9])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rings_go_round_and_blocks_take_more_tiles(
    dtype: torch.dtype, tiles: int, seeds: Iterator[int], ledger: Any
) -> None:
    """More stages than a ring has places, an odd number of them; more tiles than SMs, which persistent blocks share.

    Blocks with 3 tiles of tokens side by side work alone, with 4 in pairs that share weights, with 9 in pairs the last
    of which has one tile. Results of 16 bits leave through memory that the next tile's take, too."""
    needs_instructions(dtype)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for index in TACTICS:
        tactic = tactic_of(dtype, index, 512)
        if tactic is None or not tactic.wgmma:
            continue
        m, n = (tiles - 1) * tactic.tokens + 5, tactic.channels * (sms // (tiles - 1))
        k = tactic.k * (tactic.stages + 3 - tactic.stages % 2) - 7
        for more, out_dtype in ((9, torch.float32), (9, torch.bfloat16), (16, torch.float16)):
            case = EightBitCase(m, n + more, k, dtype, out_dtype, bias=True)
            problem, expected = case.exact(device="cuda", seed=next(seeds))
            ledger.equal(multiply(problem, tactic=tactic.name, split_k=1), expected, f"{tactic.name}: {problem}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_identity_returns_every_number_from_every_position(dtype: torch.dtype, ledger: Any) -> None:
    """With identity activations the outputs are the weights, bit for bit, for every code at every place."""
    needs_instructions(dtype)
    n, k = 256, 1056
    codes = (torch.arange(n, device="cuda")[:, None] * 5 + torch.arange(k, device="cuda") * 3) % 256
    w = codes.to(torch.uint8).view(torch.int8)
    if dtype != torch.int8:
        w = w.clone().masked_fill_((w & 127) == 127, 0).view(torch.float8_e4m3fn)  # a NaN would fill its row
    one = torch.ones(1, device="cuda")
    a = torch.eye(k, device="cuda").to(dtype)
    for index in TACTICS:
        tactic = tactic_of(dtype, index, k)
        if tactic is None:
            continue
        p = EightBitProblem(a, w, one, one, out_dtype=torch.float32)
        ledger.identity(multiply(p, tactic=tactic.name), w.float().T.contiguous(), f"{tactic.name}: {p}")


@pytest.mark.parametrize("split_k", [0, 1, 3])
def test_the_largest_sums(split_k: int, ledger: Any) -> None:
    """-128 times -128 over the longest K: the sums end just below 2^31, in every tactic."""
    k = 131071
    a, w = (torch.full((rows, k), -128, dtype=torch.int8, device="cuda") for rows in (9, 40))
    a[1], w[3] = 127, 127
    p = EightBitProblem(a, w, None, None, out_dtype=torch.int32)
    packed = pack(p)
    for tactic in filter(None, (tactic_of(torch.int8, index, len(a)) for index in TACTICS)):
        out = qcutlass.gemm_w8a8(
            a, packed, None, None, out_dtype=torch.int32, n=40, tactic=tactic.name, split_k=split_k
        )
        ledger.equal(out, p.integer_sums(), tactic.name)


@pytest.mark.parametrize("zero_point", [2**31 - 1, -(2**31), 2**24 + 1])
def test_zero_points_of_any_size(zero_point: int, seed: int, ledger: Any) -> None:
    for m in (3, 100):
        for out_dtype in (torch.int32, torch.float32):
            p = EightBitCase(m, 40, 1000, torch.int8, out_dtype, azp="each").random(device="cuda", seed=seed)
            assert p.azp is not None
            p.azp[1] = zero_point
            assert_correct(multiply(p), p, ledger)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_combination(activation: str | None, dtype: torch.dtype, seeds: Iterator[int], ledger: Any) -> None:
    needs_instructions(dtype)
    zero_points: tuple[Scope, ...] = ("none", *SCOPES) if dtype == torch.int8 else ("none",)
    kinds = itertools.product((1, 16, 100), FLOATS, SCOPES, SCOPES, zero_points, (False, True))
    for m, out_dtype, a_scale, w_scale, azp, bias in kinds:
        case = EightBitCase(m, 200, 256, dtype, out_dtype, a_scale, w_scale, azp, bias, activation=activation)
        assert_correct(multiply(p := case.random(device="cuda", seed=next(seeds))), p, ledger)


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_rows_that_overlap(dtype: torch.dtype, seed: int, ledger: Any) -> None:
    """Every tactic takes rows that overlap, though TMA takes no stride below a row's length."""
    needs_instructions(dtype)
    p = EightBitCase(130, 72, 256, dtype).random(device="cuda", seed=seed)
    for stride in (0, 16, 240):
        a = p.a.reshape(-1).as_strided(p.a.shape, (stride, 1))
        for index in TACTICS:
            if (tactic := tactic_of(dtype, index, len(a))) is not None:
                expected = multiply(replace(p, a=a.clone()), tactic=tactic.name)
                ledger.equal(multiply(replace(p, a=a), tactic=tactic.name), expected, f"{stride} {tactic.name}: {p}")


@pytest.mark.parametrize(("n", "k"), [(1, 1), (15, 31), (17, 33), (300, 333), (4096, 4096)])
def test_packing_and_sums_equal_the_cpu(n: int, k: int, seed: int, ledger: Any) -> None:
    p = EightBitCase(1, n, k).random(seed=seed)
    packed = pack(p)
    on_gpu = qcutlass.preprocess_weights(p.w.cuda(), 8, activations="int8")
    ledger.equal(on_gpu.cpu(), packed, p)
    ledger.equal(qcutlass.unpack_weights(on_gpu, bits=8, shape=(n, k)).cpu(), p.w, p)
    ledger.equal(qcutlass.weight_sums(on_gpu, n).cpu(), qcutlass.weight_sums(p.w), p)
    w = p.w.cuda().view(torch.float8_e4m3fn)
    of_fp8 = qcutlass.preprocess_weights(w, 8, activations="fp8")
    ledger.equal(of_fp8.view(torch.int8).cpu(), packed, p)
    ledger.equal(qcutlass.unpack_weights(of_fp8, bits=8, shape=(n, k)).view(torch.int8).cpu(), p.w, p)


def test_plain_fp8_weights_and_missing_sums(seed: int, ledger: Any) -> None:
    p = EightBitCase(5, 40, 100, azp="each").random(device="cuda", seed=seed)
    ledger.equal(multiply(p, w_sums=None), multiply(p), p)
    needs_instructions(torch.float8_e4m3fn)
    p = EightBitCase(5, 40, 100, torch.float8_e4m3fn).random(device="cuda", seed=seed)
    assert p.a_scale is not None
    assert p.w_scale is not None
    ledger.equal(qcutlass.gemm_fp8(p.a, p.w, p.a_scale, p.w_scale, **p.keywords), multiply(p), p)


def test_what_is_computed_at_each_call_is_captured_too(seeds: Iterator[int], ledger: Any) -> None:
    """Sums of weights that were not given, and the packing of plain fp8 weights."""
    needs_instructions(torch.float8_e4m3fn)
    cases = (INT8, INT8.case(9, 72, 256)), (FLOAT8_PRODUCTS, FLOAT8_PRODUCTS.case(9, 72, 256))
    of_int8, of_fp8 = (kind.products(case, "cuda", next(seeds))[0] for kind, case in cases)
    plain = of_fp8.problem.w.clone()
    outs, replay = captured(lambda: [of_int8(w_sums=None), of_fp8(w=plain)])
    for _ in range(3):
        jobs = [kind.products(case, "cuda", next(seeds)) for kind, case in cases]
        for target, (new, _) in zip((of_int8, of_fp8), jobs, strict=True):
            for name, tensor in new.operands.items():
                target.operands[name].copy_(tensor)
        plain.copy_(jobs[1][0].problem.w)
        replay()
        torch.cuda.synchronize()
        for out, (new, (expected,)) in zip(outs, jobs, strict=True):
            ledger.equal(out, expected, new.problem)


@pytest.mark.parametrize(("m", "n", "k"), [(33000, 65544, 32), (5, 70000, 32800), (66000, 24, 32800)])
def test_more_than_2_to_the_31_elements(m: int, n: int, k: int, seed: int, ledger: Any) -> None:
    """So many outputs, weights, or activations."""
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < 40:
        pytest.skip(f"needs 40 GiB of GPU memory, {free:.1f} are free")
    assert max(m * n, n * k, m * k) > 2**31
    g = torch.Generator("cuda").manual_seed(seed)
    a = torch.randint(-128, 128, (m, k), generator=g, device="cuda", dtype=torch.int8)
    w = torch.randint(-128, 128, (n, k), generator=g, device="cuda", dtype=torch.int8)
    a_scale, w_scale = torch.rand(m, generator=g, device="cuda") / 64, torch.rand(n, generator=g, device="cuda") / 64
    p = EightBitProblem(a, w, a_scale, w_scale, out_dtype=torch.bfloat16, seed=seed)
    out = multiply(p)
    for rows in (slice(0, 64), slice(max(m - 64, 0), m)):
        for channels in (slice(0, 1024), slice(max(n - 1024, 0), n)):
            part = replace(p, a=a[rows], w=w[channels], a_scale=a_scale[rows], w_scale=w_scale[channels])
            ledger.close(out[rows, channels], part.reference(), part)
