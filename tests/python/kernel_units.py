"""Translation units of kernels as cpp/cmake/instances.cmake writes them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def write(repository: Path, folder: Path) -> Path:
    """Writes the units of all lists, and `families.inc`, into a folder; returns that of the units.

    The test is skipped without cmake.
    """
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("needs cmake")
    lines = [
        "cmake_minimum_required(VERSION 3.24)",
        f"include({repository}/cpp/cmake/instances.cmake)",
        'qcutlass_write_instances(units "" ${QCUTLASS_KERNELS})',
        "qcutlass_write_instances(units _sm90a ${QCUTLASS_WGMMA_KERNELS})",
        'qcutlass_write_families("families.inc")',
    ]
    (folder / "write.cmake").write_text("\n".join([*lines, ""]))
    subprocess.run([cmake, "-P", "write.cmake"], cwd=folder, check=True)
    return folder / "instances"
