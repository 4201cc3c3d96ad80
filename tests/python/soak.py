"""Products that are right, that repeat and that leave memory as it was: random problems of every kind, as many as one
likes.

    python -m tests.python.soak --cases 50000                  # both oracles, every kind in turn
    python -m tests.python.soak --minutes 60 --device cuda     # the same by the clock
    python -m tests.python.soak --cases 60 --launches 1000     # each problem so often, bit for bit

Tensors of random sizes are allocated, filled with NaN and freed in between. It prints for each kind the cases, how many
of them were identities, the largest error over its bound and the failures, and at last what memory did; it exits with
1 if there were failures or memory grew. The seed that it prints repeats a run.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from tests.python.random_products import KINDS, Outs, Trial, kinds_on
from torch import Tensor

MOST_GROWTH = 48 << 20
"""Bytes that the C library's allocator may keep of a run that leaks nothing; a case has some 100 kB."""


@dataclass
class Tally:
    """What became of the cases of a kind."""

    cases: int = 0
    identities: int = 0
    ratio: float = 0.0
    failures: int = 0

    def row(self, name: str) -> str:
        return f"| {name} | {self.cases} | {self.identities} | {self.ratio:.3f} | {self.failures} |"

    def __add__(self, other: Tally) -> Tally:
        sums = (getattr(self, name) + getattr(other, name) for name in ("cases", "identities"))
        return Tally(*sums, max(self.ratio, other.ratio), self.failures + other.failures)


class Litter:
    """Tensors of NaN that come and go: what a product takes of memory is rarely where the last one's was, nor zero."""

    def __init__(self, choose: random.Random, device: str) -> None:
        self.choose, self.device = choose, device
        self.kept: deque[Tensor] = deque(maxlen=16)

    def turn(self) -> None:
        size = int(2 ** self.choose.uniform(4, 18))
        self.kept.append(torch.full((size,), torch.nan, device=self.device))


@dataclass(frozen=True)
class Memory:
    """Bytes of a process, or on a GPU of torch's tensors."""

    device: str

    def now(self) -> int:
        if self.device != "cpu":
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def busy_neighbour(device: str) -> Iterator[None]:
    """Another thread that multiplies in a stream of its own, packed weights, too."""
    stop, ready = threading.Event(), threading.Event()
    choose = random.Random(1)
    trials = [trial for _ in range(4) for trial in KINDS["gemm"](choose, device)]

    def loop() -> None:
        matrix = torch.randn(384, 384, device=device)
        with torch.cuda.stream(torch.cuda.Stream() if device != "cpu" else None):
            while not stop.is_set():
                torch.mm(matrix, matrix)
                for trial in trials:
                    trial.run()
                ready.set()
                if device != "cpu":
                    torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        assert ready.wait(300)
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def threads_of_the_cpu(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def same(outs: Outs, expected: Outs) -> bool:
    """Bit for bit: NaN and zeros of either sign, too."""
    return all(
        torch.equal(*(part.contiguous().view(torch.uint8) for part in pair))
        for pair in zip(outs, expected, strict=True)
        if pair[0].numel()
    )


def repeated(trial: Trial, launches: int, device: str) -> Iterator[str]:
    """What differed from the first time: alone and beside a busy neighbour; on the CPU with 1, 2 and 3 threads."""
    first = [out.clone() for out in trial.run()]
    for busy, count in itertools.product((False, True), (1, 2, 3) if device == "cpu" else (1,)):
        with busy_neighbour(device) if busy else threads_of_the_cpu(count), threads_of_the_cpu(count):
            wrong = sum(not same(trial.run(), first) for _ in range(launches))
        if wrong:
            yield f"{wrong} of {launches} launches differ, {count} threads, {'busy' if busy else 'alone'}"


def judged(trial: Trial, tally: Tally, launches: int, device: str) -> Iterator[str]:
    """What is wrong with a case, which is counted."""
    tally.cases += 1
    tally.identities += trial.exact
    try:
        ratio = trial.judge(trial.run())
        tally.ratio = max(tally.ratio, ratio)
        if not ratio <= 1:
            yield f"{ratio:.4g} times the bound"
        if launches:
            yield from repeated(trial, launches, device)
    except Exception as error:
        yield repr(error)


def soak(
    goes_on: Callable[[int, float], bool],
    device: str = "cpu",
    seed: int = 1,
    kinds: list[str] | None = None,
    launches: int = 0,
    report: Callable[[str], object] = print,
) -> tuple[dict[str, Tally], list[int]]:
    """Random problems of each kind in turn while `goes_on(cases, seconds)`; tallies, and the memory after each tenth
    of a minute. Ctrl-C ends it, too."""
    tallies = {name: Tally() for name in kinds or kinds_on(device)}
    memory, sizes = Memory(device), list[int]()
    litter = Litter(random.Random(seed), device)
    begin, cases = time.monotonic(), 0
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C: what there is until then
        for index in itertools.count():
            for name, tally in tallies.items():
                choose = random.Random(f"{seed} {name} {index}")
                for trial in KINDS[name](choose, device):
                    for wrong in judged(trial, tally, launches, device):
                        tally.failures += 1
                        report(f"{name}, problem {index} of seed {seed}: {wrong}: {trial.label}")
                    litter.turn()
                    cases += 1
                    if not goes_on(cases, time.monotonic() - begin):
                        return tallies, sizes
            if time.monotonic() - begin >= 6 * len(sizes):
                gc.collect()
                sizes.append(memory.now())
    return tallies, sizes


def growth(sizes: list[int]) -> int:
    """Bytes between the least memory in the second fifth of a run and in its last; 0 for a run of few sizes."""
    fifth = len(sizes) // 5
    return min(sizes[-fifth:]) - min(sizes[fifth : 2 * fifth]) if fifth else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.python.soak", description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--cases", type=int, help="stop after so many")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--launches", type=int, default=0, help="repeat each so often, alone and beside a busy thread")
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="this one alone; may be given again")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--threads", type=int, help="of torch and of products; default: torch's")
    given = parser.parse_args(arguments)
    if given.cases is None and given.minutes is None:
        parser.error("expected --cases or --minutes")
    if wrong := sorted(set(given.kind or ()) - set(kinds_on(given.device))):
        there = ", ".join(kinds_on(given.device))
        parser.error(f"--kind {wrong[0]!r}: {given.device} has none; expected one of {there}")
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    most_cases, seconds = given.cases or sys.maxsize, 60 * (given.minutes or 1e9)
    where = torch.cuda.get_device_name() if given.device == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"seed {given.seed}, {given.device}, {where}", flush=True)
    begin = time.monotonic()
    tallies, sizes = soak(
        lambda cases, after: cases < most_cases and after < seconds,
        given.device, given.seed, given.kind, given.launches, lambda line: print(line, flush=True),
    )  # fmt: skip
    total = sum(tallies.values(), Tally())
    print("| kind | cases | identities | largest error / bound | failures |\n|---|---|---|---|---|")
    print("\n".join([*(tally.row(name) for name, tally in tallies.items()), total.row("all")]))
    more = growth(sizes)
    each_minute = ", ".join(f"{size >> 20}" for size in sizes[::10])
    found = f"it grew by {more / 2**20:.1f} MiB" if len(sizes) >= 5 else "too short to tell whether it grew"
    print(f"{time.monotonic() - begin:.0f} s; MiB of memory, one a minute: {each_minute}; {found}")
    return int(total.failures > 0 or more > MOST_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
