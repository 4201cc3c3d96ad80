"""Models to convert: a model's layers under the names that transformers gives them, its other tensors, its files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats import Checkpoint, Layer
from qcutlass.formats.config import read_json
from qcutlass.formats.converted import CONFIG
from qcutlass.formats.files import inside
from qcutlass.models.extras import load_tokenizer

_DESCRIPTIONS: Final = ("quantization_config", "compression_config", "quantization")  # of the source's own weights
_COPIED: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md")
_LEFT: Final = (CONFIG, "quantize_config.json", "quant_config.json", "hf_quant_config.json")


class ModelSource:
    """A folder with safetensors files and `config.json`.

    Attributes:
        checkpoint: its layers.
        config: for `config.json`, without what it says of quantisation.
        names: of its layers; keys are names in a converted folder, values names in the checkpoint.
        rest: of its other tensors, the same way.
        model: of transformers, on the meta device; None where it is not known.
    """

    model: Any = None

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        self.checkpoint = checkpoint
        self._folder = folder
        self.config = self._config()
        if checkpoint.skipped:
            name, reason = next(iter(checkpoint.skipped.items()))
            raise UnsupportedError(f"{checkpoint.info(f'{name}.weight').file}: {name}: {reason}")
        self.names: dict[str, str] = {name: name for name in checkpoint}
        self.rest: dict[str, str] = {name: name for name in checkpoint.rest}

    def _config(self) -> dict[str, Any]:
        path = self._folder / CONFIG
        if not path.is_file():
            raise CheckpointError(f"{self._folder}: expected {CONFIG}, which says what model this is; it is absent")
        inside(self._folder, CONFIG, str(self._folder))
        return {key: value for key, value in read_json(path).items() if key not in _DESCRIPTIONS}

    @property
    def modules(self) -> list[str]:
        """Names of its layers, and of the modules that its other tensors are of."""
        return [*self.names, *(name.rpartition(".")[0] for name in self.rest)]

    def layer(self, name: str) -> Layer:
        """One layer, by its name in a converted folder."""
        stored = self.names[name]
        return self.checkpoint[stored] if stored in self.checkpoint else self.checkpoint.matrix(stored)

    def tensor(self, name: str) -> Tensor:
        """One of the other tensors, the same way."""
        return self.checkpoint.tensor(self.rest[name])

    def tokenizer(self) -> Any:
        """That of transformers; UnsupportedError if there is none, or transformers is not installed."""
        return load_tokenizer(self._folder)

    def write_files(self, folder: Path) -> None:
        """The tokenizer, and what else lies beside the weights."""
        copy_files(self._folder, folder)


def files_beside(folder: Path) -> list[Path]:
    """The files that go with a folder's weights and configuration: its tokenizer, licences, notes.

    Raises:
        CheckpointError: one of them is a link out of the folder. As for weights, the blobs of a hub's cache may be
            linked to.
    """
    found = []
    for path in sorted(folder.iterdir()):
        listed = path.suffix in _COPIED or path.name.startswith(("LICENSE", "NOTICE"))
        if path.is_file() and listed and path.name not in _LEFT and not path.name.endswith(".index.json"):
            found.append(inside(folder, path.name, str(folder)))
    return found


def copy_files(source: Path, destination: Path) -> None:
    """Copies `files_beside` a folder's weights."""
    for path in files_beside(source):
        shutil.copyfile(path, destination / path.name)
