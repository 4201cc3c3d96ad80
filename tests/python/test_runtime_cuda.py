"""How gemm behaves among streams, graphs, threads, devices and little memory."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.python.running import (
    SLEEP,
    Run,
    assert_reads_what_was_just_written,
    assert_repeats_beside_a_busy_stream,
    assert_replays_read_new_contents,
    assert_replays_repeat,
    assert_right_on_streams,
)
from torch import Tensor

import qcutlass
from qcutlass import testing
from qcutlass.products.selection import weight_dtype

pytestmark = pytest.mark.gpu

Multiply = Callable[..., Tensor]
Expect = Callable[..., testing.Reference]
OPERANDS = ("a", "zeros", "scales", "bias", "act_scale", "perm")


def packed(problem: testing.Problem) -> Tensor:
    return qcutlass.preprocess_weights(problem.codes, bits=problem.bits)


def product_of(p: testing.Problem) -> tuple[dict[str, Tensor], Run]:
    """Every operand in memory by its name, and the product of operands of such names."""
    operands = {name: getattr(p, name) for name in OPERANDS if getattr(p, name) is not None} | {"w": packed(p)}

    def run(**tensors: Any) -> Tensor:
        given = {"zeros": None} | p.keywords | operands | tensors
        return qcutlass.gemm(given.pop("a"), given.pop("w"), given.pop("scales"), given.pop("zeros"), **given)

    return operands, run


def needs_memory(gigabytes: float) -> None:
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GiB of GPU memory, {free:.1f} are free")


@pytest.mark.parametrize("m", [1, 16, 300])
def test_runs_on_the_current_stream(m: int, seed: int, ledger: Any) -> None:
    problem, expected = testing.exact_problem(m, 512, 1024, device="cuda", act_scale=True, perm=True, seed=seed)
    weights = packed(problem)
    late = torch.full_like(problem.a, torch.nan)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        late.copy_(problem.a)
        out = qcutlass.gemm(late, weights, problem.scales, problem.zeros, **problem.keywords)
    stream.synchronize()
    ledger.equal(out, expected, problem)


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("m", [1, 16, 48])
def test_weights_written_by_the_kernel_just_before(m: int, in_graph: bool, seeds: Iterator[int], ledger: Any) -> None:
    problems = [testing.exact_problem(m, 4096, 4096, device="cuda", seed=next(seeds)) for _ in range(2)]
    assert_reads_what_was_just_written(problems, product_of, "w", in_graph, 200, ledger)


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 4096, 4096), (8, 6144, 4096), (16, 4096, 14336), (32, 8192, 8192), (64, 4096, 4096)]
)
def test_a_thousand_repetitions_beside_a_busy_stream(m: int, n: int, k: int, seed: int, ledger: Any) -> None:
    problem = testing.random_problem(m, n, k, device="cuda", seed=seed)
    assert_repeats_beside_a_busy_stream(product_of(problem)[1], 20, problem, ledger)


def test_packs_on_the_current_stream(seed: int, ledger: Any) -> None:
    problem = testing.random_problem(1, 512, 1024, device="cuda", seed=seed)
    expected = packed(problem)
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


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("m", [1, 16, 77, 512])
def test_graph_capture_and_replay_with_new_contents(m: int, bits: int, seeds: Iterator[int], ledger: Any) -> None:
    case = testing.Case(m, 520, 2048, bits=bits, bias=True, act_scale=True, perm=True, activation="relu")
    assert_replays_read_new_contents(case, product_of, seeds, ledger)


def test_a_captured_graph_replays_bit_for_bit(seed: int, ledger: Any) -> None:
    problem = testing.random_problem(16, 256, 8192, device="cuda", seed=seed)  # few channels, long k: split-K
    assert_replays_repeat(product_of(problem)[1], problem, ledger)


def test_two_threads_on_two_streams(seeds: Iterator[int], ledger: Any) -> None:
    choose = random.Random(next(seeds))
    work = []
    for _ in range(2):
        sizes = [
            (choose.choice([1, 8, 40, 200]), choose.randrange(64, 900), choose.randrange(64, 5000)) for _ in range(12)
        ]
        problems = [testing.exact_problem(m, n, k, group_size=64, device="cuda", seed=next(seeds)) for m, n, k in sizes]
        work.append([(problem, expected, product_of(problem)[1]) for problem, expected in problems])
    assert_right_on_streams(work, 20, ledger)


def test_second_device_while_the_first_is_current(seed: int, ledger: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, this machine has {torch.cuda.device_count()}")
    problem, expected = testing.exact_problem(16, 256, 512, device="cuda:1", seed=seed)
    with torch.cuda.device(0):
        out = qcutlass.gemm(problem.a, packed(problem), problem.scales, problem.zeros)
        assert torch.cuda.current_device() == 0
    assert out.device == torch.device("cuda:1")
    ledger.equal(out, expected, problem)
    with pytest.raises(ValueError, match=r"(?s)cuda:0.*cuda:1|cuda:1.*cuda:0"):
        qcutlass.gemm(problem.a.to("cuda:0"), packed(problem), problem.scales, problem.zeros)


def test_more_than_2_to_the_31_weights(seed: int, ledger: Any) -> None:
    needs_memory(40)
    n, k = 65552, 32832
    assert n * k > 2**31
    for m in (2, 70):
        problem = testing.random_problem(m, n, k, group_size=32832, zeros="none", device="cuda", seed=seed)
        weights = packed(problem)
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
    operands = (problem.a, packed(problem), problem.scales, problem.zeros)
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
    operands = (a, packed(problem), problem.scales, problem.zeros)
    out = qcutlass.gemm(*operands)
    ref = problem.reference(weight_dtype(*operands))
    ledger.close(out[-4:], ref, problem)
    ledger.close(out[:4].flip(0), ref, problem)
    assert bool((out[4:-4] == 0).all())


def test_out_of_memory_raises_and_a_retry_works(seed: int, ledger: Any) -> None:
    problem, expected = testing.exact_problem(4096, 4096, 128, device="cuda", seed=seed)
    weights = packed(problem)
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


def test_no_memory_is_kept(seed: int, multiply: Multiply) -> None:
    problem = testing.random_problem(16, 256, 8192, device="cuda", seed=seed)
    multiply(problem)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        multiply(problem)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("activation", [None, "silu"])
def test_compiles_in_one_graph(activation: str | None, seeds: Iterator[int], reference: Expect, ledger: Any) -> None:
    case = testing.Case(16, 256, 512, activation=activation, bias=True)
    problem = case.random(device="cuda", seed=next(seeds))
    weights = packed(problem)

    def layer(a: Tensor) -> Tensor:
        return qcutlass.gemm(a * 2, weights, problem.scales, problem.zeros, **problem.keywords)

    out = torch.compile(layer, fullgraph=True)(problem.a)
    ledger.close(out, reference(replace(problem, a=problem.a * 2)), problem)


@pytest.mark.parametrize("forbidden", ["codes", "scales"])
def test_devices_may_not_be_mixed(forbidden: str, seed: int) -> None:
    problem = testing.random_problem(2, 64, 128, device="cuda", seed=seed)
    mixed = replace(problem, **{forbidden: getattr(problem, forbidden).cpu()})
    with pytest.raises(ValueError, match=r"(?s)cuda:0.*cpu|cpu.*cuda:0"):
        qcutlass.gemm(mixed.a, packed(mixed), mixed.scales, mixed.zeros)


def test_float32_activations_belong_to_the_cpu(seed: int, multiply: Multiply) -> None:
    problem = testing.random_problem(2, 64, 128, dtype=torch.float32, device="cuda", seed=seed)
    with pytest.raises((TypeError, qcutlass.UnsupportedError), match="float32"):
        multiply(problem)


def test_group_sizes_that_the_kernels_lack_are_refused(seed: int, multiply: Multiply) -> None:
    problem = testing.random_problem(2, 64, 128, group_size=24, device="cuda", seed=seed)
    with pytest.raises(qcutlass.UnsupportedError, match="group_size"):
        multiply(problem)


def test_unknown_tactics_are_refused(seed: int, multiply: Multiply) -> None:
    problem = testing.random_problem(2, 64, 128, device="cuda", seed=seed)
    with pytest.raises(ValueError, match="no-such-tactic"):
        multiply(problem, tactic="no-such-tactic")
