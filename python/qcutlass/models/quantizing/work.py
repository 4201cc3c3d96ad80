"""The folder beside the destination in which a run keeps what it has finished, so that it can go on after a kill."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from qcutlass.errors import CheckpointError, UnsupportedError
from qcutlass.formats import Layer
from qcutlass.formats.config import read_json
from qcutlass.formats.layers import LAYERS
from qcutlass.formats.source import SafetensorsSource
from qcutlass.models.marks import MARK, is_marked, mark, short_name
from qcutlass.models.replacing import check_new
from qcutlass.models.shards import sync, write_json, write_tensors

_MANIFEST: Final = "manifest.json"
_STATE: Final = "state"
_DIGEST: Final = "digest"
_OWN: Final = re.compile(
    r"(manifest\.json|record|block-\d{5,}\.(json|safetensors)|state-\d{5,}\.safetensors)(\.partial)?"
)
_RECORDS: Final = "block-*.json"
_SUFFIX: Final = ".work"
_SHORT: Final = 60  # characters of two values that are told
_REFUSALS: Final = (CheckpointError, UnsupportedError)
"""Errors that the same call ends in again; one with other options begins anew."""


class Work:
    """Finished blocks of one run.

    A block is finished when its record is written, which names the files of its layers and of the hidden states behind
    it with their digests; both are on the disk by then. The states before it are removed after that.

    Args:
        folder: that is there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._source: SafetensorsSource | None = None
        self._layers: dict[str, dict[str, Any]] = {}
        self._changed: set[str] = set()

    def _record(self, index: int) -> Path:
        return self.folder / f"block-{index:05}.json"

    def finished(self) -> int:
        """The number of finished blocks, from the first on, with files as they were written; removes all others."""
        count = 0
        while self._is_whole(count):
            count += 1
        states = _read_whole(self._record(count - 1))["files"] if count else {}
        if any(name.startswith(_STATE) and _digest(self.folder / name) != states[name] for name in states):
            count = 0  # the way on needs them
        kept = {_MANIFEST, *(name for name in states if count)}
        for index in range(count):
            kept |= {self._record(index).name, f"block-{index:05}.safetensors"}
        for path in _own_files(self.folder):
            if path.name not in kept:
                path.unlink()
        return count

    def _is_whole(self, index: int) -> bool:
        """Whether the layers of a block are there; states are those of the last one alone."""
        files = _read_whole(self._record(index)).get("files")
        if files is None:
            return False
        return all(_digest(self.folder / name) == value for name, value in files.items() if not name.startswith(_STATE))

    def add(
        self,
        index: int,
        layers: Mapping[str, Layer],
        changed: Mapping[str, Tensor],
        state: Tensor | None,
        notes: Mapping[str, Mapping[str, float]],
    ) -> None:
        """Keeps a block: its layers and other changed tensors, by their names in the source; the states behind it."""
        tensors, described = dict(changed), {}
        for name, layer in layers.items():
            parts = layer.tensors
            described[name] = {"kind": layer.kind, "parts": list(parts), "options": layer.options}
            tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        files = {f"block-{index:05}.safetensors": tensors}
        if state is not None:
            files[f"{_STATE}-{index:05}.safetensors"] = {_STATE: state}
        digests = {}
        for name, values in files.items():
            partial = self.folder / f"{name}.partial"
            write_tensors(partial, values)
            digests[name] = _digest(partial)
            partial.rename(self.folder / name)
        record = {"files": digests, "layers": described, "changed": list(changed), "notes": notes}
        _write_whole(self._record(index), "record", record)
        sync(self.folder)
        with suppress(FileNotFoundError):
            (self.folder / f"{_STATE}-{index - 1:05}.safetensors").unlink()

    def state(self, index: int) -> Tensor:
        """The hidden states behind a block, the last finished one."""
        return SafetensorsSource([self.folder / f"{_STATE}-{index:05}.safetensors"]).read(_STATE)

    def open(self) -> None:
        """Makes the layers of all finished blocks readable."""
        records = [_read_whole(path) for path in sorted(self.folder.glob(_RECORDS))]
        self._layers = {name: entry for record in records for name, entry in record["layers"].items()}
        self._changed = {name for record in records for name in record["changed"]}
        self._source = SafetensorsSource(sorted(self.folder.glob("block-*.safetensors")))

    @property
    def notes(self) -> dict[str, dict[str, float]]:
        """The notes on each layer, for the user."""
        found: dict[str, dict[str, float]] = {}
        for path in sorted(self.folder.glob(_RECORDS)):
            found |= _read_whole(path)["notes"]
        return found

    def set_made(self, folder: Path, told: Mapping[str, Any]) -> None:
        """Notes that `folder` is complete and about to become the destination, and what is to be told of it."""
        manifest = _read_whole(self.folder / _MANIFEST)
        _write_whole(
            self.folder / _MANIFEST, _MANIFEST, {**manifest, "made": {"files": file_stats(folder), "told": told}}
        )

    def made(self, destination: Path) -> dict[str, Any] | None:
        """The report on `destination` if this run has made it and was killed then; None otherwise."""
        made = _read_whole(self.folder / _MANIFEST).get("made")
        return made["told"] if made and made["files"] == file_stats(destination) else None

    def layer(self, name: str) -> Layer | None:
        """A quantised layer by its name in the source; None if it is none."""
        described = self._layers.get(name)
        if described is None or self._source is None:
            return None
        source = self._source
        parts = {part: source.read(f"{name}.{part}") for part in described["parts"]}
        return LAYERS[described["kind"]].of(parts, **described["options"])

    def tensor(self, name: str) -> Tensor | None:
        """Another tensor that was changed; None if this one was not."""
        return self._source.read(name) if name in self._changed and self._source is not None else None


def _digest(path: Path) -> str:
    """SHA-256 of a file; empty if it is absent."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while part := file.read(1 << 22):
                digest.update(part)
    except FileNotFoundError:
        return ""
    return digest.hexdigest()


def file_stats(path: Path) -> dict[str, list[int]]:
    """Sizes and times of a file, or of those in a folder; of none if it is absent."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = {file.name: file.stat() for file in files if file.is_file()}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def work_path(destination: Path) -> Path:
    """`<destination>.work`; where that is longer than a name may be, a shortened one."""
    return destination.parent / f"{short_name(destination.name, len(_SUFFIX))}{_SUFFIX}"


def is_made(destination: Path) -> bool:
    """Whether a run has made `destination` and was killed before its own folder was gone."""
    folder = work_path(destination)
    if not is_marked(folder) or not (folder / _MANIFEST).is_file():
        return False
    return Work(folder).made(destination) is not None


def check_destination(destination: Path, overwrite: bool, restart: bool) -> None:
    """Raises FileExistsError if `destination` is there, not to be overwritten, and not made by a run to go on with."""
    if restart or not is_made(destination):
        check_new(destination, overwrite)


@contextmanager
def work_folder(
    destination: Path, run: Mapping[str, Any], *, overwrite: bool = False, restart: bool = False
) -> Iterator[Work]:
    """The folder `work_path` of a run; removed when the block ends.

    When the block is left by an error, the folder stays if the same call can go on there: some block is finished, and
    the error is none that it would end in again.

    Args:
        run: what makes a run: of another one nothing may be taken over.
        overwrite: whether the run may replace what is at `destination`.
        restart: removes what an earlier run has left.

    Raises:
        FileExistsError: another process uses it, it is another run's, it holds files that no run has left, or
            `destination` is there.
    """
    folder = work_path(destination)
    lock = _locked(folder)
    try:
        _check_own(folder)
        try:
            check_destination(destination, overwrite, restart)  # one that held the lock until now may have made it
        except FileExistsError:
            with suppress(OSError):
                folder.rmdir()  # an empty one, made for the lock
            raise
        if restart:
            _empty(folder)
        wanted = json.loads(json.dumps(run))
        if (folder / _MANIFEST).is_file():
            manifest = _read_whole(folder / _MANIFEST)
            if not manifest:
                raise FileExistsError(
                    f"{folder / _MANIFEST}: damaged, or written by another version of qcutlass; pass restart=True "
                    "(--restart) to begin anew"
                )
            differing = list(_differences(manifest.get("run"), wanted))
            if differing:
                raise FileExistsError(
                    f"{folder}: left by a run with another {', '.join(differing)}; pass restart=True (--restart) to "
                    "remove it, or finish that run"
                )
        with _kept_if_of_use(folder):
            if not is_marked(folder):
                mark(folder)
            if not (folder / _MANIFEST).is_file():
                _write_whole(folder / _MANIFEST, _MANIFEST, {"run": wanted})
            yield Work(folder)
        _remove(folder)
    finally:
        os.close(lock)


@contextmanager
def _kept_if_of_use(folder: Path) -> Iterator[None]:
    """Removes a folder when the block is left by an error after which nobody could go on there."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, _REFUSALS) or next(folder.glob(_RECORDS), None) is None:
            with suppress(OSError):
                _remove(folder)
        raise


def _locked(folder: Path) -> int:
    """The lock on a folder, which is made if it is absent."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue  # a run that has ended was faster, and has removed it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), folder.stat()):
                return lock
        except FileNotFoundError:
            pass
        except BlockingIOError as error:
            os.close(lock)
            raise FileExistsError(f"{folder}: another process is working there") from error
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _own_files(folder: Path) -> list[Path]:
    """Files with names that runs give; the manifest last, so that what is left by a kill can tell of its run."""
    found = [path for path in folder.iterdir() if _OWN.fullmatch(path.name) and path.is_file()]
    return sorted(found, key=lambda path: (path.name == _MANIFEST, path.name))


def _check_own(folder: Path) -> None:
    """Raises unless all that a folder holds is what runs have left."""
    known = {MARK, *(path.name for path in _own_files(folder))} if is_marked(folder) else set()
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in known)
    if foreign:
        names = ", ".join(map(repr, foreign[:3])) + (", ..." if len(foreign) > 3 else "")
        raise FileExistsError(
            f"{folder}: expected what an earlier run has left, or nothing; it holds files that no run has left "
            f"({names}); move them away, or take another destination"
        )


def _write_whole(path: Path, partial_name: str, value: Mapping[str, Any]) -> None:
    """Writes an object with the digest of itself; the file appears when it is on the disk."""
    partial = path.with_name(f"{partial_name}.partial")
    write_json(partial, {**value, _DIGEST: _digest_of(value)})
    partial.rename(path)


def _read_whole(path: Path) -> dict[str, Any]:
    """The object as it was written; empty where the file is absent or holds anything else."""
    try:
        found = read_json(path)
    except (FileNotFoundError, CheckpointError):
        return {}
    digest = found.pop(_DIGEST, None)
    return found if digest == _digest_of(found) else {}


def _digest_of(value: Mapping[str, Any]) -> str:
    """SHA-256 of JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _differences(found: Any, wanted: Any, name: str = "") -> Iterator[str]:
    """The names of what differs, with both values where these are short."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in sorted({*found, *wanted}):
            yield from _differences(found.get(key), wanted.get(key), f"{name}.{key}" if name else key)
    elif found != wanted:
        values = f" ({found}, now {wanted})"
        yield name + (values if len(values) <= _SHORT else "")


def _empty(folder: Path) -> None:
    for path in _own_files(folder):
        path.unlink()


def _remove(folder: Path) -> None:
    """Removes it but for what others have put there meanwhile."""
    _empty(folder)
    (folder / MARK).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()
