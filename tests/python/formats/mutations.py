"""Ways to damage a checkpoint: its structure (dimensions, types, offsets, counts, JSON, tensors) and its bytes."""

from __future__ import annotations

import copy
import json
import random
import re
import struct
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors.torch import load, save
from tests.python.formats.fuzz_corpus import Files, gguf_bytes, gguf_parts

Mutation: TypeAlias = Callable[[random.Random, Files], None]

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


_TOKEN = re.compile(rb'"(?:[^"\\\\]|\\\\.)*"|-?\d+(?:\.\d+)?|true|false|null|[\[\]{}:,]')
_MARKS = (b"[", b"]", b"{", b"}", b":", b",")
VALUE_TEXTS = [json.dumps(value).encode() for value in VALUES]
TOKENS = [
    *VALUE_TEXTS,
    b"[", b"]", b"{", b"}", b",", b":", b"[]]", b"{}", b"-0", b"1e999", b"NaN", b"-Infinity", b"9" * 25, b"[" * 40,
    b'"\\ud800"', b'"\\u0000"', b'"a/b"', b'"../../x"', b'"/etc/passwd"', b"0.0", b"[[[[]]]]", b'{"a":{"a":{}}}',
    b"\xff",
]  # fmt: skip


def change_text(chance: random.Random, data: bytes) -> bytes:
    """A value of JSON becomes another one, a key another name, or some word any other, which ends most of it."""
    words = list(_TOKEN.finditer(data))
    if not words:
        return change_header_bytes(chance, data)
    word = chance.choice(words)
    if chance.random() < 0.2 or word.group() in _MARKS:
        other = chance.choice(TOKENS) if chance.random() < 0.5 else chance.choice(words).group()
    elif data[word.end() : word.end() + 1] == b":":
        names = [each.group() for each in words if each.group().startswith(b'"')]
        other = chance.choice([*names, b'"x"', b'""', b'"a.b"', b'"group_size"', b'"quant_method"'])
    else:
        other = chance.choice(VALUE_TEXTS)
    begin = word.end() if chance.random() < 0.05 else word.start()
    return data[:begin] + other + data[word.end() :]


def change_header_bytes(chance: random.Random, data: bytes) -> bytes:
    """One to four numbers of 1 to 8 bytes become others, or a piece is cut out, doubled or moved."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at, how = chance.randrange(len(changed) + 1), chance.randrange(8)
        if how < 3:
            changed[at : at + 1] = bytes((chance.randrange(256),))
        elif how == 3:
            changed[at : at + 1] = bytes((changed[at] ^ 1 << chance.randrange(8),)) if at < len(changed) else b"\0"
        elif how < 6:
            size = chance.choice((2, 4, 4, 8, 8))
            changed[at : at + size] = (chance.choice(INTEGERS) % 2 ** (8 * size)).to_bytes(size, "little")
        else:
            end = min(len(changed), at + chance.choice((1, 2, 4, 8, 16, 64, 4096)))
            to = at if how == 6 else chance.randrange(len(changed) + 1)
            changed[to:to] = changed[at:end]
            if chance.random() < 0.5:
                del changed[at:end]
    return bytes(changed)
