"""Models with an encoder, and other linear layers that are in no block of a decoder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.python.models.folders import write_tokenizer
from tests.python.models.quantizations import SIZES, VOCABULARY, calibration, make
from torch import Tensor, nn
from typer.testing import CliRunner

import qcutlass
from qcutlass import UnsupportedError, WeightOnly, models
from qcutlass.cli import app
from qcutlass.layers import QuantLinear
from qcutlass.testing.models import NOISE, noise_ratio

transformers = pytest.importorskip("transformers", reason="needs transformers")

METHOD = models.Method("rtn", WeightOnly(4, 32))
_ATTENTION = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
_BLOCKS = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "bart": {"d_model": 64, **_ATTENTION, **_BLOCKS, **_TOKENS, "max_position_embeddings": 32},
    "whisper": {
        "d_model": 64, **_ATTENTION, **_BLOCKS, **_TOKENS, "max_source_positions": 16, "max_target_positions": 32,
        "num_mel_bins": 8,
    },
    "t5": {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0},
}  # fmt: skip
CLASSES = {
    "bart": "BartForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
}
LAYERS = {"bart": 16, "whisper": 16, "t5": 14}
"""All linear layers of an encoder's block and of a decoder's, but for those of T5 whose weights it reads itself."""
SKIPPED = {"t5": ["wo"]}
READ_BY_NONE = {"t5": {"q", "k", "v", "o", "wi"}, "mamba": {"in_proj"}, "mamba2": {"in_proj"}}
"""Layers whose weights their model does not read itself."""


def saved(kind: str, folder: Path) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, vocab_size=VOCABULARY, **CONFIGS[kind])
    model = getattr(transformers, CLASSES[kind])(config).eval()
    model.save_pretrained(folder)
    return model


def logits(model: Any) -> Tensor:
    dtype = model.dtype
    ids = torch.arange(3, 15)[None]
    source = {"input_ids": ids}
    if model.config.model_type == "whisper":
        source = {"input_features": torch.linspace(-1, 1, 8 * 32, dtype=dtype).view(1, 8, 32)}
    with torch.inference_mode():
        found: Tensor = model(**source, decoder_input_ids=ids).logits
    return found


@pytest.mark.parametrize("kind", CONFIGS)
def test_encoder_and_decoder_are_quantised(kind: str, tmp_path: Path) -> None:
    """Those of the decoder alone were, and nothing said so."""
    model = saved(kind, tmp_path / "old")
    found = models.quantize_model(tmp_path / "old", tmp_path / "new", METHOD, skip=["lm_head", *SKIPPED.get(kind, ())])
    assert (found.layers, found.kept) == (LAYERS[kind], [])
    loaded = type(model).from_pretrained(tmp_path / "new", dtype=torch.float32)
    packed = {name: each for name, each in loaded.named_modules() if isinstance(each, QuantLinear)}
    assert len(packed) == LAYERS[kind]
    assert {"encoder", "decoder"} == {part for name in packed for part in name.split(".") if part.endswith("coder")}
    for name, layer in packed.items():
        model.get_submodule(name).weight.data = layer.weights()
    dense = logits(model)
    assert noise_ratio(logits(loaded), dense, logits(model.double())) <= NOISE
    assert sum(group.count for group in models.inspect(tmp_path / "new").groups) == LAYERS[kind]


@pytest.mark.parametrize("kind", ["bart", "whisper"])
@pytest.mark.parametrize("method", ["gptq", "awq", "smoothquant"])
def test_activations_of_encoders_are_not_recorded(kind: str, method: str, tmp_path: Path) -> None:
    """Attention to what an encoder gives was left out, or rounded by what a decoder alone makes of a text."""
    saved(kind, tmp_path / "old")
    match = f"calibration: {CLASSES[kind]} has an encoder, .* take a method without calibration.*: rtn, .*--method"
    with pytest.raises(UnsupportedError, match=match):
        models.quantize_model(tmp_path / "old", tmp_path / "new", method, calibration=calibration(0))
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_decoder_with_an_encoder_does_not_run_alone(tmp_path: Path) -> None:
    from qcutlass.models.transformers import load_model

    saved("whisper", tmp_path / "old")
    models.convert(tmp_path / "old", tmp_path / "new", scheme=METHOD.scheme)
    for folder in (tmp_path / "old", tmp_path / "new"):
        write_tokenizer(folder, VOCABULARY)
        with pytest.raises(UnsupportedError, match=r"causal language model, got WhisperFor.*an encoder; .*from_pretr"):
            load_model(folder)
    command = ["generate", str(tmp_path / "new"), "--prompt", "1 2"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 2
    assert "expected a causal language model, got WhisperForConditionalGeneration" in " ".join(shown.stderr.split())


def test_a_class_that_is_not_named(tmp_path: Path) -> None:
    saved("bart", tmp_path / "old")
    path = tmp_path / "old" / "config.json"
    path.write_text(path.read_text().replace('"architectures"', '"others"'))
    with pytest.raises(UnsupportedError, match=r"model_type 'bart': .*\(it has an encoder, and config.json names no"):
        models.quantize_model(tmp_path / "old", tmp_path / "new", METHOD)


def test_layers_outside_of_blocks_are_told(tmp_path: Path) -> None:
    make("opt", 0, word_embed_proj_dim=32).save_pretrained(tmp_path / "old")
    command = ["quantize", str(tmp_path / "old"), str(tmp_path / "new"), "--method", "rtn", "--group-size", "32"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.stderr
    told = "2 linear layers outside of the blocks stay floats: model.decoder.project_out, model.decoder.project_in"
    assert told in " ".join(shown.stdout.split())
    skip = ["lm_head", "project_*"]
    found = models.quantize_model(tmp_path / "old", tmp_path / "new", METHOD, skip=skip, overwrite=True)
    assert (found.layers, found.kept) == (6 * SIZES["num_hidden_layers"], [])


def test_convert_leaves_layers_alone(tmp_path: Path) -> None:
    """The way out of a refusal, on the command line."""
    saved("t5", tmp_path / "old")
    command = ["convert", str(tmp_path / "old"), str(tmp_path / "new"), "--bits", "4", "--group-size", "32"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 2
    assert "wo: T5ForConditionalGeneration reads the weight of this layer" in " ".join(shown.stderr.split())
    shown = CliRunner().invoke(app, [*command, "--skip", "wo", "--skip", "lm_head"])
    assert shown.exit_code == 0, shown.stderr
    loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "new", dtype=torch.float32)
    assert type(loaded.decoder.block[0].layer[2].DenseReluDense.wo) is nn.Linear


@pytest.mark.parametrize("kind", ["t5", "mamba", "mamba2"])
def test_layers_of_models_that_read_weights_themselves_are_left_alone(kind: str) -> None:
    """Such a layer ended the first call in an AttributeError."""
    torch.manual_seed(0)
    if kind == "t5":
        config = transformers.T5Config(vocab_size=VOCABULARY, **CONFIGS[kind])
        model: Any = transformers.T5ForConditionalGeneration(config).eval()
    else:
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "state_size": 16, "num_hidden_layers": 1}
        if kind == "mamba2":
            sizes |= {"num_heads": 8, "head_dim": 16, "n_groups": 1}
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes)).eval()
    ids = torch.arange(3, 15)[None]
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if kind == "t5" else {})
    dense = copy.deepcopy(model)
    names = qcutlass.replace_linear(model, WeightOnly(8, 32))
    assert {name.rpartition(".")[2] for name in names} == READ_BY_NONE[kind]
    for name in names:
        dense.get_submodule(name).weight.data = model.get_submodule(name).weights()
    with torch.inference_mode():
        found, exact = (each(**inputs).logits for each in (model, copy.deepcopy(dense).double()))
        assert noise_ratio(found, dense(**inputs).logits, exact) <= NOISE
