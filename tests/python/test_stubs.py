"""The typed stubs of the extension agree with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import qcutlass


def test_stubs_match_the_extension(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="needs mypy")
    package = Path(qcutlass.__file__).resolve().parent
    alone = tmp_path / "qcutlass"  # without the package's modules, which would have mypy read all of torch
    alone.mkdir()
    (alone / "__init__.pyi").touch()
    shutil.copy(package / "_C.pyi", alone)
    result = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "qcutlass._C", "--concise"],
        env=os.environ | {"MYPYPATH": str(tmp_path), "PYTHONPATH": str(package.parent)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
