"""Compiles the mutants, runs their tests, and prints which were caught, by what, and how."""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.python import device_mutants
from tests.python.device_mutants.building import Build, by_time
from tests.python.device_mutants.mutant import REPOSITORY, Mutant
from tests.python.device_mutants.running import Outcome, collect, run
from tests.python.device_mutants.table import MUTANTS


@dataclass(frozen=True)
class Verdict:
    """What is said of a mutant, or of a part of the control, which has none.

    Attributes:
        word: "caught", "SURVIVED", "passed", "FAILED" or "NOT RUN".
    """

    mutant: Mutant | None
    word: str
    outcome: Outcome | None
    trouble: str = ""

    @property
    def good(self) -> bool:
        return self.word in ("caught", "passed")

    def line(self) -> str:
        seconds = "" if self.outcome is None else f"{self.outcome.seconds:.0f} s"
        what = "no fault" if self.mutant is None else f"{self.mutant.loop}: {self.mutant.name}"
        text = f"{self.word:8} {seconds:>6}  {what}"
        if self.outcome is not None and self.outcome.failed:
            text += f"  [{self.outcome.how}: {self.outcome.failed}]"
        elif self.outcome is not None:
            text += f"  [{self.outcome.how or f'{self.outcome.passed} passed, {self.outcome.skipped} skipped'}]"
        trouble = self.trouble or ("" if self.good or self.outcome is None else self.outcome.text)
        return text + "".join(f"\n    | {row}" for row in trouble[-3000:].splitlines())


def judge(mutant: Mutant | None, outcome: Outcome) -> Verdict:
    """A mutant is caught where a test fails, the control passes where all ran and none does."""
    all_ran = outcome.passed > 0 and outcome.skipped == 0
    if not outcome.ran or (not outcome.how and not all_ran):
        return Verdict(mutant, "NOT RUN", outcome)
    if mutant is None:
        return Verdict(mutant, "FAILED" if outcome.how else "passed", outcome)
    return Verdict(mutant, "caught" if outcome.how else "SURVIVED", outcome)


class Session:
    """Compiles in one pool, tests in another; verdicts come in a queue."""

    def __init__(self, build: Build, runs: ThreadPoolExecutor, limit: float) -> None:
        self.build, self.runs, self.limit = build, runs, limit
        self.verdicts: queue.Queue[Verdict] = queue.Queue()

    def guarded(self, mutant: Mutant | None, work: Callable[[], Verdict]) -> None:
        try:
            self.verdicts.put(work())
        except Exception:  # reported as this mutant's trouble; the others go on
            self.verdicts.put(Verdict(mutant, "NOT RUN", None, traceback.format_exc()))

    def start_control(self, control: Path, tests: Sequence[str], parts: int) -> int:
        """Runs all tests without a fault, in so many parts; returns how many verdicts come."""
        several = [tests[part::parts] for part in range(parts) if tests[part::parts]]
        for number, part in enumerate(several):

            def work(part: Sequence[str] = part, name: str = f"part_{number}") -> Verdict:
                return judge(None, run(control, part, 5 * self.limit, name))

            self.runs.submit(self.guarded, None, work)
        return len(several)

    def start(self, mutant: Mutant, built: Future[Path], tests: Sequence[str]) -> None:
        """Runs the tests when the extension is there."""

        def examine(built: Future[Path]) -> None:
            def work() -> Verdict:
                extension = built.result()
                verdict = judge(mutant, run(extension, tests, self.limit))
                if verdict.good:  # as large as a library
                    shutil.rmtree(extension.parents[2])
                return verdict

            self.runs.submit(self.guarded, mutant, work)

        built.add_done_callback(examine)


def table(verdicts: Sequence[Verdict]) -> str:
    rows = ["| loop | fault | caught by | how |", "|---|---|---|---|"]
    for verdict in verdicts:
        if verdict.mutant is not None:
            outcome = verdict.outcome
            by = verdict.word if not verdict.good or outcome is None else outcome.failed or outcome.how
            how = "" if outcome is None else outcome.how
            rows.append(f"| {verdict.mutant.loop} | {verdict.mutant.name} | {by.replace('|', ' ')} | {how} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.python.device_mutants",
        description=device_mutants.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--library", type=Path, help="libqcutlass_cuda.a of these sources, built elsewhere for 90a-real"
    )
    parser.add_argument(
        "--folder", type=Path, default=REPOSITORY / "build" / "device_mutants", help="for everything written"
    )
    parser.add_argument(
        "--objects", type=Path, help="for units with faults, compiled once for these sources; default: in the folder"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    parser.add_argument("--runs", type=int, default=4, help="runs of tests at a time")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a mutant's tests")
    parser.add_argument("--only", default="", help="mutants whose loop, name or unit contains this")
    parser.add_argument("--compile", action="store_true", help="compile and link alone, where there is no GPU")
    arguments = parser.parse_args()

    begin = time.monotonic()
    chosen = [m for m in MUTANTS if arguments.only in f"{m.loop}: {m.name} {m.unit}"]
    if not chosen:
        parser.error(f"no mutant's loop, name or unit contains {arguments.only!r}")
    folder: Path = arguments.folder.resolve()
    objects: Path = folder / "mutants" if arguments.objects is None else arguments.objects.resolve()
    library = None if arguments.library is None else arguments.library.resolve(strict=True)
    with ThreadPoolExecutor(arguments.jobs) as pool, ThreadPoolExecutor(arguments.runs) as runs:
        session = Session(Build(folder, library, pool, objects), runs, arguments.limit)
        session.build.begin()
        order = sorted(chosen, key=by_time(session.build))
        if arguments.compile:
            return compile_alone(session.build, order)
        control = session.build.start(None)
        built = [(mutant, session.build.start(mutant)) for mutant in order]
        collected = collect(control.result(), sorted({part.file for mutant in chosen for part in mutant.tests}))
        selected = {id(mutant): mutant.selected(collected) for mutant in chosen}
        every = list(dict.fromkeys(test for tests in selected.values() for test in tests))
        print(f"{len(chosen)} mutants, {len(every)} tests; {time.monotonic() - begin:.0f} s", flush=True)
        left = session.start_control(control.result(), every, arguments.runs) + len(built)
        for mutant, extension in built:
            session.start(mutant, extension, selected[id(mutant)])
        verdicts: list[Verdict] = []
        while len(verdicts) < left:
            verdicts.append(session.verdicts.get())
            print(verdicts[-1].line(), flush=True)
    of_mutants = [verdict for verdict in verdicts if verdict.mutant is not None]
    place = {id(mutant): number for number, mutant in enumerate(chosen)}
    of_mutants.sort(key=lambda verdict: place[id(verdict.mutant)])
    print(f"\n{table(of_mutants)}\n")
    caught = sum(verdict.good for verdict in of_mutants)
    sound = all(verdict.good for verdict in verdicts if verdict.mutant is None)
    without = "all tests pass" if sound else "tests DO NOT PASS"
    print(f"{caught} of {len(of_mutants)} caught; without a fault {without}; {time.monotonic() - begin:.0f} s")
    return 0 if sound and caught == len(of_mutants) else 1


def compile_alone(build: Build, mutants: Sequence[Mutant]) -> int:
    failed = 0
    for mutant, built in [(mutant, build.start(mutant)) for mutant in (None, *mutants)]:
        name = "no fault" if mutant is None else f"{mutant.loop}: {mutant.name}"
        try:
            print(f"linked   {name}: {built.result().stat().st_size >> 20} MB", flush=True)
        except Exception as error:
            failed = 1
            print(f"FAILED   {name}\n{error}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
