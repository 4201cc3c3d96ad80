"""The base class of all peers, and the largest error that a peer's result may have."""

from __future__ import annotations

import importlib
import importlib.util
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from textwrap import shorten
from types import ModuleType
from typing import ClassVar, Final, TypeAlias, TypeVar

import torch
from torch import Tensor

from bench.gpu_timing import Contestant
from bench.layer import Layer, WeightOnlyLayer

_Kind = TypeVar("_Kind", bound=Layer)

MAX_ERROR: Final = 0.02
"""Relative Frobenius error up to which a peer's result counts. It is no judgement of the peer, which may round or
accumulate in its own way: it tells a wrongly wired adapter, whose error is of the order of 1."""

_REASON: Final = 240  # characters of an exception that a report shows

Product: TypeAlias = Callable[[int], list[Contestant]]
"""Contestants for the first M rows of the layer's activations; the fastest of them counts. Raises `Skip` if the peer
does not take this M."""


class Skip(Exception):
    """A peer does not take part; the message says why, and is stored with the results."""


class Peer(ABC):
    """Somebody else's product of activations and quantised (or dequantised) weights.

    Attributes:
        key: its name on the command line, and of its columns.
        label: its name in tables and figures.
    """

    key: ClassVar[str]
    label: ClassVar[str]

    @abstractmethod
    def load(self) -> str:
        """Loads the library and returns what it is: a version, settings.

        Raises:
            Skip: it is absent or does not run here.
        """

    @abstractmethod
    def prepare(self, layer: Layer) -> Product:
        """Brings the layer's weights into the peer's form, with copies that make them cold in L2.

        Raises:
            Skip: the peer does not take the scheme or the shape.
        """


def require(layer: Layer, kind: type[_Kind]) -> _Kind:
    """The layer, if it is of this kind; raises `Skip` if it is not."""
    if not isinstance(layer, kind):
        raise Skip(f"multiplies {kind.kind} alone")
    return layer


def require_integers(layer: Layer) -> WeightOnlyLayer:
    """The layer, if its weights are integers with scales of one level; raises `Skip` if they are not."""
    layer = require(layer, WeightOnlyLayer)
    if layer.case.weight_dtype is not None:
        raise Skip("takes integer codes alone")
    if layer.case.super_groups:
        raise Skip("takes scales of one level")
    return layer


def require_gpu() -> None:
    """Raises `Skip` where there is no GPU."""
    if not torch.cuda.is_available():
        raise Skip("torch sees no CUDA device")


def import_library(module: str, package: str) -> ModuleType:
    """The imported module of a package from PyPI; raises `Skip` if it is absent or does not import."""
    require_gpu()
    if importlib.util.find_spec(module) is None:
        raise Skip(f"not installed: pip install {package}")
    try:
        return importlib.import_module(module)
    except Exception as error:  # whatever the package does when it is imported
        raise Skip(f"import {module} fails: {reason(error)}") from error


def reason(error: Exception) -> str:
    """One line for an exception of a peer's library: its text, or where it was raised, as bare asserts have none."""
    lines = str(error).strip().splitlines() or _origin(error)
    name = type(error).__name__
    return f"{name}: {shorten(lines[0], _REASON, placeholder=' ...')}" if lines else name


def _origin(error: Exception) -> list[str]:
    """The module, line and statement that raised it, in words; none if nothing did."""
    return [
        f"{frame.f_globals.get('__name__')}:{line}: {found.line}"
        for (frame, line), found in zip(
            traceback.walk_tb(error.__traceback__), traceback.extract_tb(error.__traceback__), strict=True
        )
    ][-1:]


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error of `out` against a float64 reference; NaN counts."""
    return float((out.double() - expected).norm() / expected.norm())
