"""What compute-sanitizer watches: every kernel and every option is among it; tried on a CPU."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest
from tests.python import test_grouped_gates
from tests.python.kinds import DESCRIPTIONS
from tests.python.kinds.description import Product
from tests.python.sanitizer_matrix import SHAPES, Run, main, run_gates_of_experts, run_kind, tasks

SMALL = ("--device", "cpu", "--shape", "5", "32", "70")


@dataclass
class Names(Run):
    """Launches nothing."""

    names: set[str] = field(default_factory=set)

    def products(
        self, names: list[str], check: Callable[[str, int], float], splits: Sequence[int] | None = None
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
    part, states = [*SMALL, "--part", "7", "60"], [tmp_path / "0", tmp_path / "1"]
    main(part)
    whole = capsys.readouterr().out.rsplit(",", 1)[0]
    main([*part, "--state", str(states[0])])
    assert capsys.readouterr().out.startswith(whole)
    saved = json.loads(states[0].read_text())
    states[0].write_text(json.dumps(saved | {"done": saved["done"] - 1}))
    main([*part, "--state", str(states[0])])
    again = json.loads(states[0].read_text())
    assert again["done"] == again["tasks"] == saved["tasks"]
    assert again["launched"] == saved["launched"]
    assert saved["launches"] < again["launches"] < 2 * saved["launches"]
    states[1].write_text(json.dumps(saved | {"fitting": ["unlaunched"], "launched": ["launched"]}))
    capsys.readouterr()
    with pytest.raises(SystemExit, match="never launched, though the GPU can run them: unlaunched"):
        main(["--sum", *map(str, states)])
    said = capsys.readouterr().out
    launches, kernels = numbers(said)
    assert launches == saved["launches"] + again["launches"]
    assert kernels == len(saved["launched"]) + 1
    assert said.endswith(f", {2 * saved['tasks']} of {2 * saved['tasks']} tasks\n")
    main(["--sum", str(states[0])])
    assert numbers(capsys.readouterr().out) == (again["launches"], len(again["launched"]))


def test_a_wrong_product_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Product.outs
    monkeypatch.setattr(Product, "outs", lambda self, **options: tuple(out * 1.5 for out in right(self, **options)))
    with pytest.raises(AssertionError):
        main([*SMALL, "--part", "0", "60"])


def test_a_wrong_gate_of_experts_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    task = next(task for task in tasks(SHAPES, "cpu") if task.func is run_gates_of_experts)
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
