"""Packages that only models need, and how their loaders are called: no pickle is read, no code of a model is run."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats.config import read_json
from qcutlass.formats.converted import CONFIG

SAFE: Final[Mapping[str, Any]] = {"trust_remote_code": False}
"""Options of every `from_pretrained`: None would ask the user whether code may run."""
SAFE_WEIGHTS: Final[Mapping[str, Any]] = {**SAFE, "use_safetensors": True}
"""Options of those that read weights: None would take a pickle where there is no file in safetensors."""

_SIZES: Final = ("tp_size", "ep_size", "pp_size", "dp_size")
"""Into how many parts `DistributedConfig` of transformers has a model cut."""

_IMPLEMENTATIONS: Final = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
"""Of attention and of experts, that are parts of transformers."""


def import_transformers(purpose: str) -> Any:
    """The package; UnsupportedError if it is not installed."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UnsupportedError(f"{purpose} needs transformers 5: pip install 'qcutlass[models]' ({error})") from error


@contextmanager
def reading(place: Path, what: str) -> Iterator[None]:
    """Turns whatever transformers raises for odd files into an UnsupportedError of one line."""
    try:
        yield
    except (CheckpointError, UnsupportedError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # tokenizers and configurations raise errors of any type
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UnsupportedError(f"{place}: transformers reads no {what} there ({reason})") from error


def checked_files(files: list[str] | None, config: Any) -> list[str]:
    """The files that `from_pretrained` reads; UnsupportedError if it has none, or is to cut the model into parts."""
    if not files:
        raise UnsupportedError("from_pretrained: expected the name of a folder; quantised layers come from its files")
    plan = getattr(config, "distributed_config", None)
    split = [name for name in _SIZES if isinstance(size := getattr(plan, name, None), int) and size > 1]
    if split:
        raise UnsupportedError(
            f"from_pretrained: {split[0]} = {getattr(plan, split[0])}: transformers does not cut packed layers; leave "
            "tp_plan= and distributed_config= out, so that each process loads the model whole, and call "
            "qcutlass.models.parallelise(model)"
        )
    return files


def load_tokenizer(folder: Path, **keywords: Any) -> Any:
    """A folder's tokenizer; UnsupportedError if there is none, or transformers is absent."""
    transformers = import_transformers("a tokenizer")
    with reading(folder, "tokenizer"):
        return transformers.AutoTokenizer.from_pretrained(folder, **SAFE, **keywords)


def check_implementations(values: object, where: object) -> None:
    """Raises UnsupportedError if a configuration names an implementation that may be code from elsewhere."""
    for name in _implementations(values):
        if name not in _IMPLEMENTATIONS:
            raise UnsupportedError(
                f"{where}: an implementation {name!r:.80}, which may be code from elsewhere; expected one of "
                f"{', '.join(_IMPLEMENTATIONS)}"
            )


def _implementations(values: object, named: bool = False) -> Iterator[object]:
    """The implementations of attention and of experts that a configuration names, at any depth."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _implementations(
                value, named or str(key).endswith(("attn_implementation", "experts_implementation"))
            )
    elif isinstance(values, list):
        for value in values:
            yield from _implementations(value, named)
    elif named and values is not None:
        yield values


def check_alone(folder: Path) -> None:
    """Raises UnsupportedError where transformers would read, beside what has been checked, what has not."""
    for pattern in ("adapter_config.json", "shard-*-model-*.safetensors"):
        for path in folder.glob(pattern):
            raise UnsupportedError(
                f"{path}: adapters and shards of a distributed model are not read; merge them into the model"
            )
    path = folder / CONFIG
    check_implementations(read_json(path) if path.is_file() else {}, path)
