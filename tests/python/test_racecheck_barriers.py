"""tools/racecheck_barriers.cu as a model, all of its variants: each comes to its end, the right ones with right sums.

So whatever racecheck reports of a right one is wrong, and no variant hangs under it. And tools/racecheck_rings.sh, with
programs of the test's own for a compiler and a sanitizer.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import pytest
from tests.python.test_operand_ring import Barrier, Steps, come_to_their_ends

PLACES, STAGES, LANES = 3, 20, 4
ORDERS = 40
Arrival: TypeAlias = Literal["lanes", "warp", "late", "never"]
"""How one side hands places to the other. The last is how "late" was at first: the other side does not wait at all."""
RIGHT: list[tuple[Arrival, Arrival]] = [(full, empty) for full in ("lanes", "warp") for empty in ("lanes", "warp")]
WRONG: list[tuple[Arrival, Arrival]] = [("late", "lanes"), ("lanes", "late")]


class Warps:
    """A warp that stores numbers in places, and one that adds up what the lane after next has stored.

    Attributes:
        sums: of each lane of the second.
        behind: by name, how many phases a barrier was ahead of the one that was waited for, at most.
    """

    def __init__(self, full: Arrival, empty: Arrival) -> None:
        self.arrivals = {"full": full, "empty": empty}
        self.barriers = {
            name: [Barrier(1 if arrival == "warp" else LANES) for _ in range(PLACES)]
            for name, arrival in self.arrivals.items()
        }
        self.warps = {name: Barrier(LANES) for name in self.arrivals}  # of __syncwarp()
        self.ring = [[-1] * LANES for _ in range(PLACES)]
        self.sums = [0] * LANES
        self.behind = dict.fromkeys(self.arrivals, 0)

    def arrive(self, name: str, place: int, lane: int) -> Steps:
        if self.arrivals[name] == "warp":
            meeting = self.warps[name]
            phase = meeting.phase
            meeting.arrive()
            while meeting.phase == phase:
                yield
        if self.arrivals[name] != "warp" or lane == 0:
            self.barriers[name][place].arrive()

    def wait(self, name: str, place: int, stage: int) -> Steps:
        if self.arrivals[name] == "never":
            return
        turn = stage // PLACES + (name == "full")  # the phases that must have ended
        barrier = self.barriers[name][place]
        while not barrier.ended((turn + 1) % 2):
            self.behind[name] = max(self.behind[name], barrier.phase - turn)
            yield
        self.behind[name] = max(self.behind[name], barrier.phase - turn)

    def access(self, name: str, place: int, stage: int, lane: int) -> Steps:
        if name == "empty":
            self.ring[place][lane] = stage * LANES + lane
        else:
            self.sums[lane] += self.ring[place][(lane + 2) % LANES]
        yield

    def lane(self, waits: str, arrives: str, lane: int) -> Steps:
        for stage in range(STAGES):
            place = stage % PLACES
            wait, access = self.wait(waits, place, stage), self.access(waits, place, stage, lane)
            for steps in (access, wait) if self.arrivals[waits] == "late" else (wait, access):
                yield from steps
            yield from self.arrive(arrives, place, lane)
            yield

    def run(self, choose: random.Random) -> bool:
        """Whether all lanes come to their ends."""
        sides = (("empty", "full"), ("full", "empty"))
        lanes = [self.lane(*side, lane) for side in sides for lane in range(LANES)]
        return come_to_their_ends(lanes, choose)

    def is_right(self) -> bool:
        return self.sums == [
            sum(stage * LANES + (lane + 2) % LANES for stage in range(STAGES)) for lane in range(LANES)
        ]


def runs(full: Arrival, empty: Arrival, seed: int) -> list[tuple[Warps, bool]]:
    """Of several orders: what became of the warps, and whether they came to their ends."""
    every = [Warps(full, empty) for _ in range(ORDERS)]
    return [(warps, warps.run(random.Random(f"{seed} {order}"))) for order, warps in enumerate(every)]


@pytest.mark.parametrize(("full", "empty"), RIGHT)
def test_right_ones_end_with_right_sums(full: Arrival, empty: Arrival, seed: int) -> None:
    for warps, ended in runs(full, empty, seed):
        assert ended
        assert warps.is_right()
        assert max(warps.behind.values()) == 0, "nobody waits for a phase that another has followed"


@pytest.mark.parametrize(("full", "empty"), WRONG)
def test_wrong_ones_end_and_do_race(full: Arrival, empty: Arrival, seed: int) -> None:
    found = runs(full, empty, seed)
    assert all(ended for _, ended in found)
    assert all(max(warps.behind.values()) == 0 for warps, _ in found)
    assert not all(warps.is_right() for warps, _ in found)


@pytest.mark.parametrize(("full", "empty"), [("never", "lanes"), ("lanes", "never")])
def test_a_side_that_does_not_wait_may_leave_the_other_waiting_for_ever(
    full: Arrival, empty: Arrival, seed: int
) -> None:
    found = runs(full, empty, seed)
    assert not all(ended for _, ended in found)
    assert max(max(warps.behind.values()) for warps, _ in found) > 0


def test_the_model_has_every_variant(repository: Path) -> None:
    text = (repository / "tools/racecheck_barriers.cu").read_text()
    names = re.findall(r'\{"(\w+),(\w+)", run<Arrival::k(\w+), Arrival::k(\w+)>\}', text)
    assert {(full, empty) for full, empty, *_ in names} == {*RIGHT, *WRONG}
    assert all((full.title(), empty.title()) == (first, second) for full, empty, first, second in names)
    assert set(re.findall(r"^//   (\w+)", text, flags=re.MULTILINE)) == set(get_args(Arrival)) - {"never"}


PROGRAMS = {
    "nvcc": 'while [ "$1" != -o ]; do shift; done\n'
    'printf "#!/bin/sh\\nif [ \\$# -eq 0 ]; then echo right wrong; fi\\n" > "$2" && chmod +x "$2"',
    "compute-sanitizer": """
        case "$*" in
          --version) echo "version 7" ;;
          *barriers\\ wrong) exec sleep 100 ;;
          *rings\\ wrong) echo "the sanitizer failed" ;;
          *) echo "sums are right"; echo "========= RACECHECK SUMMARY: 0 hazards displayed" ;;
        esac""",
}


def test_a_variant_that_hangs_does_not_hide_the_others(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    script = shutil.copy(repository / "tools/racecheck_rings.sh", tmp_path / "tools")
    for name, code in PROGRAMS.items():
        program = tmp_path / name
        program.write_text(f"#!/usr/bin/env bash\n{code}\n")
        program.chmod(0o755)
    result = subprocess.run(
        ["bash", script, tmp_path / "logs"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LIMIT": "2"},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert result.stderr == ""
    version, _, *rows = (re.sub(" +", " ", line) for line in result.stdout.splitlines())
    assert version == "version 7"
    logs = tmp_path / "logs"
    assert sorted(rows[:2]) == [
        "rings right right 0 hazards displayed",
        f"rings wrong - no summary, status 0: see {logs}/rings.wrong.log",
    ]
    assert rows[2:] == [
        "barriers right right 0 hazards displayed",
        f"barriers wrong - ended by the limit of 2 s: see {logs}/barriers.wrong.log",
    ]
    assert result.returncode == 1
