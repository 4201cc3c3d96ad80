"""The tables of bench/results that a GPU makes: their commands, and how to run all of them for one tree.

Each page has a command. `run` gives every GPU one at a time, the longest first, and moves a page's two files into place
when its command has ended well, so that a page is always of one run, and its rows are the ones that its table shows.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Annotated, Final, TextIO, TypeAlias

import torch
import typer

from bench import origin
from bench.command_line import console, one_of, parsed

RESULTS: Final = Path("bench/results")
_UNFINISHED: Final = "unfinished"
_MOST_FAILURES: Final = 2  # in a row: a broken GPU is not to take all pages from others
_FEW: Final = "--m 1 --m 8 --m 16"
_MANY: Final = "--m 1024 --m 4096"


@dataclass(frozen=True)
class Page:
    """A table.

    Attributes:
        name: of its files, without .json and .md.
        arguments: of `python -m bench` or, beginning with a dot, of `python -m bench.MODULE`.
        seconds: some more than it took on an H200 whose peers had compiled most of their kernels.
        compiles: whether peers compile kernels for each number of rows, which other processes can have done before.
        promises: whether the command ends with 1 where a promise is broken, behind its files; else it has failed then.
    """

    name: str
    arguments: str
    seconds: int
    compiles: bool = False
    promises: bool = False

    @property
    def words(self) -> list[str]:
        """The command without `python`.

        Example:
            >>> Page("host", ".host", 10).words
            ['-m', 'bench.host']
        """
        first, *rest = shlex.split(self.arguments)
        return ["-m", "bench" + first, *rest] if first.startswith(".") else ["-m", "bench", first, *rest]

    @property
    def command(self) -> str:
        return shlex.join(["python", *self.words])

    def parts(self) -> list[Page]:
        """The same for each number of rows alone, and timed once: enough for peers to compile what they need."""
        words = shlex.split(self.arguments)
        places = [place for place, word in enumerate(words) if word == "--m"]
        rows = [words[place + 1] for place in places]
        others = [word for place, word in enumerate(words) if place not in places and place - 1 not in places]
        return [Page(f"{self.name}-{m}", shlex.join([*others, "--m", m, "--rounds", "1"]), 0) for m in rows]


PAGES: Final = (
    Page(
        "int4",
        f"gpu --peer cublas --peer humming --in-situ --m 1 --m 8 --m 16 --m 32 --m 64 --m 128 --m 256 --m 512 {_MANY}",
        80,
        compiles=True,
    ),
    Page(
        "int4_peers",
        "gpu --in-situ --shapes 8192x8192 --m 1 --m 2 --m 4 --m 8 --m 16 --m 32 --m 64 --m 128 --m 256 --m 512"
        " --m 1024 --m 2048 --m 4096 --m 8192",
        60,
        compiles=True,
    ),
    Page("batch_invariant", f"gpu --batch-invariant --peer cublas {_FEW} --m 64 --m 128 --m 256 {_MANY}", 20),
    Page(
        "w8a16_groups",
        "gpu --no-peers --in-situ --scheme w8a16_g32 --scheme w8a16_g128 --m 33 --m 40 --m 48 --m 64",
        15,
    ),
    Page(
        "fp4",
        "gpu --peer cublas --peer humming --scheme mxfp4 --scheme w4a16_g32 --scheme nvfp4"
        f" {_FEW} --m 64 --m 256 {_MANY}",
        220,
        compiles=True,
    ),
    Page(
        "formats",
        "gpu --peer cublas --scheme w4a16_g32_real --scheme q4_k --scheme w4a16_g32 --scheme q6_k"
        f" --scheme w4a16_g32_min {_FEW} --m 64 --m 256 {_MANY}",
        60,
    ),
    Page(
        "formats_others",
        "gpu --peer cublas --scheme q2_k --scheme q3_k --scheme q5_k --scheme iq4_nl --scheme iq4_xs --scheme e4m3"
        f" --scheme e4m3_g128 --shapes 28672x4096 --shapes 8192x8192 --m 1 --m 16 --m 64 --m 256 {_MANY}",
        40,
    ),
    Page(
        "fp8_blocks",
        "gpu --peer scaled_mm --peer triton_blockwise --scheme w8a8 --scheme fp8 --scheme blockwise_fp8"
        f" --scheme w4a8_g128 {_FEW} --m 64 --m 256 {_MANY}",
        50,
    ),
    Page(
        "fp8_beside",
        "gpu --peer scaled_mm --peer scaled_mm_promoted --scheme fp8 --scheme w4a8_g128 --scheme w4a16_g128"
        f" --m 64 --m 128 --m 256 --m 512 --m 2048 {_MANY}",
        30,
    ),
    Page(
        "w4a8",
        f"gpu --peer cublas --peer humming --scheme w4a8_g128 --m 16 --m 64 --m 256 --m 512 {_MANY}",
        50,
        compiles=True,
    ),
    Page(
        "eight_bits",
        "gpu --scheme w8a8 --scheme fp8 --scheme blockwise --peer cublas --peer humming --peer scaled_mm --peer int_mm"
        f" --m 1 --m 16 --m 64 --m 256 {_MANY}",
        80,
        compiles=True,
    ),
    Page("quantizers", "quantize", 70, promises=True),
    Page(
        "moe",
        "moe --skew uniform --skew zipf --m 1 --m 4 --m 16 --m 64 --m 256 --m 1024 --m 2048 --m 4096 --m 16384",
        170,
        compiles=True,
    ),
    Page(
        "moe_models",
        "moe --no-peers --model qwen3-235b-a22b --model gpt-oss-20b --model deepseek-v3-tp8 --model deepseek-v3"
        " --m 1 --m 16 --m 256 --m 4096",
        20,
    ),
    Page("step", "step --batch 1 --batch 8 --batch 32 --batch 64 --lm-head 4", 470),
    Page("step_context", "step --batch 1 --batch 8 --context 8192", 190),
    Page("step_prompt", "step --batch 1 --prompt 2048", 100),
    Page("step_smollm2", "step --model smollm2-135m --scheme w4a16_g64 --batch 1 --batch 32", 150),
    Page("step_qwen3", "step --model qwen3-30b-a3b --blocks 8 --batch 1 --batch 8", 70),
    Page("step_qwen3_whole", "step --model qwen3-30b-a3b --batch 1", 250),
    Page("host", ".host", 10),
    Page("first_call", "first-call", 15),
)

Launch: TypeAlias = Callable[[Sequence[str], dict[str, str], Path], int]
"""Runs Python with arguments, in an environment, its output going to a file; the exit status."""


def launch(words: Sequence[str], environment: dict[str, str], log: Path) -> int:
    with log.open("w") as file:
        return subprocess.run(
            [sys.executable, *words],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
            close_fds=False,  # an orphan keeps the lock of its folder
        ).returncode


def alone(path: Path) -> TextIO:
    """A lock that this process has, and its children until they end, as long as the file is open.

    Raises:
        ValueError: another one has it.
    """
    lock = path.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(f"{path}: another run makes pages there; wait for it") from None
    os.set_inheritable(lock.fileno(), True)
    return lock


def is_done(page: Page, folder: Path, commit: str | None) -> bool:
    """Whether the folder has a page of this command and this commit, which no changed tree has."""
    if commit is None or commit.endswith("+") or not (folder / f"{page.name}.md").exists():
        return False
    try:
        facts = json.loads((folder / f"{page.name}.json").read_text())["facts"]
        return bool(facts["commit"] == commit and facts["command"] == page.command)
    except (OSError, ValueError, KeyError, TypeError):
        return False


class Run:
    """Pages that GPUs make side by side.

    Args:
        folder: of the pages. Files of what has not ended well stay in a folder in it, with what was printed.
        devices: numbers of GPUs, as CUDA_VISIBLE_DEVICES names them.
        seconds: no page is begun that may take longer.
    """

    def __init__(self, folder: Path, devices: Sequence[str], seconds: float, start: Launch = launch) -> None:
        self._folder, self._devices, self._launch = folder, devices, start
        self._unfinished = folder / _UNFINISHED
        self._unfinished.mkdir(parents=True, exist_ok=True)
        self._end = time.monotonic() + seconds

    def compile(self, pages: Iterable[Page], processes: int) -> None:
        """Lets so many processes run every page that compiles, each number of rows by itself; nothing is kept."""
        parts = [part for page in pages if page.compiles for part in page.parts()]
        waiting = [part for part in parts if not self._compiled(part).exists()]
        self._each(waiting, [device for device in self._devices for _ in range(processes)], self._tried)

    def make(self, pages: Iterable[Page]) -> list[str]:
        """Makes pages, the longest first; the names of those that failed or were not begun."""
        wanted = sorted(pages, key=lambda page: -page.seconds)
        made = self._each(wanted, self._devices, self._made)
        return [page.name for page in wanted if page.name not in made]

    def _each(self, pages: Iterable[Page], devices: Sequence[str], act: Callable[[Page, str], bool]) -> set[str]:
        """The names of pages of which `act` has said that they are done."""
        queue: SimpleQueue[Page] = SimpleQueue()
        for page in pages:
            queue.put(page)
        done: set[str] = set()

        def work(device: str) -> None:
            failures = 0
            while failures < _MOST_FAILURES:
                try:
                    page = queue.get_nowait()
                except Empty:
                    return
                if time.monotonic() + page.seconds > self._end:
                    continue
                failures = 0 if act(page, device) else failures + 1
                if failures == 0:
                    done.add(page.name)

        with ThreadPoolExecutor(len(devices)) as pool:
            try:
                list(pool.map(work, devices))
            except BaseException:
                self._end = 0.0  # the others begin nothing more
                raise
        return done

    def _started(self, page: Page, device: str, options: Sequence[str]) -> int:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device}
        return self._launch([*page.words, *options], environment, self._unfinished / f"{page.name}.log")

    def _compiled(self, part: Page) -> Path:
        """Says that the part has run."""
        return self._unfinished / f"{part.name}.compiled"

    def _tried(self, page: Page, device: str) -> bool:
        good = self._started(page, device, []) == 0
        if good:
            self._compiled(page).touch()
        return good

    def _made(self, page: Page, device: str) -> bool:
        begin = time.monotonic()
        files = [self._unfinished / f"{page.name}{end}" for end in (".json", ".md")]
        for file in files:
            file.unlink(missing_ok=True)
        status = self._started(page, device, ["--json", str(files[0]), "--markdown", str(files[1])])
        good = (status == 0 or (page.promises and status == 1)) and all(file.exists() for file in files)
        if good:
            for file in reversed(files):  # .json last: it says that the page is done
                file.replace(self._folder / file.name)
        console.print(f"{'made' if good else 'FAILED'} {page.name}, GPU {device}: {time.monotonic() - begin:.0f} s")
        return good


def pages_command(
    names: Annotated[list[str] | None, typer.Argument(help="Pages; none: all.")] = None,
    folder: Annotated[Path, typer.Option(file_okay=False, help="Where pages lie.")] = RESULTS,
    seconds: Annotated[float, typer.Option(min=0, help="Begin no page that may take longer.")] = 1e9,
    gpu: Annotated[list[str], typer.Option(help="Numbers of GPUs to use; repeatable; default: all.")] = [],  # noqa: B006
    compilers: Annotated[
        int, typer.Option(min=0, help="Processes a GPU that let peers compile their kernels first.")
    ] = 0,
    show: Annotated[bool, typer.Option("--list", help="Print names and commands, and whether they are done.")] = False,
) -> None:
    """All tables of the documentation that a GPU makes; those of this commit are not made again.

    Exits with 1 if one failed or was not begun.
    """
    known = {page.name: page for page in PAGES}
    chosen = [known[one_of("NAME", name, known)] for name in dict.fromkeys(names or known)]
    commit = origin.tree_commit()
    if show:
        for page in chosen:
            state = "done" if is_done(page, folder, commit) else f"~{page.seconds} s"
            console.print(f"{page.name:<16} {state:>6}  {page.command}", highlight=False, soft_wrap=True)
        return
    if not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device; --list needs none")
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    devices = list(dict.fromkeys(gpu or visible or map(str, range(torch.cuda.device_count()))))
    if commit is None or commit.endswith("+"):
        console.print(f"commit {commit}: pages of a tree that is not committed are made again each time")
    wanted = [page for page in chosen if not is_done(page, folder, commit)]
    run = Run(folder, devices, seconds)
    with parsed(lambda: alone(folder / _UNFINISHED / "lock")):
        if compilers > 0:
            run.compile(wanted, compilers)
        missing = run.make(wanted)
    if missing:
        console.print(f"not made: {', '.join(missing)}; logs in {folder / _UNFINISHED}")
    raise typer.Exit(1 if missing else 0)
