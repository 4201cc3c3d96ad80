"""How products behave among streams, graphs and threads: checks that the suites of all kinds of products share.

They know a product as `product_of(problem)`: every operand in memory by its name, and `run(**tensors)`, the product of
operands of such names, of which those not given are the problem's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from qcutlass import testing

SLEEP = 20_000_000  # clock cycles: some 10 ms
VIEWS = ["every second row", "every second column", "transposed", "one row for all", "batch"]

Run: TypeAlias = Callable[..., Tensor]
ProductOf: TypeAlias = Callable[[Any], tuple[dict[str, Tensor], Run]]
Job: TypeAlias = tuple[Any, Tensor, Callable[[], Tensor]]  # a problem, its answer, its product
_Result = TypeVar("_Result")


def captured(call: Callable[[], _Result]) -> tuple[_Result, Callable[[], None]]:
    """The result of a call under capture, and the replay of its CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return result, graph.replay


def in_threads(loop: Callable[..., None], jobs: Sequence[tuple[Any, ...]]) -> None:
    """Runs `loop(*job)` for every job at once, each in a thread of its own; raises what one of them raised."""
    start = threading.Barrier(len(jobs))

    def run(job: tuple[Any, ...]) -> None:
        start.wait()
        loop(*job)

    with ThreadPoolExecutor(len(jobs)) as pool:
        for _ in pool.map(run, jobs):
            pass


def assert_right_on_streams(work: Sequence[Sequence[Job]], times: int, ledger: Any) -> None:
    """Each list of jobs on a stream and in a thread of its own."""

    def loop(*jobs: Job) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(times):
                outs = [run() for _, _, run in jobs]
                for (problem, expected, _), out in zip(jobs, outs, strict=True):
                    ledger.equal(out, expected, problem)

    torch.cuda.synchronize()
    in_threads(loop, [tuple(jobs) for jobs in work])


def assert_reads_what_was_just_written(
    problems: Sequence[tuple[Any, Tensor]], product_of: ProductOf, last: str, in_graph: bool, times: int, ledger: Any
) -> None:
    """Kernels load weights before the kernel that precedes them in the stream has ended; none may see old operands.

    Args:
        problems: with their answers, of one shape.
        last: the operand that the kernel just before the product writes.
    """
    contents = [product_of(problem)[0] for problem, _ in problems]
    run = product_of(problems[0][0])[1]
    operands = {name: torch.empty_like(tensor) for name, tensor in contents[0].items()}
    outs = [torch.empty_like(expected) for _, expected in problems]
    run(**contents[0], out=outs[0])  # warm
    order = [*(name for name in operands if name != last), last]

    def rewrite_and_multiply() -> None:
        for content, out in zip(contents, outs, strict=True):
            for name in order:
                operands[name].copy_(content[name])
            run(**operands, out=out)

    replay = captured(rewrite_and_multiply)[1] if in_graph else rewrite_and_multiply
    for _ in range(times):
        for out in outs:
            out.fill_(torch.nan)
        replay()
        for out, (problem, expected) in zip(outs, problems, strict=True):
            ledger.equal(out, expected, f"{last}: {problem}")


def assert_replays_read_new_contents(case: Any, product_of: ProductOf, seeds: Iterator[int], ledger: Any) -> None:
    """A captured product reads what its operands hold when it is replayed, and needs no warm-up."""
    problem, expected = case.exact(device="cuda", seed=next(seeds))
    operands, run = product_of(problem)
    box = testing.Poisoned(tuple(expected.shape), expected.dtype, "cuda")
    _, replay = captured(lambda: run(out=box.tensor))  # nothing of this shape has run before
    assert box.is_untouched()
    for _ in range(3):
        new, expected = case.exact(device="cuda", seed=next(seeds))
        for name, tensor in product_of(new)[0].items():
            operands[name].copy_(tensor)
        box.tensor.fill_(torch.nan)
        replay()
        torch.cuda.synchronize()
        ledger.equal(box.tensor, expected, new)
        box.check(new)


def assert_replays_repeat(run: Run, problem: object, ledger: Any) -> None:
    """A graph repeats bit for bit what eager calls compute, in products that follow one another too."""
    eager = run()
    outs, replay = captured(lambda: [run() for _ in range(8)])
    for _ in range(20):
        replay()
        for out in outs:
            ledger.equal(out, eager, problem)


def assert_repeats_beside_a_busy_stream(run: Run, rounds: int, problem: object, ledger: Any) -> None:
    """50 repetitions a round, bit for bit, beside a neighbour that is idle at first and outlasts the round at last."""
    first = run()
    busy, matrix = torch.cuda.Stream(), torch.randn(2048, 2048, dtype=torch.float16, device="cuda")
    outs = first.new_empty(50, *first.shape)
    for round_ in range(rounds):
        torch.cuda.synchronize()
        with torch.cuda.stream(busy):
            for _ in range(round_ * 3):
                torch.mm(matrix, matrix)
        for out in outs.fill_(torch.nan):
            run(out=out)
        torch.cuda.synchronize()
        ledger.equal(outs, first.expand_as(outs), problem)


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
