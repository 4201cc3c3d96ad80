"""Products that are right, that repeat and that leave memory as it was: random problems of every kind, as many as one
likes.

    python -m tests.python.soak --cases 50000                  # both oracles, every kind in turn
    python -m tests.python.soak --minutes 60 --device cuda     # the same by the clock, with the GPU to itself
    python -m tests.python.soak --cases 60 --launches 1000     # each problem so often, bit for bit
    python -m tests.python.soak --minutes 8 --log soak.jsonl   # again and again: an hour in pieces

Tensors of random sizes are allocated, filled with NaN and freed in between. It prints for each kind the cases, how many
of them were identities, the largest error over its bound and the failures, and at last what memory did: the resident
memory of the process, on a GPU also torch's tensors and all that is taken of the device, by any process: with --shared,
which says that others use the GPU, this is not watched. It exits with 1 if there were failures or one of them grew
beyond its bound (`memory_of`). The seed that it prints repeats a run.

With --log a run leaves a line in a file, and the table is printed for all runs of the file that were of the same device
and kinds, with a line below that says how many of them failed. What a run needs to be counted is that it ended: by its
limits or by Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import os
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from tests.python.random_products import KINDS, Outs, Trial, kinds_on
from torch import Tensor

from qcutlass.products import launching

MIB = 1 << 20
FEWEST_SIZES = 5
"""Looks at memory, six seconds apart or more, of which growth can be told."""


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


def resident() -> int:
    """Bytes of this process; what glibc's allocator keeps of freed memory, up to 250 MiB here, is given back first."""
    with contextlib.suppress(AttributeError):  # other C libraries have no such function
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def taken_of_the_gpu() -> int:
    """Bytes that are not free, whoever took them; what torch keeps for later tensors is given back first."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


@dataclass(frozen=True)
class Memory:
    """Memory that must not grow.

    Attributes:
        now: its bytes at present.
        most: bytes that a run which leaks nothing may grow by.
    """

    now: Callable[[], int]
    most: int


def load_kernels_at_once() -> None:
    """Has the driver load every kernel when CUDA starts, not when it first runs, which would look like a leak."""
    if not torch.cuda.is_initialized():
        os.environ["CUDA_MODULE_LOADING"] = "EAGER"


def load_products_of_torch(device: str, draws: int = 500) -> None:
    """Multiplies by torch, in the types and orders of dense products and oracles, before memory is looked at.

    cuBLAS loads kernels by the megabyte when a type, an order or sizes first ask for some, 400 MiB of the process and
    more, and this would look like a leak.
    """
    choose = random.Random(0)
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
    for dtype in (*wide, torch.float32, torch.float64):
        for _ in range(draws):
            m, n, k = choose.choice([1, 3, 8, 17, 64, 130, 257]), choose.randrange(1, 1500), choose.randrange(1, 4500)
            k = k if choose.random() < 0.5 else -(-k // 8) * 8  # rows of whole vectors have kernels of their own
            a, w = (torch.zeros(rows, k, dtype=dtype, device=device) for rows in (m, n))
            torch.mm(a, w.T)
            if dtype in wide:
                torch.mm(a, w.T, out_dtype=wide[dtype])
            else:
                torch.mm(a, w.T.contiguous())


def memory_of(device: str, shared: bool = False) -> dict[str, Memory]:
    """What is watched, by name.

    Tensors come and go: a case has some 100 kB, and `Litter` up to 16 MiB. On a CPU the first thousands of cases
    take 12 MiB more than the first ones, and looks at 100 000 cases differ by 5 MiB then. On a GPU kernels took memory
    of the device and of the process when they first ran, rare ones late: the library's are 67 MiB of packed code for
    sm_90a, torch's more. They are loaded before the first look now, and so are cuBLAS's (`load_products_of_torch`):
    twelve processes grew by 17 MiB at most in five minutes and some 27 500 cases each. Three fifths of a run lie
    between the looks that are compared, so that a leak of 4 kB a case comes to their bound. For memory of the device
    256 MiB stay until a process with a GPU of its own has shown less.

    Args:
        device: "cpu" or "cuda".
        shared: others use the GPU. What is taken of it is known for all processes together, and swings with them.
    """
    if device == "cpu":
        return {"process": Memory(resident, 24 * MIB)}
    own = {
        "tensors": Memory(torch.cuda.memory_allocated, 48 * MIB),
        "process": Memory(resident, 64 * MIB),
    }
    return own if shared else {"device": Memory(taken_of_the_gpu, 256 * MIB), **own}


def sizes_now(watched: dict[str, Memory]) -> dict[str, int]:
    """Bytes of each.

    Calls that are remembered are forgotten first: at most 4096 of a kind, some 4 KB each, they would take an hour to
    be as many as they may be. That their number is bounded has a test of its own (`test_launch.py`).
    """
    launching.forget()
    gc.collect()
    return {name: memory.now() for name, memory in watched.items()}


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
    shared: bool = False,
) -> tuple[dict[str, Tally], list[dict[str, int]]]:
    """Random problems of each kind in turn while `goes_on(cases, seconds)`; tallies, and what memory there was after
    each tenth of a minute. Ctrl-C ends it, too."""
    tallies = {name: Tally() for name in kinds or kinds_on(device)}
    if device == "cuda":
        load_products_of_torch(device)
    watched, sizes = memory_of(device, shared), list[dict[str, int]]()
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
                sizes.append(sizes_now(watched))
    return tallies, sizes


def growth(sizes: list[int]) -> int:
    """Bytes between the least memory in the second fifth of a run and in its last; 0 for a run of few sizes."""
    fifth = len(sizes) // 5
    return min(sizes[-fifth:]) - min(sizes[fifth : 2 * fifth]) if fifth else 0


def table(tallies: dict[str, Tally]) -> str:
    rows = [*(tally.row(name) for name, tally in tallies.items()), sum(tallies.values(), Tally()).row("all")]
    return "\n".join(
        ["| kind | cases | identities | largest error / bound | failures |", "|---|---|---|---|---|", *rows]
    )


@dataclass
class Run:
    """A run, as a line of a log holds it.

    Attributes:
        where: its device and kinds; runs of the same can be added up.
        tallies: of each kind.
        grown: bytes that each memory grew by, of those that were watched; nothing of a run that is too short to tell.
        success: whether it had no failure, and no memory grew beyond its bound.
    """

    where: str
    seed: int
    seconds: float
    tallies: dict[str, Tally]
    grown: dict[str, int]
    success: bool

    @staticmethod
    def of_line(line: str) -> Run:
        """ValueError for a line that is none, or of a program that kept no tallies of kinds."""
        values: Any = json.loads(line)
        names = sorted(member.name for member in fields(Run))
        got = sorted(values) if isinstance(values, dict) else [line]
        if got != names:
            raise ValueError(f"expected {', '.join(names)}, got {', '.join(got)}")
        return Run(**values | {"tallies": {name: Tally(**tally) for name, tally in values["tallies"].items()}})


def runs_of(log: Path | None, where: str) -> list[Run]:
    """Those of the same device and kinds in a log, which may not exist yet; ValueError names a line that is no run."""
    runs = list[Run]()
    for number, line in enumerate(log.read_text().splitlines() if log and log.exists() else [], start=1):
        try:
            runs.append(Run.of_line(line))
        except ValueError as error:
            raise ValueError(f"{log}, line {number}: not a run of this program; begin another file: {error}") from None
    return [run for run in runs if run.where == where]


def summary(runs: list[Run]) -> str:
    """All runs together: their table, and a line."""
    kinds = dict.fromkeys(name for run in runs for name in run.tallies)
    tallies = {kind: sum((run.tallies[kind] for run in runs if kind in run.tallies), Tally()) for kind in kinds}
    tally = sum(tallies.values(), Tally())
    told = [run.grown for run in runs if run.grown]
    grown = list[str]()
    for name in dict.fromkeys(name for each in told for name in each):
        sizes = [each[name] for each in told if name in each]
        watched = "" if len(sizes) == len(told) else f" (watched in {len(sizes)})"
        grown.append(f"{name} {max(sizes) / MIB:.1f} MiB{watched}")
    memory = f"memory grew by at most: {', '.join(grown)} (runs that were long enough to tell: {len(told)})"
    return (
        f"{table(tallies)}\n"
        f"{len(runs)} {'run' if len(runs) == 1 else 'runs'} on {runs[0].where}: "
        f"{sum(run.seconds for run in runs) / 60:.1f} minutes, {tally.cases} cases, {tally.identities} identities, "
        f"largest error / bound {tally.ratio:.3f}, {tally.failures} failures; "
        f"{memory if told else 'no run was long enough to tell whether memory grew'}; "
        f"{sum(not run.success for run in runs)} of them failed"
    )


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.python.soak", description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--cases", type=int, help="stop after so many")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--launches", type=int, default=0, help="repeat each so often, alone and beside a busy thread")
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="this one alone; may be given again")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--threads", type=int, help="of torch and of products; default: torch's")
    parser.add_argument("--shared", action="store_true", help="others use the GPU: its memory is not watched")
    parser.add_argument("--log", type=Path, metavar="FILE", help="adds this run to those of FILE, and prints their sum")
    given = parser.parse_args(arguments)
    if given.cases is None and given.minutes is None:
        parser.error("expected --cases or --minutes")
    if wrong := sorted(set(given.kind or ()) - set(kinds_on(given.device))):
        there = ", ".join(kinds_on(given.device))
        parser.error(f"--kind {wrong[0]!r}: {given.device} has none; expected one of {there}")
    if given.shared and given.device == "cpu":
        parser.error("--shared: expected --device cuda")
    if given.device == "cuda":
        load_kernels_at_once()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    name = torch.cuda.get_device_name() if given.device == "cuda" else f"{torch.get_num_threads()} threads"
    given.where = ", ".join([given.device, name, *([f"each {given.launches} times"] if given.launches else ())])
    given.where += f", of {' and '.join(sorted(set(given.kind)))} alone" if given.kind else ""
    try:
        before = runs_of(given.log, given.where)
    except ValueError as error:
        parser.error(f"--log: {error}")
    if any(run.seed == given.seed for run in before):
        parser.error(
            f"--seed {given.seed}: {given.log} has a run of it; expected another, as its problems are the same"
        )
    return given


def main(arguments: list[str] | None = None) -> int:
    given = parsed(arguments)
    most_cases, seconds = given.cases or sys.maxsize, 60 * (given.minutes or 1e9)
    print(f"seed {given.seed}, {given.where}", flush=True)
    begin = time.monotonic()
    tallies, sizes = soak(
        lambda cases, after: cases < most_cases and after < seconds,
        given.device, given.seed, given.kind, given.launches, lambda line: print(line, flush=True), given.shared,
    )  # fmt: skip
    took, total = time.monotonic() - begin, sum(tallies.values(), Tally())
    print(table(tallies))
    print(f"{took:.0f} s")
    grown = dict[str, int]()
    for name in sizes[0] if sizes else ():
        of_each = [size[name] for size in sizes]
        some = ", ".join(f"{size // MIB}" for size in of_each[::10])
        if len(sizes) >= FEWEST_SIZES:
            grown[name] = growth(of_each)
        found = f"it grew by {grown[name] / MIB:.1f} MiB" if name in grown else "too short to tell whether it grew"
        print(f"memory, {name}: MiB at every tenth look: {some}; {found}")
    if given.shared:
        print("memory, device: not watched, since others use it")
    watched = memory_of(given.device, given.shared)
    success = total.failures == 0 and all(more <= watched[name].most for name, more in grown.items())
    if given.log:
        with given.log.open("a") as file:
            file.write(json.dumps(asdict(Run(given.where, given.seed, took, tallies, grown, success))) + "\n")
        print(f"all runs of {given.log}:\n{summary(runs_of(given.log, given.where))}")
    return int(not success)


if __name__ == "__main__":
    sys.exit(main())
