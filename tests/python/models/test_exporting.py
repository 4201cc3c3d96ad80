"""Converted folders in the formats of others: read back by our loaders, and by compressed-tensors' own code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import qcutlass
from qcutlass import UnsupportedError, WeightOnly, formats, models
from qcutlass.cli import app
from qcutlass.products.checks import E8M0
from qcutlass.schemes import float_format

pytest.importorskip("transformers", reason="needs transformers")
from tests.python.formats.stored import as_fp8, named, write_folder
from tests.python.models.quantizations import calibration, make
from tests.python.models.test_quantizing import loaded

METHODS = {
    "asymmetric": models.Method("rtn", WeightOnly(4, 32)),
    "symmetric": models.Method("rtn", WeightOnly(4, 64, True)),
    "ragged": models.Method("rtn", WeightOnly(4, 48)),
    "act-order": models.Method("gptq", WeightOnly(4, 32), act_order=True),
    "channels": models.Method("awq", WeightOnly(8, None), act_scale=False),
    "int8": models.Method("smoothquant", act_scale=False),
    "fp8": models.Method("fp8"),
    "fp8 static": models.Method("fp8", activations="static"),
    "e4m3": models.Method("rtn", WeightOnly(8, 32, weight_dtype="e4m3")),
    "e4m3 ragged": models.Method("rtn", WeightOnly(8, 48, weight_dtype="e4m3", scale_dtype=torch.bfloat16)),
    "e4m3 channels": models.Method("rtn", WeightOnly(8, None, weight_dtype="e4m3", scale_dtype=torch.bfloat16)),
    "nvfp4": models.Method("rtn", float_format("nvfp4")),
    **({"mxfp4": models.Method("rtn", float_format("mxfp4"))} if E8M0 else {}),
}
ACTIVATIONS: dict[str, dict[str, Any]] = {  # for `convert`, as no method has them
    "w4a8 fp8": {"activations": "fp8", "scheme": WeightOnly(4, 32, True, torch.float16)},
    "w4a8 fp8 asymmetric": {"activations": "fp8", "scheme": WeightOnly(4, 32, False, torch.bfloat16)},
    "w4a8 int8": {"activations": "int8", "scheme": WeightOnly(4, 32, True, torch.float16)},
    "w4a8 int8 channels": {"activations": "int8", "scheme": WeightOnly(4, None, True, torch.bfloat16)},
}
NAMES = [*METHODS, *ACTIVATIONS]
UNSUPPORTED = [
    *((name, "gptq") for name in NAMES if name.startswith(("int8", "fp8", "e4m3", "nvfp4", "mxfp4", "w4a8"))),
    ("act-order", "compressed-tensors"),
    ("ragged", "compressed-tensors"),
]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """quantized(name): a folder of one of METHODS or ACTIVATIONS."""
    root = tmp_path_factory.mktemp("exporting")
    model = make("llama-mha", 0)
    model.save_pretrained(root / "source")
    (root / "source" / "tokenizer.json").write_text("{}")

    def folder(name: str) -> Path:
        if not (root / name).exists() and name in ACTIVATIONS:
            models.convert(root / "source", root / name, **ACTIVATIONS[name])
        elif not (root / name).exists():
            ids = calibration(0) if METHODS[name].needs_calibration else None
            models.quantize_model(root / "source", root / name, METHODS[name], calibration=ids)
        return root / name

    return folder


def weights(folder: Path) -> dict[str, Tensor]:
    converted = models.ConvertedFolder(folder)
    return {name: models.weights_of(converted[name]) for name in converted}


@pytest.mark.parametrize(
    ("name", "to"),
    [(name, to) for name in NAMES for to in models.EXPORTS if (name, to) not in UNSUPPORTED],
)
def test_what_is_exported_is_read_back_bit_for_bit(name: str, to: str, quantized: Any, tmp_path: Path) -> None:
    source, out = quantized(name), tmp_path / "out"
    expected = weights(source)
    assert models.export_model(source, out, to) == len(expected) == 21
    checkpoint = formats.load(out)
    assert checkpoint.format == to
    for layer, weight in expected.items():
        assert torch.equal(checkpoint[layer].dequantize(torch.float32), weight), layer
    assert (out / "tokenizer.json").read_text() == "{}"
    models.convert(out, tmp_path / "again", verify=True)
    again = weights(tmp_path / "again")
    assert all(torch.equal(again[layer], weight) for layer, weight in expected.items())
    ids = calibration(1)
    with torch.no_grad():
        assert torch.equal(loaded(tmp_path / "again")(ids).logits, loaded(source)(ids).logits)


@pytest.mark.parametrize("name", [name for name in NAMES if (name, "compressed-tensors") not in UNSUPPORTED])
def test_compressed_tensors_reads_the_same_weights(name: str, quantized: Any, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    source, out = quantized(name), tmp_path / "out"
    models.export_model(source, out, "compressed-tensors")
    described = json.loads((out / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(described)
    scheme = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config.format)
    tensors = load_file(out / "model.safetensors")
    for layer, weight in weights(source).items():
        state = {key.rpartition(".")[2]: value for key, value in tensors.items() if key.rpartition(".")[0] == layer}
        state.pop("bias", None)
        found = compressor.decompress(state, scheme)["weight"]
        dtype = found.dtype  # that of the scales, in which it multiplies
        assert torch.equal(found, weight.to(dtype)), layer


@pytest.mark.parametrize("name", ["symmetric", "e4m3 ragged", "w4a8 fp8", "w4a8 int8"])
def test_transformers_reads_exports_without_zero_points(name: str, quantized: Any, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    models.export_model(quantized(name), tmp_path / "out", "compressed-tensors")
    assert models.export_note(tmp_path / "out") is None
    model = loaded(tmp_path / "out")
    model(calibration(0))  # which dequantises
    for layer, weight in weights(quantized(name)).items():
        assert torch.equal(model.get_submodule(layer).weight.detach(), weight), layer


@pytest.mark.parametrize("name", [name for name in METHODS if name.endswith("fp4")])
def test_transformers_reads_4_bit_floats_as_bfloat16(name: str, quantized: Any, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    from transformers import AutoModelForCausalLM

    models.export_model(quantized(name), tmp_path / "out", "compressed-tensors")
    note = models.export_note(tmp_path / "out")
    assert note is not None
    assert "dtype=torch.bfloat16" in note
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    model(calibration(0))  # which dequantises
    for layer, weight in weights(quantized(name)).items():
        assert torch.equal(model.get_submodule(layer).weight.detach(), weight.bfloat16()), layer


def test_transformers_does_not_read_exports_with_zero_points(quantized: Any, tmp_path: Path) -> None:
    """Once it does, `export_note` has nothing to say."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
    if not sys.modules["transformers"].__version__.startswith("5.23"):
        pytest.skip("known of transformers 5.23")
    models.export_model(quantized("asymmetric"), tmp_path / "out", "compressed-tensors")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        loaded(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "to", "told"),
    [
        ("asymmetric", "compressed-tensors", True),
        ("symmetric", "compressed-tensors", False),
        ("int8", "compressed-tensors", False),
        ("asymmetric", "gptq", False),
    ],
)
def test_who_cannot_read_an_export_is_told_once(name: str, to: str, told: bool, quantized: Any, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(quantized(name)), str(tmp_path / "out"), "--to", to])
    assert result.exit_code == 0, result.output
    assert result.stderr.count("note: transformers (5.23) does not load compressed-tensors folders") == told


def test_gptq_says_what_it_is(quantized: Any, tmp_path: Path) -> None:
    models.export_model(quantized("symmetric"), tmp_path / "v1", "gptq")
    models.export_model(quantized("act-order"), tmp_path / "v2", "gptq", shard_bytes=50_000)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("v1", "v2")]
    first, second = (config["quantization_config"] for config in configs)
    assert configs[0]["model_type"] == "llama"
    assert (first["checkpoint_format"], first["sym"], first["desc_act"], first["group_size"]) == (
        "gptq",
        True,
        False,
        64,
    )
    assert (second["checkpoint_format"], second["sym"], second["desc_act"]) == ("gptq_v2", False, True)
    assert len(list((tmp_path / "v2").glob("model-*.safetensors"))) > 1
    layer = formats.load(tmp_path / "v2")["model.layers.0.self_attn.q_proj"]
    assert isinstance(layer, formats.CanonicalLinear)
    assert layer.perm is not None


def test_what_a_format_cannot_say_is_refused(quantized: Any, tmp_path: Path) -> None:
    def refused(message: str, source: Path, to: str) -> None:
        with pytest.raises(UnsupportedError, match=message):
            models.export_model(source, tmp_path / "out", to)
        assert not (tmp_path / "out").exists()

    refused("gptq: quantised activations have no place in it", quantized("int8"), "gptq")
    refused("gptq: quantised activations have no place in it", quantized("fp8"), "gptq")
    refused("gptq: quantised activations .*; export to compressed-tensors", quantized("w4a8 fp8"), "gptq")
    refused("gptq: e4m3 weights have no place in it; export to compressed-tensors", quantized("e4m3"), "gptq")
    refused("gptq: e2m1 weights have no place in it; export to compressed-tensors", quantized("nvfp4"), "gptq")
    refused("has given up act-order", quantized("act-order"), "compressed-tensors")
    refused(
        "takes group sizes that divide K = 128, got 48; export to gptq, or quantise with another --group-size",
        quantized("ragged"),
        "compressed-tensors",
    )
    root = quantized("symmetric").parent
    wide = models.Method("rtn", WeightOnly(4, 32, scale_dtype=torch.float32))
    models.quantize_model(root / "source", tmp_path / "wide", wide)
    refused("got float32 ones.*qcutlass quantize makes these", tmp_path / "wide", "gptq")

    models.quantize_model(root / "source", tmp_path / "blocks", "blockwise")
    refused("compressed-tensors: layers of kind blockwise are not exported", tmp_path / "blocks", "compressed-tensors")
    refused("gptq: quantised activations .*; no format of export holds them", tmp_path / "blocks", "gptq")

    refuse_w4a8_and_floats(root / "source", tmp_path, refused)

    make("llama", 0).save_pretrained(tmp_path / "grouped")  # of whose heads several share keys and values
    models.quantize_model(tmp_path / "grouped", tmp_path / "scaled", "awq", calibration=calibration(0))
    names = [name for name, layer in models.ConvertedFolder(tmp_path / "scaled").items() if layer.act_scale is not None]
    assert names
    assert all(name.endswith("o_proj") for name in names)
    refused(r"o_proj: it scales its own activations \(act_scale\)", tmp_path / "scaled", "gptq")
    with pytest.raises(ValueError, match="format: expected one of gptq, compressed-tensors, got 'awq'"):
        models.export_model(quantized("symmetric"), tmp_path / "out", "awq")


def refuse_w4a8_and_floats(source: Path, folder: Path, refused: Any) -> None:
    """The advice is true of them: gptq holds neither 8-bit activations nor floats."""
    options = ACTIVATIONS["w4a8 fp8"]
    models.convert(source, folder / "ragged", **options | {"scheme": WeightOnly(4, 48, True, torch.float16)})
    refused("divide K = 128, got 48; quantise with another --group-size", folder / "ragged", "compressed-tensors")
    floats = WeightOnly(4, 32, weight_dtype="e2m1", scale_dtype=torch.float16)
    models.quantize_model(source, folder / "e2m1", models.Method("rtn", floats))
    message = "weight_only and e2m1 codes with scales of float16 are not exported"
    refused(message, folder / "e2m1", "compressed-tensors")
    floats = WeightOnly(4, 48, weight_dtype="e2m1", scale_dtype=torch.float8_e4m3fn)
    models.quantize_model(source, folder / "wide", models.Method("rtn", floats), overwrite=True)
    refused("K = 128, got 48; quantise without this layer: --skip", folder / "wide", "compressed-tensors")
    floats = WeightOnly(4, 32, weight_dtype="e2m1", scale_dtype=torch.float8_e4m3fn)
    models.quantize_model(source, folder / "e4m3 scales", models.Method("rtn", floats))
    refused("down_proj: expected whole groups of 16 columns", folder / "e4m3 scales", "compressed-tensors")


def test_blocks_of_layers_with_few_columns(seed: int, tmp_path: Path) -> None:
    """K = 48 is less than the 64 columns of a block: one group, whose blocks have 64 rows as those of other layers."""
    generator = torch.Generator().manual_seed(seed)
    tensors, expected = {}, {}
    for name, shape in {"up": (128, 48), "down": (48, 128)}.items():
        stored, expected[name] = as_fp8(torch.randn(shape, generator=generator), (64, 64))
        tensors |= named(stored, name)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]}
    models.convert(write_folder(tmp_path / "source", tensors, config), tmp_path / "new")
    models.export_model(tmp_path / "new", tmp_path / "out", "compressed-tensors")
    described = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert described["config_groups"]["group_0"]["weights"]["block_structure"] == [64, 64]
    checkpoint = formats.load(tmp_path / "out")
    for name, weight in expected.items():
        assert torch.equal(checkpoint[name].dequantize(torch.float32), weight)


def test_only_what_export_made_is_replaced(quantized: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    models.export_model(quantized("symmetric"), out, "gptq")
    with pytest.raises(FileExistsError, match="overwrite"):
        models.export_model(quantized("symmetric"), out, "compressed-tensors")
    models.export_model(quantized("symmetric"), out, "compressed-tensors", overwrite=True)
    assert formats.detect(out) == "compressed-tensors"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("x")
    with pytest.raises(ValueError, match="remove it yourself"):
        models.export_model(quantized("symmetric"), tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "notes").read_text() == "x"


def test_an_exported_layer_multiplies_as_before(quantized: Any, tmp_path: Path) -> None:
    models.export_model(quantized("act-order"), tmp_path / "out", "gptq")
    name, x = "model.layers.1.mlp.down_proj", torch.randn(5, 128)
    ours = qcutlass.QuantLinear.from_checkpoint(quantized("act-order"), name)
    theirs = qcutlass.QuantLinear.from_checkpoint(tmp_path / "out", name)
    assert torch.equal(ours(x), theirs(x))
