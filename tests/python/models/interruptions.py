"""Conversions and quantisations that are ended, meet a full or a read-only disk, or another writer of the same folder.

    python -m tests.python.models.interruptions convert FOLDER 500     # kill -9 at 500 points, and on from there
    python -m tests.python.models.interruptions quantize FOLDER 500
    python -m tests.python.models.interruptions convert FOLDER 500 --ctrl-c   # or quantize: SIGINT in its place
    python -m tests.python.models.interruptions full_disk FOLDER 200   # as root in a tmpfs, else files end at a size
    python -m tests.python.models.interruptions writers FOLDER 100     # two at once
    python -m tests.python.models.interruptions read_only FOLDER 1     # as root, who may write everywhere else

A second number is the seed. A process of its own, so that what it forks has no threads. FOLDER is made. Prints what
happened as JSON; "broken" lists what should not have.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests.python.models.conversions import contents, limited, watch_lines
from tests.python.models.folders import random_model
from tests.python.models.quantizations import calibration, make

from qcutlass import WeightOnly, models
from qcutlass.models import conversion, marks, replacing, shards, sources
from qcutlass.models.quantizing import run, work

WRITERS = (conversion, marks, replacing, run, shards, sources, work)
"""The modules that write folders; runs are ended at their lines."""
REFUSED, FAILED, INTERRUPTED = 3, 4, 5  # exit statuses of children: FileExistsError, another OSError, KeyboardInterrupt


@dataclass
class Scenario:
    """A model that is written again and again, always to the same bytes.

    Attributes:
        act: writes the folder, over another one or not.
        place: in which it appears.
        expected: its files.
        older: a converted folder of something else, to be overwritten.
        seconds, lines: that an undisturbed run takes, lines of `WRITERS`.
        broken: what went wrong, in words.
    """

    act: Callable[[Path, bool], Any]
    place: Path
    expected: dict[str, bytes]
    older: dict[str, bytes]
    seconds: float
    lines: int
    broken: list[str] = field(default_factory=list)

    @property
    def destination(self) -> Path:
        return self.place / "new"

    def begin(self, over: bool) -> None:
        """An empty place, or one with an older folder."""
        for path in self.place.iterdir():
            shutil.rmtree(path)
        if over:
            self.destination.mkdir()
            for name, data in self.older.items():
                (self.destination / name).write_bytes(data)

    def start(self, at_line: int = 0, overwrite: bool | None = None, by: int = signal.SIGKILL) -> int:
        """A child that writes the folder; at a line of `WRITERS`, counted from 1, it sends itself a signal.

        SIGINT comes to it as KeyboardInterrupt, as Ctrl-C does.
        """
        over = self.destination.exists() if overwrite is None else overwrite
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # one for the child must find it below
        child = os.fork()
        if child:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            return child
        left, status = at_line, 1

        def reached() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), by)

        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            if at_line:
                watch_lines(WRITERS, reached)
            self.act(self.destination, over)
            status = 0
        except KeyboardInterrupt:
            status = INTERRUPTED
        except FileExistsError:
            status = REFUSED
        except OSError:
            status = FAILED
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def found(self) -> str:
        """What the destination is: nothing, the older folder, the new one as it must be; else it is broken."""
        files = contents(self.destination)
        return "whole" if files == self.expected else "old" if files == self.older else "broken" if files else "absent"

    def blocks(self) -> int:
        """Blocks of a quantisation that are finished and kept."""
        return len(list(work.work_path(self.destination).glob("block-*.json")))

    def finish(self, label: str) -> None:
        """Runs it to its end: the folder must be as expected, and nothing else may be left."""
        status = ended(self.start())
        left = sorted(path.name for path in self.place.iterdir() if path != self.destination)
        if status or self.found() != "whole" or left:
            self.broken.append(f"{label}: then run again: status {status}, {self.found()}, left {left}")


def ended(child: int) -> int:
    """The exit status of a child, less than 0 for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def scenario(kind: str, root: Path, seed: int, place: Path | None = None) -> Scenario:
    """A small conversion or quantisation; its model, and what undisturbed runs make of it, lie in `root`."""
    root.mkdir(parents=True, exist_ok=True)
    older = random_model(root / "older-source", 2, seed=seed)
    models.convert(older, root / "older")
    if kind == "convert":
        source = random_model(root / "source", 4, seed=seed + 1)

        def act(destination: Path, over: bool) -> Any:
            return models.convert(source, destination, overwrite=over, verify=True, shard_bytes=12_000)
    else:
        source, ids = root / "source", calibration(seed, samples=2)
        make("llama", seed).save_pretrained(source)

        def act(destination: Path, over: bool) -> Any:
            method = models.Method("gptq", WeightOnly(4, 32, True))
            return models.quantize_model(source, destination, method, calibration=ids, overwrite=over)

    begin = time.perf_counter()
    act(root / "reference", False)
    seconds = time.perf_counter() - begin
    child = os.fork()
    if child == 0:
        lines = 0

        def reached() -> None:
            nonlocal lines
            lines += 1

        watch_lines(WRITERS, reached)
        act(root / "counted", False)
        sys.settrace(None)
        (root / "lines").write_text(str(lines))
        os._exit(0)
    assert ended(child) == 0
    place = place or root / "place"
    place.mkdir(exist_ok=True)
    lines = int((root / "lines").read_text())
    return Scenario(act, place, contents(root / "reference"), contents(root / "older"), seconds, lines)


def end(kind: str, root: Path, points: int, seed: int, by: int) -> dict[str, Any]:
    """Ends runs by a signal, at points that are spread over their time and, every other one, over their lines.

    Then on from there. Every third run is to overwrite an older folder; a quarter of them is ended a second time before
    it may come to its end.
    """
    chance, case = random.Random(seed), scenario(kind, root, seed)
    by_it = -by if by == signal.SIGKILL else INTERRUPTED
    outcomes: Counter[str] = Counter(dict.fromkeys(("absent", "old", "whole"), 0))
    ended_early = left = resumed = again = 0
    for i in range(points):
        over = i % 3 == 0
        case.begin(over)
        part = (i + chance.random()) / points
        label = f"point {i} of {points}, seed {seed}"
        if i % 2:
            child = case.start()
            time.sleep(1.1 * case.seconds * part)
            os.kill(child, by)
        else:
            child = case.start(at_line=1 + int(part * case.lines), by=by)
        statuses = [ended(child)]
        if chance.random() < 0.25:
            statuses.append(ended(case.start(at_line=1 + chance.randrange(case.lines), by=by)))
            again += 1
        outcome = case.found()
        outcomes[outcome] += 1
        ended_early += by_it in statuses
        left += any(path != case.destination for path in case.place.iterdir())
        resumed += case.blocks() > 0
        if outcome == "broken" or (outcome == "old") > over or not {*statuses} <= {0, by_it}:
            case.broken.append(f"{label}: {outcome} after {statuses}")
        case.finish(label)
        if i % 50 == 49:
            print(f"{i + 1} points", file=sys.stderr, flush=True)
    rest = {"ended": ended_early, "left": left, "resumed": resumed, "ended again": again, "lines": case.lines}
    return {"points": points, **outcomes, **rest, "broken": case.broken}


def writers(root: Path, rounds: int, seed: int) -> dict[str, Any]:
    """Two processes write the same folder at once, by turns a conversion and a quantisation, over an older one or not.

    One at least must succeed, the other be refused or succeed, too; each in turn begins a little later.
    """
    chance = random.Random(seed)
    cases = [scenario(kind, root / kind, seed) for kind in ("convert", "quantize")]
    outcomes: Counter[str] = Counter()
    broken = []
    for i in range(rounds):
        case, over = cases[i % 2], i % 4 > 1
        case.begin(over)
        children = [case.start(overwrite=over)]
        time.sleep(case.seconds * chance.random() * chance.choice([0, 0.1, 1.2]))
        children.append(case.start(overwrite=over))
        statuses = sorted(map(ended, children))
        left = sorted(path.name for path in case.place.iterdir() if path != case.destination)
        outcomes["both" if statuses == [0, 0] else "one, the other was refused"] += 1
        if statuses not in ([0, 0], [0, REFUSED]) or case.found() != "whole" or left:
            broken.append(f"round {i} of seed {seed}: {statuses}, {case.found()}, left {left}")
    return {"rounds": rounds, **outcomes, "broken": broken}


@contextmanager
def mounted(place: Path) -> Iterator[Callable[[str], None]]:
    """A tmpfs at `place`; yields what mounts it anew with other options. CalledProcessError where one may not mount."""

    def mount(options: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True, capture_output=True)

    place.mkdir(parents=True, exist_ok=True)
    mount("size=64m")
    try:
        yield lambda options: mount(f"remount,{options}")
    finally:
        subprocess.run(["umount", str(place)], check=True)


def can_mount(root: Path) -> bool:
    """Whether this process may mount a file system of its own."""
    try:
        with mounted(root / "trial"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        with suppress(OSError):
            (root / "trial").rmdir()


def full_disk(root: Path, points: int, seed: int) -> dict[str, Any]:
    """Runs whose disk is full after ever more bytes, by turns a conversion and a quantisation; then on with room.

    As root the disk is a tmpfs, which holds so many pages; else files end at so many bytes.
    """
    chance, outcomes, broken = random.Random(seed), Counter[str](), []
    root.mkdir(parents=True, exist_ok=True)
    is_disk = can_mount(root)
    for kind in ("convert", "quantize"):
        with mounted(root / f"{kind}-disk") if is_disk else plain_folder(root / f"{kind}-disk") as remount:
            case = scenario(kind, root / kind, seed, root / f"{kind}-disk")
            most = 2 * sum(map(len, case.expected.values())) if is_disk else max(map(len, case.expected.values()))
            most = 2 * most if kind == "quantize" else most  # blocks and states, too
            for i in range(points // 2):
                over = i % 2 == 0
                case.begin(over)
                size = int((i + chance.random()) / (points // 2) * most)
                if is_disk:
                    used = sum(len(data) + 4096 for data in case.older.values()) * over
                    remount(f"size={size + used}")
                    status = ended(case.start())
                    remount("size=64m")
                else:
                    with limited(resource.RLIMIT_FSIZE, size):
                        status = ended(case.start())
                outcome = case.found()
                outcomes["full" if status else "enough"] += 1
                if (status, outcome) not in ((0, "whole"), (FAILED, "old" if over else "absent")):
                    broken.append(f"{kind} with {size} bytes of seed {seed}: status {status}, {outcome}")
                case.finish(f"{kind} with {size} bytes of seed {seed}")
            broken += case.broken
    return {"points": points, "tmpfs": is_disk, **outcomes, "broken": broken}


@contextmanager
def plain_folder(place: Path) -> Iterator[Callable[[str], None]]:
    """In place of `mounted`."""
    place.mkdir(parents=True)
    yield lambda options: None


def read_only(root: Path, points: int, seed: int) -> dict[str, Any]:
    """Destinations on a file system that cannot be written, over an older folder and not: OSError, all stays."""
    broken = []
    root.mkdir(parents=True, exist_ok=True)
    for kind in ("convert", "quantize"):
        with mounted(root / f"{kind}-disk") as remount:
            case = scenario(kind, root / kind, seed, root / f"{kind}-disk")
            for i in range(2 * points):
                case.begin(over=i % 2 == 0)
                remount("ro")
                status, outcome = ended(case.start()), case.found()
                left = [path.name for path in case.place.iterdir() if path != case.destination]
                remount("rw")
                if (status, outcome, left) != (FAILED, "absent" if i % 2 else "old", []):
                    broken.append(f"{kind}: status {status}, {outcome}, left {left}")
                case.finish(kind)
            broken += case.broken
    return {"points": 4 * points, "broken": broken}


def positive(text: str) -> int:
    """A number of points or rounds."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    others = {"full_disk": full_disk, "writers": writers, "read_only": read_only}
    parser.add_argument("action", choices=["convert", "quantize", *others])
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="a new one, on a disk that is not the one under test"
    )
    parser.add_argument("count", type=positive, metavar="COUNT", help="points, sizes or rounds")
    parser.add_argument("seed", type=int, nargs="?", default=1, metavar="SEED", help="1, if it is not given")
    parser.add_argument("--ctrl-c", action="store_true", help="SIGINT in place of kill -9, of convert and quantize")
    given = parser.parse_args(words)
    root, numbers = given.folder, (given.count, given.seed)
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        parser.error(f"FOLDER: expected a new or an empty folder, got {root}")
    if given.ctrl_c and given.action in others:
        parser.error(f"--ctrl-c: expected convert or quantize, got {given.action}")
    if given.action == "read_only" and not can_mount(root):
        parser.error("read_only: expected root, who may mount a file system")
    torch.set_num_threads(1)  # a forked child has none of the OpenMP threads that its parent's runtime counts on
    if given.action in others:
        found = others[given.action](root, *numbers)
    else:
        found = end(given.action, root, *numbers, signal.SIGINT if given.ctrl_c else signal.SIGKILL)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
