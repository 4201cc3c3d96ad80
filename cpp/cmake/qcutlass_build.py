"""The build backend: scikit-build-core's, with two additions. nvcc from PyPI is a build requirement where a GPU is
present and no nvcc; and every 10 seconds a line tells how many units are compiled.

pip shows what a build prints with -v alone; so those lines go to the terminal itself where there is one.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cuda_choice
from scikit_build_core import build as scikit_build

Settings = dict[str, "str | list[str]"]
SECONDS = 10  # from one line of progress to the next

build_sdist = scikit_build.build_sdist
get_requires_for_build_sdist = scikit_build.get_requires_for_build_sdist
prepare_metadata_for_build_wheel = scikit_build.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = scikit_build.prepare_metadata_for_build_editable


def tell(line: str) -> None:
    """Prints a line to the terminal, or to the build's output where there is none."""
    try:
        with open("/dev/tty", "w") as terminal:
            terminal.write(f"\nqcutlass: {line}")
    except OSError:
        print(f"qcutlass: {line}", flush=True)


def setting(name: str, settings: Settings | None, default: str = "") -> str:
    """An option of CMake as `-C cmake.define.NAME=` or the environment has it."""
    value = (settings or {}).get(f"cmake.define.{name}", os.environ.get(name, default))
    return value if isinstance(value, str) else value[-1]


def nvcc_requirement(settings: Settings | None) -> list[str]:
    """nvcc from PyPI, where this build needs it."""
    if setting("QCUTLASS_CUDA_LIBRARY", settings):
        return []
    cuda, from_pypi = (setting(f"QCUTLASS_{name}", settings, "AUTO") for name in ("CUDA", "NVCC_FROM_PYPI"))
    architectures = setting("QCUTLASS_CUDA_ARCHITECTURES", settings)
    chosen = setting("CMAKE_CUDA_ARCHITECTURES", settings) or os.environ.get("CUDAARCHS")
    if not cuda_choice.needs_nvcc_from_pypi(cuda, architectures, from_pypi, bool(chosen)):
        return []
    tell(f"nvcc comes from PyPI for this build: {cuda_choice.NVCC_FROM_PYPI}")
    return [cuda_choice.NVCC_FROM_PYPI]


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    return scikit_build.get_requires_for_build_wheel(config_settings) + nvcc_requirement(config_settings)


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    return scikit_build.get_requires_for_build_editable(config_settings) + nvcc_requirement(config_settings)


def build_wheel(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    with progress():
        return scikit_build.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    with progress():
        return scikit_build.build_editable(wheel_directory, config_settings, metadata_directory)


def compiled_units(folder: Path) -> tuple[int, int]:
    """Of a build folder of Ninja's: how many units have been compiled, and how many there are."""
    rules = folder / "build.ninja"
    objects = re.findall(r"^build (\S+\.o):", rules.read_text(), flags=re.MULTILINE) if rules.exists() else []
    return sum((folder / name).exists() for name in objects), len(objects)


@contextmanager
def progress(seconds: float = SECONDS) -> Iterator[None]:
    """Tells what is built, and how far it is while it goes on. CMake writes its folder, and what it builds, into the
    file that QCUTLASS_BUILD_FOLDER names."""
    done, begin = threading.Event(), time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        note = Path(scratch) / "build-folder"
        os.environ["QCUTLASS_BUILD_FOLDER"] = str(note)

        def report() -> None:
            told = False
            while not done.wait(seconds):
                if note.exists():
                    folder, summary = note.read_text().split("\n", 1)
                    if not told:
                        tell(summary)
                    told = True
                    compiled, units = compiled_units(Path(folder))
                    tell(f"{compiled} of {units} units compiled, {time.monotonic() - begin:.0f} s")

        thread = threading.Thread(target=report)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            del os.environ["QCUTLASS_BUILD_FOLDER"]
