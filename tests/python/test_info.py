"""What `qcutlass info` says of this machine: a driver that shows a GPU is a library of the test's own here."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from qcutlass import _C
from qcutlass.cli import app, info


@pytest.fixture
def one_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that shows one GPU, which torch does not see."""

    def get_count(count: Any) -> int:
        count._obj.value = 1
        return 0

    def get_name(name: Any, length: int, index: int) -> int:
        name.value = b"NVIDIA H200"
        return 0

    def get_attribute(value: Any, attribute: int, index: int) -> int:
        value._obj.value = {75: 9, 76: 0}[attribute]
        return 0

    library = SimpleNamespace(
        cuInit=lambda flags: 0,
        cuDeviceGetCount=get_count,
        cuDeviceGetName=get_name,
        cuDeviceGetAttribute=get_attribute,
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def printed() -> str:
    result = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, ["info"])
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.replace("│", " ").split())


def test_a_gpu_that_the_build_does_not_serve_is_named(one_h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def device_traits(index: int) -> None:
        raise NotImplementedError("qcutlass was built without CUDA: reinstall it")

    monkeypatch.setattr(_C, "device_traits", device_traits)
    assert info.driver_gpus() == [
        {
            "index": 0,
            "name": "NVIDIA H200",
            "compute_capability": "9.0",
            "obstacle": "qcutlass was built without CUDA: reinstall it",
        }
    ]
    said = printed()
    assert "GPU 0 NVIDIA H200, compute capability 9.0, not seen by torch" in said
    assert "qcutlass was built without CUDA: reinstall it" in said


def test_a_gpu_that_torch_alone_does_not_see_is_named(one_h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "device_traits", lambda index: None)
    assert "this build has kernels for it: install torch for CUDA" in printed()


@pytest.mark.skipif(_C.cuda_is_built(), reason="this build has the CUDA backend")
def test_a_build_without_cuda_says_how_to_get_it() -> None:
    with pytest.raises(NotImplementedError, match=r"reinstall qcutlass from source where the GPU is.*QCUTLASS_CUDA=ON"):
        _C.device_traits(0)


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert info.driver_gpus() == []


def test_instruction_sets_and_threads(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 avx512f fma avx512_vnni\n")
    assert info.instruction_sets(cpuinfo) == ["avx2", "fma", "avx512f", "avx512_vnni"]
    cpuinfo.write_text("Features\t: fp asimd asimddp\n")
    assert info.instruction_sets(cpuinfo) == ["asimd", "asimddp"]
    assert info.instruction_sets(tmp_path / "absent") == []
    facts = info.collect()
    assert facts["cpu"]["threads"] == torch.get_num_threads()
    assert f"{torch.get_num_threads()} threads" in printed()
