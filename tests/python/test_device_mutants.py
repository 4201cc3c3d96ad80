"""The table of faults in device code, and what its program makes of runs of tests; the program itself needs a GPU."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
from tests.python import kernel_units
from tests.python.device_mutants.__main__ import Verdict, judge, table
from tests.python.device_mutants.building import Unit, slug
from tests.python.device_mutants.mutant import SOURCES, Mutant
from tests.python.device_mutants.running import Outcome, collect, kind_of, run
from tests.python.device_mutants.table import MUTANTS

from qcutlass import _C

LOOPS = (
    "stream",
    "multistage",
    "blockwise",
    "groups",
    "wgmma_rs",
    "wgmma_ss",
    "ring",
    "grouped",
    "norm",
    "moe",
    "quantiser",
)
mutants = pytest.mark.parametrize("mutant", MUTANTS, ids=slug)


@mutants
def test_texts_stand_in_their_files_once(mutant: Mutant) -> None:
    source = (SOURCES / mutant.file).read_text()
    changed = mutant.mutated()
    assert changed != source
    assert changed.count(mutant.replacement) >= 1
    assert source.count("{") - source.count("}") == changed.count("{") - changed.count("}")


def test_a_text_that_is_not_there_is_told() -> None:
    changed = Mutant("a fault", "norm", "cuda/decoder.cu", "no such text", "", "decoder", ())
    with pytest.raises(ValueError, match=r"a fault: cuda/decoder\.cu has 0 times, not once: no such text"):
        changed.mutated()


def test_the_table_covers_the_loops() -> None:
    assert len(MUTANTS) >= 25
    assert len({slug(mutant) for mutant in MUTANTS}) == len(MUTANTS)
    assert [loop for loop in LOOPS if not any(loop in mutant.loop for mutant in MUTANTS)] == []


def test_units_are_those_of_the_library(repository: Path, tmp_path: Path) -> None:
    written = kernel_units.write(repository, tmp_path).glob("*.cu")
    units = {path.stem for path in itertools.chain(written, SOURCES.glob("cuda/**/*.cu"))}
    assert {mutant.unit for mutant in MUTANTS} - units == set()


@pytest.fixture(scope="module")
def collected() -> list[str]:
    return collect(Path(str(_C.__file__)), sorted({part.file for mutant in MUTANTS for part in mutant.tests}))


def test_each_has_a_few_tests(collected: list[str]) -> None:
    counts = {(slug(mutant), part): len(part.among(collected)) for mutant in MUTANTS for part in mutant.tests}
    assert [key for key, count in counts.items() if not 0 < count < 25] == []


def test_commands_are_those_of_the_build_but_for_files() -> None:
    command = "nvcc -DNDEBUG -I{0}/cpp/src -O3 -MD -MT a.o -MF a.o.d -x cu -c {0}/cpp/src/cuda/rows.cu -o a.o"
    text = command.format(SOURCES.parents[1])
    unit = Unit.of({"output": "b/CMakeFiles/x.dir/a.o", "file": "b/rows.cu", "directory": "b", "command": text})
    assert (unit.target, unit.name) == ("x", "rows")
    plain = unit.command(Path("out.o"))
    assert plain == [*text.partition(" -MD")[0].split(), *f"-x cu -c {SOURCES}/cuda/rows.cu -o out.o".split()]
    moved = unit.command(Path("out.o"), Path("copy"), traps=True)
    assert moved == ["nvcc", "-Icopy/src", "-O3", "-x", "cu", "-c", "copy/src/cuda/rows.cu", "-o", "out.o"]


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("AssertionError: 3 elements differ", "assertion"),
        ("assert 3 == 4", "assertion"),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "CUDA error"),
        ("ValueError: a: no", "ValueError"),
    ],
)
def test_failures_have_kinds(message: str, kind: str) -> None:
    assert kind_of(message) == kind


TESTS = """
import os, time
import pytest

def test_right(): pass
def test_wrong(): assert 1 == 2
def test_error(): raise RuntimeError("CUDA error: misaligned address")
def test_slow(): time.sleep(60)
def test_crash(): os.abort()
def test_skipped(): pytest.skip("for a reason")
"""


@pytest.mark.parametrize(
    ("names", "word", "how"),
    [
        ("right", "SURVIVED", ""),
        ("right wrong", "caught", "assertion"),
        ("error right", "caught", "CUDA error"),
        ("slow", "caught", "timeout"),
        ("crash", "caught", "crash"),
        ("skipped", "NOT RUN", ""),
        ("absent", "NOT RUN", "error"),
    ],
)
def test_verdicts(names: str, word: str, how: str, tmp_path: Path) -> None:
    extension = tmp_path / "site" / "qcutlass" / "_C.so"
    extension.parent.mkdir(parents=True)
    extension.touch()
    (extension.parent / "__init__.py").write_text(f"class _C: __file__ = {str(extension)!r}\n")
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    outcome = run(extension, [f"{file}::test_{name}" for name in names.split()], 3 if names == "slow" else 60)
    verdict = judge(MUTANTS[0], outcome)
    assert (verdict.word, outcome.how) == (word, how), outcome.text
    assert verdict.good == (word == "caught")
    assert outcome.failed in ("", f"test_{names.split()[-1]}", "test_error")
    assert word in verdict.line()
    assert MUTANTS[0].name in table([verdict])


def test_another_extension_is_not_taken_for_the_mutant(tmp_path: Path) -> None:
    extension = tmp_path / "site" / "qcutlass" / "_C.so"
    extension.parent.mkdir(parents=True)
    extension.touch()
    (extension.parent / "__init__.py").write_text(f"class _C: __file__ = {sys.executable!r}\n")
    assert judge(MUTANTS[0], run(extension, [], 60)).word == "NOT RUN"


def test_the_control_passes_only_where_all_ran() -> None:
    def word(passed: int, skipped: int, how: str = "") -> str:
        return judge(None, Outcome(passed, skipped, "test" if how else "", how, "", 1.0)).word

    assert [word(3, 0), word(3, 1), word(0, 0), word(2, 0, "assertion")] == ["passed", "NOT RUN", "NOT RUN", "FAILED"]
    assert not Verdict(None, "NOT RUN", None, "no compiler").good
