"""A model of the ring of wgmma's loop where warps make operands: whoever is slow, whenever, nobody waits for ever.

A barrier of a GPU tells by a parity whether a phase has ended, which one two phases farther on hides. Here producer,
operand warps and consumers of `operand_producer.h` are generators that take steps in an order of chance, some of them
hundreds of times as seldom as others for a while.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

OPERAND_WARPS, LANES, CONSUMERS = 3, 32, 2
Steps = Iterator[None]


class Barrier:
    """An mbarrier: a phase ends with its last arrival."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.left = arrivals
        self.phase = 0

    def arrive(self, count: int = 1) -> None:
        self.left -= count
        assert self.left >= 0, "an arrival that belongs to the next phase"
        if self.left == 0:
            self.left, self.phase = self.arrivals, self.phase + 1

    def ended(self, parity: int) -> bool:
        """What `try_wait.parity` says: the phase under way has the other parity."""
        return self.phase % 2 != parity


class Ring:
    """Stages of some products, each from place 0 on; operand warps take the rows of all stages in turns.

    Args:
        rows: of a stage. One: the others have none of it.
        others_arrive: whether operand warps arrive for stages of which they have no row, as they do.
    """

    def __init__(self, places: int, stages: int, products: int, rows: int, others_arrive: bool) -> None:
        assert others_arrive or rows == 1, "arrivals at a barrier are as many in every phase"
        arrivals = 1 + LANES * (OPERAND_WARPS if others_arrive else 1)
        self.full = [Barrier(arrivals) for _ in range(places)]
        self.empty = [Barrier(CONSUMERS) for _ in range(places)]
        self.codes, self.operands = [-1] * places, [[-1] * rows for _ in range(places)]
        self.order = [stage % places for _ in range(products) for stage in range(stages)]
        self.rows, self.others_arrive = rows, others_arrive

    def producer(self) -> Steps:
        phases = [1] * len(self.empty)
        for stage, place in enumerate(self.order):
            while not self.empty[place].ended(phases[place]):
                yield
            self.codes[place] = stage
            yield
            self.full[place].arrive()
            phases[place] ^= 1
            yield

    def operand_warp(self, warp: int) -> Steps:
        phases = [1] * len(self.empty)
        for stage, place in enumerate(self.order):
            while not self.empty[place].ended(phases[place]):
                yield
            mine = [row for row in range(self.rows) if (stage * self.rows + row) % OPERAND_WARPS == warp]
            for row in mine:
                self.operands[place][row] = stage
                yield
            if mine or self.others_arrive:
                self.full[place].arrive(LANES)
            phases[place] ^= 1
            yield

    def consumer(self) -> Steps:
        phases = [0] * len(self.full)
        for stage, place in enumerate(self.order):
            while not self.full[place].ended(phases[place]):
                yield
            for _ in range(2):
                assert (self.codes[place], self.operands[place]) == (stage, [stage] * self.rows)
                yield
            self.empty[place].arrive()
            phases[place] ^= 1
            yield


def come_to_their_ends(everyone: Sequence[Steps], choose: random.Random) -> bool:
    """Whether all do: first in an order of chance, where anyone may be slow, or fast, for a while; then in turns.

    In turns nobody is slow, so whoever has not ended after so many of them waits for what does not come.
    """
    steps = list(everyone)
    speeds = dict.fromkeys(steps, 1.0)

    def step(one: Steps) -> None:
        if next(one, StopIteration) is StopIteration:
            steps.remove(one)

    for _ in range(20_000):
        if not steps:
            return True
        if choose.random() < 0.02:
            speeds[choose.choice(steps)] = choose.choice((0.01, 1, 5, 30))
        step(*choose.choices(steps, [speeds[other] for other in steps]))
    for _ in range(5_000):
        for one in tuple(steps):
            step(one)
    return not steps


def ends(seed: int, others_arrive: bool) -> bool:
    """Whether all of a ring come to their ends."""
    choose = random.Random(seed)
    places, stages, products = choose.choice((3, 4, 7)), choose.choice((1, 2, 5, 20)), choose.choice((1, 3, 12))
    ring = Ring(places, stages, products, choose.choice((1, 2, 4)) if others_arrive else 1, others_arrive)
    steps = [ring.producer(), *map(ring.operand_warp, range(OPERAND_WARPS)), ring.consumer(), ring.consumer()]
    return come_to_their_ends(steps, choose)


@pytest.mark.parametrize("seed", range(40))
def test_nobody_waits_for_ever(seed: int) -> None:
    assert ends(seed, others_arrive=True)


def test_a_warp_that_does_not_arrive_for_stages_of_others_may_miss_a_phase() -> None:
    assert not all(ends(seed, others_arrive=False) for seed in range(40))
