"""Damaged checkpoints of all kinds: a layer comes out in canonical form, or CheckpointError or UnsupportedError does.

QCUTLASS_FUZZ_INPUTS: how many are tried; 2000 by default, 20000 take about a minute.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save
from tests.python.formats.stored import (
    Tensors,
    as_awq,
    as_compressed,
    as_gptq,
    as_hqq,
    as_marlin,
    as_tensorrt_llm,
    named,
    stored,
)

from qcutlass import CheckpointError, UnsupportedError, formats
from qcutlass.formats import CanonicalLinear, Int8Linear, Layer

Files: TypeAlias = dict[str, bytes]
Mutation: TypeAlias = Callable[[random.Random, Files], None]

INPUTS = int(os.environ.get("QCUTLASS_FUZZ_INPUTS", "2000"))
SECONDS = 10
SPARE_MEMORY = 192 << 20  # address space over what the process has: files have a few kilobytes

INTEGERS = [
    0, 1, -1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1,
    2**31, -(2**31), 2**32 - 1, 2**32, 2**40, 2**53, 2**60, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64,
]  # fmt: skip
VALUES: list[Any] = [
    *INTEGERS, None, True, False, "", "x", "4", 0.5, 1e400, [], {}, [0], [1] * 9, {"a": 1},
    "../x", "a.safetensors", "gptq_v2", "awq", "hqq",
]  # fmt: skip
DTYPES = ["F16", "BF16", "F32", "F64", "I8", "U8", "I16", "I32", "I64", "BOOL", "F8_E4M3", "F8_E5M2", "F4", "U16", "?"]
KEYS = ["bits", "sym", "dynamic", "group_size", "quant_method"]
NAMES = ["up.g_idx", "up.bias", "weight", ".weight", "up.weight", "é.qweight"]


def subjects() -> dict[str, Files]:
    """A small valid checkpoint of each kind."""
    layer = stored(64, 64, 32, seed=1)
    eight = stored(16, 48, 16, 8, seed=2, act_order=True)
    even = stored(64, 64, 32, seed=3, symmetric=True)
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq"}
    act_order = gptq | {"bits": 8, "group_size": 16, "desc_act": True, "checkpoint_format": "gptq_v2"}
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    packed = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    int8 = {
        "weight": torch.ones(16, 32, dtype=torch.int8),
        "weight_scale": torch.ones(16, 1),
        "input_scale": torch.ones(1),
    }
    activations = {"num_bits": 8, "dynamic": False}
    group = {"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": activations}
    offsets = np.full(layer.scales.shape, 0.125)
    hqq = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 32, "axis": 1}}}
    bias = {"bias": torch.ones(64)}
    return {
        "gptq": folder(as_gptq(layer) | bias, gptq),
        "gptq act-order": folder(as_gptq(eight, 2), act_order),
        "awq": folder(as_awq(layer) | bias, awq),
        "compressed-tensors": folder(as_compressed(layer), packed),
        "compressed-tensors int8": folder(int8, {"quant_method": "compressed-tensors", "config_groups": {"g": group}}),
        "marlin": folder(as_marlin(even), gptq | {"checkpoint_format": "marlin", "sym": True}),
        "hqq": folder(as_hqq(layer), hqq),
        "tensorrt-llm": folder(as_tensorrt_llm(layer, offsets, channels_first=True), {"quant_algo": "W4A16_AWQ"}),
        "floats": folder({"weight": torch.randn(8, 16).bfloat16(), "bias": torch.ones(8)}, None),
        "shards": sharded(as_gptq(layer), gptq),
        "gguf": {"model.gguf": gguf_bytes()},
    }


def folder(tensors: Tensors, config: dict[str, Any] | None) -> Files:
    files = {"model.safetensors": save(named(tensors, "up"))}
    if config is not None:
        files["config.json"] = json.dumps({"quantization_config": config}).encode()
    return files


def sharded(tensors: Tensors, config: dict[str, Any]) -> Files:
    parts: dict[str, Tensors] = {"a.safetensors": {}, "b.safetensors": {}}
    for index, (name, tensor) in enumerate(named(tensors, "up").items()):
        parts["ab"[index % 2] + ".safetensors"][name] = tensor
    weight_map = {name: file for file, part in parts.items() for name in part}
    files = {file: save(part) for file, part in parts.items()}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    files["config.json"] = json.dumps({"quantization_config": config}).encode()
    return files


def gguf_bytes() -> bytes:
    """A small GGUF file, written from the format's description; `test_gguf.py` reads files of the gguf package."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    kinds = [gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q8_0", "F16", "F32")]
    header, data = b"", b""
    for kind in kinds:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        header += text(f"blk.{int(kind)}.ffn_up.weight") + struct.pack("<IQQIQ", 2, 64, 3, kind, len(data))
        data += bytes(range(60, 60 + size)) * (64 * 3 // block) if size < 60 else b""
        data += bytes(-len(data) % 32)
    strings = text("tokens") + struct.pack("<IIQ", 9, 8, 3) + text("a") + text("bc") + text("")
    nested = text("nested") + struct.pack("<IIQIQ", 9, 9, 1, 4, 2) + bytes(8)
    alignment = text("general.alignment") + struct.pack("<II", 4, 32)
    flag = text("flag") + struct.pack("<I?", 7, True)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(kinds), 4) + strings + nested + alignment + flag + header
    return head + bytes(-len(head) % 32) + data


def change_bytes(chance: random.Random, files: Files) -> None:
    name = chance.choice(list(files))
    data = bytearray(files[name])
    begin = min(len(data), 2000) if chance.random() < 0.5 else len(data)  # headers more than data
    for _ in range(chance.choice([1, 1, 2, 8])):
        at = chance.randrange(begin)
        data[at] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, data[at] ^ (1 << chance.randrange(8)), chance.randrange(256)])
    files[name] = bytes(data)


def change_number(chance: random.Random, files: Files) -> None:
    """A number of 2, 4 or 8 bytes; in halves, NaN and infinity."""
    name = chance.choice(list(files))
    data = bytearray(files[name])
    size = chance.choice([2, 4, 8])
    at = chance.randrange(len(data) - size)
    value = chance.choice([*INTEGERS, 0x7C00, 0x7E00, 0xFC00]) % 2 ** (8 * size)
    data[at : at + size] = value.to_bytes(size, "little")
    files[name] = bytes(data)


def change_length(chance: random.Random, files: Files) -> None:
    name = chance.choice(list(files))
    data = files[name]
    cut = chance.randrange(len(data))
    files[name] = chance.choice([data[:cut], data[cut:], data + data[:cut], data[:cut] + data[cut + 1 :], b""])


def change_header(chance: random.Random, files: Files) -> None:
    names = [name for name in files if name.endswith(".safetensors")]
    if not names:
        change_bytes(chance, files)
        return
    name = chance.choice(names)
    (length,) = struct.unpack("<Q", files[name][:8])
    header, data = json.loads(files[name][8 : 8 + length]), files[name][8 + length :]
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
        change_number(chance, files)
        return
    name = chance.choice(names)
    whole = json.loads(files[name])
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


MUTATIONS: list[Mutation] = [change_bytes, change_number, change_length, change_header, change_header, change_json]


def check(layer: Layer) -> None:
    """Asserts that a loaded layer is well-formed, whatever the file was."""
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
    elif isinstance(layer, Int8Linear):
        assert layer.scales.shape == (n,)
        tensors += [layer.scales, layer.input_scale]
    else:
        tensors += [layer.weight]
    assert layer.bias is None or layer.bias.shape == (n,)
    assert all(bool(tensor.isfinite().all()) for tensor in tensors if tensor is not None)


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


def load_all(folder: Path) -> int:
    """Layers that were loaded; the others raised what they should."""
    loaded = 0
    with suppress(CheckpointError, UnsupportedError):
        checkpoint = formats.load(folder)
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
        path.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc, to know how much memory is in use")
@pytest.mark.parametrize("subject", subjects())
def test_damaged_checkpoints(subject: str, seed: int, tmp_path: Path) -> None:
    valid = subjects()[subject]
    write_files(tmp_path, valid)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert load_all(tmp_path) == (5 if subject == "gguf" else 1)
        survived = 0
        count = -(-INPUTS // len(subjects()))
        with little_time_and_memory():
            for index in range(count):
                chance = random.Random(seed * 1_000_003 + index)
                files = dict(valid)
                mutations = chance.choices(MUTATIONS, k=chance.choice([1, 1, 1, 2, 3]))
                try:
                    for mutation in mutations:
                        mutation(chance, files)
                except (ValueError, KeyError, IndexError, struct.error, AttributeError, TypeError):
                    pass  # the first damage left nothing for the second one to parse
                write_files(tmp_path, files)
                signal.alarm(SECONDS)
                try:
                    survived += load_all(tmp_path) > 0
                except BaseException as error:
                    names = [mutation.__name__ for mutation in mutations]
                    raise AssertionError(f"{subject}, input {index} of seed {seed}, {names}: {error!r}") from error
    assert 0 < survived < count
