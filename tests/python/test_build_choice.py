"""What a build is for: the GPUs that the driver shows, nvcc, and what the build says. Drivers here are programs."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.python import kernel_units

H100, A100, T4, B300 = "9.0, 580.65.06", "8.0, 580.65.06", "7.5, 580.65.06", "12.0, 580.65.06"
Driver = Callable[..., None]


@pytest.fixture(scope="module")
def choice(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_choice", repository / "cpp/cmake/cuda_choice.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def backend(choice: ModuleType, repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("scikit_build_core", reason="needs scikit-build-core, of the extra [test]")
    monkeypatch.setitem(sys.modules, "cuda_choice", choice)
    monkeypatch.chdir(repository)
    for name in os.environ:
        if name.startswith("QCUTLASS_") or name == "CUDAARCHS":
            monkeypatch.delenv(name)
    spec = importlib.util.spec_from_file_location("qcutlass_build", repository / "cpp/cmake/qcutlass_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr("builtins.open", without_a_terminal(open))
    return module


def without_a_terminal(function: Callable[..., Any]) -> Callable[..., Any]:
    def opened(name: Any, *arguments: Any, **keywords: Any) -> Any:
        if name == "/dev/tty":
            raise OSError("No such device or address")
        return function(name, *arguments, **keywords)

    return opened


def no_library(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """driver(*lines, status=0, nvcc=False): nvidia-smi that prints lines, and nothing else of a toolkit but nvcc."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("CUDACXX", "CUDA_PATH", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name.startswith("/usr/local/cuda") else which(name))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    def write(*lines: str, status: int = 0, nvcc: bool = False) -> None:
        program(folder / "nvidia-smi", "\n".join(lines), status)
        if nvcc:
            program(folder / "nvcc", "not a compiler", 1)

    return write


def program(path: Path, output: str, status: int) -> None:
    path.write_text(f"#!/bin/sh\nprintf '%s\\n' '{output}'\nexit {status}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("lines", "architectures"),
    [
        ([H100], ("90a-real",)),
        ([A100, H100, H100], ("80-real", "90a-real")),
        (["8.9, 550.54.15", T4], ("89-real",)),
        ([B300], ("90-virtual",)),
        ([H100, B300], ("90a-real", "90-virtual")),
    ],
)
def test_a_build_is_for_the_gpus_that_are_present(
    choice: ModuleType, driver: Driver, lines: list[str], architectures: tuple[str, ...]
) -> None:
    driver(*lines)
    assert choice.choose("AUTO", "").architectures == architectures
    assert choice.choose("ON", "").architectures == architectures
    assert choice.choose("OFF", "").architectures == ()


@pytest.mark.parametrize(
    ("lines", "status", "reason"),
    [
        ([], 0, "the NVIDIA driver shows no GPU. QCUTLASS_CUDA=ON builds for all GPUs"),
        ([H100], 9, "shows no GPU"),
        (["NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."], 9, "shows no GPU"),
        (["Field compute_cap is not a valid field to query."], 0, "shows no GPU"),
        ([T4, "6.1, 580.65.06"], 0, "the GPUs that are present have compute capability 6.1, 7.5, kernels need 8.0"),
    ],
    ids=["none", "failed", "broken", "old nvidia-smi", "old GPUs"],
)
def test_without_a_gpu_that_it_serves_a_build_is_for_the_cpu(
    choice: ModuleType, driver: Driver, lines: list[str], status: int, reason: str
) -> None:
    driver(*[line.replace("'", "") for line in lines], status=status, nvcc=True)
    chosen = choice.choose("AUTO", "")
    assert chosen.architectures == ()
    assert reason in chosen.reason
    assert choice.choose("ON", "").architectures == choice.ALL


def test_no_program_is_asked_where_there_is_none(choice: ModuleType, driver: Driver) -> None:
    assert choice.present_gpus() == []


def test_the_driver_itself_is_asked_where_nvidia_smi_is_broken(
    choice: ModuleType, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {75: 9, 76: 0}

    def answer(value: int) -> Callable[..., int]:
        def function(target: object, *arguments: int) -> int:
            target._obj.value = values[arguments[0]] if arguments else value  # type: ignore[attr-defined]
            return 0

        return function

    library = SimpleNamespace(
        cuInit=lambda flags: 0,
        cuDriverGetVersion=answer(12040),
        cuDeviceGetCount=answer(2),
        cuDeviceGetAttribute=answer(0),
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    driver("broken", status=1)
    assert choice.present_gpus() == [choice.Gpu(90, 12)] * 2
    library.cuInit = lambda flags: 100  # CUDA_ERROR_NO_DEVICE
    assert choice.present_gpus() == []


@pytest.mark.parametrize(
    ("architectures", "expected"),
    [
        ("all", ("80-real", "89-real", "90-real", "90a-real", "90-virtual")),
        ("90a", ("90a-real",)),
        ("8.6;9.0", ("86-real", "90a-real")),
        ("80, 90-virtual 12.0", ("80-real", "90-virtual")),
        ("90-real", ("90-real",)),
        ("100;120", ("90-virtual",)),
        ("100-real;120-real", ("100-real", "120-real")),
    ],
)
def test_architectures_that_are_chosen(
    choice: ModuleType, driver: Driver, architectures: str, expected: tuple[str, ...]
) -> None:
    driver(A100)
    assert choice.choose("AUTO", architectures).architectures == expected


@pytest.mark.parametrize("architectures", ["75", "sm_90", "90b", "80a", "90a-native", "fast"])
def test_wrong_architectures(choice: ModuleType, architectures: str) -> None:
    with pytest.raises(ValueError, match="QCUTLASS_CUDA_ARCHITECTURES: expected all, or compute capabilities"):
        choice.choose("AUTO", f"80;{architectures}")


def test_nvcc_comes_from_pypi_for_a_gpu_without_nvcc(
    backend: ModuleType, choice: ModuleType, driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    driver(H100)
    requirement = choice.NVCC_FROM_PYPI
    assert requirement in backend.get_requires_for_build_wheel()
    assert f"qcutlass: nvcc comes from PyPI for this build: {requirement}" in capsys.readouterr().out
    assert requirement in backend.get_requires_for_build_editable()
    assert requirement not in backend.get_requires_for_build_wheel({"cmake.define.QCUTLASS_NVCC_FROM_PYPI": "OFF"})
    assert requirement not in backend.get_requires_for_build_wheel({"cmake.define.QCUTLASS_CUDA": "OFF"})
    assert requirement not in backend.get_requires_for_build_wheel({"cmake.define.QCUTLASS_CUDA_LIBRARY": "x.a"})
    driver(H100, nvcc=True)
    assert requirement not in backend.get_requires_for_build_wheel()
    assert requirement in backend.get_requires_for_build_wheel({"cmake.define.QCUTLASS_NVCC_FROM_PYPI": "ON"})


def test_nvcc_of_pypi_is_not_asked_for_where_it_is_of_no_use(
    backend: ModuleType, choice: ModuleType, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver()
    requirement = choice.NVCC_FROM_PYPI
    assert requirement not in backend.get_requires_for_build_wheel()
    assert requirement in backend.get_requires_for_build_wheel({"cmake.define.QCUTLASS_CUDA": "ON"})
    monkeypatch.setenv("CUDAARCHS", "80-real")
    assert requirement in backend.get_requires_for_build_wheel()
    driver("9.0, 550.54.15")  # a driver of CUDA 12 does not run what nvcc 13 compiles
    assert requirement not in backend.get_requires_for_build_wheel()
    assert "Put nvcc 12 on PATH, or update the driver" in choice.absent_nvcc(choice.present_gpus())


def test_the_backend_has_every_hook_of_the_one_it_wraps(backend: ModuleType) -> None:
    from scikit_build_core import build

    assert [name for name in build.__all__ if not callable(getattr(backend, name, None))] == []


def test_progress_counts_compiled_units(backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "build.ninja").write_text(
        "build a/one.o: CXX one.cc\nbuild two.o: CUDA two.cu\nbuild lib.a: AR a/one.o\n"
    )
    (tmp_path / "two.o").touch()
    assert backend.compiled_units(tmp_path) == (1, 2)
    assert backend.compiled_units(tmp_path / "absent") == (0, 0)
    lines: list[str] = []
    monkeypatch.setattr(backend, "tell", lines.append)
    with backend.progress(seconds=0.01):
        note = Path(os.environ["QCUTLASS_BUILD_FOLDER"])
        note.write_text(f"{tmp_path}\nCPU backend only: for a reason")
        while len(lines) < 3:
            time.sleep(0.01)
    assert "QCUTLASS_BUILD_FOLDER" not in os.environ
    assert lines[:2] == ["CPU backend only: for a reason", "1 of 2 units compiled, 0 s"]


@pytest.mark.parametrize(
    ("options", "smi", "expected"),
    [
        ([], T4, "qcutlass: CPU backend only: the GPUs that are present have compute capability 7.5, kernels need 8.0"),
        (["-DQCUTLASS_CUDA=OFF"], H100, "qcutlass: CPU backend only (QCUTLASS_CUDA=OFF)"),
        ([], H100, "qcutlass: CPU backend only, no CUDA compiler works; for the GPUs that are present, of compute"),
        (["-DQCUTLASS_CUDA=ON"], H100, "QCUTLASS_CUDA=ON, but no CUDA compiler works"),
        (["-DQCUTLASS_CUDA_ARCHITECTURES=75"], H100, "expected all, or compute capabilities from 8.0 up"),
    ],
    ids=["old GPU", "off", "broken nvcc", "broken nvcc, on", "wrong architectures"],
)
def test_cmake_says_what_it_builds(
    options: list[str], smi: str, expected: str, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cmake = shutil.which("cmake")
    if cmake is None or shutil.which("c++") is None:
        pytest.skip("needs cmake and a C++ compiler")
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin/nvidia-smi", smi, 0)
    program(tmp_path / "bin/nvcc", "not a compiler", 1)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.24)\nproject(choice LANGUAGES NONE)\n"
        "foreach(name QCUTLASS_CUDA QCUTLASS_NVCC_FROM_PYPI)\nset(${name} AUTO CACHE STRING choice)\nendforeach()\n"
        f"include({repository}/cpp/cmake/cuda.cmake)\nmessage(STATUS ${{QCUTLASS_CUDA_BACKEND}})\n"
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.delenv("CUDAARCHS", raising=False)
    command = [cmake, "-S", str(tmp_path), "-B", str(tmp_path / "build"), f"-DPython_EXECUTABLE={sys.executable}"]
    result = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    said = " ".join((result.stdout + result.stderr).split())
    assert expected in said, said
    if result.returncode == 0:
        assert "-- NONE" in result.stdout
    else:
        assert expected.startswith(("QCUTLASS_CUDA=ON", "expected all"))


HEADERS = {
    "Family": "family.cuh",
    "GroupedFamily": "family_grouped.cuh",
    "WgmmaFamily": "family_wgmma.cuh",
    "WgmmaGroupedFamily": "family_wgmma_grouped.cuh",
}


def test_translation_units_hold_every_family_once(repository: Path, tmp_path: Path) -> None:
    units = [path.read_text() for path in kernel_units.write(repository, tmp_path).glob("*.cu")]
    rows = re.findall(r"kFamily<(.*), (true|false)>", (tmp_path / "families.inc").read_text())
    of_experts = [name for name, _ in rows if "A16" in name]
    wanted = {
        "Family": [name for name, _ in rows],
        "GroupedFamily": of_experts,
        "WgmmaFamily": [name for name, wgmma in rows if wgmma == "true"],
        "WgmmaGroupedFamily": [name for name in of_experts if not re.search("W.A16.*(kFloat|kMinimum)$", name)],
    }
    for template, families in wanted.items():
        held = [name for text in units for name in re.findall(rf"template struct {template}<(.*)>;", text)]
        assert sorted(held) == sorted(families)
        assert len(families) > 8
        assert all((f"struct {template}<" in text) == (f'"cuda/{HEADERS[template]}"' in text) for text in units)
    assert len(units) < len(rows)


def test_products_of_8_bit_floats_have_code_for_sm_89(repository: Path, tmp_path: Path) -> None:
    """Where others have that for sm_80 alone: they are in the units that cpp/CMakeLists.txt tells by their names."""
    of_float8 = re.search(
        r'list\(FILTER float8_units INCLUDE REGEX "(.*)"\)', (repository / "cpp/CMakeLists.txt").read_text()
    )
    assert of_float8 is not None
    found = {True: 0, False: 0}
    for unit in kernel_units.write(repository, tmp_path).glob("*.cu"):
        if unit.stem.endswith("_sm90a"):
            continue
        chosen = re.search(of_float8[1], str(unit.relative_to(tmp_path))) is not None
        needed = re.search("<DType::kFloat8|kE4M3A16", unit.read_text()) is not None
        assert chosen == needed, unit.name
        found[chosen] += 1
    assert min(found.values()) > 4
