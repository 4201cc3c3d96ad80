"""What the CUDA backend is built for, and with which nvcc: asked by cuda.cmake and by the build backend, without torch.

cuda.cmake runs this file with the values of QCUTLASS_CUDA, QCUTLASS_CUDA_ARCHITECTURES and QCUTLASS_NVCC_FROM_PYPI. It
prints three lines: the architectures in CMake's form (empty: the CPU backend alone), the path of nvcc (empty: there is
none), and a sentence that says why.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

ALL = ("80-real", "89-real", "90-real", "90a-real", "90-virtual")
OLDEST, NEWEST = 80, 90  # compute capabilities with machine code; GPUs after them compile the PTX of the last
# The plain nvidia-cuda-nvcc leaves nvvm's version open. There is no nvcc 12 on PyPI, only its parts.
NVCC_FROM_PYPI = "cuda-toolkit[nvcc,nvvm,crt,cudart,cccl]==13.0.*"
PYPI_CUDA = 13
MORE = "QCUTLASS_CUDA=ON builds for all GPUs, QCUTLASS_CUDA_ARCHITECTURES for those it lists: 80, 86, 89, 90a, all"
DRIVERS = ((580, 13), (525, 12), (450, 11))  # the first branch of Linux drivers that runs this version of CUDA


class Gpu(NamedTuple):
    """A GPU as its driver describes it."""

    capability: int  # 10 * major + minor
    cuda: int  # the newest major version of CUDA that the driver runs


class Choice(NamedTuple):
    """What is built: architectures in CMake's form, none for the CPU backend alone; and why, a sentence."""

    architectures: tuple[str, ...]
    reason: str


def present_gpus() -> list[Gpu]:
    """The GPUs that the NVIDIA driver shows; of a driver that does not answer, none."""
    return _ask_nvidia_smi() or _ask_libcuda()


def _ask_nvidia_smi() -> list[Gpu]:
    command = ["nvidia-smi", "--query-gpu=compute_cap,driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return []
    found = re.findall(r"^(\d+)\.(\d), *(\d+)\.", output, flags=re.MULTILINE)
    return [Gpu(10 * int(major) + int(minor), _cuda_of_driver(int(driver))) for major, minor, driver in found]


def _cuda_of_driver(branch: int) -> int:
    return next((cuda for first, cuda in DRIVERS if branch >= first), 0)


def _ask_libcuda() -> list[Gpu]:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    number = ctypes.c_int()

    def ask(function: str, *arguments: int) -> int | None:
        return number.value if getattr(driver, function)(ctypes.byref(number), *arguments) == 0 else None

    if driver.cuInit(0) != 0:
        return []
    version, found = ask("cuDriverGetVersion") or 0, []
    for device in range(ask("cuDeviceGetCount") or 0):
        major, minor = (ask("cuDeviceGetAttribute", attribute, device) for attribute in (75, 76))  # of cuda.h
        if major is not None and minor is not None:
            found.append(Gpu(10 * major + minor, version // 1000))
    return found


def find_nvcc(from_pypi: str = "AUTO") -> str:
    """The path of nvcc, or "". from_pypi: "OFF" looks for an installed toolkit, "ON" in Python's packages, "AUTO" in
    both."""
    places: list[str | None] = []
    if from_pypi != "ON":
        places = [os.environ.get("CUDACXX"), shutil.which("nvcc")]
        roots = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
        places += [f"{root}/bin/nvcc" for root in roots if root]
    if from_pypi != "OFF":
        spec = importlib.util.find_spec("nvidia")
        places += [f"{path}/cu{PYPI_CUDA}/bin/nvcc" for path in (spec and spec.submodule_search_locations) or ()]
    return next((found for place in places if place and (found := shutil.which(place))), "")


def code_for(capability: int) -> str:
    """The architecture to compile for a GPU of this compute capability, in CMake's form."""
    if capability > NEWEST:
        return f"{NEWEST}-virtual"
    return "90a-real" if capability == 90 else f"{capability}-real"


def _listed(architectures: str) -> Iterator[str]:
    for item in re.split(r"[;,\s]+", architectures.strip(" ;,")):
        match = re.fullmatch(r"(\d+)\.?(\d)(a?)(-real|-virtual)?", item)
        if item == "all":
            yield from ALL
        elif match is None or (capability := int(match[1] + match[2])) < OLDEST or (match[3] and capability != 90):
            raise ValueError(
                f"QCUTLASS_CUDA_ARCHITECTURES: expected all, or compute capabilities from 8.0 up such as 80;90a, "
                f"got {item!r}"
            )
        else:
            yield f"{capability}{match[3]}{match[4]}" if match[4] else code_for(capability)


def _unique(items: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(items))


def _versions(gpus: Sequence[Gpu]) -> str:
    return ", ".join(f"{gpu // 10}.{gpu % 10}" for gpu in sorted({gpu.capability for gpu in gpus}))


def choose(cuda: str, architectures: str, gpus: Sequence[Gpu] | None = None) -> Choice:
    """What to build. cuda: QCUTLASS_CUDA; architectures: QCUTLASS_CUDA_ARCHITECTURES; gpus: those present, or None to
    ask the driver if it matters."""
    if cuda == "OFF":
        return Choice((), "QCUTLASS_CUDA=OFF")
    if architectures:
        return Choice(_unique(_listed(architectures)), f"QCUTLASS_CUDA_ARCHITECTURES={architectures}")
    gpus = present_gpus() if gpus is None else gpus
    served = [gpu for gpu in gpus if gpu.capability >= OLDEST]
    if served:
        chosen = _unique(code_for(gpu.capability) for gpu in sorted(served))
        return Choice(chosen, f"for the GPUs that are present, of compute capability {_versions(served)}")
    if cuda == "ON":
        return Choice(ALL, "QCUTLASS_CUDA=ON and no GPU is present that it could be built for: for all")
    if gpus:
        return Choice((), f"the GPUs that are present have compute capability {_versions(gpus)}, kernels need 8.0")
    return Choice((), f"the NVIDIA driver shows no GPU. {MORE}")


def needs_nvcc_from_pypi(cuda: str, architectures: str, from_pypi: str, chosen: bool = False) -> bool:
    """Whether a build has to have nvcc from PyPI. chosen: CMake's own variables name architectures."""
    if cuda == "OFF" or from_pypi == "OFF":
        return False
    if from_pypi == "ON":
        return True
    if find_nvcc():
        return False
    gpus = present_gpus()
    wanted = chosen or bool(choose(cuda, architectures, gpus).architectures)
    return wanted and not driver_is_too_old(gpus)


def driver_is_too_old(gpus: Sequence[Gpu]) -> bool:
    """Whether GPUs are present whose driver does not run what nvcc from PyPI compiles."""
    return any(gpu.cuda < PYPI_CUDA for gpu in gpus)


def absent_nvcc(gpus: Sequence[Gpu]) -> str:
    """What to do where there is no nvcc, a sentence."""
    if driver_is_too_old(gpus):
        cuda = min(gpu.cuda for gpu in gpus)
        return (
            f"there is no nvcc: the driver runs CUDA {cuda}, PyPI has nvcc {PYPI_CUDA}. Put nvcc {cuda} on PATH, or "
            "update the driver"
        )
    return f"there is no nvcc: put it on PATH, set CUDACXX, or pip install '{NVCC_FROM_PYPI}'"


def main(cuda: str, architectures: str, from_pypi: str) -> None:
    """Prints the choice for cuda.cmake."""
    chosen, reason = choose(cuda, architectures)
    nvcc = find_nvcc(from_pypi)
    if chosen and not nvcc:
        reason += f"; {absent_nvcc(present_gpus())}"
    print(";".join(chosen), nvcc, reason, sep="\n")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
