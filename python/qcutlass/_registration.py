"""Registers the operators with torch and the quantiser with transformers: at once where these are loaded, else as soon
as they are.

`import qcutlass` does this without importing either. Without the operators torch could not load a program that calls
them; without the quantiser transformers would refuse a converted folder.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final


def _import_operators() -> None:
    if "qcutlass.products" in sys.modules:
        return  # it registers them itself, and may be what imports torch now
    try:
        importlib.import_module("qcutlass.products")
    except Exception as error:  # of a torch that is older, newer or damaged: it is of use without them
        warnings.warn(f"qcutlass does not register its operators: {error}", stacklevel=2)


def _import_quantiser() -> None:
    try:
        importlib.import_module("qcutlass.models.transformers")
    except Exception as error:  # of a transformers that is older, newer or damaged: both are of use without it
        warnings.warn(f"qcutlass does not register its quantiser: it needs transformers 5 ({error})", stacklevel=2)


_AWAITED: Final[dict[str, Callable[[], None]]] = {
    "torch": _import_operators,
    "transformers.quantizers.auto": _import_quantiser,  # which holds the tables of quantisers
}


def register() -> None:
    """Registers now or later."""
    for name, act in _AWAITED.items():
        if name in sys.modules:
            act()
        elif not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder(name))


class _Finder(MetaPathFinder):
    """Finds one module as the other finders do, and has its loader register; it goes when that has happened."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 :] if self in finders else finders:  # those before were asked
            find = getattr(finder, "find_spec", None)  # Python passes over those without
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(self, spec, spec.loader)
                return spec
        return None


class _Loader(Loader):
    """Loads as another loader, to which it leaves the module."""

    def __init__(self, finder: _Finder, spec: ModuleSpec, loader: Loader) -> None:
        self._finder, self._spec, self._loader = finder, spec, loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        _AWAITED[self._finder.name]()
