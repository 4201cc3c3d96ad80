"""Versions of the package, and of the packed layout that its kernels read."""

from __future__ import annotations

from typing import Final

from qcutlass import _C

__version__: Final = str(_C.build_info()["version"])
LAYOUT_VERSION: Final = int(_C.build_info()["layout_version"])
