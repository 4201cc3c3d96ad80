"""How 8-by-8-bit products behave among streams, graphs, threads and large sizes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.python.eight_bit import multiply, needs_instructions, pack
from tests.python.running import (
    SLEEP,
    assert_reads_what_was_just_written,
    assert_repeats_beside_a_busy_stream,
    assert_replays_read_new_contents,
    assert_replays_repeat,
    assert_right_on_streams,
    captured,
)
from torch import Tensor

import qcutlass
from qcutlass.testing import EightBitCase, EightBitProblem

pytestmark = pytest.mark.gpu

DTYPES = (torch.int8, torch.float8_e4m3fn)
OPERANDS = ("a", "a_scale", "w_scale", "azp", "bias")


def case_of(m: int, n: int, k: int, dtype: torch.dtype) -> EightBitCase:
    """With every operand such a product has."""
    return EightBitCase(m, n, k, dtype, azp="each" if dtype == torch.int8 else "none", bias=True)


def product_of(p: EightBitProblem) -> tuple[dict[str, Tensor], Callable[..., Tensor]]:
    """Every operand in memory by its name, and the product of operands of such names."""
    operands = {name: getattr(p, name) for name in OPERANDS if getattr(p, name) is not None} | {"w": pack(p)}
    if p.azp is not None:
        operands["w_sums"] = qcutlass.weight_sums(p.w)

    def run(**tensors: Any) -> Tensor:
        given = operands | {"activation": p.activation, "out_dtype": p.out_dtype, "n": p.shape[1]} | tensors
        a, w, a_scale, w_scale = (given.pop(name) for name in ("a", "w", "a_scale", "w_scale"))
        function = qcutlass.gemm_w8a8 if p.w.dtype == torch.int8 else qcutlass.gemm_fp8
        return function(a, w, a_scale, w_scale, **given)

    return operands, run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 16, 300])
def test_runs_on_the_current_stream(m: int, dtype: torch.dtype, seed: int, ledger: Any) -> None:
    needs_instructions(dtype)
    problem, expected = case_of(m, 512, 1024, dtype).exact(device="cuda", seed=seed)
    operands, run = product_of(problem)
    late = {name: torch.zeros_like(operands[name]) for name in ("a", "a_scale")}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        for name, tensor in late.items():
            tensor.copy_(operands[name])
        out = run(**late)
    stream.synchronize()
    ledger.equal(out, expected, problem)


@pytest.mark.parametrize("last", ["w", "a_scale", "azp", "w_scale", "w_sums", "bias", "a"])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("m", [1, 16, 48])
def test_operands_written_by_the_kernel_just_before(
    m: int, in_graph: bool, last: str, seeds: Iterator[int], ledger: Any
) -> None:
    """Scales and zero points of activations are always new: the kernel just before is the one that quantises."""
    problems = [case_of(m, 2048, 2048, torch.int8).exact(device="cuda", seed=next(seeds)) for _ in range(2)]
    assert_reads_what_was_just_written(problems, product_of, last, in_graph, 50, ledger)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 16, 77, 512])
def test_graph_capture_and_replay_with_new_contents(
    m: int, dtype: torch.dtype, seeds: Iterator[int], ledger: Any
) -> None:
    needs_instructions(dtype)
    case = replace(case_of(m, 520, 2048, dtype), activation="relu")
    assert_replays_read_new_contents(case, product_of, seeds, ledger)


def test_what_is_computed_at_each_call_is_captured_too(seeds: Iterator[int], ledger: Any) -> None:
    """Sums of weights that were not given, and the packing of plain fp8 weights."""
    needs_instructions(torch.float8_e4m3fn)
    cases = (case_of(9, 72, 256, torch.int8), case_of(9, 72, 256, torch.float8_e4m3fn))
    problems = [case.exact(device="cuda", seed=next(seeds))[0] for case in cases]
    (of_int8, int8), (of_fp8, fp8) = (product_of(p) for p in problems)
    plain = problems[1].w.clone()
    outs, replay = captured(lambda: [int8(w_sums=None), fp8(w=plain)])
    for _ in range(3):
        (new_int8, expected), (new_fp8, expected_fp8) = (c.exact(device="cuda", seed=next(seeds)) for c in cases)
        for target, new in ((of_int8, new_int8), (of_fp8, new_fp8)):
            for name, tensor in product_of(new)[0].items():
                target[name].copy_(tensor)
        plain.copy_(new_fp8.w)
        replay()
        torch.cuda.synchronize()
        ledger.equal(outs[0], expected, new_int8)
        ledger.equal(outs[1], expected_fp8, new_fp8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_captured_graph_replays_bit_for_bit(dtype: torch.dtype, seed: int, ledger: Any) -> None:
    needs_instructions(dtype)
    problem = case_of(16, 256, 8192, dtype).random(device="cuda", seed=seed)  # few channels, long k: split-K
    assert_replays_repeat(product_of(problem)[1], problem, ledger)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 4096, 4096), (16, 4096, 14336), (64, 4096, 4096), (256, 4096, 4096)])
def test_many_repetitions_beside_a_busy_stream(m: int, n: int, k: int, seed: int, ledger: Any) -> None:
    problem = case_of(m, n, k, torch.int8).random(device="cuda", seed=seed)
    assert_repeats_beside_a_busy_stream(product_of(problem)[1], 10, problem, ledger)


def test_two_threads_on_two_streams(seeds: Iterator[int], ledger: Any) -> None:
    choose = random.Random(next(seeds))
    dtypes = DTYPES if torch.cuda.get_device_capability() >= (8, 9) else DTYPES[:1]
    work = []
    for _ in range(2):
        sizes = [
            (choose.choice([1, 8, 40, 200]), choose.randrange(64, 900), choose.randrange(64, 5000)) for _ in range(12)
        ]
        problems = [case_of(*size, choose.choice(dtypes)).exact(device="cuda", seed=next(seeds)) for size in sizes]
        work.append([(problem, expected, product_of(problem)[1]) for problem, expected in problems])
    assert_right_on_streams(work, 20, ledger)


def test_second_device_while_the_first_is_current(seed: int, ledger: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, this machine has {torch.cuda.device_count()}")
    problem, expected = case_of(16, 256, 512, torch.int8).exact(device="cuda:1", seed=seed)
    with torch.cuda.device(0):
        out = multiply(problem)
        missing = multiply(problem, w_sums=None)
        assert torch.cuda.current_device() == 0
    assert out.device == torch.device("cuda:1")
    ledger.equal(out, expected, problem)
    ledger.equal(missing, expected, problem)


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


def test_no_memory_is_kept(seed: int) -> None:
    run = product_of(case_of(16, 256, 8192, torch.int8).random(device="cuda", seed=seed))[1]
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiles_in_one_graph(dtype: torch.dtype, seed: int, ledger: Any) -> None:
    needs_instructions(dtype)
    problem = case_of(16, 256, 512, dtype).random(device="cuda", seed=seed)
    run = product_of(problem)[1]
    torch._dynamo.reset()
    compiled = torch.compile(lambda a: run(a=a) + 1, fullgraph=True)
    with torch.no_grad():
        ledger.equal(compiled(problem.a), run() + 1, problem)
