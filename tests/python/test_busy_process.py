"""Products repeat bit for bit while another process computes on the same device.

Two processes on a GPU take turns in slices of time, or share it where CUDA's MPS runs: a block may wait for any other,
and caches hold what others read. On the CPU they share cores and caches.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from tests.python import test_grouped
from tests.python.kinds import DESCRIPTIONS
from tests.python.soak import same
from torch import Tensor

from qcutlass import _C
from qcutlass.testing import Case, GroupedCase

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAUNCHES, AT_ONCE = 200, 50
TURNS = 3
SIZES = {"cpu": [(3, 96, 264)], "cuda": [(1, 4096, 4096), (17, 2048, 4096), (300, 3072, 2048)]}
MATRIX = {"cpu": 128, "cuda": 4096}
"""Of dense products of the other process, which keep a GPU busy while the host has something else to do."""

NEIGHBOUR = """
import itertools, sys
import torch
from tests.python.test_busy_process import MATRIX, products, same

device, seed = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(2)
matrix = torch.randn(MATRIX[device], MATRIX[device], device=device)
work = [(run, [out.clone() for out in run()]) for _, run in products(device, seed)]
for turn in itertools.count():
    for run, expected in work:
        for _ in range(4):
            torch.mm(matrix, matrix)
        if not same(run(), expected):
            sys.exit("a product of the busy process differs from the first time")
    print(turn, flush=True)
"""


def products(device: str, seed: int) -> Iterator[tuple[str, Callable[[], Sequence[Tensor]]]]:
    """Products of every kind that the device has, judged once."""
    for number, (m, n, k) in enumerate(SIZES[device]):
        for name, kind in DESCRIPTIONS.items():
            if device == "cpu" or kind.serves(_C.device_traits(torch.cuda.current_device())):
                product = kind.random(kind.on(device, kind.case(m, n, k)), device, seed + number)
                kind.assert_correct(product.outs(), product.problem)
                yield f"{name} {m} {n} {k}", product.outs
        case = Case(m, n, k, group_size=64)
        problem = GroupedCase(case, (m, 0, 5, 2 * m), before=1, scaled=True).random(device=device, seed=seed + number)
        out = test_grouped.product(problem)
        assert problem.error_ratio(out, test_grouped.weight_dtype(problem, None)) <= 1
        yield f"gemm_grouped {m} {n} {k}", lambda problem=problem: [test_grouped.product(problem)]  # type: ignore[misc]


@contextlib.contextmanager
def busy_process(device: str, seed: int, repository: Path) -> Iterator[Callable[[], int]]:
    """Another process that multiplies and compares; gives the number of turns that it has made so far."""
    command = [sys.executable, "-c", NEIGHBOUR, device, str(seed)]
    process = subprocess.Popen(command, cwd=repository, stdout=subprocess.PIPE, text=True)
    turns: list[str] = []

    def read() -> None:
        assert process.stdout
        turns.extend(iter(process.stdout.readline, ""))

    def so_far() -> int:
        assert process.poll() is None, "the busy process has ended"
        return len(turns)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        waits_until = time.monotonic() + 300
        while not so_far() and time.monotonic() < waits_until:
            time.sleep(0.05)
        assert so_far()
        yield so_far
        so_far()
    finally:
        process.kill()
        process.wait()
        reader.join()


@pytest.mark.parametrize("device", DEVICES)
def test_products_repeat_beside_a_busy_process(device: str, seed: int, repository: Path) -> None:
    """What they gave alone, 200 times each and for as long as the other takes for three turns."""
    work = [(name, run, [out.clone() for out in run()]) for name, run in products(device, seed)]
    with busy_process(device, seed + 100, repository) as turns:
        begin, launches = turns(), 0
        while launches < LAUNCHES or turns() < begin + TURNS:
            for name, run, expected in work:
                several = [run() for _ in range(AT_ONCE)]
                assert all(same(outs, expected) for outs in several), name
            launches += AT_ONCE
    assert launches >= LAUNCHES


def test_a_busy_process_that_ends_is_seen(seed: int, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "NEIGHBOUR", "import time; print(0, flush=True); time.sleep(0.5)")

    def wait() -> None:
        with busy_process("cpu", seed, repository) as turns:
            assert turns() == 1
            time.sleep(3)

    with pytest.raises(AssertionError, match="has ended"):
        wait()
