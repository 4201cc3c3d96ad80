"""Runs tests with an extension of its own, and tells what came of them."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.python.device_mutants.mutant import REPOSITORY

SEED = "1"  # of all runs: tests draw the same cases with a fault and without it
PRELOADED = ["torch", "numpy", "hypothesis", "pytest"]  # which take seconds, once for all runs
OF_CUDA = ("CUDA error", "cudaError", "AcceleratorError", "CUBLAS_STATUS", "illegal memory access")


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(PRELOADED)


@dataclass(frozen=True)
class Outcome:
    """What became of a run of tests.

    Attributes:
        passed, skipped: how many.
        failed: the first that failed, empty if none did.
        how: what failed: "assertion", "CUDA error", "timeout", "crash" or another error; empty if nothing did.
        ran: whether tests ran at all.
        text: the message, or the end of the output.
    """

    passed: int
    skipped: int
    failed: str
    how: str
    text: str
    seconds: float
    ran: bool = True


def kind_of(text: str) -> str:
    """What a failed test's message tells."""
    if any(word in text for word in OF_CUDA):
        return "CUDA error"
    if text.startswith(("AssertionError", "assert ")):
        return "assertion"
    return text.partition(":")[0] or "error"


def read(report: Path, seconds: float) -> Outcome:
    """From a JUnit report."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    skipped = sum(case.find("skipped") is not None for case in cases)
    bad = [(case, part) for case in cases for part in (*case.findall("failure"), *case.findall("error"))]
    passed = len(cases) - skipped - len({id(case) for case, _ in bad})
    if not bad:
        return Outcome(passed, skipped, "", "", "", seconds)
    case, part = bad[0]
    message = part.get("message") or part.text or ""
    name, ran = case.get("name", ""), message != "collection failure"
    return Outcome(passed, skipped, name, kind_of(message), message if ran else part.text or message, seconds, ran)


def environment_of(extension: Path) -> dict[str, str]:
    """In which the package with this extension is imported."""
    paths = [str(extension.parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONDONTWRITEBYTECODE": "1"}


def child(extension: Path, arguments: Sequence[str], output: Path) -> None:
    """pytest in a process of its own, whose status is that of pytest."""
    os.setsid()
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(REPOSITORY)
    os.environ |= environment_of(extension) | {"QCUTLASS_TEST_SEED": SEED}
    sys.path.insert(0, str(extension.parents[1]))
    qcutlass, pytest = importlib.import_module("qcutlass"), importlib.import_module("pytest")
    assert extension.samefile(qcutlass._C.__file__), f"{qcutlass._C.__file__} was imported"
    status = int(pytest.main(list(arguments)))
    sys.stdout.flush()
    os._exit(status)  # whatever a fault has left behind


def run(extension: Path, tests: Sequence[str], limit: float, name: str = "report") -> Outcome:
    """Runs tests by their ids until one fails; `name`: of files with what they say."""
    site = extension.parents[1]
    report = site / f"{name}.xml"
    output = site / f"{name}.txt"
    arguments = ["-q", "-x", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
    begin = time.monotonic()
    process = FORKS.Process(target=child, args=(extension, arguments, output))
    process.start()
    process.join(limit)
    status = process.exitcode
    if status is None and process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    seconds = time.monotonic() - begin
    tail = output.read_text()[-2000:] if output.exists() else ""
    if status is None:
        return Outcome(0, 0, "", "timeout", tail, seconds)
    if status in (0, 1) and report.exists():
        return read(report, seconds)
    return Outcome(0, 0, "", "crash" if status < 0 else "error", f"status {status}\n{tail}", seconds, status < 0)


def collect(extension: Path, files: Sequence[str]) -> list[str]:
    """The ids of the GPU tests of files of tests/python."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command += [f"tests/python/{name}" for name in files]
    result = subprocess.run(
        command, cwd=REPOSITORY, env=environment_of(extension), capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise RuntimeError(result.stdout[-4000:] + result.stderr[-2000:])
    return [line for line in result.stdout.splitlines() if "::" in line]
