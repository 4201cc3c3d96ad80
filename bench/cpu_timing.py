"""Time of a call on the CPU beside that of another, and of a copy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from bench.timing import Sample, interleave, wall_time

LEAST_ROUNDS: Final = 7
MOST_ROUNDS: Final = 51
_REPEAT_SECONDS: Final = 0.01  # short calls are repeated until a round takes about this long
_ROUNDS_SECONDS: Final = 0.5  # and rounds are added until they take about this long
_COPIED_BYTES: Final = 256 << 20  # more than caches hold


@dataclass(frozen=True)
class Comparison:
    """Seconds of two calls in interleaved rounds."""

    ours: Sample
    other: Sample

    @property
    def ratio(self) -> float:
        return self.ours.median / self.other.median

    @property
    def ratio_of_best(self) -> float:
        return self.ours.best / self.other.best

    @property
    def spread(self) -> float:
        """Of the one that varies more."""
        return max(self.ours.spread, self.other.spread)


def measure(ours: Callable[[], object], other: Callable[[], object]) -> Comparison:
    """Times both in the same rounds."""
    once = wall_time(ours) + wall_time(other)
    repeats = max(1, round(_REPEAT_SECONDS / once))
    rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, round(_ROUNDS_SECONDS / (repeats * once))))
    return Comparison(*interleave([functools.partial(wall_time, call, repeats) for call in (ours, other)], rounds))


def copy_rate() -> float:
    """GB/s that a copy of a large tensor writes (and reads), on torch's threads; the best of some rounds."""
    source = torch.ones(_COPIED_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    (sample,) = interleave([functools.partial(wall_time, functools.partial(target.copy_, source))], LEAST_ROUNDS)
    return _COPIED_BYTES / sample.best / 1e9
