"""Repeated, interleaved measurements and what is reported of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """Times of one contestant, seconds."""

    times: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def best(self) -> float:
        return min(self.times)

    @property
    def spread(self) -> float:
        """(largest - smallest) / median."""
        return (max(self.times) - min(self.times)) / self.median


def interleave(measures: Sequence[Callable[[], float]], rounds: int | Sequence[int], warmup: int = 1) -> list[Sample]:
    """Runs every measure once a round, so that a drift of the clocks meets all of them alike.

    The order differs from round to round (and is the same from run to run): what ran just before, a hungry kernel say,
    leaves its mark on the clocks.

    Args:
        measures: each runs one contestant and returns its time in seconds.
        rounds: rounds that count, of all of them or of each.
        warmup: rounds before them that do not.
    """
    wanted = [rounds] * len(measures) if isinstance(rounds, int) else rounds
    times: list[list[float]] = [[] for _ in measures]
    shuffle = random.Random(0).shuffle
    order = list(range(len(measures)))
    for round_ in range(warmup + max(wanted, default=0)):
        shuffle(order)
        for index in order:
            if round_ < warmup + wanted[index]:
                times[index].append(measures[index]())
    return [Sample(mine[warmup:]) for mine in times]


def wall_time(call: Callable[[], object], repeats: int = 1) -> float:
    """Seconds a call of `call` takes, averaged over `repeats` calls in a row."""
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats
