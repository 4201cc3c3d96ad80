"""Models with layers of 8 by 8 bits: what the methods make, fp8 folders of others, types of activations."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.python.absent_gpu import refuse_as
from tests.python.formats.stored import Tensors, as_fp8, named
from tests.python.models.folders import RandomCut, write_model
from tests.python.models.test_commands import command
from tests.python.modules import assert_same_state
from torch import Tensor

import qcutlass
from qcutlass import FP8, W8A8, Blockwise, QuantLinear, formats, models
from qcutlass.layers import BlockwiseLinear, Fp8Linear, WeightOnlyLinear
from qcutlass.models.transformers import load_model
from qcutlass.schemes import Scheme
from qcutlass.testing.models import NOISE, noise_ratio

pytest.importorskip("transformers", reason="needs transformers")
from tests.python.models.quantizations import calibration, make
from tests.python.models.test_transformers import load, logits

SCHEMES: dict[str, Scheme] = {
    "w8a8": W8A8(),
    "fp8": FP8(),
    "blockwise": Blockwise(),
    "blockwise-fp8": Blockwise(type="fp8"),
}
CHANNEL = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FLOAT = {"num_bits": 8, "type": "float"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**FLOAT, "strategy": "channel"},
            "input_activations": {**FLOAT, "strategy": "token", "dynamic": True},
        }
    },
}


@pytest.mark.parametrize("name", SCHEMES)
def test_layers_are_those_of_their_scheme(name: str, seed: int, tmp_path: Path) -> None:
    model = make("llama", seed)
    model.save_pretrained(tmp_path / "source")
    models.quantize_model(tmp_path / "source", tmp_path / "new", name)
    folder = models.ConvertedFolder(tmp_path / "new")
    assert len(folder) == 21
    for layer in folder:
        expected = QuantLinear.from_linear(model.get_submodule(layer), SCHEMES[name])
        assert_same_state(folder[layer], expected.state_dict())
    kinds = {"w8a8": "int8", "blockwise-fp8": "blockwise"}
    assert folder.spec.default is not None
    assert folder.spec.default.kind == kinds.get(name, name)
    assert (folder.spec.default.weight_dtype == "e4m3") == (name == "blockwise-fp8")  # kind fp8 says it by itself


@pytest.mark.parametrize("name", ["w8a8", "fp8"])
def test_static_scales_are_of_the_largest_activation(name: str, seed: int, tmp_path: Path) -> None:
    """In the first block, whose input no quantised layer has changed; q, k and v read the same."""
    model, ids = make("llama", seed), calibration(seed)
    model.save_pretrained(tmp_path / "source")
    method = models.Method(name, activations="static")
    models.quantize_model(tmp_path / "source", tmp_path / "new", method, calibration=ids)
    with torch.no_grad(), qcutlass.calibrate(model) as statistics:
        for row in ids:
            model(row[None])
    folder = models.ConvertedFolder(tmp_path / "new")
    dtype = torch.int8 if name == "w8a8" else torch.float8_e4m3fn
    for layer in ("q_proj", "k_proj", "v_proj"):
        full = f"model.layers.0.self_attn.{layer}"
        found: Any = folder[full]
        expected = qcutlass.quantize_activations(statistics[full].absmax[None], dtype=dtype, per_tensor=True)[1]
        assert torch.equal(found.a_scale, expected)
    assert all(getattr(folder[each], "a_scale") is not None for each in folder)  # noqa: B009


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SCHEMES)
def test_models_of_every_type_of_activations(name: str, dtype: torch.dtype, seed: int, tmp_path: Path) -> None:
    """Scales stay float32, weights what they are; a saved model is the same."""
    make("llama", seed).save_pretrained(tmp_path / "source")
    models.quantize_model(tmp_path / "source", tmp_path / "new", name)
    model, ids = load(tmp_path / "new", dtype), calibration(seed)
    layer = model.model.layers[1].mlp.up_proj
    assert_same_state(layer, models.ConvertedFolder(tmp_path / "new")["model.layers.1.mlp.up_proj"].state_dict())
    out = logits(model, ids)
    assert out.dtype == dtype
    assert bool(out.isfinite().all())
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved", dtype), ids), out)


def fp8_folder(cut: RandomCut, folder: Path, config: dict[str, Any], **options: Any) -> tuple[Path, dict[str, Tensor]]:
    """A small model with fp8 weights, and what they stand for."""
    tensors: Tensors = dict(cut.rest)
    weights = {}
    for name in cut.names:
        stored, weights[name] = as_fp8(cut.weight(name), **options)
        tensors |= named(stored, name)
    write_model(folder, tensors, cut.config, config)
    for path in (cut.root / "tokenizer").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder, weights


@pytest.mark.parametrize("config", [CHANNEL, COMPRESSED], ids=["fp8", "compressed-tensors"])
def test_fp8_folders_run_as_they_are_and_converted(
    config: dict[str, Any], random_cut: RandomCut, seed: int, tmp_path: Path
) -> None:
    folder, weights = fp8_folder(random_cut, tmp_path / "source", config)
    found = models.convert(folder, tmp_path / "new", verify=True)
    assert (found.source, found.layers, found.verified) == (config["quant_method"], len(weights), len(weights))
    converted = models.ConvertedFolder(tmp_path / "new")
    assert all(torch.equal(models.weights_of(converted[name]), weight) for name, weight in weights.items())
    ids = torch.randint(0, random_cut.VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(seed))
    direct, again = load(folder, direct=True), load(tmp_path / "new")
    assert isinstance(direct.model.layers[0].mlp.up_proj, Fp8Linear)
    assert torch.equal(logits(direct, ids), logits(again, ids))
    direct.save_pretrained(tmp_path / "saved")
    assert_same_state(load(tmp_path / "saved"), again.state_dict())


BLOCKS = {**CHANNEL, "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
def test_fp8_in_blocks_multiplies_16_bit_activations(
    scales: torch.dtype, random_cut: RandomCut, seed: int, tmp_path: Path
) -> None:
    """As transformers' own layers do with the dequantised weights; scales keep their type in the converted folder."""
    options = {"block": (128, 128), "name": "weight_scale_inv", "dtype": scales}
    folder, weights = fp8_folder(random_cut, tmp_path / "source", BLOCKS, **options)
    assert models.convert(folder, tmp_path / "new", verify=True).source == "fp8"
    converted = models.ConvertedFolder(tmp_path / "new")
    for name, weight in weights.items():
        layer: Any = converted[name]
        assert (type(layer), layer.weight_dtype, layer.scales.dtype) == (WeightOnlyLinear, "e4m3", scales)
        assert torch.equal(models.weights_of(layer), weight)
    assert "e4m3 g128" in {group.scheme for group in models.inspect(tmp_path / "new").groups}
    ids = torch.randint(0, random_cut.VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(seed))
    direct, again = load(folder, direct=True), load(tmp_path / "new")
    assert torch.equal(logits(direct, ids), logits(again, ids))
    cut = SimpleNamespace(weights=weights)
    dense, exact = (logits(random_cut.dense(cut, dtype), ids) for dtype in (torch.float32, torch.float64))  # type: ignore[arg-type]
    assert noise_ratio(logits(direct, ids), dense, exact) <= NOISE
    direct.save_pretrained(tmp_path / "saved")
    assert_same_state(load(tmp_path / "saved"), again.state_dict())


@pytest.mark.parametrize("form", ["blocks", "fp8 activations", "groups"])
def test_fp8_in_blocks_is_exported(form: str, random_cut: RandomCut, tmp_path: Path) -> None:
    """As blocks where scales are those of square ones, else as groups; compressed-tensors' own code reads them."""
    options = {"block": (16 if form == "groups" else 128, 128), "name": "weight_scale_inv"}
    config = {**BLOCKS, "weight_block_size": list(options["block"])}
    folder, weights = fp8_folder(random_cut, tmp_path / "source", config, **options)
    models.convert(folder, tmp_path / "new")
    if form == "fp8 activations":
        load_model(tmp_path / "new", activations="fp8")[0].save_pretrained(tmp_path / "quantising")
    source = tmp_path / ("quantising" if form == "fp8 activations" else "new")
    models.export_model(source, tmp_path / "out", "compressed-tensors")
    described = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    group = described["config_groups"]["group_0"]
    told = {"block_structure": [128, 128]} if form != "groups" else {"group_size": 128}
    assert {**told, "strategy": "group" if form == "groups" else "block"}.items() <= group["weights"].items()
    inputs = group["input_activations"]
    if form == "fp8 activations":
        expected = {**FLOAT, "strategy": "group", "group_size": 128, "dynamic": True, "symmetric": True}
        assert inputs == expected
    else:
        assert inputs is None
    checkpoint = formats.load(tmp_path / "out")
    for name, weight in weights.items():
        assert torch.equal(checkpoint[name].dequantize(torch.float32), weight)
    models.convert(tmp_path / "out", tmp_path / "again", verify=True)
    with pytest.raises(qcutlass.UnsupportedError, match=r"gptq: (e4m3 weights|quantised activations) have no place"):
        models.export_model(source, tmp_path / "gptq", "gptq")
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    read = QuantizationConfig.model_validate(described)
    compressor = BaseCompressor.get_value_from_registry(read.format)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name, weight in weights.items():
        state = {key: tensors[f"{name}.{key}"] for key in ("weight", "weight_scale")}
        assert torch.equal(compressor.decompress(state, read.config_groups["group_0"])["weight"].float(), weight)


def test_fp8_in_blocks_multiplies_fp8_activations_where_asked(random_cut: RandomCut, seed: int, tmp_path: Path) -> None:
    """By `activations`, of the folder and of the one it is converted to; every layer has the file's weights."""
    options = {"block": (128, 128), "name": "weight_scale_inv"}
    folder, weights = fp8_folder(random_cut, tmp_path / "source", BLOCKS, **options)
    models.convert(folder, tmp_path / "new")
    ids = torch.randint(0, random_cut.VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(seed))
    found = []
    for place in (folder, tmp_path / "new"):
        model, _ = load_model(place, activations="fp8")
        for name, weight in weights.items():
            layer = model.get_submodule(name)
            assert (type(layer), layer.weight_dtype, layer.group_size) == (BlockwiseLinear, "e4m3", 128)
            assert torch.equal(layer.weights(), weight)
        found.append(logits(model, ids))
    assert torch.equal(*found)
    assert bool(found[0].isfinite().all())
    assert not torch.equal(found[0], logits(load(folder, direct=True), ids))
    model.save_pretrained(tmp_path / "saved")
    assert models.ConvertedFolder(tmp_path / "saved").spec.default == model.get_submodule(name).spec
    assert torch.equal(logits(load(tmp_path / "saved"), ids), found[0])
    text = tmp_path / "text"
    text.write_text(" ".join(str(i % 100) for i in range(200)))
    eval_text = "eval", folder, "--text", text, "--tokens", 64, "--window", 32
    for words in (eval_text, ("generate", tmp_path / "new", "--prompt", "1 2 3", "--max-new-tokens", 4)):
        result = command(*words, "--activations", "fp8")
        assert result.exit_code == 0, result.output


def test_fp8_in_blocks_is_converted_to_fp8_activations(random_cut: RandomCut, seed: int, tmp_path: Path) -> None:
    """The folder's layers are those that `load_model` makes of the source with the same option, and go back again."""
    options = {"block": (128, 128), "name": "weight_scale_inv"}
    folder, weights = fp8_folder(random_cut, tmp_path / "source", BLOCKS, **options)
    result = command("convert", folder, tmp_path / "new", "--activations", "fp8", "--verify")
    assert result.exit_code == 0, result.output
    converted = models.ConvertedFolder(tmp_path / "new")
    assert set(converted) == set(weights)
    ids = torch.randint(0, random_cut.VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(seed))
    for name, weight in weights.items():
        assert converted.spec[name].words == "fp8 blocks of 128"
        assert torch.equal(converted[name].weights(), weight)
    expected = logits(load_model(folder, activations="fp8")[0], ids)
    assert torch.equal(logits(load_model(tmp_path / "new")[0], ids), expected)
    plain = logits(load_model(folder)[0], ids)
    assert torch.equal(logits(load_model(tmp_path / "new", activations="none")[0], ids), plain)


def test_fp8_folders_run_with_16_bit_activations(
    random_cut: RandomCut, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are asked to, by conversion or loading, and on a GPU whose products of fp8 are absent."""
    folder, weights = fp8_folder(random_cut, tmp_path / "source", CHANNEL)
    result = command("convert", folder, tmp_path / "new", "--activations", "none", "--verify")
    assert result.exit_code == 0, result.output
    converted = models.ConvertedFolder(tmp_path / "new")
    for name, weight in weights.items():
        assert type(converted[name]) is WeightOnlyLinear
        assert torch.equal(converted[name].weights(), weight)
    models.convert(folder, tmp_path / "fp8")
    ids = torch.randint(0, random_cut.VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(seed))
    expected = logits(load_model(tmp_path / "new")[0], ids)
    places = folder, tmp_path / "fp8"
    for place in places:
        assert torch.equal(logits(load_model(place, activations="none")[0], ids), expected)
        assert not torch.equal(logits(load_model(place)[0], ids), expected)
    text = tmp_path / "text"
    text.write_text(" ".join(str(i % 100) for i in range(200)))
    words = "eval", folder, "--text", text, "--tokens", 64, "--window", 32, "--activations", "none"
    assert command(*words).exit_code == 0

    refuse_as("a100", monkeypatch)
    expected = logits(load_model(tmp_path / "new", dtype=torch.float16)[0], ids)
    for place in places:
        with pytest.warns(UserWarning, match=f"{len(weights)} layers, as .*, multiply 16-bit activations"):
            model, _ = load_model(place, dtype=torch.float16)
        assert torch.equal(logits(model, ids), expected)
    shown = command(*words[:-2], "--dtype", "float16")
    assert shown.exit_code == 0
    assert shown.stderr.count("warning: ") == 1


@pytest.mark.parametrize("form", ["gptq", "awq", "blocks"])
def test_folders_converted_to_fp8_activations_run_on_a_gpu_without_fp8(
    form: str, random_cut: RandomCut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 16-bit activations, and a warning: of 4-bit codes, in their own order (gptq), and of e4m3 in blocks."""
    if form == "blocks":
        folder, _ = fp8_folder(random_cut, tmp_path / "source", BLOCKS, block=(128, 128), name="weight_scale_inv")
    else:
        folder = getattr(random_cut, form)().folder
    models.convert(folder, tmp_path / "new", activations="fp8", verify=True)
    ids, count = torch.arange(24)[None] % random_cut.VOCABULARY, len(random_cut.names)
    options: dict[str, Any] = {"dtype": torch.float16}
    expected = logits(load_model(folder, **options)[0], ids)
    assert not torch.equal(logits(load_model(tmp_path / "new", **options)[0], ids), expected)  # type: ignore[arg-type]
    refuse_as("a100", monkeypatch)
    with pytest.warns(UserWarning, match=rf"{count} layers, as .*, multiply 16-bit .* this one has 8\.0") as told:
        model, _ = load_model(tmp_path / "new", **options)
    assert len(told) == 1
    assert torch.equal(logits(model, ids), expected)
    assert {type(model.get_submodule(name)) for name in random_cut.names} == {WeightOnlyLinear}
    with pytest.warns(UserWarning, match=rf"{count} of {count} layers still multiply 16-bit .* this one has 8\.0"):
        model, _ = load_model(folder, activations="fp8", **options)
    assert torch.equal(logits(model, ids), expected)


def test_commands_of_an_fp8_folder(random_cut: RandomCut, tmp_path: Path) -> None:
    folder, _ = fp8_folder(random_cut, tmp_path / "source", CHANNEL)
    for place in (folder, tmp_path / "new"):
        if place != folder:
            assert command("convert", folder, place, "--verify").exit_code == 0
        shown = command("inspect", place)
        assert shown.exit_code == 0
        assert "fp8 channel dynamic" in shown.stdout
        text = tmp_path / "text"
        text.write_text(" ".join(str(i % 100) for i in range(200)))
        result = command("eval", place, "--text", text, "--tokens", 64, "--window", 32)
        assert result.exit_code == 0, result.output
        result = command("generate", place, "--prompt", "1 2 3", "--max-new-tokens", 4)
        assert result.exit_code == 0, result.output


def test_fp8_weights_are_quantised_anew(random_cut: RandomCut, tmp_path: Path) -> None:
    folder, weights = fp8_folder(random_cut, tmp_path / "source", CHANNEL)
    method = models.Method("rtn", qcutlass.WeightOnly(4, 32, True), clip=False)
    models.quantize_model(folder, tmp_path / "w4", method)
    converted = models.ConvertedFolder(tmp_path / "w4")
    for name, weight in weights.items():
        expected = qcutlass.quantize(weight, 4, 32, True, scale_dtype=torch.float16)
        assert torch.equal(models.weights_of(converted[name]), expected.dequantize(torch.float32)), name


def test_nan_in_packed_weights_is_told(random_cut: RandomCut, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    models.convert(fp8_folder(random_cut, tmp_path / "source", CHANNEL)[0], tmp_path / "new")
    path, name = tmp_path / "new" / "model.safetensors", random_cut.names[0]
    tensors = load_file(path)
    tensors[f"{name}.w_packed"].view(torch.uint8).view(-1)[5] = 0xFF
    save_file(tensors, path)
    with pytest.raises(qcutlass.CheckpointError, match="w_packed: expected finite numbers"):
        models.ConvertedFolder(tmp_path / "new")[name]
