"""Files that are none, that change while they are open, or that compete with each other."""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.python.formats.test_gguf import F32, header, tensor_info
from torch import Tensor

from qcutlass import CheckpointError, formats
from qcutlass.formats.safetensors_header import _TORCH_NAMES, BITS
from qcutlass.formats.source import SafetensorsSource

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two layers in two shards, with an index and a configuration."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in "ab":
        save_file({f"{name}.weight": torch.ones(32, 64)}, folder / f"{name}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"{name}.weight": f"{name}.safetensors" for name in "ab"}}))
    (folder / "config.json").write_text("{}")
    return folder


def replace(path: Path, kind: str) -> None:
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path.name)
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "loop"])
@pytest.mark.parametrize("name", [INDEX, "config.json", "a.safetensors"])
def test_what_is_no_regular_file_is_refused_at_once(name: str, kind: str, folder: Path) -> None:
    """A FIFO would be waited for, a device read without end."""

    def give_up(signum: int, frame: object) -> None:
        raise TimeoutError

    replace(folder / name, kind)
    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(5)
    try:
        with pytest.raises(CheckpointError, match=re.escape(name)):
            formats.load(folder)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors"])
def test_weights_that_are_no_regular_file(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    for place in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointError, match="expected"):
            formats.load(place)


def test_an_index_and_another_whole_file(folder: Path) -> None:
    """Of these, others read `model.safetensors`."""
    save_file({f"{name}.weight": torch.zeros(32, 64) for name in "ab"}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"two sources of weights, model\.safetensors .* {INDEX}; remove"):
        formats.load(folder)
    names = {"a.weight": "a.safetensors", "b.weight": "model.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointError, match="two sources of weights"):
        formats.load(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    assert sorted(formats.load(folder)) == ["a", "b"]


def test_a_configuration_that_names_other_weights(folder: Path) -> None:
    for named in ("a.safetensors", "model.safetensors", 5):
        (folder / "config.json").write_text(json.dumps({"transformers_weights": named}))
        with pytest.raises(CheckpointError, match=r"two sources of weights, .*transformers_weights"):
            formats.load(folder)
    (folder / "config.json").write_text(json.dumps({"transformers_weights": INDEX}))
    assert sorted(formats.load(folder)) == ["a", "b"]


CUT = textwrap.dedent(
    """
    import os, sys
    from qcutlass import CheckpointError, formats
    checkpoint = formats.load(sys.argv[1])
    assert checkpoint["up"].weight.sum() == 2**22
    os.truncate(sys.argv[1], 4096)
    for name in ("up", "down"):
        try:
            checkpoint[name]
            print("read")
        except CheckpointError as error:
            print(error)
    """
)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_file_that_is_cut_short_while_it_is_open(kind: str, tmp_path: Path) -> None:
    """A mapped file would end the process."""
    path, weight = tmp_path / f"model.{kind}", np.ones((2048, 2048), dtype=np.float32)
    if kind == "gguf":
        head = header(
            tensors=2,
            body=tensor_info("up.weight", (2048, 2048), F32, 0) + tensor_info("down.weight", (2048, 2048), F32, 2**24),
        )
        path.write_bytes(head + bytes(-len(head) % 32) + 2 * weight.tobytes())
    else:
        save_file({f"{name}.weight": torch.from_numpy(weight.copy()) for name in ("up", "down")}, path)
    found = subprocess.run([sys.executable, "-c", CUT, str(path)], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("the file changed after it was opened; open the checkpoint again") == 2


def test_a_file_that_is_replaced_while_it_is_open(folder: Path) -> None:
    checkpoint = formats.load(folder)
    os.utime(folder / "a.safetensors", ns=(0, 0))
    save_file({"b.weight": torch.zeros(64, 64)}, folder / "b.safetensors")
    for name in "ab":
        with pytest.raises(CheckpointError, match=rf"{name}\.safetensors: {name}\.weight: the file changed"):
            checkpoint[name]
    (folder / "a.safetensors").unlink()
    with pytest.raises(CheckpointError, match="the file changed"):
        checkpoint["a"]


def test_an_interrupted_opening_closes_the_file_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second time could close the file of another thread."""
    opened: list[int] = []

    def fails(descriptor: int, mode: str) -> None:  # as io.open does where memory or a signal ends it
        os.close(descriptor)
        opened.append(os.open("/dev/null", os.O_RDONLY))
        assert opened == [descriptor]
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fdopen", fails)
    with pytest.raises(KeyboardInterrupt):
        formats.load(folder)
    os.fstat(opened[0])  # still open
    os.close(opened[0])


def of_every_type() -> dict[str, Tensor]:
    """By the name in safetensors: the bytes 0 to 63 in every type that torch has."""
    data = torch.arange(64, dtype=torch.uint8)
    tensors = {
        label: data.clone().view(getattr(torch, name)).view(2, -1)
        for label, name in _TORCH_NAMES.items()
        if label != "BOOL" and hasattr(torch, name)
    }
    return tensors | {"BOOL": torch.tensor([[True], [False]]), "scalar": torch.tensor(7, dtype=torch.uint16)}


def test_every_type_is_read_as_it_is_stored(tmp_path: Path) -> None:
    tensors = of_every_type()
    assert len(tensors) > 15
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource([tmp_path / "model.safetensors"])
    for name, tensor in tensors.items():
        found = source.read(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert found.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()
        assert source.tensors[name].nbytes == tensor.nbytes
        assert name == "scalar" or source.tensors[name].dtype == name


def test_the_types_are_those_of_safetensors(tmp_path: Path) -> None:
    """Its library says which it knows where a file names another one."""
    from safetensors import SafetensorError, safe_open
    from tests.python.formats.test_checkpoint import safetensors_file

    path = safetensors_file(tmp_path / "x.safetensors", {"x": {"dtype": "?", "shape": [], "data_offsets": [0, 0]}})
    with pytest.raises(SafetensorError) as error, safe_open(path, "pt"):
        pass
    known = set(str(error.value).partition("expected one of")[2].replace("`", " ").replace(",", " ").split())
    assert {name for name in known if name in BITS or name[0].isupper()} == set(BITS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [0, 2**63], "data_offsets": [0, 0]}, "shape"),
        ({"shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}, "shape"),
        ({"shape": [-1, 4]}, "shape"),
        ({"shape": [2.0, 4]}, "shape"),
        ({"shape": [True, 8]}, "shape"),
        ({"shape": None}, "shape"),
        ({"shape": [2, 5]}, "does not fill the bytes"),
        ({"data_offsets": [4, 36]}, "no gaps"),
        ({"data_offsets": [0]}, "data_offsets"),
        ({"data_offsets": [32, 0]}, "does not fill"),
        ({"dtype": "F7"}, "unknown type 'F7'"),
        ({"dtype": ["F32"]}, "unknown type"),
        ({"dtype": "F4", "shape": [64, 1]}, "does not fill"),
    ],
)
def test_headers_that_lie(change: dict[str, object], message: str, tmp_path: Path) -> None:
    from tests.python.formats.test_checkpoint import safetensors_file

    entry = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}
    path = safetensors_file(tmp_path / "bad.safetensors", {"up.weight": {**entry, **change}}, bytes(32))
    with pytest.raises(CheckpointError, match=rf"bad\.safetensors.*{message}"):
        formats.load(path)


def test_a_name_that_nothing_can_print(tmp_path: Path) -> None:
    from tests.python.formats.test_checkpoint import safetensors_file

    entry = b'{"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}'
    path = safetensors_file(tmp_path / "bad.safetensors", b'{"\\ud800.weight": ' + entry + b"}", bytes(4))
    with pytest.raises(CheckpointError, match="surrogates"):
        formats.load(path)


@pytest.mark.parametrize("name", [INDEX, "config.json", "a.safetensors"])
def test_lists_without_end_take_no_memory(name: str, folder: Path) -> None:
    """A list costs the parser 30 times the bytes that it has in a file."""
    text = b'{"a": [' + b"[]," * (1 << 20) + b"[]]}"
    whole = struct.pack("<Q", len(text)) + text if name.endswith("safetensors") else text
    (folder / name).write_bytes(whole)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=rf"{name}: .*expected at most (65536 tensors|524288 lists and obj)"):
            formats.load(folder)
        assert tracemalloc.get_traced_memory()[1] < (32 << 20) + 3 * len(text)  # room to read the longest, and the text
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("inner", ["[%s]", '{"a": %s}'])
@pytest.mark.parametrize("name", [INDEX, "config.json"])
def test_lists_in_each_other(name: str, inner: str, folder: Path) -> None:
    for depth, message in ((63, None), (64, "at most 64 lists and objects in each other"), (10**5, "not JSON")):
        value = "1"
        for _ in range(depth if depth < 100 else 0):
            value = inner % value
        if depth > 100:
            value = inner.partition("%")[0] * depth
        weights = {f"{each}.weight": f"{each}.safetensors" for each in "ab"}
        (folder / name).write_text(f'{{"weight_map": {json.dumps(weights)}, "deep": {value}}}')
        if message is None:
            assert len(formats.load(folder)) == 2
        else:
            with pytest.raises(CheckpointError, match=rf"{name}: not JSON .*{message if depth < 100 else ''}"):
                formats.load(folder)
