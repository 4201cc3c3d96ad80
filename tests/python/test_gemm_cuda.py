"""What qcutlass.gemm alone has on CUDA tensors: codes at every place, packing, dequantising, sizes over 2^31."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.python.kinds.description import FLOATS, fits
from tests.python.kinds.weight_only import OF_MINIMUMS, SCHEMES, WEIGHT_ONLY, Scheme
from tests.python.running import SLEEP
from torch import Tensor

import qcutlass
from qcutlass import _C, testing
from qcutlass.products.selection import weight_dtype

pytestmark = pytest.mark.gpu

Multiply = Callable[..., Tensor]
TACTICS = range(len(WEIGHT_ONLY.traits(testing.Case(1, 4096, 4096))))


def tactic_of(case: testing.Case, index: int) -> _C.TacticTraits | None:
    """The configuration in row `index` of the table, None where there is none, or this GPU has not what it needs."""
    found = WEIGHT_ONLY.traits(case)
    if index >= len(found):
        return None
    traits = found[index]
    return traits if fits(traits, "cuda") else None


@pytest.mark.parametrize("scheme", [*SCHEMES, OF_MINIMUMS], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_identity_returns_every_code_from_every_position(
    dtype: torch.dtype, bits: int, scheme: Scheme, multiply: Multiply, seeds: Iterator[int], ledger: Any
) -> None:
    """With identity activations the outputs are the dequantised weights, bit for bit, for every code at every place."""
    choose = random.Random(next(seeds))
    n, k = torch.arange(16 * 2**bits, device="cuda")[:, None], torch.arange(576, device="cuda")
    codes = ((n // 16 + 5 * n + 3 * k) % 2**bits).to(torch.uint8)
    for index in TACTICS:
        case = testing.Case(576, 16 * 2**bits, 576, bits, dtype=dtype, **scheme.options(choose))
        tactic = tactic_of(case, index)
        if tactic is None:
            continue
        p = case.random(device="cuda", seed=next(seeds))
        p = replace(p, a=torch.eye(case.k, dtype=dtype, device="cuda"), codes=codes)
        ledger.identity(multiply(p, tactic=tactic.name), p.weight(dtype).T, f"{tactic.name}: {p}")


def test_columns_that_do_not_exist_are_not_scaled(multiply: Multiply, seeds: Iterator[int], ledger: Any) -> None:
    """48 columns in groups of 32: codes of 0 beside them, scaled, would be infinite, and times activations of 0 NaN."""
    case = testing.Case(48, 64, 48, 4, group_size=32, zeros="none", scale_dtype=torch.float32)
    for index in TACTICS:
        tactic = tactic_of(case, index)
        if tactic is None:
            continue
        p = case.random(device="cuda", seed=next(seeds))
        a = torch.eye(case.k, dtype=case.dtype, device="cuda")
        p = replace(p, a=a, codes=p.codes.clamp(min=1), scales=torch.full_like(p.scales, 9000))
        ledger.identity(multiply(p, tactic=tactic.name), p.weight(case.dtype).T, f"{tactic.name}: {p}")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (15, 63), (17, 65), (300, 333), (4096, 4096)])
def test_packing_equals_the_cpu(n: int, k: int, bits: int, seed: int, ledger: Any) -> None:
    p = testing.random_problem(1, n, k, bits=bits, seed=seed)
    packed = qcutlass.preprocess_weights(p.codes, bits=bits)
    on_gpu = qcutlass.preprocess_weights(p.codes.cuda(), bits=bits)
    ledger.equal(on_gpu.cpu(), packed, p)
    ledger.equal(qcutlass.unpack_weights(on_gpu, bits=bits, shape=(n, k)).cpu(), p.codes, p)
    strided = torch.zeros(n, 2 * k + 1, dtype=torch.uint8)[:, : 2 * k : 2].copy_(p.codes)
    ledger.equal(qcutlass.preprocess_weights(strided.cuda(), bits=bits).cpu(), packed, p)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [4, 8])
def test_dequantising_equals_the_cpu(bits: int, out_dtype: torch.dtype, seeds: Iterator[int], ledger: Any) -> None:
    choose = random.Random(next(seeds))
    for scheme in (*SCHEMES, OF_MINIMUMS):
        for n, k in [(1, 1), (33, 100), (200, 1000), (4096, 512)]:
            case = testing.Case(1, n, k, bits, dtype=choose.choice(FLOATS), **scheme.options(choose))
            p = case.random(device="cuda", seed=next(seeds))
            packed = qcutlass.preprocess_weights(p.codes, bits=bits)
            options = {"k": k, "dtype": out_dtype, **p.ambiguous}
            out = qcutlass.dequantize(packed, p.scales, p.zeros, minimums=p.minimums, **options)
            ledger.equal(out, p.weight(out_dtype), p)
            zeros, minimums = (None if part is None else part.cpu() for part in (p.zeros, p.minimums))
            on_cpu = qcutlass.dequantize(packed.cpu(), p.scales.cpu(), zeros, minimums=minimums, **options)
            ledger.equal(out.cpu(), on_cpu, p)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dequantising_every_code_zero_and_float16_scale(out_dtype: torch.dtype, ledger: Any) -> None:
    scales = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cuda").view(torch.float16)
    scales = scales[scales.isfinite()][None]
    codes = torch.arange(16, dtype=torch.uint8, device="cuda").repeat(scales.shape[1], 1)
    packed = qcutlass.preprocess_weights(codes, bits=4)
    for zero in range(16):
        zeros = torch.full_like(scales, zero, dtype=torch.uint8)
        out = qcutlass.dequantize(packed, scales, zeros, k=16, bits=4, dtype=out_dtype)
        ledger.equal(out, testing.dequantized_weight(codes, scales, zeros, 16, 4, out_dtype), f"zero {zero}")


def pack(problem: testing.Problem) -> Tensor:
    return qcutlass.preprocess_weights(problem.codes, bits=problem.bits)


def needs_memory(gigabytes: float) -> None:
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GiB of GPU memory, {free:.1f} are free")


def test_packs_on_the_current_stream(seed: int, ledger: Any) -> None:
    problem = testing.random_problem(1, 512, 1024, device="cuda", seed=seed)
    expected = pack(problem)
    late = torch.zeros_like(problem.codes)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        late.copy_(problem.codes)
        weights = qcutlass.preprocess_weights(late, bits=4)
        codes = qcutlass.unpack_weights(weights, bits=4, shape=(512, 1024))
        dense = qcutlass.dequantize(weights, problem.scales, problem.zeros, k=1024)
    stream.synchronize()
    ledger.equal(weights, expected, problem)
    ledger.equal(codes, problem.codes, problem)
    ledger.equal(dense, problem.weight(dense.dtype), problem)


def test_more_than_2_to_the_31_weights(seed: int, ledger: Any) -> None:
    needs_memory(40)
    n, k = 65552, 32832
    assert n * k > 2**31
    for m in (2, 70):
        problem = testing.random_problem(m, n, k, group_size=32832, zeros="none", device="cuda", seed=seed)
        weights = pack(problem)
        out = qcutlass.gemm(problem.a, weights, problem.scales)
        last = replace(problem, codes=problem.codes[-4096:], scales=problem.scales[:, -4096:])
        first = replace(problem, codes=problem.codes[:4096], scales=problem.scales[:, :4096])
        rounded = weight_dtype(problem.a, weights, problem.scales)
        ledger.close(out[:, -4096:], last.reference(rounded), problem)
        ledger.close(out[:, :4096], first.reference(rounded), problem)
    codes = qcutlass.unpack_weights(weights, bits=4, shape=(n, k))
    ledger.equal(codes[-100:], problem.codes[-100:], problem)
    dense = qcutlass.dequantize(weights, problem.scales, k=k)
    ledger.equal(
        dense[-100:], replace(last, codes=last.codes[-100:], scales=last.scales[:, -100:]).weight(dense.dtype), last
    )


def test_more_than_2_to_the_31_outputs(seed: int, ledger: Any) -> None:
    needs_memory(24)
    m, n = 33000, 65544
    assert m * n > 2**31
    problem = testing.random_problem(m, n, 64, group_size=64, device="cuda", seed=seed)
    operands = (problem.a, pack(problem), problem.scales, problem.zeros)
    out = qcutlass.gemm(*operands)
    for rows in (slice(0, 128), slice(m - 300, m)):
        part = replace(problem, a=problem.a[rows])
        ledger.close(out[rows], part.reference(weight_dtype(*operands)), problem)


def test_more_than_2_to_the_31_activations(seed: int, ledger: Any) -> None:
    needs_memory(24)
    m, k = 66000, 32768
    assert m * k > 2**31
    problem = testing.random_problem(4, 24, k, group_size=128, device="cuda", seed=seed)
    a = torch.zeros(m, k, dtype=torch.float16, device="cuda")
    a[-4:], a[:4] = problem.a, problem.a.flip(0)
    operands = (a, pack(problem), problem.scales, problem.zeros)
    out = qcutlass.gemm(*operands)
    ref = problem.reference(weight_dtype(*operands))
    ledger.close(out[-4:], ref, problem)
    ledger.close(out[:4].flip(0), ref, problem)
    assert bool((out[4:-4] == 0).all())


def test_out_of_memory_raises_and_a_retry_works(seed: int, ledger: Any) -> None:
    problem, expected = testing.exact_problem(4096, 4096, 128, device="cuda", seed=seed)
    weights = pack(problem)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(problem.a.device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**20) / total)
    cached: list[Tensor] = []  # what the allocator holds and could still give: an output is 32 MB
    try:
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            while True:
                cached.append(torch.empty(2**22, dtype=torch.uint8, device="cuda"))
        with pytest.raises(torch.cuda.OutOfMemoryError):
            qcutlass.gemm(problem.a, weights, problem.scales, problem.zeros)
    finally:
        cached.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
    ledger.equal(qcutlass.gemm(problem.a, weights, problem.scales, problem.zeros), expected, problem)


def test_float32_activations_belong_to_the_cpu(seed: int, multiply: Multiply) -> None:
    problem = testing.random_problem(2, 64, 128, dtype=torch.float32, device="cuda", seed=seed)
    with pytest.raises((TypeError, qcutlass.UnsupportedError), match="float32"):
        multiply(problem)


def test_group_sizes_that_the_kernels_lack_are_refused(seed: int, multiply: Multiply) -> None:
    problem = testing.random_problem(2, 64, 128, group_size=24, device="cuda", seed=seed)
    with pytest.raises(qcutlass.UnsupportedError, match="group_size"):
        multiply(problem)
