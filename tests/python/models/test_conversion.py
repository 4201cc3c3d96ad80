"""Converted folders: their contents, against what the source holds; bad arguments, damaged folders."""

from __future__ import annotations

import errno
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.python.formats.stored import (
    Stored,
    Tensors,
    as_awq,
    as_compressed,
    as_gptq,
    as_hqq,
    as_marlin,
    named,
    stored,
)
from tests.python.models.folders import AWQ, COMPRESSED, GPTQ, W8A8, random_model, write_model
from torch import Tensor

import qcutlass
from qcutlass import CheckpointError, UnsupportedError, formats, models
from qcutlass.formats.specs import ModelSpec
from qcutlass.layers.base import from_spec
from qcutlass.models import conversion
from qcutlass.models.shards import ShardedWriter

UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"


def sources(seed: int) -> dict[str, tuple[Tensors, dict[str, Any] | None, Tensor]]:
    """The tensors of one layer, the configuration and the weights, by format."""

    def layer(**options: Any) -> Stored:
        return stored(64, 128, 64, seed=seed, **options)

    symmetric, ordered, plain = layer(symmetric=True), layer(act_order=True), layer()
    codes, scales = qcutlass.quantize_weights_int8(plain.weight)
    w8a8 = {"weight": codes, "weight_scale": scales[:, None]}
    w8a8_static = w8a8 | {"input_scale": torch.tensor([0.25])}
    wide = stored(64, 128, -1, 8, seed=seed, symmetric=True)
    return {
        "gptq-act-order": (as_gptq(ordered), GPTQ, ordered.weight),
        "gptq-8-channel": (as_gptq(wide), {**GPTQ, "bits": 8, "group_size": -1, "sym": True}, wide.weight),
        "awq": (as_awq(plain), AWQ, plain.weight),
        "compressed": (as_compressed(plain), COMPRESSED, plain.weight),
        "w8a8": (w8a8, W8A8, codes.float() * scales[:, None]),
        "w8a8-static": (w8a8_static, W8A8, codes.float() * scales[:, None]),
        "marlin": (as_marlin(symmetric), {"quant_method": "marlin"}, symmetric.weight),
        "hqq": (as_hqq(plain), {"quant_method": "hqq"}, plain.weight),
    }


@pytest.mark.parametrize("kind", sources(0))
def test_every_format_is_taken_over_without_loss(kind: str, tmp_path: Path, seed: int) -> None:
    tensors, config, weight = sources(seed)[kind]
    bias = torch.randn(64).half()
    kept = {"model.norm.weight": torch.randn(5), "lm_head.weight": torch.randn(6, 8).bfloat16()}
    source = write_model(
        tmp_path / "source", named(tensors | {"bias": bias}, UP) | kept, {"model_type": "llama"}, config
    )
    found = models.convert(source, tmp_path / "new", verify=True)
    assert (found.layers, found.verified, found.weights) == (1, 1, 64 * 128)

    folder = models.ConvertedFolder(tmp_path / "new")
    assert list(folder) == [UP]
    layer = folder[UP]
    assert torch.equal(models.weights_of(layer), weight)
    assert layer.bias is not None
    assert torch.equal(layer.bias, bias)
    assert {name: folder.tensor(name).dtype for name in folder.rest} == {n: t.dtype for n, t in kept.items()}
    assert all(torch.equal(folder.tensor(name), tensor) for name, tensor in kept.items())
    assert folder.config["model_type"] == "llama"
    assert "lm_head" in folder.spec.modules_to_not_convert
    if kind != "w8a8" and kind != "w8a8-static":
        x = torch.eye(128)
        assert torch.equal(layer(x) - bias.float(), (weight.T + bias.float()) - bias.float())
    else:
        assert (getattr(layer, "a_scale") is not None) == (kind == "w8a8-static")  # noqa: B009


def test_floats_are_quantised_and_skipped_ones_kept(tmp_path: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"{UP}.weight": torch.randn(48, 96, generator=generator).half(),
        f"{DOWN}.weight": torch.randn(96, 48, generator=generator).half(),
        f"{DOWN}.bias": torch.randn(96, generator=generator).half(),
        "lm_head.weight": torch.randn(32, 48, generator=generator).half(),
    }
    source = write_model(tmp_path / "source", tensors, {}, None)
    scheme = qcutlass.WeightOnly(8, 32, symmetric=True)
    found = models.convert(source, tmp_path / "new", scheme=scheme, skip=["lm_head", "*.0.*.down_proj"], verify=True)
    assert (found.source, found.layers) == ("floats", 1)
    folder = models.ConvertedFolder(tmp_path / "new")
    expected = qcutlass.quantize(tensors[f"{UP}.weight"], 8, 32, True)
    assert torch.equal(models.weights_of(folder[UP]), expected.dequantize(torch.float32))
    assert all(torch.equal(folder.tensor(name), tensors[name]) for name in tensors if not name.startswith(UP))
    assert set(folder.spec.modules_to_not_convert) == {DOWN, "lm_head"}


def test_layers_that_differ_are_exceptions(tmp_path: Path, seed: int) -> None:
    source = random_model(tmp_path / "source", 3, seed=seed)
    tensors = load_file(source / "model.safetensors")
    odd = stored(64, 128, 64, seed=seed, act_order=True)
    tensors |= named(as_gptq(odd), DOWN)
    save_file(tensors, source / "model.safetensors")
    models.convert(source, tmp_path / "new", verify=True)
    folder = models.ConvertedFolder(tmp_path / "new")
    described = folder.config["quantization_config"]
    default = {
        "kind": "weight_only",
        "bits": 4,
        "group_size": 64,
        "scales": "float16",
        "zeros": "uint8",
        "bias": "float16",
    }
    assert described["default"] == default
    exception = {key: value for key, value in default.items() if key != "bias"} | {"perm": "int32"}
    assert described["exceptions"] == {DOWN: exception}
    assert described["layout_version"] == int(qcutlass._C.build_info()["layout_version"])
    assert torch.equal(models.weights_of(folder[DOWN]), odd.weight)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip


def test_large_models_are_sharded(tmp_path: Path, seed: int) -> None:
    source = random_model(tmp_path / "source", 5, seed=seed)
    limit = 12_000  # two layers
    found = models.convert(source, tmp_path / "new", shard_bytes=limit, verify=True)
    shards = sorted((tmp_path / "new").glob("*.safetensors"))
    assert [path.name for path in shards] == [
        f"model-0000{i + 1}-of-0000{len(shards)}.safetensors" for i in range(len(shards))
    ]
    assert len(shards) > 2
    assert found.files == [*(path.name for path in shards), "model.safetensors.index.json"]
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    held = {}
    for path in shards:
        with safe_open(path, "pt") as file:
            held |= dict.fromkeys(file.keys(), path.name)
        (header,) = struct.unpack("<Q", path.read_bytes()[:8])
        assert path.stat().st_size - header - 8 <= limit
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == found.size
    models.convert(source, tmp_path / "whole")
    whole, parts = models.ConvertedFolder(tmp_path / "whole"), models.ConvertedFolder(tmp_path / "new")
    assert all(torch.equal(whole[name].w_packed, parts[name].w_packed) for name in whole)  # type: ignore[arg-type]


def test_two_conversions_are_the_same_bytes(tmp_path: Path, seed: int) -> None:
    source = random_model(tmp_path / "source", seed=seed)
    for name in ("first", "second"):
        models.convert(source, tmp_path / name)
    first, second = (sorted((tmp_path / name).iterdir()) for name in ("first", "second"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_every_tensor_lies_on_a_multiple_of_its_elements_size(tmp_path: Path, seed: int) -> None:
    source = random_model(tmp_path / "source", 3, (24, 192), seed=seed, act_order=True)
    tensors = load_file(source / "model.safetensors") | {"odd": torch.ones(3, dtype=torch.uint8)}
    save_file(tensors, source / "model.safetensors")
    models.convert(source, tmp_path / "new", verify=True)
    data = (tmp_path / "new" / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    widths = {"I64": 8, "I32": 4, "F32": 4, "F16": 2, "U8": 1}
    assert size % 8 == 0
    for name, entry in header.items():
        assert name == "__metadata__" or entry["data_offsets"][0] % widths[entry["dtype"]] == 0, name


def test_tensors_of_one_element_are_written_whatever_their_strides_are(tmp_path: Path) -> None:
    """A slice of a matrix is one, and counts as contiguous: the scale of a layer's only block, for example."""
    part = torch.arange(5.0, 69).view(1, 64).T[::64]
    assert (part.is_contiguous(), part.reshape(-1).stride()) == (True, (64,))
    with ShardedWriter(tmp_path, 1 << 20) as writer:
        writer.add({"x": part, "none": torch.ones(0), "one": torch.tensor(2.0)})
        writer.finish()
    found = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"x": [[5.0]], "none": [], "one": 2.0}


def test_verification_notices_one_wrong_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    source = random_model(tmp_path / "source", seed=seed)
    write = conversion.write_folder

    def write_and_damage(read: Any, layer_of: Any, folder: Path, *rest: Any) -> Any:
        found = write(read, layer_of, folder, *rest)
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(-100, 2)  # packed weights are last
            byte = file.read(1)
            file.seek(-100, 2)
            file.write(bytes([byte[0] ^ 1]))
        return found

    monkeypatch.setattr(conversion, "write_folder", write_and_damage)
    models.convert(source, tmp_path / "unverified")
    with pytest.raises(CheckpointError, match="differs from the source"):
        models.convert(source, tmp_path / "new", verify=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "unverified"]


def test_verification_compares_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Of tensors that are no numbers as well, of none and of one element, and of zeros of either sign."""
    source = random_model(tmp_path / "source", 1, seed=seed)
    rest = {
        "mask": torch.tensor([torch.nan, 1.0, -0.0, -torch.inf]),
        "payload": torch.tensor([0x7FC1, 0xFE00 - 0x10000], dtype=torch.int16).view(torch.float16),
        "one": torch.tensor(torch.nan, dtype=torch.bfloat16),
        "none": torch.ones(0, 3),
    }
    save_file(load_file(source / "model.safetensors") | rest, source / "model.safetensors")
    assert models.convert(source, tmp_path / "new", verify=True).verified == 1

    read = conversion.ConvertedFolder.tensor
    monkeypatch.setattr(conversion.ConvertedFolder, "tensor", lambda folder, name: read(folder, name) + 0.0)
    with pytest.raises(CheckpointError, match="mask: read back, it differs"):  # -0.0 + 0.0 is 0.0
        models.convert(source, tmp_path / "other", verify=True)


def test_an_existing_folder_is_left_alone_unless_asked(tmp_path: Path, seed: int) -> None:
    source = random_model(tmp_path / "source", 2, seed=seed)
    models.convert(source, tmp_path / "new")
    before = (tmp_path / "new" / "model.safetensors").read_bytes()
    other = random_model(tmp_path / "other", 2, seed=seed + 100)
    with pytest.raises(FileExistsError, match="overwrite"):
        models.convert(other, tmp_path / "new")
    assert (tmp_path / "new" / "model.safetensors").read_bytes() == before
    (tmp_path / "new" / "stale.txt").write_text("")
    models.convert(other, tmp_path / "new", overwrite=True)
    assert models.ConvertedFolder(tmp_path / "new").config["seed"] == seed + 100
    assert not (tmp_path / "new" / "stale.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "other", "source"]


def test_conversions_to_one_place_leave_each_other_alone(tmp_path: Path, seed: int) -> None:
    """One begins and ends while the other is at work: its folder in the making is not taken for a leftover."""
    first, second = (random_model(tmp_path / name, 2, seed=seed + i) for i, name in enumerate(("first", "second")))

    def other(name: str, count: int, total: int) -> None:
        if count == 1:
            models.convert(second, tmp_path / "new")

    with pytest.raises(FileExistsError, match="meanwhile"):
        models.convert(first, tmp_path / "new", progress=other)
    assert models.ConvertedFolder(tmp_path / "new").config["seed"] == seed + 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "new", "second"]


def test_others_may_read_what_the_umask_lets_them(tmp_path: Path, seed: int) -> None:
    mask = os.umask(0o027)
    try:
        models.convert(random_model(tmp_path / "source", 1, seed=seed), tmp_path / "new")
    finally:
        os.umask(mask)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()} == {0o640}


def test_only_converted_folders_are_overwritten(tmp_path: Path, seed: int) -> None:
    source = random_model(tmp_path / "source", 1, seed=seed)
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match="not a converted folder"):
        models.convert(source, home, overwrite=True)
    assert (home / "thesis.txt").exists()


@pytest.mark.parametrize("place", [".", "inside", "..", "link"])
def test_source_and_destination_must_be_apart(place: str, tmp_path: Path, seed: int) -> None:
    source = random_model(tmp_path / "outer" / "source", 1, seed=seed)
    (tmp_path / "link").symlink_to(source)
    destination = tmp_path / "link" if place == "link" else source / place
    with pytest.raises(ValueError, match="apart from the source"):
        models.convert(source, destination, overwrite=True)
    assert len(formats.load(source)) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scheme": qcutlass.W8A8()}, TypeError, "scheme: expected a qcutlass.WeightOnly or None, got W8A8"),
        ({"shard_bytes": "1"}, TypeError, "shard_bytes: expected an int, got str"),
        ({"shard_bytes": 0}, ValueError, "shard_bytes: expected at least 1, got 0"),
        ({"skip": "a.up"}, TypeError, "skip: expected a list of names, got the string 'a.up'"),
        ({"skip": [0]}, TypeError, "skip: expected a list of names, got one with 0"),
    ],
)
def test_arguments_are_checked_before_anything_is_opened(
    arguments: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        models.convert(tmp_path / "absent", tmp_path / "new", **arguments)


def test_names_to_skip_that_are_no_layers(tmp_path: Path, seed: int) -> None:
    source = random_model(tmp_path / "source", 1, seed=seed)
    with pytest.raises(ValueError, match=r"skip: 'up_prj' matches no layer; there are .*up_proj"):
        models.convert(source, tmp_path / "new", skip=["lm_head", "up_prj"])
    assert not (tmp_path / "new").exists()


def test_bad_sources_leave_nothing_behind(tmp_path: Path, seed: int) -> None:
    good = random_model(tmp_path / "good", 2, seed=seed)
    models.convert(good, tmp_path / "converted")
    with pytest.raises(FileNotFoundError, match="no such"):
        models.convert(tmp_path / "absent", tmp_path / "new")
    with pytest.raises(ValueError, match="converted already"):
        models.convert(tmp_path / "converted", tmp_path / "new")
    tensors = load_file(good / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.scales"][0, 0] = torch.nan
    damaged = write_model(tmp_path / "damaged", tensors, {}, GPTQ)
    with pytest.raises(CheckpointError, match=r"layers\.1.*NaN"):
        models.convert(damaged, tmp_path / "new")
    (damaged / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        models.convert(damaged, tmp_path / "new")
    wide = write_model(tmp_path / "wide", {"up.weight": torch.ones(4, 4, dtype=torch.float64)}, {}, None)
    with pytest.raises(UnsupportedError, match="F64"):
        models.convert(wide, tmp_path / "new")
    empty = write_model(tmp_path / "empty", {"norm.weight": torch.ones(4)}, {}, None)
    with pytest.raises(CheckpointError, match="no layer"):
        models.convert(empty, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir() if "new" in path.name] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout_version": 99}, "convert the model again"),
        ({"layout_version": 1}, "convert the model again"),
        ({"version": 3}, "convert the model again"),
        ({"exceptions": []}, "exceptions"),
        ({"default": {"kind": "magic"}}, "kind"),
        ({"default": {"kind": "weight_only", "bits": 3, "group_size": 64}}, "bits"),
        ({"default": {"kind": "weight_only", "bits": 4, "group_size": 64, "scales": "int7"}}, "int7"),
        ({"default": {"kind": "weight_only", "bits": 4, "group_size": 64}}, "scales"),
        ({"default": None}, "describes no layer"),
    ],
)
def test_damaged_descriptions(change: dict[str, Any], message: str, tmp_path: Path, seed: int) -> None:
    models.convert(random_model(tmp_path / "source", 1, seed=seed), tmp_path / "new")
    path = tmp_path / "new" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        dict(models.ConvertedFolder(tmp_path / "new"))


@pytest.mark.parametrize("suffix", ["w_packed", "scales", "zeros", "layout"])
def test_damaged_tensors(suffix: str, tmp_path: Path, seed: int) -> None:
    models.convert(random_model(tmp_path / "source", 1, seed=seed), tmp_path / "new")
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    name = f"{UP}.{suffix}"
    wrong = tensors[name] + 1 if suffix == "layout" else tensors[name][:-1].clone()
    for damaged in ({**tensors, name: wrong}, {key: value for key, value in tensors.items() if key != name}):
        save_file(damaged, tmp_path / "new" / "model.safetensors")
        folder = models.ConvertedFolder(tmp_path / "new")
        with pytest.raises((CheckpointError, KeyError), match="up_proj"):
            folder[UP]


def test_a_huge_shape_allocates_nothing(tmp_path: Path, seed: int) -> None:
    models.convert(random_model(tmp_path / "source", 1, seed=seed), tmp_path / "new")
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    tensors[f"{UP}.layout"] = torch.tensor([2, 4, 1 << 40, 1 << 40, 64])
    save_file(tensors, tmp_path / "new" / "model.safetensors")
    with pytest.raises(CheckpointError, match="expected w_packed"):
        models.ConvertedFolder(tmp_path / "new")[UP]


def test_specs_survive_json(seed: int) -> None:
    layer = qcutlass.QuantLinear.from_linear(torch.nn.Linear(128, 48), bits=8, group_size=32)
    spec = layer.spec
    model = ModelSpec.of({"a": spec, "b": spec}, ["lm_head"], "gptq")
    assert ModelSpec.from_dict(json.loads(json.dumps(model.to_dict()))) == model
    empty = from_spec(spec, 48, 128)
    empty.load_state_dict(layer.state_dict(), assign=True)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(empty(x), layer(x))


def test_inspection_counts_bits_and_bytes(tmp_path: Path, seed: int) -> None:
    source = random_model(tmp_path / "source", 3, seed=seed)
    models.convert(source, tmp_path / "new")
    (group,) = models.inspect(tmp_path / "new").groups
    parts = {"w_packed": 64 * 128 // 2, "scales": 2 * 64 * 2, "zeros": 64 * 2, "bias": 2 * 64, "layout": 5 * 8}
    assert group.name == "model.layers.*.mlp.up_proj"
    assert (group.shape, group.scheme, group.count) == ((64, 128), "w4 g64 int zeros", 3)
    assert group.size == 3 * sum(parts.values())
    assert group.bits_per_weight == 8 * sum(parts.values()) / (64 * 128)
    found = models.inspect(tmp_path / "new")
    assert (found.format, found.rest, found.rest_size) == ("qcutlass", 2, 96 * 2 + 7 * 4)
    before = models.inspect(source)
    assert before.format == "gptq"
    assert [(g.name, g.shape, g.scheme, g.count) for g in before.groups] == [
        (group.name, group.shape, group.scheme, group.count)
    ]


def test_a_layer_of_a_checkpoint(tmp_path: Path, seed: int) -> None:
    layer = stored(64, 128, 64, seed=seed, act_order=True)
    tensors = named(as_gptq(layer), UP) | {f"{UP}.bias": torch.ones(64).half(), "lm_head.weight": torch.ones(4, 4)}
    folder = write_model(tmp_path / "source", tensors, {}, GPTQ)
    opened = formats.load(folder)
    models.convert(folder, tmp_path / "new")
    for source in (folder, opened, tmp_path / "new"):
        found = qcutlass.QuantLinear.from_checkpoint(source, UP, activation="relu")
        expected = torch.relu(layer.weight.T + 1)
        assert torch.equal(found(torch.eye(128)), expected)
        found.check()
    for source in (folder, opened, tmp_path / "new", tmp_path / "absent"):
        with pytest.raises(ValueError, match=r"activation: expected one of .*, got 'tanh'"):
            qcutlass.QuantLinear.from_checkpoint(source, UP, activation="tanh")
    with pytest.raises(ValueError, match="expected one of the checkpoint's 1 layers"):
        qcutlass.QuantLinear.from_checkpoint(folder, "lm_head")
    floats = {"lm_head.weight": torch.ones(4, 4)}
    with pytest.raises(ValueError, match="from_linear"):
        qcutlass.QuantLinear.from_checkpoint(floats, "lm_head")
    codes, scales = qcutlass.quantize_weights_int8(layer.weight)
    w8a8 = qcutlass.QuantLinear.from_checkpoint(
        {"up.weight": codes, "up.weight_scale": scales[:, None]}, "up", config=W8A8
    )
    assert torch.equal(models.weights_of(w8a8), codes.float() * scales[:, None])


def test_a_parent_that_cannot_be_written(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the folder that was asked for, not a temporary one."""

    def refuse(**options: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", f"{options['dir']}/temporary")

    source, destination = random_model(tmp_path / "source", 1, seed=seed), tmp_path / "new"
    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(PermissionError, match=f"Permission denied: '{destination}'"):
        models.convert(source, destination)
    assert not destination.exists()
