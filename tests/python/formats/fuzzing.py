"""Damages valid checkpoints: their structure (dimensions, types, offsets, counts, JSON, tensors) and their bytes.

`python -m tests.python.formats.fuzzing [INPUTS] [SEED]` tries many (200000 by default, five minutes) and prints what
raised something else than it should; `test_fuzz.py` tries a few thousand.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors.torch import load, save
from tests.python.formats.fuzz_corpus import Files, gguf_bytes, gguf_parts, subjects

from qcutlass import CheckpointError, UnsupportedError, formats, models
from qcutlass.formats import CanonicalFp8, CanonicalInt8, CanonicalLinear, Layer
from qcutlass.layers import QuantLinear
from qcutlass.products.checks import are_finite

Mutation: TypeAlias = Callable[[random.Random, Files], None]

SECONDS = 10
SPARE_MEMORY = 192 << 20  # address space over what the process has: files have a few kilobytes

INTEGERS = [
    0, 1, -1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1,
    2**31, -(2**31), 2**32 - 1, 2**32, 2**40, 2**53, 2**60, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64,
]  # fmt: skip
VALUES: list[Any] = [
    *INTEGERS, None, True, False, "", "x", "4", 0.5, 1e400, [], {}, [0], [1] * 9, {"a": 1},
    "../x", "a.safetensors", "model.safetensors", "gptq_v2", "awq", "hqq", "weight_only", "int8", "float16", "uint8",
]  # fmt: skip
DTYPES = ["F16", "BF16", "F32", "F64", "I8", "U8", "I16", "I32", "I64", "BOOL", "F8_E4M3", "F8_E5M2", "F4", "U16", "?"]
KEYS = [
    "bits", "sym", "dynamic", "group_size", "quant_method", "kind", "zeros", "perm", "transformers_weights", "up",
    "weight_block_size", "activation_scheme", "strategy",
]  # fmt: skip
NAMES = [
    "up.g_idx", "up.bias", "weight", ".weight", "up.weight", "é.qweight", "up.zeros", "up.perm", "up.act_scale",
    "layout", "w_packed", ".w_packed", "up.layout", "up.w_packed", "up.scales", "up.a_scale", "up.smooth", "b.layout",
    "a.scales", "up.weight_scale", "up.weight_scale_inv", "up.input_scale",
]  # fmt: skip
SHAPES = [(), (0,), (1,), (5,), (3, 2), (0, 4), (64, 0), (1, 64), (1, 2, 3), (1, 1, 1, 1), (2, 1, 8, 16)]
TENSOR_DTYPES = [
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16,
]  # fmt: skip


def change_bytes(chance: random.Random, files: Files) -> None:
    name = chance.choice(list(files))
    data = bytearray(content(files, name))
    begin = min(len(data), 2000) if chance.random() < 0.5 else len(data)  # headers more than data
    for _ in range(chance.choice([1, 1, 2, 8])):
        at = chance.randrange(begin)
        data[at] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, data[at] ^ (1 << chance.randrange(8)), chance.randrange(256)])
    files[name] = bytes(data)


def change_number(chance: random.Random, files: Files) -> None:
    """A number of 2, 4 or 8 bytes; in halves, NaN and infinity."""
    name = chance.choice(list(files))
    data = bytearray(content(files, name))
    size = chance.choice([2, 4, 8])
    at = chance.randrange(len(data) - size)
    value = chance.choice([*INTEGERS, 0x7C00, 0x7E00, 0xFC00]) % 2 ** (8 * size)
    data[at : at + size] = value.to_bytes(size, "little")
    files[name] = bytes(data)


def change_length(chance: random.Random, files: Files) -> None:
    name = chance.choice(list(files))
    data = content(files, name)
    cut = chance.randrange(len(data))
    files[name] = chance.choice([data[:cut], data[cut:], data + data[:cut], data[:cut] + data[cut + 1 :], b""])


def change_header(chance: random.Random, files: Files) -> None:
    names = [name for name in files if name.endswith(".safetensors")]
    if not names:
        change_gguf(chance, files)
        return
    name = chance.choice(names)
    whole = content(files, name)
    (length,) = struct.unpack("<Q", whole[:8])
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    header.pop("__metadata__", None)
    tensor, other = chance.choice(list(header)), chance.choice(list(header))
    entry = header[tensor]
    how = chance.randrange(8)
    if how == 0:
        entry["dtype"] = chance.choice(DTYPES)
    elif how == 1 and entry["shape"]:
        entry["shape"][chance.randrange(len(entry["shape"]))] = chance.choice(INTEGERS)
    elif how == 2:
        entry["shape"] = chance.choice([entry["shape"][::-1], [*entry["shape"], 1], entry["shape"][1:], [2**40, 0], []])
    elif how == 3:
        entry["data_offsets"][chance.randrange(2)] = chance.choice(INTEGERS)
    elif how == 4:
        header[tensor], header[other] = header[other], header[tensor]
    elif how == 5:  # away, and its bytes with it: a valid file
        begin, end = header.pop(tensor)["data_offsets"]
        data = data[:begin] + data[end:]
        for rest in header.values():
            rest["data_offsets"] = [at - (end - begin if at >= end else 0) for at in rest["data_offsets"]]
    elif how == 6:  # another shape of as many bytes
        count = int(np.prod(entry["shape"]))
        half = count // 2
        entry["shape"] = chance.choice([[count], [1, count], [count, 1], [half, 2], [2, half], [count, 1, 1]])
    else:
        header[chance.choice(NAMES)] = header.pop(tensor)
    text = json.dumps(header).encode()
    files[name] = struct.pack("<Q", len(text)) + text + data


def change_json(chance: random.Random, files: Files) -> None:
    names = [name for name in files if name.endswith(".json")]
    if not names:
        change_gguf(chance, files)
        return
    name = chance.choice(names)
    whole = json.loads(content(files, name))
    node, keys = whole, []
    while True:
        key = chance.choice(list(node) or ["new"])
        keys.append(key)
        if not isinstance(node.get(key), dict) or chance.random() < 0.15:
            break
        node = node[key]
    if chance.random() < 0.2:
        node.pop(keys[-1], None)
    else:
        node[keys[-1] if chance.random() < 0.8 else chance.choice(KEYS)] = chance.choice(VALUES)
    files[name] = json.dumps(whole).encode()


def change_tensor(chance: random.Random, files: Files) -> None:
    """Another tensor in a file that stays whole: one more, one less, numbers, a type or a shape of its own."""
    names = [name for name in files if name.endswith(".safetensors")]
    if not names:
        change_gguf(chance, files)
        return
    file = chance.choice(names)
    tensors = load(content(files, file))
    name = chance.choice(list(tensors))
    tensor = tensors[name]
    how = chance.randrange(6)
    if how == 0:
        del tensors[name]
    elif how == 1:  # a few numbers
        if tensor.numel():
            value = chance.choice([*INTEGERS[:34], 0x7C00, 0x7E00, 0x7F80, float("nan"), float("inf"), -1.0])
            flat = tensor.reshape(-1)
            flat[chance.randrange(len(flat))] = value
            tensors[name] = flat.view(tensor.shape)
    elif how == 2:
        tensors[name] = tensor.double().to(chance.choice(TENSOR_DTYPES))
    elif how == 3:
        shape = chance.choice(SHAPES)
        tensors[name] = torch.ones(shape).to(tensor.dtype if chance.random() < 0.5 else chance.choice(TENSOR_DTYPES))
    elif how == 4:
        tensors[name] = chance.choice([tensor[:1], tensor[None], tensor.repeat(2, *[1] * (tensor.dim() - 1)), tensor.T])
    else:
        tensors[chance.choice(NAMES)] = tensor.clone() if chance.random() < 0.5 else torch.ones(chance.choice(SHAPES))
    files[file] = save({key: value.contiguous() for key, value in tensors.items()})


def change_gguf(chance: random.Random, files: Files) -> None:
    """A number, a name or a list of a GGUF header."""
    if "model.gguf" not in files:
        change_index(chance, files)
        return
    parts = copy.deepcopy(gguf_parts())
    info, pair = chance.choice(parts["infos"]), chance.choice(parts["pairs"])
    how = chance.randrange(10)
    if how == 0:
        info["dims"][chance.randrange(2)] = chance.choice([0, 32, *INTEGERS])
    elif how == 1:
        dims = info["dims"]
        info["dims"] = chance.choice(
            [[], dims[:1], [*dims, 1], [*dims, 1, 1], [1] * 5, dims[::-1], [0, 2**63], [192, 1]]
        )
    elif how == 2:
        info["kind"] = chance.choice([*range(40), *INTEGERS])
    elif how == 3:
        info["offset"] = chance.choice([*INTEGERS, *range(0, 4096, 32)])
    elif how == 4:
        info["name"] = chance.choice(
            ["", "token_embd.weight", "output.weight", "blk.0.ffn_up.weight", ".weight", "weight"]
        )
    elif how == 5:
        parts[chance.choice(["version", "tensors", "count"])] = chance.choice(INTEGERS)
    elif how == 6:
        chosen = parts[chance.choice(["infos", "pairs"])]
        chosen.append(copy.deepcopy(chance.choice(chosen))) if chance.random() < 0.5 else chosen.pop()
        parts["tensors"], parts["count"] = len(parts["infos"]), len(parts["pairs"])
    elif how == 7:
        pair["kind"] = chance.choice([*range(14), *INTEGERS])
    elif how == 8 and "element" in pair:
        pair[chance.choice(["element", "count"])] = chance.choice([*range(14), *INTEGERS])
    else:
        alignment = parts["pairs"][2]
        alignment["value"] = (chance.choice(INTEGERS) % 2**32).to_bytes(4, "little")
    files["model.gguf"] = gguf_bytes(parts)


def change_index(chance: random.Random, files: Files) -> None:
    """Names of files and tensors in the index; an index, a file or a kind of file more than there should be."""
    index = "model.safetensors.index.json"
    weights = [name for name in files if name.endswith(".safetensors")]
    how = chance.randrange(6)
    if index in files and how < 4:
        weight_map = json.loads(content(files, index))["weight_map"]
        tensor, other = chance.choice(list(weight_map)), chance.choice(list(weight_map))
        if how == 0:
            weight_map[tensor], weight_map[other] = weight_map[other], weight_map[tensor]
        elif how == 1:
            weight_map[tensor] = chance.choice([*weights, *VALUES])
        elif how == 2:
            weight_map[chance.choice(NAMES)] = weight_map.pop(tensor)
        else:
            del weight_map[tensor]
        files[index] = json.dumps({"weight_map": weight_map}).encode()
    elif how < 3:
        listed = chance.choice([weights, ["x.safetensors"], [""], [7], []])
        files[index] = json.dumps({"weight_map": {name: chance.choice(listed or [None]) for name in NAMES}}).encode()
    elif how == 3:
        files["model.safetensors"] = content(files, chance.choice(weights)) if weights else b""
    elif how == 4:
        files[chance.choice([*files, index, "config.json"])] = chance.choice(["fifo", "folder", "device"])
    else:
        del files[chance.choice(list(files))]


def content(files: Files, name: str) -> bytes:
    """What a file holds; KeyError where there is none."""
    data = files[name]
    if isinstance(data, str):
        raise KeyError(name)
    return data


MUTATIONS: list[Mutation] = [
    change_bytes, change_number, change_length, change_header, change_header, change_json, change_json,
    change_tensor, change_tensor, change_gguf, change_index,
]  # fmt: skip


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


@contextmanager
def little_time_and_memory() -> Iterator[None]:
    """Ends what hangs, and refuses memory out of proportion to the files."""

    def hang(signum: int, frame: object) -> None:
        raise AssertionError(f"no answer in {SECONDS} seconds")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    previous = signal.signal(signal.SIGALRM, hang)
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_MEMORY, limits[1]))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def load_all(folder: Path, meanwhile: Callable[[], None] = lambda: None) -> int:
    """Layers that were loaded; the others raised what they should. `meanwhile` runs when the folder is open."""
    loaded = 0
    checkpoint: Any
    check: Callable[[Any], None]
    with suppress(CheckpointError, UnsupportedError):
        if models.is_converted(folder):
            checkpoint, check = models.ConvertedFolder(folder), check_converted
            models.inspect(folder)
        else:
            checkpoint, check = formats.load(folder), check_layer
        meanwhile()
        for name in checkpoint:
            with suppress(CheckpointError, UnsupportedError):
                check(checkpoint[name])
                loaded += 1
        for name in checkpoint.rest:
            with suppress(CheckpointError, UnsupportedError):
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
    files, names = damaged(subject, chance)
    write_files(folder, files)
    signal.alarm(SECONDS)
    try:
        return load_all(folder, (lambda: cut(chance, folder)) if chance.random() < 0.05 else lambda: None)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise AssertionError(f"{subject}, input {index} of seed {seed}, {names}: {error!r}") from error
    finally:
        signal.alarm(0)


def main(inputs: int = 200_000, seed: int = 1) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    failures: Counter[str] = Counter()
    loaded = 0
    with tempfile.TemporaryDirectory() as folder:
        for subject in subjects():
            write_files(Path(folder), subjects()[subject])
            load_all(Path(folder))
            with little_time_and_memory():
                for index in range(-(-inputs // len(subjects()))):
                    try:
                        loaded += attempt(subject, seed, index, Path(folder))
                    except AssertionError as error:
                        failures[repr(error.__cause__)[:60]] += 1
                        if failures[repr(error.__cause__)[:60]] <= 3:
                            print(error, flush=True)
            print(f"{subject}: {index + 1} inputs", flush=True)
    print(f"{len(subjects()) * (index + 1)} inputs of seed {seed}: {loaded} layers loaded, {failures.total()} failures")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
