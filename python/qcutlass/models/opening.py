"""Opens the models that are converted or quantised: folders and GGUF files."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qcutlass import formats
from qcutlass.formats import Checkpoint
from qcutlass.formats.config import read_json
from qcutlass.formats.converted import CONFIG, check_rest, is_converted
from qcutlass.formats.gguf import models_in
from qcutlass.formats.source import listed
from qcutlass.models.experts import check_configuration, check_names
from qcutlass.models.fitting import check_codes, embeddings, left_out, skeleton
from qcutlass.models.gguf import GGUFModel
from qcutlass.models.sources import ModelSource, files_beside


def open_source(path: Path, format: str, config: Mapping[str, Any] | None) -> ModelSource:
    """A folder or a file, as `qcutlass.formats.load` reads them.

    What the model never loads is left out, with a warning.

    Raises:
        UnsupportedError: a mixture of experts that converted folders do not hold; codes that no layer has.
    """
    if path.is_dir() and is_converted(path):
        raise ValueError(f"source: {path} is converted already")
    described = (path if path.is_dir() else path.parent) / CONFIG
    values = read_json(described) if path.suffix != ".gguf" and described.is_file() else None
    check_configuration(values, path)
    checkpoint = formats.load(path, format, config)
    check_names(checkpoint, checkpoint.rest, None if checkpoint.format == "gguf" else values, path)
    source = _model_source(path, checkpoint)
    source.model = skeleton(source.config, checkpoint, path)
    check_codes(checkpoint, source.model)
    if source.model is not None:
        _leave_out(source, source.model, path)
        if checkpoint.format == "floats":
            _keep_embeddings(source, source.model)
    check_rest(source.rest, source.names, path)  # refused before anything is written, as links are
    return source


def _leave_out(source: ModelSource, model: Any, where: Path) -> None:
    """Takes from a source what its model never loads, as blocks that predict further tokens, and says so."""
    gone = left_out([*source.names, *source.rest], model)
    for name in gone:
        source.names.pop(name, None)
        source.rest.pop(name, None)
    if gone:
        warnings.warn(
            f"{where}: {len(gone)} layers and tensors are left out, which {type(model).__name__} never loads, as "
            f"{gone[0]}",
            stacklevel=2,
        )


def _keep_embeddings(source: ModelSource, model: Any) -> None:
    """Takes from a source's layers the matrices that are embeddings in the model, whatever their names are."""
    for name in embeddings(source.names, model):
        stored = source.names.pop(name)
        source.rest[f"{name}.weight"] = f"{stored}.weight"


def _model_source(path: Path, checkpoint: Checkpoint) -> ModelSource:
    if checkpoint.format == "gguf":
        return GGUFModel(checkpoint, path if path.is_file() else path / models_in(listed(path))[0])
    folder = path if path.is_dir() else path.parent
    files_beside(folder)
    return ModelSource(checkpoint, folder)
