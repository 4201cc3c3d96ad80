"""How products of every kind behave among streams, graphs and threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import torch
from tests.python.kinds.description import Description, Product
from torch import Tensor

from qcutlass import testing

SLEEP = 20_000_000  # clock cycles: some 10 ms
VIEWS = ["every second row", "every second column", "transposed", "one row for all", "batch"]

Job: TypeAlias = tuple[Product, tuple[Tensor, ...]]  # a product, its outputs
_Result = TypeVar("_Result")


def captured(call: Callable[[], _Result]) -> tuple[_Result, Callable[[], None]]:
    """The result of a call under capture, and the replay of its CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return result, graph.replay


def assert_replays(graph: torch.cuda.CUDAGraph, outs: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Fifty replays of a graph, whose outputs are the expected ones by turns, each time."""
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize()
        for i, out in enumerate(outs):
            testing.assert_equal(out, expected[i % len(expected)], label=f"product {i}")


def in_threads(loop: Callable[..., None], jobs: Sequence[tuple[Any, ...]]) -> None:
    """Runs `loop(*job)` for every job at once, each in a thread of its own; raises what one of them raised."""
    start = threading.Barrier(len(jobs))

    def run(job: tuple[Any, ...]) -> None:
        start.wait()
        loop(*job)

    with ThreadPoolExecutor(len(jobs)) as pool:
        for _ in pool.map(run, jobs):
            pass


def run_into(outs: Sequence[Tensor], product: Product, **changes: Any) -> None:
    """The product written to `outs`, by itself where its function takes `out`."""
    if product.description.has_out:
        product(out=outs[0], **changes)
    else:
        for kept, out in zip(outs, product.outs(**changes), strict=True):
            kept.copy_(out)


def poison(outs: Iterable[Tensor]) -> None:
    """What no product gives: NaN, or 127 everywhere."""
    for out in outs:
        out.fill_(torch.nan if out.is_floating_point() else 127)


def assert_equal(outs: Sequence[Tensor], expected: Sequence[Tensor], label: object, ledger: Any) -> None:
    for out, wanted in zip(outs, expected, strict=True):
        ledger.equal(out, wanted, label)


def assert_right_on_streams(work: Sequence[Sequence[Job]], times: int, ledger: Any) -> None:
    """Each list of jobs on a stream and in a thread of its own."""

    def loop(*jobs: Job) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(times):
                results = [product.outs() for product, _ in jobs]
                for (product, expected), outs in zip(jobs, results, strict=True):
                    assert_equal(outs, expected, product.problem, ledger)

    torch.cuda.synchronize()
    in_threads(loop, [tuple(jobs) for jobs in work])


def assert_waits_for_its_stream(product: Product, expected: Sequence[Tensor], ledger: Any) -> None:
    """Activations and what belongs to them arrive late in a stream that is not the default one."""
    late = {name: torch.zeros_like(tensor) for name, tensor in product.rows(product.a).items()}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP)
        for name, tensor in late.items():
            tensor.copy_(product.operands[name])
        outs = product.outs(**late)
    stream.synchronize()
    assert_equal(outs, expected, product.problem, ledger)


def _strided(tensor: Tensor) -> Tensor:
    """The same, of which a kernel makes copies: contiguous tensors are copied without one."""
    result = torch.empty(*tensor.shape, 2, dtype=tensor.dtype, device=tensor.device)[..., 0]
    return result.copy_(tensor)


def assert_reads_what_was_just_written(jobs: Sequence[Job], last: str, in_graph: bool, times: int, ledger: Any) -> None:
    """Kernels load weights before the kernel that precedes them in the stream has ended; none may see old operands.

    Args:
        jobs: of one shape.
        last: the operand that the kernel just before the product writes.
    """
    first = jobs[0][0]
    operands = {name: torch.empty_like(tensor) for name, tensor in first.operands.items()}
    sources = [{name: _strided(tensor) for name, tensor in product.operands.items()} for product, _ in jobs]
    results = [tuple(torch.empty_like(out) for out in expected) for _, expected in jobs]
    run_into(results[0], first)  # warm
    order = [*(name for name in operands if name != last), last]

    def rewrite_and_multiply() -> None:
        for source, outs in zip(sources, results, strict=True):
            for name in order:
                operands[name].copy_(source[name])
            run_into(outs, first, **operands)

    replay = captured(rewrite_and_multiply)[1] if in_graph else rewrite_and_multiply
    for _ in range(times):
        for outs in results:
            poison(outs)
        replay()
        for outs, (product, expected) in zip(results, jobs, strict=True):
            assert_equal(outs, expected, f"{last}: {product.problem}", ledger)


def assert_replays_read_new_contents(
    kind: Description, case: Any, device: str, seeds: Iterator[int], ledger: Any
) -> None:
    """A captured product reads what its operands hold when it is replayed, and needs no warm-up."""
    problem, expected = case.exact(device=device, seed=next(seeds))
    product = kind.product(problem)
    box = testing.Poisoned(tuple(expected.shape), kind.out_dtype(problem), device)
    changes = {"out": box.tensor} if kind.has_out else {}
    outs, replay = captured(lambda: product.outs(**changes))  # nothing of this shape has run before
    assert box.is_untouched()
    for _ in range(3):
        new, wanted = kind.products(case, device, next(seeds))
        for name, tensor in new.operands.items():
            product.operands[name].copy_(tensor)
        poison(outs)
        replay()
        torch.cuda.synchronize()
        assert_equal(outs, wanted, new.problem, ledger)
        if kind.has_out:
            box.check(new.problem)


def assert_replays_repeat(product: Product, ledger: Any) -> None:
    """A graph repeats bit for bit what eager calls compute, in products that follow one another too."""
    eager = product.outs()
    results, replay = captured(lambda: [product.outs() for _ in range(8)])
    for _ in range(20):
        replay()
        for outs in results:
            assert_equal(outs, eager, product.problem, ledger)


def assert_repeats_beside_a_busy_stream(product: Product, rounds: int, ledger: Any) -> None:
    """50 repetitions a round, bit for bit, beside a neighbour that is idle at first and outlasts the round at last."""
    first = product.outs()
    busy, matrix = torch.cuda.Stream(), torch.randn(2048, 2048, device=product.a.device).half()
    results = [out.new_empty(50, *out.shape) for out in first]
    for round_ in range(rounds):
        torch.cuda.synchronize()
        with torch.cuda.stream(busy):
            for _ in range(round_ * 3):
                torch.mm(matrix, matrix)
        poison(results)
        for outs in zip(*results, strict=True):
            run_into(outs, product)
        torch.cuda.synchronize()
        expected = [out.expand_as(repeated) for out, repeated in zip(first, results, strict=True)]
        assert_equal(results, expected, product.problem, ledger)


def view_of(a: Tensor, view: str) -> Tensor:
    """The activations `[24, K]`, or some of them, in memory in one of `VIEWS`."""
    return {
        "every second row": a.repeat_interleave(2, dim=0)[::2],
        "every second column": a.repeat_interleave(2, dim=1)[:, ::2],
        "transposed": a.T.contiguous().T,
        "one row for all": a[:1].expand_as(a),
        "batch": a.reshape(4, 6, -1).transpose(0, 1),
    }[view]


def misaligned(tensor: Tensor, offset: int) -> Tensor:
    """A copy, so many bytes behind an aligned address."""
    size = tensor.element_size()
    buffer = torch.zeros(tensor.numel() * size + offset, dtype=torch.uint8, device=tensor.device)
    return buffer[offset:].view(tensor.dtype).view(tensor.shape).copy_(tensor)


def run_poisoned(product: Product, choose: random.Random, **forced: Any) -> tuple[Tensor, ...]:
    """The product with sentinels around everything read and in everything written, at offsets that break alignment."""
    kind, aligned = product.description, 16 // product.a.element_size()

    def around(tensor: Tensor) -> Tensor:
        offset, padding = choose.choice([0, 0, aligned, 1, 3]), choose.choice([0, 0, aligned, 5])
        return testing.Poisoned.around(tensor, offset=offset, padding=padding).tensor

    boxed: dict[str, Any] = {name: around(product.operands[name]) for name in kind.boxed if name in product.operands}
    if not kind.has_out:
        return product.outs(**boxed, **forced)
    (m, n, _), dtype = product.problem.shape, kind.out_dtype(product.problem)
    offset, padding = choose.choice([0, 0, 8, 1]), choose.choice([0, 0, 8, 3])
    box = testing.Poisoned((m, n), dtype, product.a.device, offset=offset, padding=padding)
    product(**boxed, **forced, out=box.tensor)
    box.check(f"{product.problem} {forced}")
    return (box.tensor,)
