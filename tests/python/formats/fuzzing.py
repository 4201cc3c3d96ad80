"""Damages valid checkpoints, and every other file that qcutlass reads, and looks at what readers make of them.

    python -m tests.python.formats.fuzzing --mutations 50_000_000 --processes 8 --state fuzz.json   # again goes on
    python -m tests.python.formats.fuzzing --only "gguf: header" --input 1234                       # one, by its number

Of a hundred inputs one is a whole folder, of which all layers are read, the others are headers, configurations,
indexes and the like (`readers.py`). A finding is an error of another type than those that are documented, one that
names neither a file of the folder, nor the folder, nor the layer that was asked for, a file that is opened outside of
the folder (`opened.py`), a layer that is not what layers must be, a crash, more than 10 seconds of the CPU for one
input, or more than 192 MB of address space beyond those that the process has; the files have a few kilobytes.
`test_fuzz.py` tries a few thousand.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from tests.python.formats.chunks import Chunk, Tally, in_children
from tests.python.formats.fuzz_corpus import Files, subjects
from tests.python.formats.mutations import MUTATIONS, change_header_bytes, change_text
from tests.python.formats.opened import inside_alone
from tests.python.formats.readers import Reader, names, readers, refusals

from qcutlass import formats, models
from qcutlass.formats import CanonicalFp8, CanonicalInt8, CanonicalLinear, Layer
from qcutlass.layers import QuantLinear
from qcutlass.products.checks import are_finite

SECONDS = 10  # of the CPU: a busy machine may let a process wait for longer
WAITING = 60
SPARE_MEMORY = 192 << 20  # address space over what the process has: files have a few kilobytes


def check_layer(layer: Layer) -> None:
    """What every layer that is loaded must be, whatever the file was."""
    n, k = layer.shape
    tensors = [layer.bias]
    if isinstance(layer, CanonicalLinear):
        weight = layer.weight
        groups = -(-k // weight.group_size)
        assert weight.codes.dtype == torch.uint8
        assert int(weight.codes.max()) < 2**weight.bits
        assert weight.scales.shape == (groups, n)
        assert weight.zeros is None or weight.zeros.shape == (groups, n)
        assert layer.perm is None or layer.perm.sort().values.tolist() == list(range(k))
        assert layer.act_scale is None or layer.act_scale.shape == (k,)
        tensors += [weight.scales, weight.zeros, layer.act_scale]
    elif isinstance(layer, CanonicalInt8 | CanonicalFp8):
        assert layer.scales.shape == (n,)
        assert are_finite(layer.codes)
        tensors += [layer.scales, layer.input_scale]
    else:
        tensors += [layer.weight]
    assert layer.bias is None or layer.bias.shape == (n,)
    assert all(bool(tensor.float().isfinite().all()) for tensor in tensors if tensor is not None)


def check_converted(layer: QuantLinear) -> None:
    """As `check_layer`, and it multiplies."""
    layer.check()
    assert layer(torch.ones(1, layer.in_features)).shape == (1, layer.out_features)


def set_alarms(seconds: float, waiting: float) -> None:
    """Of the CPU, and of the clock; 0: none."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, waiting)


@contextmanager
def little_time_and_memory() -> Iterator[None]:
    """Ends what hangs, and refuses memory out of proportion to the files."""

    def hang(signum: int, frame: object) -> None:
        raise AssertionError(f"no answer in {SECONDS} seconds of the CPU, or {WAITING} of the clock")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    previous = [(number, signal.signal(number, hang)) for number in (signal.SIGALRM, signal.SIGPROF)]
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_MEMORY, limits[1]))
    try:
        yield
    finally:
        set_alarms(0, 0)
        for number, handler in previous:
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def load_all(folder: Path, meanwhile: Callable[[], None] = lambda: None) -> int:
    """Layers that were loaded; the others raised what they should. `meanwhile` runs when the folder is open."""
    loaded = 0
    checkpoint: Any
    check: Callable[[Any], None]
    with refusals(folder):
        if models.is_converted(folder):
            checkpoint, check = models.ConvertedFolder(folder), check_converted
            with refusals(folder, *checkpoint):
                models.inspect(folder)
        else:
            checkpoint, check = formats.load(folder), check_layer
        meanwhile()
        for name in checkpoint:
            with refusals(folder, name):
                check(checkpoint[name])
                loaded += 1
        for name in checkpoint.rest:
            with refusals(folder, name):
                checkpoint.tensor(name)
    return loaded


def write_files(folder: Path, files: Files) -> None:
    for path in folder.iterdir():
        path.rmdir() if path.is_dir() else path.unlink()
    for name, data in files.items():
        path = folder / name
        if isinstance(data, bytes):
            path.write_bytes(data)
        elif data == "fifo":
            os.mkfifo(path)
        elif data == "folder":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero")


def cut(chance: random.Random, folder: Path) -> None:
    """Cuts one of the files short."""
    path = chance.choice(sorted(folder.iterdir()))
    if path.is_file():
        os.truncate(path, chance.randrange(1 + path.stat().st_size))


def damaged(subject: str, chance: random.Random) -> tuple[Files, list[str]]:
    """The files of a checkpoint, damaged in one to three ways, and the names of these."""
    files = dict(subjects()[subject])
    mutations = chance.choices(MUTATIONS, k=chance.choice([1, 1, 1, 2, 3]))
    try:
        for mutation in mutations:
            mutation(chance, files)
    except (ValueError, KeyError, IndexError, struct.error, AttributeError, TypeError, RuntimeError, OverflowError):
        pass  # the first damage left nothing for the second one to parse
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
    return files, [mutation.__name__ for mutation in mutations]


def attempt(subject: str, seed: int, index: int, folder: Path) -> int:
    """The layers that are loaded of one input; AssertionError, with what it takes to repeat it, for other errors."""
    chance = random.Random(f"{seed} {subject} {index}")
    files, damages = damaged(subject, chance)
    write_files(folder, files)
    set_alarms(SECONDS, WAITING)
    try:
        with inside_alone(folder):
            return load_all(folder, (lambda: cut(chance, folder)) if chance.random() < 0.05 else lambda: None)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise AssertionError(f"{subject}, input {index} of seed {seed}, {damages}: {error!r}") from error
    finally:
        set_alarms(0, 0)


def damaged_file(reader: Reader, chance: random.Random) -> bytes:
    """What is damaged of a reader's file, in one to three places; a safetensors header keeps its length, mostly."""
    data = reader.data
    is_tensors = reader.file.endswith(".safetensors")
    text = data[8:] if is_tensors else data
    is_text = not reader.file.endswith(".gguf") and chance.random() < 0.7
    if is_tensors and not is_text and chance.random() < 0.5:
        return change_header_bytes(chance, data)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        text = (change_text if is_text else change_header_bytes)(chance, text)
    return struct.pack("<Q", len(text)) + text if is_tensors else text


def read_damaged(name: str, seed: int, index: int, folder: Path) -> bool:
    """Whether one input is read; AssertionError, with what it takes to repeat it, for errors of other types.

    The folder holds the reader's files; those that reading has removed are written again.
    """
    reader = readers()[name]
    chance = random.Random(seed << 64 | zlib.crc32(name.encode()) << 32 | index)
    data = damaged_file(reader, chance)
    if {*os.listdir(folder)} != reader.files.keys():
        write_files(folder, reader.files)
    with open(folder / reader.file, "wb") as file:
        file.write(data)
        file.truncate(len(data) + reader.hole)
    set_alarms(SECONDS, WAITING)
    try:
        with inside_alone(folder):
            reader.read(folder)
    except reader.errors as error:
        if not names(error, folder):
            raise AssertionError(f"{name}, input {index} of seed {seed}: names no file: {error!r}") from error
        return False
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise AssertionError(f"{name}, input {index} of seed {seed}: {error!r}") from error
    finally:
        set_alarms(0, 0)
    return True


def try_input(name: str, seed: int, index: int, folder: Path) -> bool:
    """One input of a reader or of a whole folder; whether something of it was read."""
    if name in readers():
        return read_damaged(name, seed, index, folder)
    return attempt(name, seed, index, folder) > 0


def read_whole(name: str) -> None:
    """Reads undamaged files, so that what the first reading imports and allocates is in memory before."""
    with warnings.catch_warnings(), folder_in_memory() as folder:
        warnings.simplefilter("ignore")
        write_files(folder, readers()[name].files if name in readers() else subjects()[name])
        assert readers()[name].read(folder) if name in readers() else load_all(folder) > 0, name


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """An empty folder, on a tmpfs where there is one; named as that of a quantisation is."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as root:
        folder = Path(root) / "new.work"
        folder.mkdir()
        yield folder


def try_chunk(chunk: Chunk, reached: Callable[[int], None], limit: bool) -> Tally:
    """All inputs of a chunk, within the limits of time and memory; `reached` is told the number of each."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tally = Tally(chunk.name)
    with folder_in_memory() as folder, little_time_and_memory() if limit else nullcontext():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for index in range(chunk.first, chunk.first + chunk.count):
            reached(index)
            begin = time.process_time()
            try:
                tally.survived += try_input(chunk.name, chunk.seed, index, folder)
            except AssertionError as error:
                tally.add_failure(str(error))
            tally.note_time(time.process_time() - begin, index)
            tally.inputs += 1
        tally.megabytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return tally


def chunks(mutations: int, seed: int, only: str | None) -> list[Chunk]:
    """As many inputs, shared out: one of a hundred is a whole folder, readers have their shares."""
    folders = {name: 1.0 / len(subjects()) for name in subjects()}
    total = sum(reader.share for reader in readers().values())
    weights = folders | {name: 99.0 * reader.share / total for name, reader in readers().items()}
    if only is not None:
        weights = {name: weight for name, weight in weights.items() if only in name}
    found = []
    for name, weight in weights.items():
        count, size = round(mutations * weight / sum(weights.values())), 10_000 if name in readers() else 500
        firsts = range(0, count, size)
        found += [Chunk(name, seed, first, min(size, count - first)) for first in firsts]
    return sorted(found, key=lambda chunk: chunk.first)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=200_000, help="inputs in all")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--state", type=Path, help="file that keeps what is done: the same command goes on from there")
    parser.add_argument("--only", metavar="NAME", help="only what has this in its name")
    parser.add_argument("--input", type=int, help="only this one, with the traceback; --only is its whole name")
    parser.add_argument("--no-memory-limit", action="store_true", help="for AddressSanitizer, which takes terabytes")
    arguments = parser.parse_args()
    known = [name for name in (*subjects(), *readers()) if arguments.only is None or arguments.only in name]
    if not known:
        parser.error(f"--only: expected a part of {', '.join((*subjects(), *readers()))}; got {arguments.only!r}")
    if arguments.input is not None:
        if arguments.only not in known:
            parser.error(f"--input: expected --only with a whole name, such as {known[0]!r}; got {arguments.only!r}")
        read_whole(arguments.only)
        with folder_in_memory() as folder:
            print("read" if try_input(arguments.only, arguments.seed, arguments.input, folder) else "refused")
        return 0
    wanted = chunks(arguments.mutations, arguments.seed, arguments.only)
    for name in (*subjects(), *readers()):
        read_whole(name)
    work = lambda chunk, reached: try_chunk(chunk, reached, not arguments.no_memory_limit)  # noqa: E731
    return in_children(wanted, work, arguments.processes, 2 * WAITING, arguments.state)


if __name__ == "__main__":
    sys.exit(main())
