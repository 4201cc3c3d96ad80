"""Shared by all tests: a printed seed, the GPU mark, and one call that runs a problem through the package."""

from __future__ import annotations

import os
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.python.absent_gpu import NAME
from torch import Tensor

import qcutlass
from qcutlass import testing, tuning
from qcutlass.cli.quickstart import default_model

# All processes of a session have the same: they inherit it, or draw it from the number that pytest-xdist gave it.
_DRAWN = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID")).randrange(2**31)
_SESSION_SEED = int(os.environ.setdefault("QCUTLASS_TEST_SEED", str(_DRAWN)))


def _gpu_obstacle() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not qcutlass._C.cuda_is_built():
        return "qcutlass was built without its CUDA backend"
    return None


def pytest_report_header() -> str:
    return f"qcutlass: QCUTLASS_TEST_SEED={_SESSION_SEED}, GPU tests: {_gpu_obstacle() or torch.cuda.get_device_name()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    obstacle, slow = _gpu_obstacle(), "slow" in config.getoption("-m")
    for item in items:
        if item.get_closest_marker("slow") and not slow:
            item.add_marker(pytest.mark.skip(reason="takes half a minute or more: python -m pytest -m slow"))
        if obstacle and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {obstacle}"))


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """torch keeps what it compiled by code and gives up after eight: tests of one process would count each other's."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@dataclass
class Ledger:
    """The record of all checks of GPU tests, which the terminal summary shows."""

    cases: int = 0
    ratio: float = 0.0
    ratio_label: str = "none"
    identity_error: float = 0.0
    tactics: set[str] = field(default_factory=set)

    def close(self, out: Tensor, ref: testing.Reference, label: object, splits: int = 1) -> None:
        """Oracle T."""
        self.record(testing.assert_close(out, ref, splits=splits, label=label), label)

    def record(self, ratio: float, label: object) -> None:
        """A case that was judged, and its largest error over its bound."""
        self.cases += 1
        if ratio > self.ratio:
            self.ratio, self.ratio_label = ratio, str(label)

    def equal(self, out: Tensor, expected: Tensor, label: object) -> None:
        """Oracle E."""
        testing.assert_equal(out, expected, label=label)
        self.cases += 1

    def identity(self, out: Tensor, expected: Tensor, label: object) -> None:
        """Dequantised weights: the largest relative error must be exactly zero."""
        error = (out.double() - expected.double()).abs() / expected.double().abs().clamp(min=2.0**-24)
        self.identity_error = max(self.identity_error, float(error.max().nan_to_num(nan=float("inf"))))
        self.equal(out, expected, label)

    def add(self, other: Ledger) -> None:
        """The record of another process."""
        self.cases += other.cases
        if other.ratio > self.ratio:
            self.ratio, self.ratio_label = other.ratio, other.ratio_label
        self.identity_error = max(self.identity_error, other.identity_error)
        self.tactics |= other.tactics


_LEDGER = Ledger()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist
        session.config.workeroutput["ledger"] = asdict(_LEDGER)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    record = getattr(node, "workeroutput", {}).get("ledger")  # there is none of a process that crashed
    if record is not None:
        _LEDGER.add(Ledger(**record))


@pytest.fixture(scope="session")
def ledger() -> Ledger:
    return _LEDGER


@pytest.fixture
def ledger_of_the_cpu() -> Ledger:
    """For the checks of GPU tests where they run on the CPU, which the summary leaves out."""
    return Ledger()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _LEDGER.cases:
        terminalreporter.section("GPU checks")
        terminalreporter.line(f"cases: {_LEDGER.cases}, tactics: {len(_LEDGER.tactics)}")
        terminalreporter.line(f"largest |error| / T: {_LEDGER.ratio:.4f} ({_LEDGER.ratio_label})")
        terminalreporter.line(
            f"largest relative error of identity-activation dequantisation: {_LEDGER.identity_error:g}"
        )


def _seed_of(name: str) -> int:
    return (_SESSION_SEED + zlib.crc32(name.encode())) % 2**31


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of this test's own; the header prints the session's, from which it follows."""
    return _seed_of(request.node.nodeid)


@pytest.fixture
def seeds(seed: int) -> Iterator[int]:
    """Seeds, as many as a test wants."""
    return iter(range(seed, seed + 2**31))


@pytest.fixture(autouse=True)
def _drawn_from_the_seed(seed: int) -> None:
    """What a test draws without a generator follows from its seed as well, not from the tests before it."""
    torch.manual_seed(seed)
    random.seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> None:
    """Likewise what a fixture of several tests draws."""
    if fixturedef.scope != "function":
        torch.manual_seed(_seed_of(f"{fixturedef.baseid}::{fixturedef.argname}"))


@pytest.fixture(autouse=True, scope="session")
def _no_tuned_plans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the tuned plans of this machine's user out of the tests, and the tests out of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QCUTLASS_CACHE_DIR", str(tmp_path_factory.mktemp("no_tuned_plans")))
        tuning.forget()
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_captures_without_a_pool() -> Iterator[None]:
    """compute-sanitizer is to see every tensor in an allocation of its own, which captures do not allow."""

    def refuse(self: object) -> None:
        pytest.skip("captures need torch's pool of memory: without PYTORCH_NO_CUDA_MEMORY_CACHING")

    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
            patch.setattr(torch.cuda.graph, "__enter__", refuse)
        yield


@pytest.fixture
def plan_folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder of tuned plans, in use by a process that knows none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QCUTLASS_CACHE_DIR", str(tmp_path / "cache"))
        tuning.forget()
        yield tmp_path / "cache"
    tuning.forget()


@pytest.fixture
def plans(plan_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of plans, for a GPU that is not there."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: NAME)
    return plan_folder


@pytest.fixture(scope="session")
def multiply() -> Callable[..., Tensor]:
    """multiply(problem, **keywords): packs the problem's codes and calls qcutlass.gemm."""

    def run(problem: testing.Problem, **keywords: Any) -> Tensor:
        packed = qcutlass.preprocess_weights(problem.codes, bits=problem.bits)
        return qcutlass.gemm(problem.a, packed, problem.scales, problem.zeros, **(problem.keywords | keywords))

    return run


@pytest.fixture(scope="session")
def repository() -> Path:
    """The source tree the tests belong to."""
    return Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def smol_file() -> Path:
    """SmolLM2's GGUF file."""
    pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("gguf", reason="transformers needs gguf to read the configuration of a GGUF file")
    try:
        return default_model()
    except FileNotFoundError as error:
        pytest.skip(f"needs the model: {error}")
