"""What compute-sanitizer watches: tried on a CPU, and every kernel is among it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from tests.python import sanitizer_matrix
from tests.python.kinds import DESCRIPTIONS
from tests.python.kinds.description import Product
from tests.python.sanitizer_matrix import Run, tasks


@dataclass
class Names(Run):
    """Launches nothing."""

    def products(
        self, names: list[str], check: Callable[[str, int], float], splits: Sequence[int] | None = None
    ) -> None:
        self.known |= set(names)


def test_every_kernel_is_launched() -> None:
    run = Names("", [1], "cpu")
    for number, task in enumerate(tasks([(3, 32, 96), (3, 40, 512)], "cpu")):
        task(run, number)
    built = {name.split("_")[0] for name in run.known}
    assert built >= {"w4a16", "w8a16", "e2m1a16", "e4m3a16", "w8a8", "w4a8"}
    for kind in DESCRIPTIONS.values():
        for draw in kind.families.values():
            for seed in range(20):
                case = draw(3, 4096, 4096, random.Random(seed))
                assert {traits.name for traits in kind.traits(case)} <= run.known


def test_a_part_of_it_runs_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    sanitizer_matrix.main(["--device", "cpu", "--shape", "5", "32", "70", "--part", "7", "60"])
    assert "largest |error| / bound 0." in capsys.readouterr().out


def test_a_wrong_product_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Product.outs
    monkeypatch.setattr(Product, "outs", lambda self, **options: tuple(out * 1.5 for out in right(self, **options)))
    with pytest.raises(AssertionError):
        sanitizer_matrix.main(["--device", "cpu", "--shape", "5", "32", "70", "--tactic", "w4a16", "--part", "0", "60"])


def test_kernels_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    sanitizer_matrix.main(
        ["--device", "cpu", "--shape", "5", "32", "70", "--tactic", "_sm90a_", "--without", "m64", "--part", "0", "60"]
    )
    run = Run("_sm90a_", [1], "cpu", "m64")
    run.products(["a_sm90a_m64", "a_sm90a_m32", "a_sm80_m32"], lambda tactic, split_k: 0.5)
    assert run.launched == {"a_sm90a_m32"}
    assert "products by" in capsys.readouterr().out


def test_names_that_no_kernel_has_are_told() -> None:
    with pytest.raises(SystemExit, match="no kernel's name contains 'no_such'"):
        sanitizer_matrix.main(["--device", "cpu", "--tactic", "no_such", "--part", "0", "30"])
