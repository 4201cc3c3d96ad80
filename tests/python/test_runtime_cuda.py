"""How products of every kind behave among streams, graphs, threads and devices, and what they leave in memory."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.python import running
from tests.python.kinds import DESCRIPTIONS
from tests.python.kinds.description import Description
from tests.python.running import (
    Job,
    assert_reads_what_was_just_written,
    assert_repeats_beside_a_busy_stream,
    assert_replays_read_new_contents,
    assert_replays_repeat,
    assert_right_on_streams,
    assert_waits_for_its_stream,
)

gpu = pytest.mark.gpu
kinds = pytest.mark.parametrize("kind", DESCRIPTIONS.values(), ids=list(DESCRIPTIONS))
variants = pytest.mark.parametrize(
    ("kind", "variant"),
    [pytest.param(kind, name, id=f"{kind.name}-{name}") for kind in DESCRIPTIONS.values() for name in kind.variants],
)
OPERANDS = [
    pytest.param(kind, name, id=f"{kind.name}-{name}")
    for kind in DESCRIPTIONS.values()
    for name in kind.random(kind.case(1, 32, 64)).operands
]


@pytest.fixture(autouse=True)
def instructions(request: pytest.FixtureRequest) -> None:
    """Skips kinds that this GPU has no instructions for."""
    if request.node.get_closest_marker("gpu"):
        request.node.callspec.params["kind"].skip_without_instructions()


@gpu
@variants
@pytest.mark.parametrize("m", [1, 16, 300])
def test_runs_on_the_current_stream(kind: Description, variant: str, m: int, seed: int, ledger: Any) -> None:
    case = kind.full(m, 512, 1024, **kind.variants[variant])
    assert_waits_for_its_stream(*kind.products(case, "cuda", seed), ledger)


@gpu
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("m", [1, 16, 48, 300])
@pytest.mark.parametrize(("kind", "last"), OPERANDS)
def test_operands_written_by_the_kernel_just_before(
    kind: Description, last: str, m: int, in_graph: bool, seeds: Iterator[int], ledger: Any
) -> None:
    """Scales and zero points of activations are always new: the kernel just before is the one that quantises."""
    n, k, times = kind.settled
    jobs = [kind.products(kind.case(m, n, k), "cuda", next(seeds)) for _ in range(2)]
    assert_reads_what_was_just_written(jobs, last, in_graph, times, ledger)


@gpu
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (1, 4096, 4096),
        (8, 6144, 4096),
        (16, 4096, 14336),
        (32, 8192, 8192),
        (64, 4096, 4096),
        (256, 4096, 4096),
    ],
)
@kinds
def test_a_thousand_repetitions_beside_a_busy_stream(
    kind: Description, m: int, n: int, k: int, seed: int, ledger: Any
) -> None:
    assert_repeats_beside_a_busy_stream(kind.random(kind.case(m, n, k), "cuda", seed), 20, ledger)


@gpu
@variants
@pytest.mark.parametrize("m", [1, 16, 77, 512])
def test_graph_capture_and_replay_with_new_contents(
    kind: Description, variant: str, m: int, seeds: Iterator[int], ledger: Any
) -> None:
    case = kind.full(m, 520, 2048, activation="relu", **kind.variants[variant])
    assert_replays_read_new_contents(kind, case, "cuda", seeds, ledger)


@gpu
@variants
def test_a_captured_graph_replays_bit_for_bit(kind: Description, variant: str, seed: int, ledger: Any) -> None:
    case = kind.case(16, 256, 8192, **kind.variants[variant])  # few channels, long k: split-K
    assert_replays_repeat(kind.random(case, "cuda", seed), ledger)


def work_of(kind: Description, jobs: int, most_k: int, device: str, seeds: Iterator[int]) -> list[list[Job]]:
    """Jobs of any size and variant for two threads."""
    choose = random.Random(next(seeds))
    work = []
    for _ in range(2):
        sizes = [
            (choose.choice([1, 8, 40, 200]), choose.randrange(64, 900), choose.randrange(64, most_k))
            for _ in range(jobs)
        ]
        options = [kind.variants[choose.choice(list(kind.variants))] | kind.finely for _ in sizes]
        cases = [kind.case(*size, **more) for size, more in zip(sizes, options, strict=True)]
        work.append([kind.products(case, device, next(seeds)) for case in cases])
    return work


@gpu
@kinds
def test_two_threads_on_two_streams(kind: Description, seeds: Iterator[int], ledger: Any) -> None:
    assert_right_on_streams(work_of(kind, 12, 5000, "cuda", seeds), 20, ledger)


@gpu
@kinds
def test_second_device_while_the_first_is_current(kind: Description, seed: int, ledger: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, this machine has {torch.cuda.device_count()}")
    product, expected = kind.products(kind.full(16, 256, 512), "cuda:1", seed)
    with torch.cuda.device(0):
        outs, more = product.outs(), product.without_computed().outs()
        assert torch.cuda.current_device() == 0
    assert {out.device for out in (*outs, *more)} == {torch.device("cuda:1")}
    running.assert_equal(outs, expected, product.problem, ledger)
    running.assert_equal(more, expected, product.problem, ledger)
    with pytest.raises(ValueError, match=r"(?s)cuda:0.*cuda:1|cuda:1.*cuda:0"):
        product(**{product.activations: product.a.to("cuda:0")})


@gpu
@kinds
def test_no_memory_is_kept(kind: Description, seed: int) -> None:
    product = kind.random(kind.case(16, 256, 8192), "cuda", seed)
    product()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        product()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@gpu
@pytest.mark.parametrize(("kind", "name"), OPERANDS)
def test_devices_may_not_be_mixed(kind: Description, name: str, seed: int) -> None:
    product = kind.random(kind.case(2, 64, 128), "cuda", seed)
    with pytest.raises(ValueError, match=r"(?s)cuda:0.*cpu|cpu.*cuda:0"):
        product(**{name: product.operands[name].cpu()})


@gpu
@kinds
def test_unknown_tactics_are_refused(kind: Description, seed: int) -> None:
    product = kind.random(kind.case(2, 64, 128), "cuda", seed)
    with pytest.raises(ValueError, match="no-such-tactic"):
        product(tactic="no-such-tactic")


@pytest.fixture
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams, graphs and sleep as they look to the checks, without a GPU: all is in order, a replay is a call."""
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)

    def captured(call: Callable[[], Any]) -> tuple[list[Any], Callable[[], None]]:
        results: list[Any] = []

        def replay() -> None:
            results[:] = call() or []

        return results, replay

    monkeypatch.setattr(running, "captured", captured)


@pytest.mark.usefixtures("no_streams")
@variants
def test_the_checks_of_streams_on_the_cpu(
    kind: Description, variant: str, seeds: Iterator[int], ledger_of_the_cpu: Any
) -> None:
    """They pass for the sound product."""
    case, ledger = kind.full(5, 40, 96, **kind.variants[variant]), ledger_of_the_cpu
    jobs = [kind.products(case, "cpu", next(seeds)) for _ in range(2)]
    assert_waits_for_its_stream(*jobs[0], ledger)
    for last in jobs[0][0].operands:
        assert_reads_what_was_just_written(jobs, last, True, 2, ledger)
    assert_replays_repeat(jobs[0][0], ledger)
    assert_replays_read_new_contents(kind, case, "cpu", seeds, ledger)
    assert_right_on_streams(work_of(kind, 2, 300, "cpu", seeds), 2, ledger)
    assert ledger.cases > 20


@pytest.mark.usefixtures("no_streams")
@kinds
def test_the_checks_of_streams_see_stale_operands(
    kind: Description, seeds: Iterator[int], ledger_of_the_cpu: Any
) -> None:
    """A product that reads an operand as it was before it was rewritten is caught, whichever operand it is."""
    case = kind.full(5, 300, 300)
    jobs = [kind.products(case, "cpu", next(seeds)) for _ in range(2)]
    before = jobs[0][0].operands
    while any(torch.equal(operand, before[name]) for name, operand in jobs[1][0].operands.items()):
        jobs[1] = kind.products(case, "cpu", next(seeds))  # five scales out of few may be the same twice
    for name in before:
        stale = [(replace(job, operands=job.operands | {name: jobs[0][0].operands[name]}), out) for job, out in jobs]
        with pytest.raises(AssertionError, match="elements differ"):
            assert_reads_what_was_just_written(stale, name, False, 1, ledger_of_the_cpu)
