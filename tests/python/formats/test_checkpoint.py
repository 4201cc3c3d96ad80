"""Folders, shards, labels and what lies: whatever the format."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.python.formats.bitsandbytes_files import as_int8
from tests.python.formats.stored import (
    Stored,
    Tensors,
    as_awq,
    as_compressed,
    as_fp8,
    as_gptq,
    as_hqq,
    as_marlin,
    as_tensorrt_llm,
    canonical,
    dequantized,
    named,
    stored,
    write_folder,
)

from qcutlass import CheckpointError, UnsupportedError, defaults, formats
from qcutlass.formats import FORMATS, FloatLinear
from qcutlass.formats.safetensors_header import dtype_name
from qcutlass.products.checks import E8M0

GPTQ = {"quant_method": "gptq", "checkpoint_format": "gptq", "bits": 4, "group_size": 32, "sym": False}


def layer_of(seed: int = 0, symmetric: bool = True) -> Stored:
    return stored(64, 64, 32, seed=seed, symmetric=symmetric)


def every_format() -> dict[str, Tensors]:
    layer = layer_of()
    return {
        "gptq": as_gptq(layer),
        "awq": as_awq(layer),
        "compressed-tensors": as_compressed(layer),
        "fp8": as_fp8(layer.weight)[0],
        "bitsandbytes": as_int8(layer.weight)[0],
        "marlin": as_marlin(layer),
        "hqq": as_hqq(layer),
        "tensorrt-llm": as_tensorrt_llm(layer, None, channels_first=True),
    }


LABELS = {
    "gptq": "gptq", "awq": "awq", "compressed-tensors": "compressed-tensors", "fp8": "fp8", "marlin": "gptq",
    "hqq": "hqq", "bitsandbytes": "bitsandbytes",
}  # fmt: skip


@pytest.mark.parametrize("name", every_format())
def test_the_format_is_told_by_the_tensors(name: str, tmp_path: Path) -> None:
    """All of them hold the same layer; embeddings, norms and a head stay."""
    others = {"model.embed_tokens.weight": torch.ones(8, 4), "lm_head.weight": torch.ones(8, 4).half()}
    config: dict[str, Any] = {"quant_config": {"weight_quant_params": {"axis": 1}}}
    if name in LABELS:
        config |= {"quant_method": LABELS[name], "sym": True}
    folder = write_folder(tmp_path / "model", named(every_format()[name]) | others, config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert formats.detect(folder) == name
        checkpoint = formats.load(folder)
    assert list(checkpoint) == ["model.layers.0.mlp.up_proj"]
    assert sorted(checkpoint.rest) == sorted(others)
    assert torch.equal(checkpoint.tensor("lm_head.weight"), others["lm_head.weight"])
    found = checkpoint["model.layers.0.mlp.up_proj"]
    if name == "fp8":
        assert torch.equal(found.dequantize(torch.float32), as_fp8(layer_of().weight)[1])
    elif name == "bitsandbytes":
        stored = every_format()[name]
        assert torch.equal(dequantized(canonical(found)), stored["weight"] * (stored["SCB"] / 127)[:, None])
    else:
        assert torch.equal(dequantized(canonical(found)), layer_of().weight)


@pytest.mark.parametrize("name", every_format())
def test_a_label_that_lies_is_not_believed(name: str) -> None:
    label = "awq" if name != "awq" else "gptq"
    with pytest.warns(UserWarning, match=f"quant_method is '{label}', but the tensors are those of {name}"):
        assert formats.detect(named(every_format()[name]), {"quant_method": label}) == name


def test_floats_under_the_label_of_something_quantised() -> None:
    with pytest.warns(UserWarning, match="tensors are those of floats"):
        assert formats.detect({"up.weight": torch.ones(4, 4)}, {"quant_method": "gptq"}) == "floats"


def test_labels_that_are_not_known() -> None:
    with pytest.raises(UnsupportedError, match="quant_method 'quanto' is not read, only gptq, awq"):
        formats.load({"up.weight": torch.ones(4, 4)}, config={"quant_method": "quanto"})
    with pytest.raises(UnsupportedError, match=r"converted already; qcutlass\.models\.ConvertedFolder reads"):
        formats.load({"up.weight": torch.ones(4, 4)}, config={"quant_method": "qcutlass"})


def test_layers_of_several_formats() -> None:
    """Each is read as what its own tensors are; a format that is asked for leaves the others."""
    weights = {"up": layer_of(1).weight, "down": as_fp8(layer_of(2).weight)[1]}
    both = named(as_gptq(layer_of(1)), "up") | named(as_fp8(layer_of(2).weight)[0], "down")
    with pytest.warns(UserWarning, match="the tensors are those of gptq, fp8: read as gptq, fp8"):
        checkpoint = formats.load(both, config=GPTQ | {"sym": True})
    assert checkpoint.format == "gptq, fp8"
    assert list(checkpoint) == ["up", "down"]
    assert checkpoint.rest == []
    for name, weight in weights.items():
        assert torch.equal(checkpoint[name].dequantize(torch.float32), weight)
    alone = formats.load(both, "fp8")
    assert list(alone) == ["down"]
    assert list(alone.codes()) == ["up.qweight", "up.qzeros", "up.g_idx"]


def test_formats_of_which_a_model_has_one() -> None:
    """Those of layers by the same tensors' names: the label decides, and is asked for where there is none."""
    both = named(as_gptq(layer_of()), "up") | named(as_awq(layer_of()), "down")
    with pytest.raises(CheckpointError, match=r"several formats \(gptq, awq\); pass format="):
        formats.load(both)
    checkpoint = formats.load(both, config=GPTQ | {"sym": True})
    assert checkpoint.format == "gptq"
    with pytest.raises(CheckpointError, match=r"down\."):
        checkpoint["down"]


@pytest.mark.skipif(not E8M0, reason="this torch has no float8_e8m0fnu")
def test_a_mixture_of_modelopts_formats() -> None:
    """MIXED_PRECISION: 4-bit floats with two scales beside fp8 with one."""
    four = {
        "weight": torch.full((32, 32), 0x2A, dtype=torch.uint8),  # 1.0 and -1.0
        "weight_scale": torch.full((32, 4), 2.0).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.25),
    }
    eight = {"weight": torch.ones(32, 32).to(torch.float8_e4m3fn), "weight_scale": torch.tensor(3.0)}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    checkpoint = formats.load(named(four, "mlp") | named(eight, "attention"), config=config)
    assert checkpoint.format == "fp8, nvfp4"
    assert checkpoint["mlp"].dequantize(torch.float32)[0, :2].abs().tolist() == [0.5, 0.5]
    assert bool((checkpoint["attention"].dequantize(torch.float32) == 3).all())
    assert list(checkpoint.codes()) == []


def test_codes_that_no_layer_has() -> None:
    """Not masks of attention, positions, or a scale: codes have at most three dimensions."""
    rest = {
        "a.weight": torch.ones(8, 8).to(torch.float8_e4m3fn),
        "b.experts": torch.ones(2, 8, 8, dtype=torch.int8),
        "c.table": torch.ones(8, dtype=torch.int32),
        "attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8),
        "position_ids": torch.ones(1, 8, dtype=torch.int64),
        "norm.weight": torch.ones(8),
    }
    checkpoint = formats.load(rest | named(as_gptq(layer_of()), "up"), "gptq", GPTQ | {"sym": True})
    assert list(checkpoint.codes()) == ["a.weight", "b.experts", "c.table"]


def test_layers_come_block_by_block() -> None:
    """Files in safetensors are sorted by characters: 0, 1, 10, 2."""
    names = [f"model.layers.{block}.{layer}" for block in ("0", "1", "10", "2") for layer in ("up", "down")]
    checkpoint = formats.load({f"{name}.weight": torch.ones(32, 64) for name in ["lm_head", *names]})
    ordered = [f"model.layers.{block}.{layer}" for block in (0, 1, 2, 10) for layer in ("up", "down")]
    assert list(checkpoint) == ["lm_head", *ordered]
    many = f"{'7' * 5000}.up"
    assert list(formats.load({f"{many}.weight": torch.ones(32, 64)})) == [many]


def test_damage_is_not_passed_over() -> None:
    """A layer whose shapes fit no format is a damaged one, not one that is not quantised."""
    tensors = named(as_gptq(layer_of()), "up") | named(as_gptq(layer_of()), "down")
    tensors["down.scales"] = tensors["down.scales"][:, :48]
    checkpoint = formats.load(tensors, config=GPTQ | {"sym": True})
    assert list(checkpoint) == ["up", "down"]
    with pytest.raises(CheckpointError, match=r"down\.q"):
        checkpoint["down"]
    alone = {name: tensor for name, tensor in tensors.items() if name.startswith("down")}
    with pytest.raises(CheckpointError, match=r"down\.q"):
        formats.load(alone, config=GPTQ)["down"]


def test_an_unknown_format() -> None:
    with pytest.raises(ValueError, match=r"format: expected 'auto' or one of gptq, awq, .*, got 'ggml'"):
        formats.load({}, "ggml")


def test_names_that_are_not_there() -> None:
    checkpoint = formats.load(named(as_gptq(layer_of()), "up"), config=GPTQ | {"sym": True})
    for name in ("up.qweight", "down", ""):
        assert name not in checkpoint
        with pytest.raises(KeyError):
            checkpoint[name]
    with pytest.raises(KeyError):
        checkpoint.tensor("lm_head.weight")


def test_floats(tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": torch.ones(8, 4),
        "model.norm.weight": torch.ones(4),
        "up.weight": torch.randn(8, 4).bfloat16(),
        "up.bias": torch.randn(8),
        "counts.weight": torch.ones(4, 4, dtype=torch.int64),
    }
    checkpoint = formats.load(write_folder(tmp_path / "model", tensors))
    layer = checkpoint["up"]
    assert checkpoint.format == "floats"
    assert list(checkpoint.skipped) == ["counts"]
    assert isinstance(layer, FloatLinear)
    assert layer.bias is not None
    assert torch.equal(layer.weight, tensors["up.weight"])
    assert torch.equal(layer.bias, tensors["up.bias"])
    assert layer.shape == (8, 4)
    assert layer.dequantize(torch.float32).dtype == torch.float32


def test_what_is_loaded_owns_its_memory(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", {"up.weight": torch.ones(4, 4)})
    layer = formats.load(folder)["up"]
    assert isinstance(layer, FloatLinear)
    (folder / "model.safetensors").write_bytes(bytes(1000))
    assert bool((layer.weight == 1).all())


READ_ALL = """
import resource, sys
from qcutlass import formats

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20

checkpoint = formats.load(sys.argv[1])
checkpoint["0"]
before = resident()
print(len(checkpoint), max(resident() - before for layer in checkpoint.values()))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc, to know how much memory is in use")
def test_memory_stays_at_a_layer(tmp_path: Path) -> None:
    """160 MiB in 40 layers; what is mapped of the file counts."""
    folder = write_folder(tmp_path / "model", {f"{index}.weight": torch.ones(1024, 1024) for index in range(40)})
    result = subprocess.run([sys.executable, "-c", READ_ALL, str(folder)], capture_output=True, text=True, check=True)
    layers, mebibytes = map(int, result.stdout.split())
    assert layers == 40
    assert mebibytes < 100


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two layers; tensors of the first lie in two files."""
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = named(as_gptq(layer_of(1, False)), "up") | named(as_gptq(layer_of(2, False)), "down")
    tensors["lm_head.weight"] = torch.ones(2, 2)
    weight_map = {name: f"model-{index % 2 + 1}-of-2.safetensors" for index, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    write_index(folder, weight_map)
    (folder / "config.json").write_text(json.dumps({"quantization_config": GPTQ}))
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def index_of(folder: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return weight_map


def test_shards(shards: Path) -> None:
    checkpoint = formats.load(shards)
    assert sorted(checkpoint) == ["down", "up"]
    assert checkpoint.rest == ["lm_head.weight"]
    assert torch.equal(dequantized(canonical(checkpoint["up"])), layer_of(1, False).weight)
    assert torch.equal(dequantized(canonical(checkpoint["down"])), layer_of(2, False).weight)


def test_shards_without_an_index(shards: Path) -> None:
    (shards / "model.safetensors.index.json").unlink()
    assert sorted(formats.load(shards)) == ["down", "up"]
    save_file({"lm_head.weight": torch.ones(2, 2)}, shards / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' is also in .*model-.*; keep one"):
        formats.load(shards)
    save_file({"up.weight": torch.ones(2, 2)}, shards / "model.safetensors")  # takes the place of all others
    with pytest.warns(UserWarning, match="floats"):
        assert list(formats.load(shards)) == ["up"]


def test_one_shard_alone_is_read_with_the_configuration_beside_it(shards: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected a tensor qzeros"):
        formats.load(shards / index_of(shards)["up.qweight"])["up"]


@pytest.mark.parametrize(
    "name",
    [
        "../model-1-of-2.safetensors", "../model/model-1-of-2.safetensors",
        "/etc/passwd.safetensors", "..", "", "a/b.safetensors", "a\\b.safetensors",
        "model\0.safetensors", "model-1-of-2.bin", 5, None, ["x"], "x" * 5000 + ".safetensors",
    ],
)  # fmt: skip
def test_paths_in_an_index(name: Any, shards: Path) -> None:
    write_index(shards, index_of(shards) | {"up.qweight": name})
    with pytest.raises(CheckpointError, match="index"):
        formats.load(shards)


def test_links_out_of_the_folder(shards: Path, tmp_path: Path) -> None:
    file = shards / "model-1-of-2.safetensors"
    file.rename(tmp_path / "elsewhere.safetensors")
    file.symlink_to("../elsewhere.safetensors")
    with pytest.raises(CheckpointError, match="link out of the folder"):
        formats.load(shards)
    (shards / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match="link out of the folder"):
        formats.load(shards)
    file.unlink()
    file.symlink_to(file.name)
    with pytest.raises(CheckpointError, match=r"no readable path|absent"):
        formats.load(shards)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_descriptions_that_are_links_out_of_the_folder(name: str, shards: Path, tmp_path: Path) -> None:
    file = shards / name
    file.unlink(missing_ok=True)
    (tmp_path / "secret").write_text('{"quant_method": "secret"}')
    file.symlink_to("../secret")
    with pytest.raises(CheckpointError, match="link out of the folder"):
        formats.load(shards)


def test_gguf_files_that_are_links_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.gguf").write_bytes(b"GGUF")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.gguf").symlink_to("../elsewhere.gguf")
    with pytest.raises(CheckpointError, match="link out of the folder"):
        formats.load(tmp_path / "folder")


def test_links_in_a_hub_cache(shards: Path, tmp_path: Path) -> None:
    """<model>/snapshots/<revision>/file -> <model>/blobs/<hash> is how the hub's cache stores all files."""
    blobs, revision = tmp_path / "models--a" / "blobs", tmp_path / "models--a" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    revision.mkdir(parents=True)
    for index, file in enumerate(sorted(shards.iterdir())):
        file.rename(blobs / f"hash{index}")
        (revision / file.name).symlink_to(os.path.relpath(blobs / f"hash{index}", revision))
    assert sorted(formats.load(revision)) == ["down", "up"]


def test_an_index_that_lies(shards: Path) -> None:
    weight_map = index_of(shards)
    swapped = {name: f"model-{3 - int(file[6])}-of-2.safetensors" for name, file in weight_map.items()}
    for changed, message in (
        (swapped, "that the index places there; it is absent"),
        (weight_map | {"ghost": "model-1-of-2.safetensors"}, "'ghost'"),
        (weight_map | {"up.qweight": "model-3-of-2.safetensors"}, "expected the file 'model-3-of-2.safetensors'"),
        ({}, "weight_map"),
        ([], "weight_map"),
        (None, "weight_map"),
    ):
        write_index(shards, changed)
        with pytest.raises(CheckpointError, match=message):
            formats.load(shards)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json"])
@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100000, b'{"a": ' + b"9" * 5000 + b"}", b"null"]
)
def test_json_that_is_none(name: str, text: bytes, shards: Path) -> None:
    (shards / name).write_bytes(text)
    with pytest.raises(CheckpointError, match=name):
        formats.load(shards)


def test_huge_json(shards: Path) -> None:
    with (shards / "config.json").open("wb") as file:
        file.truncate(33 << 20)
    with pytest.raises(CheckpointError, match=r"config\.json: expected at most 33554432 bytes"):
        formats.load(shards)


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
def test_old_configuration_files(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", named(as_gptq(layer_of())))
    (folder / "config.json").write_text("{}")
    (folder / name).write_text(json.dumps({"bits": 8}))
    with pytest.raises(CheckpointError, match=rf"{name} says 8"):
        formats.load(folder)["model.layers.0.mlp.up_proj"]


def test_folders_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected \.safetensors files or a \.gguf file, got none"):
        formats.load(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match=r"pytorch_model\.bin.*convert to safetensors"):
        formats.load(tmp_path)
    for name in "ab":
        (tmp_path / f"{name}.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"expected one GGUF model, got a\.gguf, b\.gguf"):
        formats.load(tmp_path)
    (tmp_path / "a.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"b\.gguf: not a whole GGUF file"):
        formats.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        formats.load(tmp_path / "nowhere")


def test_an_index_chooses_between_copies(shards: Path) -> None:
    weight_map = index_of(shards)
    other = next(file for file in weight_map.values() if file != weight_map["lm_head.weight"])
    copies = {"lm_head.weight": torch.zeros(2, 2)} | load_file(shards / other)
    save_file(copies, shards / other)
    assert bool((formats.load(shards).tensor("lm_head.weight") == 1).all())


def test_two_indexes(shards: Path) -> None:
    (shards / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="expected one index"):
        formats.load(shards)


def safetensors_file(path: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_too_many_tensors(tmp_path: Path) -> None:
    header = {f"t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(100_000)}
    path = safetensors_file(tmp_path / "many.safetensors", header)
    with pytest.raises(CheckpointError, match=r"many\.safetensors: expected at most 65536 tensors, got 100000"):
        formats.load(path)


def test_a_header_that_is_too_large(tmp_path: Path) -> None:
    path = safetensors_file(tmp_path / "large.safetensors", b'{"__metadata__": {"a": "' + b"x" * (17 << 20) + b'"}}')
    with pytest.raises(CheckpointError, match=r"expected a header of at most 16777216 bytes"):
        formats.load(path)


@pytest.mark.parametrize("padding", range(4))
def test_headers_of_any_length(padding: int, tmp_path: Path) -> None:
    """Tensors then begin at odd addresses of the file."""
    header = json.dumps({"up.weight": {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}}).encode()
    path = safetensors_file(tmp_path / "odd.safetensors", header + b" " * padding, struct.pack("<2f", 1.5, -2))
    layer = formats.load(path)["up"]
    assert isinstance(layer, FloatLinear)
    assert layer.weight.tolist() == [[1.5, -2]]
    assert layer.weight.data_ptr() % 8 == 0


@pytest.mark.parametrize("name", every_format())
def test_empty_tensors_of_any_extent_are_refused_before_anything_is_made_of_them(name: str, tmp_path: Path) -> None:
    """Shapes with a zero need no bytes, so that the file's size does not bound the other extent."""
    header = {
        f"up.{suffix}": {
            "dtype": dtype_name(tensor),
            "shape": [2**40 if extent > 1 else 1 for extent in tensor.shape[:-1]] + [0],
            "data_offsets": [0, 0],
        }
        for suffix, tensor in every_format()[name].items()
    }
    path = safetensors_file(tmp_path / "empty.safetensors", header)
    with pytest.raises((CheckpointError, UnsupportedError)):
        formats.load(path, name, {"axis": 1})["up"]


def test_the_table_is_complete() -> None:
    assert (
        list(FORMATS)
        == [*every_format(), "nvfp4", "modelopt-awq", "mxfp4", "gguf", "floats"]
        == list(defaults.FORMAT_NAMES)
    )
    for name, row in FORMATS.items():
        assert row.name == name
        assert row.key in row.suffixes
