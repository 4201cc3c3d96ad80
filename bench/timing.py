"""Repeated, interleaved measurements and what is reported of them."""

from __future__ import annotations

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


def interleave(measures: Sequence[Callable[[], float]], rounds: int, warmup: int = 1) -> list[Sample]:
    """Runs every measure once a round, so that a drift of the clocks meets all of them alike.

    Args:
        measures: each runs one contestant and returns its time in seconds.
        rounds: rounds that count.
        warmup: rounds before them that do not.
    """
    rows = [[measure() for measure in measures] for _ in range(warmup + rounds)][warmup:]
    return [Sample(times) for times in zip(*rows, strict=True)]


def wall_time(call: Callable[[], object], repeats: int = 1) -> float:
    """Seconds a call of `call` takes, averaged over `repeats` calls in a row."""
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats
