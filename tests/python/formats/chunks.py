"""Runs chunks of inputs in child processes, each in one of its own: a crash or a hang ends that one, and is told."""

from __future__ import annotations

import json
import mmap
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

_KEPT = 5  # messages of findings that one tally keeps


class Chunk(NamedTuple):
    """Inputs [first, first + count) of one name."""

    name: str
    seed: int
    first: int
    count: int


@dataclass
class Tally:
    """What came of inputs of one name.

    Attributes:
        name: of the reader or folder.
        inputs: how many were tried.
        survived: how many were read in spite of their damage.
        failures, messages: how many findings, and the first of them.
        slowest, which: CPU seconds of the input that took longest, and its number.
        megabytes: by which the resident memory of a child grew, at most.
    """

    name: str
    inputs: int = 0
    survived: int = 0
    failures: int = 0
    messages: list[str] = field(default_factory=list)
    slowest: float = 0.0
    which: int = 0
    megabytes: float = 0.0

    def add_failure(self, message: str) -> None:
        self.failures += 1
        if len(self.messages) < _KEPT:
            self.messages.append(message[:600])

    def note_time(self, seconds: float, index: int) -> None:
        if seconds > self.slowest:
            self.slowest, self.which = seconds, index

    def add(self, other: Tally) -> None:
        """Takes in another one of the same name."""
        self.inputs += other.inputs
        self.survived += other.survived
        self.failures += other.failures
        self.messages += other.messages[: _KEPT - len(self.messages)]
        self.note_time(other.slowest, other.which)
        self.megabytes = max(self.megabytes, other.megabytes)


@dataclass
class _Child:
    chunk: Chunk
    pid: int
    pipe: int
    slot: int
    at: int
    since: float


Work = Callable[[Chunk, Callable[[int], None]], Tally]


def in_children(chunks: list[Chunk], work: Work, processes: int, most_seconds: float, state: Path | None) -> int:
    """Runs all chunks that `state` does not have yet, and prints a table; the number of findings.

    Args:
        work: runs one; it tells the number of each input before it is tried.
        processes: at once.
        most_seconds: of the clock, for one input, where Python's own alarm does not come through.
        state: keeps the tallies of finished chunks.
    """
    done = {} if state is None or not state.exists() else json.loads(state.read_text())
    tallies: dict[str, Tally] = {}
    left = []
    for chunk in chunks:
        tallies.setdefault(chunk.name, Tally(chunk.name))
        known = done.get(_key(chunk))
        if known is None:
            left.append(chunk)
        else:
            tallies[chunk.name].add(Tally(**known))
    begin, before = time.monotonic(), sum(tally.inputs for tally in tallies.values())
    numbers = mmap.mmap(-1, 8 * processes)
    running: list[_Child] = []
    left.reverse()
    while left or running:
        while left and len(running) < processes:
            slot = min({*range(processes)} - {child.slot for child in running})
            running.append(_started(left.pop(), work, numbers, slot))
        time.sleep(0.02)
        for child in list(running):
            found = _finished(child, numbers, most_seconds)
            if found is None:
                continue
            running.remove(child)
            for message in found.messages:
                print(message, flush=True)
            tallies[child.chunk.name].add(found)
            done[_key(child.chunk)] = asdict(found)
            if state is not None:
                partial = state.with_suffix(".partial")
                partial.write_text(json.dumps(done))
                partial.rename(state)
    return _told(tallies, time.monotonic() - begin, before)


def _key(chunk: Chunk) -> str:
    return f"{chunk.name}, seed {chunk.seed}, {chunk.first} + {chunk.count}"


def _started(chunk: Chunk, work: Work, numbers: mmap.mmap, slot: int) -> _Child:
    reading, writing = os.pipe()
    numbers[8 * slot : 8 * slot + 8] = chunk.first.to_bytes(8, "little")
    pid = os.fork()
    if pid == 0:

        def reached(index: int) -> None:
            numbers[8 * slot : 8 * slot + 8] = index.to_bytes(8, "little")

        status = 1
        try:
            os.close(reading)
            os.write(writing, json.dumps(asdict(work(chunk, reached))).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    return _Child(chunk, pid, reading, slot, chunk.first, time.monotonic())


def _finished(child: _Child, numbers: mmap.mmap, most_seconds: float) -> Tally | None:
    """The tally of a child that has ended, or was ended; None while it is at work."""
    at = int.from_bytes(numbers[8 * child.slot : 8 * child.slot + 8], "little")
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    if pid == 0:
        if at != child.at:
            child.at, child.since = at, time.monotonic()
        if time.monotonic() - child.since < most_seconds:
            return None
        os.kill(child.pid, signal.SIGKILL)
        _, status = os.waitpid(child.pid, 0)
    with os.fdopen(child.pipe, "rb") as file:
        text = file.read()
    if status == 0:
        return Tally(**json.loads(text))
    code = os.waitstatus_to_exitcode(status)
    found = Tally(child.chunk.name, inputs=at - child.chunk.first)
    found.add_failure(f"{child.chunk.name}, input {at} of seed {child.chunk.seed}: the process ended with {code}")
    return found


def _told(tallies: dict[str, Tally], seconds: float, before: int) -> int:
    """Prints a line a name, and the sum."""
    print(f"{'':40} {'inputs':>10} {'read':>9} {'findings':>8} {'slowest ms':>10} {'of input':>10} {'MB':>6}")
    whole = Tally("all")
    for name, tally in sorted(tallies.items()):
        whole.add(tally)
        for each, label in ((tally, name), *(((whole, "all"),) if name == max(tallies) else ())):
            print(
                f"{label:40} {each.inputs:10} {each.survived:9} {each.failures:8} {1000 * each.slowest:10.1f} "
                f"{each.which:10} {each.megabytes:6.1f}"
            )
    print(f"{(whole.inputs - before) / max(seconds, 1e-9):.0f} inputs a second, {seconds:.0f} s")
    return whole.failures
