"""Converted folders that are damaged or hold what no layer is made of."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.python.formats.stored import as_gptq, named, stored
from tests.python.formats.test_files import of_every_type
from tests.python.models.folders import GPTQ, W8A8, random_model, write_model
from torch import Tensor

import qcutlass
from qcutlass import CheckpointError, models

UP = "model.layers.0.mlp.up_proj"


@pytest.fixture
def converted(tmp_path: Path, seed: int) -> Path:
    """One layer with act-order and a bias, and two other tensors."""
    models.convert(random_model(tmp_path / "source", 1, seed=seed, act_order=True), tmp_path / "new")
    return tmp_path / "new"


def change(folder: Path, tensors: dict[str, Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file({**load_file(path), **tensors}, path)


@pytest.mark.parametrize(
    "layout",
    [
        torch.zeros(5, 1, dtype=torch.int64),
        torch.zeros((), dtype=torch.int64),
        torch.zeros(4, dtype=torch.int64),
        torch.full((5,), torch.nan),
        torch.full((5,), torch.inf),
        torch.zeros(5, dtype=torch.complex64),
        torch.tensor([2, 4, 0, 128, 64]),
        torch.tensor([2, 4, 64, -1, 64]),
        torch.tensor([2, 4, 2**63 - 1, 2**63 - 1, 64]),
    ],
    ids=lambda layout: f"{layout.dtype} {layout.tolist()}",
)
def test_layouts_that_are_none(layout: Tensor, converted: Path) -> None:
    change(converted, {f"{UP}.layout": layout})
    with pytest.raises(CheckpointError, match=UP):
        models.ConvertedFolder(converted)[UP]
    with pytest.raises(CheckpointError, match=UP):
        models.ConvertedFolder(converted).empty(UP)


@pytest.mark.parametrize("shape", [(), (4096,), (4096, 0), (0, 2, 32)])
def test_packed_weights_of_other_shapes(shape: tuple[int, ...], converted: Path) -> None:
    change(converted, {f"{UP}.w_packed": torch.zeros(shape, dtype=torch.int32)})
    with pytest.raises(CheckpointError, match=f"{UP}.*w_packed"):
        models.ConvertedFolder(converted)[UP]


@pytest.mark.parametrize(
    "values",
    [
        {"bits": 4.0},
        {"bits": True},
        {"bits": [4]},
        {"kind": [4]},
        {"kind": None},
        {"scales": ["float16"]},
        {"perm": {}},
    ],
)
def test_descriptions_of_other_types(values: dict[str, Any], converted: Path) -> None:
    path = converted / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["default"] |= values
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json: default"):
        models.ConvertedFolder(converted)


@pytest.mark.parametrize("suffix", ["scales", "bias"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite(suffix: str, value: float, converted: Path) -> None:
    tensor = load_file(converted / "model.safetensors")[f"{UP}.{suffix}"]
    tensor.view(-1)[3] = value
    change(converted, {f"{UP}.{suffix}": tensor})
    with pytest.raises(CheckpointError, match=f"{UP}: {suffix}: expected finite numbers"):
        models.ConvertedFolder(converted)[UP]


def test_int8_scales_that_are_not_finite(tmp_path: Path) -> None:
    codes, scales = qcutlass.quantize_weights_int8(torch.ones(32, 64))
    source = write_model(tmp_path / "source", named({"weight": codes, "weight_scale": scales[:, None]}, UP), {}, W8A8)
    models.convert(source, tmp_path / "new")
    change(tmp_path / "new", {f"{UP}.w_scale": torch.full((32,), torch.nan)})
    with pytest.raises(CheckpointError, match="w_scale: expected finite numbers"):
        models.ConvertedFolder(tmp_path / "new")[UP]


def test_zeros_out_of_range(converted: Path) -> None:
    zeros = load_file(converted / "model.safetensors")[f"{UP}.zeros"]
    zeros[0, 0] = 16
    change(converted, {f"{UP}.zeros": zeros})
    assert models.ConvertedFolder(converted)[UP].zeros is not None
    zeros[0, 0] = 17
    change(converted, {f"{UP}.zeros": zeros})
    with pytest.raises(CheckpointError, match=r"zeros: expected integers in \[0, 16\]"):
        models.ConvertedFolder(converted)[UP]


def test_tensors_that_are_named_like_those_of_a_layer(tmp_path: Path, seed: int) -> None:
    """Of a model's own module, or of the model itself."""
    plain = {
        "foo.layout": torch.ones(3),
        "bar.w_packed": torch.ones(3),
        "layout": torch.ones(2),
        "w_packed": torch.ones(2),
    }
    tensors = named(as_gptq(stored(64, 128, 64, seed=seed)), UP)
    models.convert(write_model(tmp_path / "source", tensors | plain, {}, GPTQ), tmp_path / "new", verify=True)
    folder = models.ConvertedFolder(tmp_path / "new")
    assert list(folder) == [UP]
    assert sorted(folder.rest) == sorted(plain)
    assert all(torch.equal(folder.tensor(name), tensor) for name, tensor in plain.items())
    assert [group.name for group in models.inspect(tmp_path / "new").groups] == ["model.layers.*.mlp.up_proj"]


@pytest.mark.parametrize("names", [["up.scales"], ["up.layout", "up.act_scale"], ["foo.layout", "foo.scales"]])
def test_tensors_that_would_be_taken_for_a_layer_are_refused_first(names: list[str], tmp_path: Path) -> None:
    tensors = {"up.weight": torch.randn(32, 64), **{name: torch.ones(5) for name in names}}
    source = write_model(tmp_path / "source", tensors, {}, None)
    with pytest.raises(CheckpointError, match="named as a part of a packed layer"):
        models.convert(source, tmp_path / "new", progress=lambda *_: pytest.fail("something was written"))


def test_other_tensors_of_a_layer_are_carried_over(tmp_path: Path) -> None:
    """As the scales of a cache beside the projections of keys and values."""
    tensors = {"k_proj.weight": torch.randn(32, 64), "k_proj.output_scale": torch.ones(1)}
    models.convert(write_model(tmp_path / "source", tensors, {}, None), tmp_path / "new", verify=True)
    folder = models.ConvertedFolder(tmp_path / "new")
    assert folder["k_proj"].in_features == 64
    assert folder.rest == ["k_proj.output_scale"]


def test_a_shard_beside_the_whole_file(converted: Path) -> None:
    save_file({f"{UP}.scales": torch.zeros(2, 64).half()}, converted / "shard.safetensors")
    names = dict.fromkeys(load_file(converted / "model.safetensors"), "model.safetensors")
    index = {"weight_map": {**names, f"{UP}.scales": "shard.safetensors"}}
    (converted / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="two sources of weights"):
        models.ConvertedFolder(converted)


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_a_configuration_that_is_no_file(kind: str, converted: Path) -> None:
    (converted / "config.json").unlink()
    (os.mkfifo if kind == "fifo" else os.mkdir)(converted / "config.json")
    for opened in (models.is_converted, models.ConvertedFolder):
        with pytest.raises(CheckpointError, match=r"config\.json: expected a file"):
            opened(converted)


def test_types_that_products_do_not_know_are_carried_over(tmp_path: Path) -> None:
    """Also in shards; bytes, types and shapes."""
    source = tmp_path / "source"
    others = of_every_type()
    write_model(source, {"up.weight": torch.randn(32, 64), **others}, {}, None)
    for name, limit in (("whole", 1 << 30), ("shards", 100)):
        models.convert(source, tmp_path / name, shard_bytes=limit)
        folder = models.ConvertedFolder(tmp_path / name)
        for key, tensor in others.items():
            found = folder.tensor(key)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert found.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()
    for key, tensor in load_file(tmp_path / "whole" / "model.safetensors").items():
        assert key.startswith("up.") or tensor.dtype == others[key].dtype


def test_types_that_torch_lacks_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    from tests.python.formats.test_checkpoint import safetensors_file

    (tmp_path / "config.json").write_text("{}")
    header = {
        "up.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]},
        "other": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [64, 67]},
    }
    safetensors_file(tmp_path / "model.safetensors", header, bytes(67))
    with pytest.raises(qcutlass.UnsupportedError, match=r"other: torch .* has no type for F6_E2M3"):
        models.convert(tmp_path, tmp_path.parent / "new")
    assert not (tmp_path.parent / "new").exists()
