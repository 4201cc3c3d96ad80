"""tools/gpu_check.sh without a GPU: what it runs under which sanitizer, what it leaves out, and that it says so.

Programs of the test's own stand for Python and for compute-sanitizer.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.python.sanitizer_matrix import SHAPES, run_kind, tasks
from tests.python.test_sanitizer_matrix import Names

TOOLS = ["memcheck", "racecheck", "initcheck", "synccheck"]
OF_EVERY_TOOL = {"hundred_repetitions", "2_to_the_31", "out_of_memory_raises", "never_used_cublas"}
FILES_LEFT_OUT = {"racecheck": {"test_gemm_cuda.py", "test_dense_cuda.py"}, "initcheck": {"test_dense_cuda.py"}}
TESTS_LEFT_OUT = {("racecheck", f"tests/python/test_{file}.py"): {"products_behind"}
                  for file in ("decoder_operators", "quantized_norms")}  # fmt: skip


class Watched(NamedTuple):
    """A run under a sanitizer."""

    tool: str
    arguments: list[str]

    @property
    def part(self) -> tuple[str, ...]:
        """Of the matrix; nothing for files of tests."""
        if "--part" not in self.arguments:
            return ()
        place = self.arguments.index("--part")
        return tuple(self.arguments[place + 1 : place + 3])

    @property
    def file(self) -> str:
        """Of tests; nothing for the matrix."""
        return next((name for name in self.arguments if name.endswith(".py")), "")

    def after(self, option: str) -> list[str]:
        return [value for name, value in zip(self.arguments, self.arguments[1:], strict=False) if name == option]


class Check(NamedTuple):
    """What the script did."""

    status: int
    printed: str
    runs: list[Watched]

    def out(self, tool: str) -> str:
        """What it says that a tool leaves out."""
        return "\n".join(re.findall(rf"^OUT +{tool} +(.*)$", self.printed, flags=re.MULTILINE))


def check(repository: Path, folder: Path, *steps: str, fails: str = "nothing", **variables: str) -> Check:
    """The script in a folder of its own, since it replaces what it installed before. What a folder has logged stays."""
    for old in ("tools", "bin"):
        shutil.rmtree(folder / old, ignore_errors=True)
    (folder / "calls").unlink(missing_ok=True)
    (folder / "tools").mkdir(parents=True)
    script = shutil.copy(repository / "tools/gpu_check.sh", folder / "tools")
    programs, calls = folder / "bin", folder / "calls"
    programs.mkdir()
    for name, code in {
        "python": "exit 0",
        "compute-sanitizer": f'printf "%s\\n" "$*" >> {calls}\n[[ "$*" != *{fails}* ]]',
    }.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{code}\n")
        (programs / name).chmod(0o755)
    own = {"SANITIZERS", "PARALLEL", "WHEELS", "RESUME", "MATRIX_SECONDS", "MATRIX_ARGUMENTS"}
    inherited = {name: value for name, value in os.environ.items() if name not in own}
    path = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHON": "python"}
    result = subprocess.run(
        ["bash", script, folder / "logs", *steps],
        env=inherited | path | variables, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert result.stderr == ""
    lines = calls.read_text().splitlines() if calls.exists() else []
    runs = [Watched(line.split()[1], line.split()) for line in lines]
    assert all(run.arguments[0] == "--tool" for run in runs)
    return Check(result.returncode, result.stdout, runs)


@pytest.fixture(scope="module")
def sanitized(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Check:
    return check(repository, tmp_path_factory.mktemp("check"), "sanitize")


def test_every_tool_watches_products_and_what_is_between_them(sanitized: Check) -> None:
    assert sanitized.status == 0
    assert list(dict.fromkeys(run.tool for run in sanitized.runs)) == TOOLS
    files = {}
    for tool in TOOLS:
        runs = [run for run in sanitized.runs if run.tool == tool]
        assert [run.part for run in runs if run.part] == [("0", "1")]
        assert all(run.after("--error-exitcode") == ["1"] for run in runs)
        files[tool] = {run.file for run in runs if run.file}
        assert len(files[tool]) == len(runs) - 1
        assert sanitized.printed.count(f"PASS  {tool}-") == len(runs) + 1
        assert sanitized.printed.count(f"PASS  {tool}-kernels ") == 1
    assert files["memcheck"] == files["synccheck"]
    assert len(files["memcheck"]) == 9
    for tool, names in FILES_LEFT_OUT.items():
        assert {Path(name).name for name in files["memcheck"] - files[tool]} == names
        assert all(name in sanitized.out(tool) for name in names)


def test_one_tool_in_parts(repository: Path, tmp_path: Path) -> None:
    options = {"SANITIZERS": "synccheck", "PARALLEL": "3", "MATRIX_ARGUMENTS": "--tactic stream"}
    found = check(repository, tmp_path, "sanitize", **options)
    assert found.status == 0
    assert {run.tool for run in found.runs} == {"synccheck"}
    assert sorted(run.part for run in found.runs if run.part) == [("0", "3"), ("1", "3"), ("2", "3")]
    assert {tuple(run.after("--tactic")) for run in found.runs if run.part} == {("stream",)}


def test_what_is_done_is_kept_if_one_says_so(repository: Path, tmp_path: Path) -> None:
    """And states of another number of parts, which would be counted, are not."""
    options = {"SANITIZERS": "racecheck", "PARALLEL": "2", "MATRIX_SECONDS": "300"}
    states = [tmp_path / "logs" / f"racecheck-{part}.json" for part in (0, 1, 5)]
    others = [tmp_path / "logs" / name for name in ("racecheck-moe.log", "memcheck-0.json", "bench.json")]
    (tmp_path / "logs").mkdir()
    for resume, kept in ({"RESUME": "1"}, True), ({}, False):
        for file in (*states, *others):
            file.write_text(resume.get("RESUME", ""))
        found = check(repository, tmp_path, "sanitize", **options, **resume)
        assert found.status == 0
        assert [state.exists() for state in states] == [kept] * 3
        assert all(file.exists() for file in others)
        parts = [run for run in found.runs if run.part]
        assert sorted(Path(*run.after("--state")) for run in parts) == states[:2]
        assert [run.after("--seconds") for run in parts] == [["300"]] * 2
    without = check(repository, tmp_path, "sanitize", SANITIZERS="racecheck")
    assert not any(run.after("--seconds") for run in without.runs)


def test_a_finding_fails_it(repository: Path, tmp_path: Path) -> None:
    found = check(repository, tmp_path, "sanitize", fails="initcheck*pytest?-p")
    assert found.status == 1
    assert len(re.findall("^FAIL  initcheck-", found.printed, flags=re.MULTILINE)) == 8
    assert found.printed.count("FAIL") == 8


def kernels() -> set[str]:
    """The names of all that the matrix may launch."""
    run = Names("", [1], "cpu")
    for number, task in enumerate(tasks(SHAPES, "cpu", 1)):
        if task.func is run_kind:  # type: ignore[attr-defined]
            kind, case = task.args  # type: ignore[attr-defined]
            run.names |= {traits.name for traits in kind.traits(case)}
        else:
            task(run, number)
    return run.names


def is_explained(name: str) -> bool:
    """Why racecheck is wrong about a kernel: a ring of several warps, which a turn of 128 columns of K each has, or
    operands that other warps make, in fp32 of integer codes."""
    ring = re.search(r"_stream_n\d+m\d+k(\d+)w(\d+)_", name)
    shares = bool(ring and int(ring[2]) != int(ring[1]) // 128)
    return shares or bool(re.fullmatch(r"w[48]a16_b?f16_(float|minimum)_sm90a_.*", name))


def test_racecheck_leaves_out_what_it_is_wrong_about_and_nothing_else(sanitized: Check) -> None:
    (matrix,) = (run for run in sanitized.runs if run.tool == "racecheck" and run.part)
    left = matrix.after("--without")
    names = kernels()
    explained = {name for name in names if is_explained(name) or name.endswith("_dequantize_dense")}
    assert {name for name in names if any(part in name for part in left)} == explained
    assert len(explained) < len(names) / 3
    assert all(any(part in name for name in names) for part in left)
    said = sanitized.out("racecheck")
    assert all(part in said for part in left)
    assert "tools/racecheck_rings.sh" in said
    excluded = {tuple(run.after("--kernel-name-exclude")) for run in sanitized.runs if run.tool == "racecheck"}
    assert excluded == {(), ("kns=MmaPacked",)}
    assert "MmaPacked" in said


@pytest.mark.parametrize("tool", ["memcheck", "initcheck", "synccheck"])
def test_other_tools_watch_every_kernel(tool: str, sanitized: Check) -> None:
    runs = [run for run in sanitized.runs if run.tool == tool]
    left = [name for run in runs for name in run.after("--without")]
    assert left == (["_dequantize_dense"] if tool == "initcheck" else [])
    assert all(name in sanitized.out(tool) for name in left)
    assert not any(run.after("--kernel-name-exclude") for run in runs)


def functions(paths: set[Path]) -> Iterator[str]:
    for path in paths:
        yield from (node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))


def test_tests_that_are_left_out_are_said_and_exist(repository: Path, sanitized: Check) -> None:
    runs = [run for run in sanitized.runs if not run.part]
    paths = {repository / run.file for run in runs}
    names = [name for name in functions(paths) if name.startswith("test_")]
    for run in runs:
        expression = " ".join(run.arguments[run.arguments.index("-k") + 1 :])
        left = TESTS_LEFT_OUT.get((run.tool, run.file), set())
        assert set(re.findall(r"not (\w+)", expression)) == OF_EVERY_TOOL | left, run
        assert set(re.findall(r"\w+", sanitized.out(run.tool))) >= OF_EVERY_TOOL | left
    for (tool, file), parts in TESTS_LEFT_OUT.items():
        assert file in {run.file for run in runs if run.tool == tool}
        assert Path(file).name in sanitized.out(tool)
        assert [sum(part in name for name in functions({repository / file})) for part in parts] == [1]
    for part in ("out_of_memory_raises", "never_used_cublas"):
        assert len([name for name in names if part in name]) == 1, part
    assert all(any(part in name for name in names) for part in OF_EVERY_TOOL)
