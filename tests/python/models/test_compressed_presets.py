"""Folders that the compressed-tensors package writes, by the names of its presets: read, converted, exported again."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qcutlass import formats, models

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")
from tests.python.models.quantizations import calibration, make
from tests.python.models.test_quantizing import loaded

PRESETS = {  # and the words of their layers
    "W4A16": "w4 g128 sym",
    "W4A16_ASYM": "w4 g128 int zeros",
    "W4A8": "w4 g128 sym, int8 activations",
    "W4AFP8": "w4 g128 sym, fp8 activations",
    "INT8": "w8a8 channel dynamic",
    "FP8": "fp8 channel static",
    "FP8_DYNAMIC": "fp8 channel dynamic",
    "FP8_BLOCK": "e4m3 g128",
    "NVFP4": "e2m1 g16 e4m3 scales",
    "NVFP4A16": "e2m1 g16 e4m3 scales",
    "MXFP4": "e2m1 g32 e8m0 scales",
    "MXFP4A16": "e2m1 g32 e8m0 scales",
    "MXFP8A16": "e4m3 g32",
}
RAGGED = {"FP8_BLOCK": 320}
"""Sizes of the MLP that are no multiple of the groups, which the package writes of these presets alone."""


def write(preset: str, folder: Path, seed: int) -> dict[str, Tensor]:
    """Writes a model that the package compresses; its weights, as the package reads them."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config

    sizes = {"hidden_size": 256, "intermediate_size": RAGGED.get(preset, 384), "num_hidden_layers": 1}
    model = make("llama", seed, **sizes).to(torch.bfloat16)
    apply_quantization_config(model, QuantizationConfig(config_groups={preset: ["Linear"]}, ignore=["lm_head"]))
    names = []
    for name, layer in model.named_modules():
        if getattr(layer, "quantization_scheme", None) is not None and isinstance(layer, torch.nn.Linear):
            calibrate(layer)
            layer.quantization_status = QuantizationStatus.FROZEN  # type: ignore[assignment]
            names.append(name)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    return {name: model.get_submodule(name).weight.detach() for name in names}


def calibrate(layer: Any) -> None:
    """Gives a layer the scales that fit its weights, and some for its activations."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme, weight = layer.quantization_scheme.weights, layer.weight.float()
    low, high = extremes(weight, scheme)
    options = {}
    if hasattr(layer, "weight_global_scale"):
        whole = generate_gparam(weight.min().view(1), weight.max().view(1))
        layer.weight_global_scale.data = whole.view_as(layer.weight_global_scale)
        options["global_scale"] = whole
    scales, zeros = calculate_qparams(low, high, scheme, **options)
    layer.weight_scale.data = scales.view(layer.weight_scale.shape).to(layer.weight_scale.dtype)
    if hasattr(layer, "weight_zero_point"):
        layer.weight_zero_point.data = zeros.view(layer.weight_zero_point.shape).to(layer.weight_zero_point.dtype)
    for name in ("input_scale", "input_global_scale"):
        if hasattr(layer, name):
            getattr(layer, name).data.fill_(0.25)


def extremes(weight: Tensor, scheme: Any) -> tuple[Tensor, Tensor]:
    """The least and largest weights that share a scale."""
    n, k = weight.shape
    if scheme.strategy == "block":
        rows, columns = scheme.block_structure
        padded = torch.nn.functional.pad(weight, (0, -k % columns, 0, -n % rows))
        blocks = padded.view(len(padded) // rows, rows, -1, columns).transpose(1, 2).flatten(2)
    elif scheme.strategy == "tensor":
        blocks = weight.view(1, -1)
    else:
        blocks = weight.view(n, -1, k if scheme.group_size in (None, -1) else scheme.group_size)
    return blocks.amin(-1), blocks.amax(-1)


@pytest.mark.parametrize("preset", PRESETS)
def test_what_the_package_writes(preset: str, seed: int, tmp_path: Path) -> None:
    from compressed_tensors.quantization import is_preset_scheme

    if not is_preset_scheme(preset):
        pytest.skip(f"this compressed-tensors has no preset {preset}")
    expected = write(preset, tmp_path / "source", seed)
    checkpoint = formats.load(tmp_path / "source")
    assert (checkpoint.format, set(checkpoint)) == ("compressed-tensors", set(expected))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers = dict(checkpoint)
    for name, weight in expected.items():
        assert layers[name].words == PRESETS[preset]
        assert torch.equal(layers[name].dequantize(torch.bfloat16), weight), name
    models.convert(tmp_path / "source", tmp_path / "new", verify=True)
    with torch.no_grad():
        logits = loaded(tmp_path / "new")(calibration(seed)).logits
    assert logits.isfinite().all()

    models.export_model(tmp_path / "new", tmp_path / "again", "compressed-tensors")
    again = formats.load(tmp_path / "again")
    for name, layer in layers.items():
        assert again[name].words == layer.words
        assert torch.equal(again[name].dequantize(torch.float32), layer.dequantize(torch.float32)), name
    assert set(again) == set(layers)
