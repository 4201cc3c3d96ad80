"""Translation units of kernels as cpp/cmake/instances.cmake writes them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

LISTS = {
    "Family": ("family.cuh", "", "QCUTLASS_INSTANCES"),
    "GroupedFamily": ("family_grouped.cuh", "_grouped", "QCUTLASS_GROUPED_INSTANCES"),
    "WgmmaFamily": ("family_wgmma.cuh", "_sm90a", "QCUTLASS_WGMMA_INSTANCES"),
    "WgmmaGroupedFamily": ("family_wgmma_grouped.cuh", "_grouped_sm90a", "QCUTLASS_WGMMA_GROUPED_INSTANCES"),
}
"""By template: its header, the suffix of its units, the list of its families."""


def write(repository: Path, folder: Path) -> Path:
    """Writes the units of all lists, and `families.inc`, into a folder; returns that of the units.

    The test is skipped without cmake.
    """
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("needs cmake")
    lines = [f"include({repository}/cpp/cmake/instances.cmake)"]
    lines += [
        f'qcutlass_write_instances(units {header} {template} "{suffix}" ${{{families}}})'
        for template, (header, suffix, families) in LISTS.items()
    ]
    (folder / "write.cmake").write_text("\n".join([*lines, 'qcutlass_write_families("families.inc")', ""]))
    subprocess.run([cmake, "-P", "write.cmake"], cwd=folder, check=True)
    return folder / "instances"
