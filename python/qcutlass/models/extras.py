"""Packages that only models need."""

from __future__ import annotations

import importlib
from typing import Any

from qcutlass.errors import UnsupportedError


def import_transformers(purpose: str) -> Any:
    """The package; UnsupportedError if it is not installed."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UnsupportedError(f"{purpose} needs transformers 5: pip install 'qcutlass[models]' ({error})") from error
