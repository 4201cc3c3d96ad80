"""What compute-sanitizer watches: every kernel and every option is among it; tried on a CPU."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.python import sanitizer_matrix, test_grouped_gates
from tests.python.kinds import DESCRIPTIONS
from tests.python.kinds.description import Product
from tests.python.sanitizer_matrix import (
    OF_EXPERTS,
    OF_GATES,
    OF_WRONG,
    SHAPES,
    Run,
    Task,
    main,
    run_codes,
    run_experts,
    run_gates_of_experts,
    run_kind,
    run_wrong_indices,
    tasks,
)

from qcutlass.products import selection

SMALL = ("--device", "cpu", "--shape", "5", "32", "70")


@dataclass
class Names(Run):
    """Launches nothing."""

    names: set[str] = field(default_factory=set)

    def products(
        self,
        names: list[str],
        check: Callable[[str, int], float],
        splits: Sequence[int] | None = None,
        use: str = "",
    ) -> None:
        self.names |= set(names)


def test_every_kernel_and_option_is_among_the_tasks(seed: int) -> None:
    run, options = Names("", [1], "cpu"), set()
    for number, task in enumerate(tasks(SHAPES, "cpu", seed)):
        if task.func is run_kind:
            kind, case = task.args
            run.names |= {traits.name for traits in kind.traits(case)}
            options |= {(kind.name, member.name, getattr(case, member.name)) for member in fields(case)}
        else:
            task(run, number)
    assert {name.split("_")[0] for name in run.names} == {"w4a16", "w8a16", "e2m1a16", "e4m3a16", "w8a8", "w4a8"}
    for kind in DESCRIPTIONS.values():
        for family, draw in kind.families.items():
            for number in range(20):
                case = draw(3, 4096, 4096, random.Random(f"{seed} {family} {number}"))
                assert {traits.name for traits in kind.traits(case)} <= run.names
                of_case = {(kind.name, member.name, getattr(case, member.name)) for member in fields(case)}
                assert {option for option in of_case if option[1] not in "mnk"} <= options


def numbers(output: str) -> tuple[int, int]:
    """Products and kernels, as the program prints them."""
    found = re.search(r"(\d+) products by (\d+) kernels, largest \|error\| / bound 0\.\d+", output)
    assert found, output
    return int(found[1]), int(found[2])


def test_code_for_sm80_leaves_out_what_needs_fp8_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Int4 by int8 runs there, and int4 by fp8 does not."""
    monkeypatch.setattr(sanitizer_matrix, "H200", selection.GPUS["a100"])
    cases: dict[str, list[Any]] = {}
    for task in tasks(SHAPES[:1], "cpu"):
        if isinstance(task, partial) and task.func is run_kind:
            kind, case = task.args
            cases.setdefault(kind.name, []).append(case)
    left_out = {kind.name for kind in DESCRIPTIONS.values()} - set(cases)
    assert left_out == {kind.name for kind in DESCRIPTIONS.values() if kind.capability > (8, 0)} - {"gemm_w4a8"}
    assert {case.dtype for case in cases["gemm_w4a8"]} == {torch.int8}


def test_a_part_of_it_runs_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "--part", "7", "60"])
    every = numbers(capsys.readouterr().out)
    main([*SMALL, "--part", "7", "60", "--without", "_sm90a_", "--without", "_stream_"])
    assert (0, 0) < numbers(capsys.readouterr().out) < every
    main([*SMALL, "--part", "7", "60", "--tactic", "no_such"])  # another part may have it
    assert "0 products by 0 kernels" in capsys.readouterr().out


def test_it_ends_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "--seconds", "-1"])
    assert re.fullmatch(r"0 products by 0 kernels, .*, 0 of \d{3} tasks, \d+ s\n", capsys.readouterr().out)
    main([*SMALL, "--part", "7", "60"])
    done, every = re.search(r"(\d+) of (\d+) tasks", capsys.readouterr().out).groups()  # type: ignore[union-attr]
    assert done == every != "0"


def test_it_goes_on_where_it_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part, state = [*SMALL, "--part", "7", "60"], tmp_path / "7"
    main(part)
    whole = capsys.readouterr().out.rsplit(",", 1)[0]
    main([*part, "--state", str(state), "--seconds", "-1"])
    assert json.loads(state.read_text())["done"] == 0, "that it was begun is known"
    main([*part, "--state", str(state)])
    assert capsys.readouterr().out.splitlines()[-1].startswith(whole)
    saved = json.loads(state.read_text())
    state.write_text(json.dumps(saved | {"done": saved["done"] - 1}))
    main([*part, "--state", str(state)])
    again = json.loads(state.read_text())
    assert again["done"] == again["tasks"] == saved["tasks"]
    assert again["launched"] == saved["launched"]
    assert saved["launches"] < again["launches"] < 2 * saved["launches"]


OTHERS = {
    "part 7, not 6": ["--part", "6", "60"],
    "parts 60, not 59": ["--part", "7", "59"],
    "seed 1, not 2": ["--seed", "2"],
    "tactic '', not 'stream'": ["--tactic", "stream"],
    "without [], not ['_sm90a_']": ["--without", "_sm90a_"],
    "split_k [1, 2], not [1]": ["--split-k", "1"],
    "shape [5, 32, 70], not [6, 32, 70]": ["--shape", "6", "32", "70"],
}


@pytest.mark.parametrize("said", OTHERS)
def test_a_state_of_another_run_is_refused(said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state"
    begun = [*SMALL, "--part", "7", "60", "--state", str(state), "--seconds", "-1"]
    main(begun)
    before = state.read_text()
    with pytest.raises(SystemExit, match=re.escape(f"{state} is of another run: {said}") + "$"):
        main([*begun, *OTHERS[said]])
    assert state.read_text() == before
    for name in ("device", "kernels"):
        values = json.loads(before)
        state.write_text(json.dumps(values | {"of": values["of"] | {name: "another"}}))
        with pytest.raises(SystemExit, match=rf" is of another run: {name} 'another', not '[^;]*'$"):
            main(begun)
    state.write_text(json.dumps({name: value for name, value in json.loads(before).items() if name != "of"}))
    for run in (begun, ["--sum", str(state)]):
        with pytest.raises(SystemExit, match=r" is of another run: it does not say of which$"):
            main(run)
    assert "0 of" in capsys.readouterr().out


def states_of(folder: Path, parts: int) -> list[Path]:
    """Of a run in parts, none of whose tasks is done."""
    files = [folder / str(part) for part in range(parts)]
    for part, file in enumerate(files):
        main(["--device", "cpu", "--part", str(part), str(parts), "--state", str(file), "--seconds", "-1"])
    return files


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_the_sum_is_of_all_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = states_of(tmp_path, 3)
    counts = [json.loads(file.read_text())["tasks"] for file in files]
    total = sum(counts)
    for number, file in enumerate(files):
        launched = [f"kernel {number}", f"kernel {number}{OF_EXPERTS}", f"kernel {number}{OF_GATES}"]
        change(file, done=counts[number], launches=10 + number, worst=number / 10, launched=launched)
    capsys.readouterr()

    def wrong() -> str:
        with pytest.raises(SystemExit) as ended:
            main(["--sum", *map(str, files)])
        return str(ended.value)

    main(["--sum", *map(str, files)])
    assert capsys.readouterr().out == (
        f"33 products by 6 kernels, largest |error| / bound 0.200, {total} of {total} tasks\n"
    )
    change(files[1], done=counts[1] - 4)
    assert wrong() == f"4 of {total} tasks are missing"
    change(files[1], done=counts[1], fitting=["kernel 2", "kernel 2 of others", "kernel 7"])
    assert wrong() == "never launched, though the GPU can run them: kernel 2 of others, kernel 7"
    change(files[1], fitting=[])
    all_files, files = files, files[:1]
    assert wrong() == "of 3 parts are missing 1, 2"
    files = [*all_files, all_files[1]]
    assert wrong() == "--sum: expected each part once, got 0, 1, 1, 2"
    files = all_files
    change(files[2], of=json.loads(files[2].read_text())["of"] | {"seed": 9})
    assert wrong() == f"{files[2]} is of another run: seed 9, not 1"


def first_task(function: Callable[..., None]) -> Task:
    return next(task for task in tasks(SHAPES, "cpu") if task.func is function)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("function", "use"),
    [(run_kind, ""), (run_codes, ""), (run_experts, OF_EXPERTS), (run_gates_of_experts, OF_GATES)],
)
def test_what_is_not_launched_is_missed(
    function: Callable[..., None], use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each kind of task; what experts run counts for itself, as gates do."""
    run, right = Run("", [1], "cpu"), Run.products
    first_task(function)(run, 1)
    assert run.fitting
    assert all(name.endswith(use) and (use or " " not in name) for name in run.fitting)
    assert run.never_launched() == ""
    lost = min(run.fitting).removesuffix(use)
    monkeypatch.setattr(Run, "products", lambda self, names, *rest: right(self, [n for n in names if n != lost], *rest))
    other = Run("", [1], "cpu")
    first_task(function)(other, 1)
    assert other.never_launched().endswith(f": {lost}{use}")


def test_wrong_indices_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU refuses them, so that nothing is launched here."""
    run = Run("", [1], "cpu")
    monkeypatch.setattr(Run, "products", lambda *_: None)
    run_wrong_indices(first_task(run_experts).args[0], (4, 3, 6), run, 1)  # type: ignore[attr-defined]
    assert run.fitting
    assert all(name.endswith(OF_WRONG) for name in run.fitting)


def test_a_wrong_product_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Product.outs
    monkeypatch.setattr(Product, "outs", lambda self, **options: tuple(out * 1.5 for out in right(self, **options)))
    with pytest.raises(AssertionError):
        main([*SMALL, "--part", "0", "60"])


def test_a_wrong_gate_of_experts_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    task = first_task(run_gates_of_experts)
    run, right = Run("", [1], "cpu"), test_grouped_gates.separately
    task(run, 1)
    assert run.launches > 0
    monkeypatch.setattr(test_grouped_gates, "separately", lambda *given: right(*given).roll(1, 1))
    with pytest.raises(AssertionError):
        task(run, 1)


def test_what_cannot_be_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="no kernel that the GPU can run has 'no_such' in its name"):
        main(["--device", "cpu", "--tactic", "no_such", "--shape", "5", "32", "70"])
    for part in (("3", "3"), ("0", "0")):
        with pytest.raises(SystemExit):
            main([*SMALL, "--part", *part])
    monkeypatch.setattr(Run, "products", lambda self, *_, **__: setattr(self, "launches", 1))
    with pytest.raises(SystemExit, match=r"never launched, though the GPU can run them: w4a16"):
        main(["--device", "cpu", "--tactic", "w4a16_f16_fine_sm80_n64"])
