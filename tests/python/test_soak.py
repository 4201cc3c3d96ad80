"""Random problems of every kind: a few of each, again and again, by many threads at once; that `soak.py`, which tries
as many as one likes, finds what is wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from tests.python import random_products, soak
from tests.python.random_products import KINDS, Trial, kinds_on
from tests.python.running import in_threads
from torch import Tensor

import qcutlass

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_both = pytest.mark.parametrize("device", DEVICES)
of_every_kind = pytest.mark.parametrize(
    ("kind", "device"),
    [
        pytest.param(kind, device, marks=[pytest.mark.gpu] if device == "cuda" else [], id=f"{kind}-{device}")
        for device in ("cpu", "cuda")
        for kind in kinds_on(device)
    ],
)


def trials(kind: str, problems: int, device: str, seed: int) -> Iterator[Trial]:
    for index in range(problems):
        yield from KINDS[kind](random.Random(f"{seed} {index}"), device)


@of_every_kind
def test_random_problems(kind: str, device: str, seed: int) -> None:
    lines: list[str] = []
    cases = 12 if device == "cpu" else 1000
    tallies, _ = soak.soak(lambda done, _: done < cases, device, seed, [kind], report=lines.append)
    assert lines == []
    assert tallies[kind].cases == cases
    assert tallies[kind].ratio <= 1


@of_every_kind
def test_launches_repeat_bit_for_bit(kind: str, device: str, seed: int) -> None:
    """Alone and beside a busy neighbour; on the CPU with any number of threads. `soak.py --launches` does more."""
    problems, launches = (1, 3) if device == "cpu" else (5, 40)
    for trial in trials(kind, problems, device, seed):
        assert list(soak.repeated(trial, launches, device)) == [], trial.label


@on_both
def test_calls_of_sixteen_threads(device: str, seed: int) -> None:
    """Each with problems of its own, of all kinds; on a GPU four threads share each stream."""
    names = kinds_on(device)
    streams = [torch.cuda.Stream() if device == "cuda" else None for _ in range(4)]

    def loop(number: int) -> None:
        with torch.cuda.stream(streams[number % 4]):
            for kind in random.Random(seed + number).sample(names, len(names)):
                for trial in trials(kind, 1, device, seed + number):
                    ratio = trial.judge(trial.run())
                    assert ratio <= 1, trial.label

    in_threads(loop, [(number,) for number in range(16)])


def wrong_once(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """qcutlass.gemm, the call number `times` of which loses its last row."""
    right, calls = qcutlass.gemm, iter(range(10**9))

    def gemm(*operands: Tensor, **options: object) -> Tensor:
        out: Tensor = right(*operands, **options)  # type: ignore[arg-type]
        if next(calls) == times:
            out[-1:] = torch.nan
        return out

    monkeypatch.setattr(qcutlass, "gemm", gemm)


def test_wrong_products_are_reported(
    seed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong_once(monkeypatch, 20)
    arguments = ["--seed", str(seed), "--cases", "60", "--kind", "weights", "--kind", "gemm, floating codes"]
    assert soak.main(arguments) == 1
    printed = capsys.readouterr().out
    assert f" of seed {seed}: AssertionError(" in printed
    assert printed.count("| 1 |\n") == 2, "one kind's failure, and the sum's"
    monkeypatch.undo()
    assert soak.main(arguments) == 0


def test_launches_that_differ_are_reported(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_once(monkeypatch, 5)
    products = (each for each in trials("gemm, floating codes", 30, "cpu", seed) if not each.exact)
    trial = next(each for each in products if (out := each.run()[0]).numel() and out.isfinite().all())
    monkeypatch.undo()
    wrong_once(monkeypatch, 5)
    assert list(soak.repeated(trial, 4, "cpu")) == ["1 of 4 launches differ, 2 threads, alone"]


def test_memory_that_grows_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    flat = [300, 400, 401, 402, 400, 403, 399, 404, 400, 401]
    assert soak.growth(flat) == -1
    assert soak.growth([size + 10 * index for index, size in enumerate(flat)]) == 59
    assert soak.growth([]) == soak.growth([1, 2, 3]) == 0
    before = soak.Memory("cpu").now()
    leak = torch.ones(1 << 26)  # more than the allocator may have at hand
    assert soak.Memory("cpu").now() - before > 200 << 20
    del leak
    most = soak.MOST_GROWTH
    monkeypatch.setattr(soak, "soak", lambda *_: ({"gemm": soak.Tally(cases=1)}, [0] * 8 + [most + 1] * 2))
    assert soak.main(["--cases", "1"]) == 1
    assert "it grew by 48.0 MiB" in capsys.readouterr().out


def test_kinds_that_a_gpu_has_not_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(KINDS) - set(kinds_on("cuda")) == {"gemm, int8 activations"}
    with pytest.raises(SystemExit):
        soak.main(["--device", "cuda", "--cases", "1", "--kind", "gemm, int8 activations"])
    assert "--kind 'gemm, int8 activations': cuda has none; expected one of gemm," in capsys.readouterr().err


def test_seeds_repeat(seed: int) -> None:
    first, again = ([str(trial.label) for trial in trials(kind, 2, "cpu", seed)] for kind in ["gemm"] * 2)
    assert first == again
    assert first != [str(trial.label) for trial in trials("gemm", 2, "cpu", seed + 1)]
    assert set(random_products.DESCRIPTIONS) < set(KINDS)
