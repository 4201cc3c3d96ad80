"""A built wheel, which QCUTLASS_WHEEL names: what it holds, needs and weighs. tools/build_wheel.sh makes one."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import qcutlass

MEGABYTE = 10**6
LARGEST = {"none": 3 * MEGABYTE, "cuda": 60 * MEGABYTE}
# What every system of a manylinux tag has; above all neither the CUDA runtime, which is linked statically, nor the
# driver, which machines without a GPU lack.
LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2"}
LIBRARIES |= {"ld-linux-aarch64.so.1", "libgcc_s.so.1", "libstdc++.so.6"}


@pytest.fixture(scope="module")
def path() -> Path:
    name = os.environ.get("QCUTLASS_WHEEL")
    if not name:
        pytest.skip("needs QCUTLASS_WHEEL, a wheel of tools/build_wheel.sh")
    return Path(name)


@pytest.fixture(scope="module")
def wheel(path: Path) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def extension(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (name,) = [name for name in wheel.namelist() if name.endswith(".so")]
    return Path(wheel.extract(name, tmp_path_factory.mktemp("wheel")))


def readelf(option: str, extension: Path) -> str:
    if shutil.which("readelf") is None:
        pytest.skip("needs the program readelf")
    return subprocess.run(["readelf", "-W", option, str(extension)], capture_output=True, text=True, check=True).stdout


def test_its_name_says_what_runs_it(path: Path) -> None:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert re.fullmatch(
        rf"qcutlass-{re.escape(qcutlass.__version__)}-{python}-{python}-(manylinux[0-9a-z_]+\.?)+\.whl", path.name
    )


def test_it_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile, repository: Path) -> None:
    tracked = {
        str(file.relative_to(repository / "python"))
        for file in (repository / "python/qcutlass").rglob("*")
        if file.suffix in {".py", ".pyi"} or file.name == "py.typed"
    }
    held = {name for name in wheel.namelist() if not name.endswith("/")}
    assert tracked - held == set()
    others = {name for name in held - tracked if not re.fullmatch(r"qcutlass-[\w.]+\.dist-info/.+", name)}
    assert [re.sub(r"\.cpython-.*\.so$", ".so", name) for name in others] == ["qcutlass/_C.so"]
    names = {name.split(".dist-info/")[1] for name in held if ".dist-info/" in name}
    assert {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"} <= names


def test_its_metadata_names_the_commands_and_requirements(wheel: zipfile.ZipFile) -> None:
    texts = {Path(name).name: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
    metadata = email.message_from_string(texts["METADATA"])
    assert metadata["Version"] == qcutlass.__version__
    required = {re.match(r"[\w-]+", line)[0] for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}  # type: ignore[index]
    assert {"torch", "numpy", "typer"} <= required
    assert required.isdisjoint({"nvidia-cutlass", "cuda-toolkit", "pybind11", "scikit-build-core"})
    assert re.search(r"^qcutlass *= *qcutlass\.__main__:main$", texts["entry_points.txt"], re.MULTILINE)


def test_its_extension_needs_the_c_library_alone(extension: Path) -> None:
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("--dynamic", extension)))
    assert "libc.so.6" in needed
    assert needed <= LIBRARIES
    assert not re.search(r"\((RPATH|RUNPATH)\)", readelf("--dynamic", extension))


def test_its_extension_is_stripped(extension: Path) -> None:
    sections = set(re.findall(r"^ *\[ *\d+\] (\S+)", readelf("--sections", extension), flags=re.MULTILINE))
    assert ".dynsym" in sections
    assert sections.isdisjoint({".symtab", ".debug_info"})


def test_its_size(path: Path, extension: Path) -> None:
    kind = "cuda" if ".nv_fatbin" in readelf("--sections", extension) else "none"
    assert path.stat().st_size <= LARGEST[kind]
