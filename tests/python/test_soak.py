"""Random problems of every kind: a few of each, again and again, by many threads at once; that `soak.py`, which tries
as many as one likes, finds what is wrong."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.python import random_products, soak
from tests.python.random_products import KINDS, Trial, kinds_on
from tests.python.running import in_threads
from torch import Tensor

import qcutlass
from qcutlass.products.weight_only import WEIGHT_ONLY

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


def test_growth_is_between_the_second_fifth_and_the_last() -> None:
    flat = [300, 400, 401, 402, 400, 403, 399, 404, 400, 401]
    assert soak.growth(flat) == -1
    assert soak.growth([size + 10 * index for index, size in enumerate(flat)]) == 59
    assert soak.growth([]) == soak.growth([1, 2, 3]) == 0


def test_memory_of_a_process_is_seen() -> None:
    memory = soak.memory_of("cpu")["process"]
    before = memory.now()
    leak = torch.ones(1 << 26)  # more than the allocator may have at hand
    assert memory.now() - before > 200 << 20
    del leak


@pytest.mark.gpu
def test_memory_of_a_gpu_is_seen() -> None:
    """That of torch's tensors, and of the device; what torch keeps for later counts as free. Other processes may take
    and give back some at any time."""
    watched = soak.memory_of("cuda")
    before = soak.sizes_now(watched)
    leak = torch.ones(1 << 28, device="cuda")
    after, kept = soak.sizes_now(watched), torch.cuda.memory_reserved()
    assert after["tensors"] - before["tensors"] == 1 << 30
    assert after["device"] >= kept >= 1 << 30
    del leak
    assert soak.sizes_now(watched)["tensors"] == before["tensors"]
    assert torch.cuda.memory_reserved() == kept - (1 << 30)


def test_remembered_calls_do_not_count(seed: int) -> None:
    """They are bounded by their number, and an hour may be too short for as many."""
    for trial in trials("gemm", 2, "cpu", seed):
        trial.run()
    assert len(WEIGHT_ONLY.launches) > 0
    assert set(soak.sizes_now(soak.memory_of("cpu"))) == {"process"}
    assert len(WEIGHT_ONLY.launches) == 0


@pytest.mark.parametrize("name", ["device", "tensors", "process"])
def test_memory_that_grows_is_reported(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a GPU, which this test has no need of, any of the three."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    watched = soak.memory_of("cuda")
    assert set(watched) == {"device", "tensors", "process"}
    most = watched[name].most
    for more, failed in ((most, 0), (most + 1, 1)):
        sizes = [dict.fromkeys(watched, 0) for _ in range(8)] + [dict.fromkeys(watched, 0) | {name: more}] * 2
        monkeypatch.setattr(soak, "soak", lambda *_, sizes=sizes: ({"gemm": soak.Tally(cases=1)}, sizes))
        assert soak.main(["--device", "cuda", "--cases", "1"]) == failed
        printed = capsys.readouterr().out
        assert printed.startswith("seed ")
        assert ", cuda, a GPU\n" in printed
        assert f"memory, {name}: MiB at every tenth look: 0; it grew by {more / 2**20:.1f} MiB" in printed
        assert printed.count("it grew by 0.0 MiB") == 2


def test_memory_of_a_gpu_that_others_use_is_not_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And runs of a log say in how many it was."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    assert set(soak.memory_of("cuda", shared=True)) == {"tensors", "process"}

    def run(seed: int, *more: str) -> list[str]:
        def no_run(*given: Any) -> tuple[dict[str, soak.Tally], list[dict[str, int]]]:
            shared = given[-1]
            return {"gemm": soak.Tally(cases=1)}, [dict.fromkeys(soak.memory_of("cuda", shared), 0)] * 10

        monkeypatch.setattr(soak, "soak", no_run)
        arguments = ["--device", "cuda", "--cases", "1", "--log", str(tmp_path / "log"), "--seed", str(seed), *more]
        assert soak.main(arguments) == 0
        return capsys.readouterr().out.splitlines()

    alone, shared = run(1), run(2, "--shared")
    assert "memory, device: MiB at every tenth look: 0; it grew by 0.0 MiB" in alone
    assert "memory, device: not watched, since others use it" in shared
    assert not any("memory, device: MiB" in line for line in shared)
    assert (
        "memory grew by at most: device 0.0 MiB (watched in 1), tensors 0.0 MiB, process 0.0 MiB "
        "(runs that were long enough to tell: 2); 0 of them failed"
    ) in shared[-1]
    with pytest.raises(SystemExit):
        soak.main(["--cases", "1", "--shared"])
    assert "--shared: expected --device cuda" in capsys.readouterr().err


def test_soaks_watch_what_they_are_told_to(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[tuple[str, bool]] = []

    def nothing(device: str, shared: bool) -> dict[str, soak.Memory]:
        watched.append((device, shared))
        return {}

    monkeypatch.setattr(soak, "memory_of", nothing)
    for shared in (False, True):
        soak.soak(lambda *_: False, "cpu", seed, ["weights"], shared=shared)
    assert watched == [("cpu", False), ("cpu", True)]


def test_kernels_are_loaded_before_the_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver reads the variable when CUDA starts: the program sets it before it asks for the GPU's name."""
    monkeypatch.setenv("CUDA_MODULE_LOADING", "LAZY")
    soak.parsed(["--cases", "1"])
    assert os.environ["CUDA_MODULE_LOADING"] == "LAZY", "of no concern on a CPU"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: os.environ["CUDA_MODULE_LOADING"])
    assert soak.parsed(["--device", "cuda", "--cases", "1"]).where == "cuda, EAGER"


def test_memory_of_a_gpu_is_what_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def look() -> tuple[int, int]:
        done.append("look")
        return 30, 100

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", look)
    assert soak.memory_of("cuda")["device"].now() == 70
    assert done == ["synchronize", "empty_cache", "look"]


def test_runs_of_a_log_are_added_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An hour in pieces: each kind's cases, errors and failures, what memory grew by at most, and which runs failed."""
    log = tmp_path / "soak.jsonl"

    def run(seed: int, tally: soak.Tally, sizes: list[int], *more: str) -> tuple[int, list[str]]:
        tallies = {"gemm": tally, "weights": soak.Tally(1000, 1000)}
        monkeypatch.setattr(soak, "soak", lambda *_: (tallies, [{"process": size << 20} for size in sizes]))
        status = soak.main(["--seed", str(seed), "--cases", "1", "--threads", "2", "--log", str(log), *more])
        return status, capsys.readouterr().out.splitlines()

    flat, most = [5] * 10, soak.memory_of("cpu")["process"].most >> 20
    status, printed = run(1, soak.Tally(100, 40, 0.5, 0), flat)
    assert status == 0
    assert printed[-1] == (
        "1 run on cpu, 2 threads: 0.0 minutes, 1100 cases, 1040 identities, largest error / bound 0.500, 0 failures; "
        "memory grew by at most: process 0.0 MiB (runs that were long enough to tell: 1); 0 of them failed"
    )
    assert run(2, soak.Tally(10, 1, 1.5, 1), [*flat, 9, 9, 9])[0] == 1
    run(3, soak.Tally(7, 7, 0.0, 0), [5, 500])  # too short to tell
    other = run(4, soak.Tally(5, 5, 0.9, 0), flat, "--kind", "weights")[1]
    assert other[-1].startswith("1 run on cpu, 2 threads, of weights alone: 0.0 minutes, 1005 cases,")
    assert run(5, soak.Tally(2), [*flat, *[6 + most] * 3])[0] == 1
    status, printed = run(6, soak.Tally(1, 0, 0.25, 0), flat)
    assert status == 0, "of this run alone"
    assert printed[-6:] == [
        "| kind | cases | identities | largest error / bound | failures |",
        "|---|---|---|---|---|",
        "| gemm | 120 | 48 | 1.500 | 1 |",
        "| weights | 5000 | 5000 | 0.000 | 0 |",
        "| all | 5120 | 5048 | 1.500 | 1 |",
        "5 runs on cpu, 2 threads: 0.0 minutes, 5120 cases, 5048 identities, largest error / bound 1.500, 1 failures; "
        f"memory grew by at most: process {most + 1}.0 MiB (runs that were long enough to tell: 4); 2 of them failed",
    ]
    runs = [soak.Run.of_line(line) for line in log.read_text().splitlines()]
    assert [run.seed for run in runs] == [1, 2, 3, 4, 5, 6]
    assert [run.success for run in runs] == [True, False, True, True, False, True]
    with pytest.raises(SystemExit):
        run(2, soak.Tally(), [])
    assert "--seed 2: " in capsys.readouterr().err, "problems are counted once"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            '{"where": "cpu", "seed": 1, "seconds": 9.0, "tally": {}, "grown": {}}',
            "expected grown, seconds, seed, success, tallies, where, got grown, seconds, seed, tally, where",
        ),
        ("1 run on cpu", "Extra data"),
        ("57", "expected grown, seconds, seed, success, tallies, where, got 57"),
    ],
    ids=["of the program before it kept kinds", "no JSON", "no run"],
)
def test_lines_of_other_programs_are_refused(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "soak.jsonl"
    log.write_text(f"{json.dumps(asdict(soak.Run('cpu', 2, 9.0, {}, {}, True)))}\n{line}\n")
    with pytest.raises(SystemExit):
        soak.main(["--cases", "1", "--log", str(log)])
    assert f"--log: {log}, line 2: not a run of this program; begin another file: {said}" in capsys.readouterr().err


def test_minutes_of_a_log_are_those_that_runs_took(tmp_path: Path) -> None:
    tallies = {"gemm": soak.Tally(3, 1, 0.5)}
    runs = [soak.Run("cpu, 1 threads", seed, 90.0, tallies, {}, True) for seed in (1, 2)]
    line = soak.summary(runs).splitlines()[-1]
    assert line.startswith("2 runs on cpu, 1 threads: 3.0 minutes, 6 cases, 2 identities,")
    assert line.endswith("; no run was long enough to tell whether memory grew; 0 of them failed")
    assert soak.runs_of(tmp_path / "none yet", "cpu, 1 threads") == soak.runs_of(None, "cpu, 1 threads") == []


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
