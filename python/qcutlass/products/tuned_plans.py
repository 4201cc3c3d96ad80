"""The file of tuned plans: its format, its checks, and the look-up.

One JSON file for each GPU model and set of kernels, in the user's cache folder. A file that is damaged, belongs to
other kernels or cannot be written is ignored with one warning; the plans of this process then stay in memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import platformdirs
import torch

from qcutlass import _C
from qcutlass.errors import UnsupportedError
from qcutlass.products.checks import check_integer
from qcutlass.products.extension import DTYPES

BUCKETS: Final = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Numbers of rows that are tuned; a product uses the plan of the first one that is not less than its own."""

_FORMAT: Final = 1
_MOST_BYTES: Final = 1 << 24
_MOST_SPLITS: Final = 16  # that selection makes
_MOST_MICROSECONDS: Final = 1e9
_BITS: Final = {code: 8 * dtype.itemsize for dtype, code in DTYPES.items()}


class TunedPlan(NamedTuple):
    """A configuration that was the fastest of those measured.

    Attributes:
        tactic: name of the configuration.
        split_k: blocks that share the K extent of an output tile.
        microseconds: that it took.
    """

    tactic: str
    split_k: int
    microseconds: float


class Gpu(NamedTuple):
    """The GPU and the kernels that plans were measured on.

    Attributes:
        name: as torch reports it.
        sm_count: number of multiprocessors, which differs between variants of one name.
    """

    name: str
    sm_count: int


def cache_folder() -> Path:
    """Where the files are: `QCUTLASS_CACHE_DIR`, or the user's cache folder.

    Example:
        >>> import qcutlass.tuning
        >>> folder = qcutlass.tuning.cache_folder()
    """
    chosen = os.environ.get("QCUTLASS_CACHE_DIR")
    if not chosen:
        return Path(platformdirs.user_cache_dir("qcutlass", appauthor=False))
    with contextlib.suppress(RuntimeError):  # "~name" of a user that does not exist: a folder of that name
        return Path(chosen).expanduser()
    return Path(chosen)


def bucket(m: int) -> int | None:
    """The number of rows that `m` rows are tuned as, None beyond the largest.

    Example:
        >>> from qcutlass.tuning import bucket
        >>> [bucket(m) for m in (1, 17, 48, 16384, 16385)]
        [1, 32, 48, 16384, None]
    """
    check_integer("m", m, minimum=0)
    return next((size for size in BUCKETS if size >= m), None)


def product_key(arguments: _C.GemmArguments, rows: int) -> str:
    """The key of a measured plan: the scheme, the shape and `rows`, the bucket of the number of rows.

    Of an output of another type than the activations it has the bits of an element: types of as many take equal times.
    Of experts it has their number, and whether rows are gathered; which of them has which rows, nobody knows before.
    """
    w = arguments.weights
    group = "channel" if w.group_size >= w.k else w.group_size
    names = (value.name.lower() for value in (w.packing, arguments.a_type, w.scale_type, w.zero_type))
    packing, a_type, scale_type, zero_type = names
    offsets = f"zeros={zero_type}"
    if w.minimum_type != _C.DType.NONE:
        offsets = f"minimums={w.minimum_type.name.lower()}"
    parts = [packing, a_type, f"scales={scale_type}", offsets, f"group={group}"]
    if arguments.blocks.size:
        parts.append(f"blocks={arguments.blocks.size}")
    if arguments.experts.count:
        parts.append(f"experts={arguments.experts.count}{'/gathered' if arguments.experts.rows else ''}")
    if arguments.out_type != arguments.a_type:
        parts.append(f"out={_BITS[arguments.out_type]}-bit")
    return "/".join([*parts, f"{w.n}x{w.k}", f"m={rows}"])


class _NotOurs(ValueError):
    """The content of a file is damaged or belongs to something else."""


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise _NotOurs(what)


def _integer(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _parse_plan(key: object, value: object) -> TunedPlan:
    _check(isinstance(value, dict) and set(value) == set(TunedPlan._fields), f"the entry {key!r} has other fields")
    plan = TunedPlan(**value)  # type: ignore[arg-type]
    named = isinstance(plan.tactic, str) and 0 < len(plan.tactic) < 200 and plan.tactic.isascii()
    _check(named, f"the tactic of {key!r} is no name")
    _check(_integer(plan.split_k, 1, _MOST_SPLITS), f"split_k of {key!r} is not in 1 .. {_MOST_SPLITS}")
    time = plan.microseconds
    number = isinstance(time, int | float) and not isinstance(time, bool) and 0 < time < _MOST_MICROSECONDS
    _check(number, f"microseconds of {key!r} are not in 0 .. {_MOST_MICROSECONDS:g}")
    return plan


def parse(text: str, gpu: Gpu, kernels: str) -> dict[str, TunedPlan]:
    """The plans in a file's text.

    Raises:
        ValueError: the text is not such a file, or was written for another GPU or other kernels.
    """
    try:
        content = json.loads(text)
    except RecursionError:
        raise _NotOurs("its JSON is nested too deeply") from None
    fields = {"format", "gpu", "kernels", "plans"}
    _check(isinstance(content, dict) and set(content) == fields, f"expected an object of {', '.join(sorted(fields))}")
    _check(_integer(content["format"], _FORMAT, _FORMAT), f"format {content['format']!r} is not {_FORMAT}")
    _check(content["gpu"] == gpu._asdict(), f"it is for the GPU {content['gpu']!r}, this one is {gpu._asdict()!r}")
    _check(content["kernels"] == kernels, f"it is for the kernels {content['kernels']!r}, this build is {kernels!r}")
    _check(isinstance(content["plans"], dict), "its plans are not an object")
    return {key: _parse_plan(key, value) for key, value in content["plans"].items()}


def _render(plans: Mapping[str, TunedPlan], gpu: Gpu, kernels: str) -> str:
    entries = {key: plan._asdict() for key, plan in sorted(plans.items())}
    return json.dumps({"format": _FORMAT, "gpu": gpu._asdict(), "kernels": kernels, "plans": entries}, indent=1) + "\n"


class PlanCache:
    """Tuned plans for one GPU model and set of kernels: a dictionary, and its file."""

    def __init__(self, gpu: Gpu, kernels: str, folder: Path) -> None:
        """Reads the file if there is one."""
        self.gpu, self.kernels = gpu, kernels
        slug = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")
        self.path = folder / f"tuned-{slug}-{gpu.sm_count}-{kernels}.json"
        self._plans = self._read()

    def get(self, key: str) -> TunedPlan | None:
        """The plan for a product, if it was tuned."""
        return self._plans.get(key)

    def update(self, plans: Mapping[str, TunedPlan]) -> bool:
        """Adds plans, and those that other processes wrote meanwhile; says whether the file has them now."""
        known, self._plans = self._plans, {**self._plans, **plans}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._plans = {**known, **self._read(), **plans}
                text = _render(self._plans, self.gpu, self.kernels)
                if len(text) > _MOST_BYTES:
                    raise OSError(f"it would be larger than {_MOST_BYTES >> 20} MiB; remove it to begin anew")
                self._write(text)
        except OSError as error:
            _warn_once(self.path, f"cannot be written ({error}); the tuned plans stay in memory")
            return False
        return True

    def _read(self) -> dict[str, TunedPlan]:
        try:
            status = self.path.stat()
            _check(stat.S_ISREG(status.st_mode), "it is no regular file")
            _check(status.st_size <= _MOST_BYTES, f"it is larger than {_MOST_BYTES >> 20} MiB")
            return parse(self.path.read_text(encoding="utf-8"), self.gpu, self.kernels)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:  # of JSON, of UTF-8, of ours
            _warn_once(self.path, f"is ignored: {error}")
            return {}

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Between reading and writing, no other process writes."""
        with open(self.path.with_suffix(".lock"), "a") as lock:  # closing it releases the lock
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write(self, text: str) -> None:
        """All or nothing: a reader sees the old file or the new one."""
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


_lock: Final = threading.Lock()
_caches: Final[dict[int, PlanCache]] = {}
_listeners: Final[list[Callable[[], Any]]] = []
_warned: Final[set[Path]] = set()


def _warn_once(path: Path, what: str) -> None:
    if path not in _warned:
        _warned.add(path)
        warnings.warn(f"qcutlass: the file of tuned plans {path} {what}", RuntimeWarning, stacklevel=2)


def on_change(listener: Callable[[], Any]) -> None:
    """Has `listener` called whenever tuned plans change, so that plans made before can be dropped."""
    _listeners.append(listener)


def _changed() -> None:
    for listener in _listeners:
        listener()


def forget() -> None:
    """Drops the tuned plans in memory; files are read again, from the folder that the environment then names.

    Example:
        >>> import qcutlass.tuning
        >>> qcutlass.tuning.forget()
    """
    with _lock:
        _caches.clear()
        _warned.clear()
    _changed()


def _cache(device: int, traits: _C.DeviceTraits) -> PlanCache:
    cache = _caches.get(device)
    if cache is None:
        with _lock:
            cache = _caches.get(device)
            if cache is None:
                gpu = Gpu(torch.cuda.get_device_name(device), traits.sm_count)
                cache = _caches[device] = PlanCache(gpu, _C.kernel_set_hash(), cache_folder())
    return cache


def store(plans: Mapping[str, TunedPlan], traits: _C.DeviceTraits, device: int) -> Path | None:
    """Remembers plans by `product_key` for GPU `device`; returns the file, None if it could not be written."""
    cache = _cache(device, traits)
    with _lock:
        written = cache.update(plans)
    _changed()
    return cache.path if written else None


def lookup(arguments: _C.GemmArguments, traits: _C.DeviceTraits, device: int) -> _C.Plan | None:
    """The tuned plan for a product on GPU `device`; None if there is none, or if it does not serve this product.

    The plan is made anew for these very arguments: a file can choose among the kernels, and nothing else.
    """
    rows = bucket(arguments.m)
    tuned = None if rows is None else _cache(device, traits).get(product_key(arguments, rows))
    if tuned is None:
        return None
    try:
        plan = _C.select(arguments, traits, tuned.tactic, tuned.split_k, True)
    except (ValueError, UnsupportedError):  # a name of other kernels; a split of more stages than this K has
        return None
    # Tuning measures plain products. An epilogue costs the fused kernels nothing, the dense product a pass of its own.
    finished = arguments.bias_type != _C.DType.NONE, arguments.activation != _C.Activation.NONE, arguments.residual
    return None if plan.dense and any(finished) else plan
