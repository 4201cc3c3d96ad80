"""fp8 folders of transformers' own quantiser, of a dense model and of a mixture: in blocks, and with one scale."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.python.models.folders import Cut
from tests.python.models.mixtures import MixtureCut
from tests.python.models.test_commands import command
from tests.python.models.test_mixtures import load, logits
from torch import Tensor

from qcutlass import models
from qcutlass.layers import BlockwiseLinear, Fp8Linear
from qcutlass.models.transformers import load_model
from qcutlass.products.checks import E8M0
from qcutlass.testing.models import NOISE, noise_ratio

pytest.importorskip("transformers", reason="needs transformers")
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

KINDS: dict[str, dict[str, Any]] = {
    # Of two and three blocks of 128, and of two and a half.
    "qwen3": {"hidden_size": 256, "intermediate_size": 320, "head_dim": 128},
    "deepseek_v3": {
        "hidden_size": 256,
        "intermediate_size": 384,
        "moe_intermediate_size": 256,
        "q_lora_rank": 128,
        "kv_lora_rank": 256,
        "qk_rope_head_dim": 64,  # beside the rank: 320 channels
        "qk_nope_head_dim": 64,
        "v_head_dim": 128,
    },
}
RAGGED = {"qwen3": 2 * 3, "deepseek_v3": 2}
"""Layers, of 14 and of 28, with sizes that are no multiples of 128: transformers leaves these as floats."""


@pytest.fixture(scope="module")
def cuts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MixtureCut]:
    return {kind: MixtureCut(tmp_path_factory.mktemp(kind), kind, **sizes) for kind, sizes in KINDS.items()}


def written(cut: MixtureCut, patch: pytest.MonkeyPatch, scales: Tensor | None = None, **options: Any) -> Cut:
    """What transformers writes of a model that it has quantised, and what the weights there stand for.

    Args:
        cut: of the model.
        patch: its quantiser asks for a GPU, which quantising does not need.
        scales: of the activations of each layer where they are static: transformers does not calibrate them.
        options: of its configuration.
    """
    with patch.context() as patched:
        patched.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
        config = FineGrainedFP8Config(**options)
        model = AutoModelForCausalLM.from_pretrained(
            cut.root / "saved", quantization_config=config, dtype=torch.float32
        )
        if scales is not None:
            for name, scale in zip(cut.names, scales, strict=True):
                model.get_parameter(f"{name}.activation_scale").data.fill_(float(scale))
        found = cut._write("-".join(map(str, ["fp8", *options.values()])), {}, None, {})
        model.save_pretrained(found.folder)
    tensors = load_file(found.folder / "model.safetensors")
    return Cut(found.folder, {name: dequantised(tensors, name) for name in cut.names})


def dequantised(tensors: dict[str, Tensor], name: str) -> Tensor:
    """By transformers; the scales of experts are in the file as they are in its memory, of all of them at once."""
    weight = tensors[f"{name}.weight"]
    if weight.dtype != torch.float8_e4m3fn:
        return weight
    undo = Fp8Dequantize(None)._dequantize_one
    if f"{name}.weight_scale_inv" in tensors:
        return undo(weight, tensors[f"{name}.weight_scale_inv"], torch.float32)  # type: ignore[no-any-return]
    block, expert, part = name.rsplit(".", 2)
    if part == "down_proj":
        return undo(weight, tensors[f"{block}.down_proj_scale_inv"][int(expert)], torch.float32)  # type: ignore[no-any-return]
    pair = torch.cat([tensors[f"{block}.{expert}.{each}_proj.weight"] for each in ("gate", "up")])
    both: Tensor = undo(pair, tensors[f"{block}.gate_up_proj_scale_inv"][int(expert)], torch.float32)
    return both.chunk(2)[part == "up_proj"]


def check_weights(folder: Path, cut: Cut, ragged: int) -> None:
    """Of a converted folder: all that are fp8, to the bit."""
    converted = models.ConvertedFolder(folder)
    assert len(converted) == len(cut.weights) - ragged
    for name in converted:
        assert torch.equal(models.weights_of(converted[name]), cut.weights[name]), name


def check_logits(found: Tensor, cuts: MixtureCut, cut: Cut) -> None:
    exact, dense = (logits(cuts.dense(cut, dtype)) for dtype in (torch.float64, torch.float32))
    assert noise_ratio(found, dense, exact) <= NOISE


@pytest.mark.parametrize("scale_fmt", ["float", *(["ue8m0"] if E8M0 else [])])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks(
    kind: str, scale_fmt: str, cuts: dict[str, MixtureCut], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`load` says that nothing of the converted folder is left over, as the scales of no weights would be."""
    cut = written(cuts[kind], monkeypatch, scale_fmt=scale_fmt)
    done = models.convert(cut.folder, tmp_path / "new", verify=True)
    assert (done.source, done.layers) == ("fp8", done.verified)
    check_weights(tmp_path / "new", cut, RAGGED[kind])
    direct = logits(load_model(cut.folder)[0])
    check_logits(direct, cuts[kind], cut)
    assert torch.equal(logits(load(tmp_path / "new")), direct)


def test_one_scale_a_layer(cuts: dict[str, MixtureCut], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For fp8 activations, whose scales are in the folder, too; with 16-bit ones logits are those of the weights."""
    scales = torch.linspace(0.01, 0.03, len(cuts["qwen3"].names))
    cut = written(cuts["qwen3"], monkeypatch, scales, weight_block_size=None, activation_scheme="static")
    assert models.convert(cut.folder, tmp_path / "new", verify=True).verified == len(scales)
    check_weights(tmp_path / "new", cut, 0)
    model = load(cut.folder, direct=True)
    for name, scale in zip(cuts["qwen3"].names, scales, strict=True):
        layer = model.get_submodule(name)
        assert isinstance(layer, Fp8Linear)
        assert layer.a_scale is not None
        assert torch.equal(layer.a_scale, scale.reshape(1))
    assert torch.equal(logits(load(tmp_path / "new")), logits(model))
    check_logits(logits(load_model(cut.folder, activations="none")[0]), cuts["qwen3"], cut)


def test_experts_with_one_scale(cuts: dict[str, MixtureCut], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Gate and up of an expert have one for both; experts are multiplied by 16-bit activations."""
    cut = written(cuts["deepseek_v3"], monkeypatch, weight_block_size=None)
    done = models.convert(cut.folder, tmp_path / "new", verify=True, activations="none")
    assert done.layers == done.verified == len(cut.weights)
    check_weights(tmp_path / "new", cut, 0)
    check_logits(logits(load(tmp_path / "new")), cuts["deepseek_v3"], cut)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_at_the_edge(kind: str, cuts: dict[str, MixtureCut], tmp_path: Path) -> None:
    """As DeepSeek publishes them: of fewer rows or columns; with fp8 activations, layers have the same weights."""
    source = cuts[kind]
    cut = source.fp8(128)
    check_logits(logits(load(cut.folder, direct=True)), source, cut)
    result = command("convert", cut.folder, tmp_path / "new", "--activations", "fp8", "--verify")
    assert result.exit_code == 0, result.output
    check_weights(tmp_path / "new", cut, 0)
    model = load(tmp_path / "new")
    layers = [model.get_submodule(name) for name in source.names if ".experts." not in name]
    assert {(type(layer), layer.group_size) for layer in layers} == {(BlockwiseLinear, 128)}
    assert torch.equal(logits(load_model(cut.folder, activations="fp8")[0]), logits(model))
