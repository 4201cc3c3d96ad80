"""What users name as a model: folders, GGUF files, names on the Hugging Face hub."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Final

from qcutlass.cli.terminal import Steps, say
from qcutlass.errors import UnsupportedError
from qcutlass.formats.converted import CONFIG, is_converted
from qcutlass.formats.gguf import files_of, models_in
from qcutlass.formats.source import listed
from qcutlass.models.conversion import convert
from qcutlass.models.opening import open_source
from qcutlass.products.tuned_plans import cache_folder
from qcutlass.version import __version__

_HUB_NAME: Final = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)  # owner/name


def found_model(model: Path) -> Path:
    """A place as it is; for `owner/name`, which is none: the folder in the hub's local cache. Nothing is downloaded.

    Raises:
        FileNotFoundError: neither; the message has the command that downloads it.
    """
    name = str(model)
    if os.path.lexists(model) or not _HUB_NAME.fullmatch(name) or model.suffix in (".gguf", ".safetensors"):
        return model
    folder = _cached(name)
    if folder is None:
        raise FileNotFoundError(
            f"{name}: no such file or folder, and not in the local cache of the hub; if that is a name on the hub: "
            f"hf download {name} --local-dir {model.name}"
        )
    say(f"{name}: taken from {folder}")
    return folder


def _cached(name: str) -> Path | None:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:  # it comes with transformers
        return None
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):  # not there; no name
        return None


def runnable_model(model: Path, report: Steps) -> Path:
    """The folder to run: `found_model`; for a GGUF file a converted one in the user's cache, made if it is absent.

    Raises:
        FileNotFoundError: as for `found_model`.
        CheckpointError, UnsupportedError, OSError: as for `qcutlass.models.convert`.
    """
    place = found_model(model)
    path = _gguf_of(place)
    if path is None:
        return place
    files = (path.with_name(name) for name in files_of(path.name))
    states = [file.stat() for file in files if file.exists()]
    identity = f"{path.resolve()} {[(each.st_size, each.st_mtime_ns) for each in states]} {__version__}"
    folder = cache_folder() / "models" / f"{path.stem[:80]}-{hashlib.sha256(os.fsencode(identity)).hexdigest()[:16]}"
    if not is_converted(folder):
        if open_source(path, "auto", None).checkpoint.is_float:  # of a model that is taken, else it says so
            raise UnsupportedError(
                f"{path}: its weights are floats, which are not rounded without being asked to; convert it first: "
                "qcutlass convert FILE OUT --bits 8 (or 4), or with less loss quantize FILE OUT --calibration TEXT"
            )
        say(f"{path.name}: converted into {folder}, where the next run finds it")
        try:
            convert(path, folder, progress=report)
        except FileExistsError:  # another process was faster
            if not is_converted(folder):
                raise
    return folder


def _gguf_of(place: Path) -> Path | None:
    """The GGUF file that a place is, or is a folder of (the first of a model's); None for what transformers reads."""
    if place.suffix.lower() == ".gguf" and place.is_file():
        return place
    if place.is_dir() and not (place / CONFIG).exists():
        names = models_in(listed(place))
        return place / names[0] if len(names) == 1 else None
    return None
