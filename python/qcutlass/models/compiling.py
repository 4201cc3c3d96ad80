"""How torch compiles steps of decoding: alike in every process, kept on disk, and with a reason where it cannot."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch._dynamo.exc import TorchDynamoException

from qcutlass.products.tuned_plans import cache_folder

_CACHE_VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
FAILURES: Final = (TorchDynamoException, OSError)
"""What ends a first call that torch compiles; the latter where its folder is full, or cannot be written."""

_TELLING: Final = re.compile(r"^[\w.]+(Error|Exception): |\berror: ")


def compiled_code() -> str:
    """The folder that keeps compiled steps: `TORCHINDUCTOR_CACHE_DIR`, or one in qcutlass's cache folder.

    That is the folder of `QCUTLASS_CACHE_DIR`, or of the user's caches. torch's default, which any import of
    `torch._dynamo` writes into the variable, is a temporary folder: it counts as none, and serves where that other one
    cannot be written.
    """
    chosen = os.environ.get(_CACHE_VARIABLE)
    default: str = importlib.import_module("torch._inductor.runtime.runtime_utils").default_cache_dir()
    if chosen is None or Path(chosen) == Path(default).absolute():
        ours = cache_folder().absolute() / "inductor"
        chosen = os.environ[_CACHE_VARIABLE] = str(ours if _is_writable(ours) else Path(default).absolute())
    return chosen


def _is_writable(folder: Path) -> bool:
    """Whether there is such a folder now, and files may be put into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's forward pass, compiled by torch at its first call for each shape, into `compiled_code()`."""
    compiled_code()
    return torch.compile(_own(forward), dynamic=False, options=_options())  # how keys are split depends on the batch


def _own(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same, of code of this module's own.

    torch counts what it compiled of each code, and all models of transformers share one: what steps have compiled would
    keep callers from compiling a model themselves.
    """

    def step(*arguments: Any, **options: Any) -> Any:
        return forward(*arguments, **options)

    return step


def _options() -> dict[str, Any] | None:
    """With these torch compiles a step alike in every process.

    It would choose among kernels of a few microseconds by timing them apart, and takes others each time: what adds up
    shares of attention took 3.7 microseconds instead of 1.4 on an H200, in each of 32 layers, and sums had another
    order.
    """
    known = hasattr(importlib.import_module("torch._inductor.config"), "deterministic")
    return {"deterministic": True} if known else None


def failure(error: Exception) -> str:
    """What torch could not compile means and why, in one line: the last of what a compiler or another process said."""
    why, *rest = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    told = [line for line in rest if _TELLING.search(line)]
    if told and why.endswith((":", "C++ compile error")):
        why = f"{why.rstrip(':')}: {told[-1]}"
    return f"steps are not compiled, which is slower: {why}"
