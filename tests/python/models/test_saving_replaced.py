"""Models of transformers whose layers `replace_linear` has replaced: what they save is a converted folder."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.python.models.folders import write_tokenizer
from tests.python.models.mixtures import VOCABULARY, model_of
from tests.python.models.quantizations import make
from tests.python.models.test_commands import command
from tests.python.models.test_mixtures import load, logits
from torch import nn

import qcutlass
from qcutlass import CheckpointError, WeightOnly, formats, models
from qcutlass.formats.converted import CONFIG, QUANTIZATION

pytest.importorskip("transformers", reason="needs transformers")

KINDS = ("llama", "gpt_neox", "mixtral", "qwen3_moe", "deepseek_v3")
W4, W8 = WeightOnly(4, 16), WeightOnly(8, None)


def model_for(kind: str, seed: int, **options: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, **options}
    return make(kind, seed, **sizes) if kind in ("llama", "gpt_neox") else model_of(kind, seed)


@pytest.mark.parametrize("original", [True, False], ids=["names of files", "names of modules"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_is_a_converted_folder(kind: str, original: bool, tmp_path: Path, seed: int) -> None:
    """With layers of two schemes, in several files, the output head too; twice, once from what was loaded."""
    model = model_for(kind, seed)
    qcutlass.replace_linear(model, W4, ["*.layers.1.*", "lm_head"])
    qcutlass.replace_linear(model, W8, [])
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB", save_original_format=original)
    found = models.ConvertedFolder(tmp_path / "saved")
    assert {spec.bits for spec in map(found.spec.__getitem__, found)} == {4, 8}
    again = load(tmp_path / "saved")
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again")), logits(model))


@pytest.mark.parametrize("scheme", [qcutlass.W8A8(), qcutlass.FP8(), qcutlass.Blockwise(32), WeightOnly(8, 32)])
def test_of_every_scheme(scheme: Any, tmp_path: Path, seed: int) -> None:
    model = model_for("llama", seed, tie_word_embeddings=True)
    qcutlass.replace_linear(model, scheme)
    model.save_pretrained(tmp_path / "saved")
    found = models.ConvertedFolder(tmp_path / "saved")
    assert list(found.spec.modules_to_not_convert) == ["lm_head"]
    assert found.spec.source == "floats"
    assert torch.equal(logits(load(tmp_path / "saved")), logits(model))


def test_parts_and_wholes_are_saved(tmp_path: Path, seed: int) -> None:
    """A model within another module, and its base model; casts stay what they are."""
    from transformers import AutoModel

    model = model_for("llama", seed)
    qcutlass.replace_linear(nn.ModuleList([model]), W4)
    ids = torch.arange(9)[None]
    for _ in range(2):
        model.model.save_pretrained(tmp_path / "base")
        model.save_pretrained(tmp_path / "whole")
        base = AutoModel.from_pretrained(tmp_path / "base")
        with torch.inference_mode():
            assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
        assert torch.equal(logits(load(tmp_path / "whole")), logits(model))
        assert list(models.ConvertedFolder(tmp_path / "whole").spec.modules_to_not_convert) == ["lm_head"]
    assert model.half().dtype == torch.float16
    loaded = load(tmp_path / "whole")
    with pytest.raises(ValueError, match="not supported for quantized model"):
        loaded.half()  # as docs/layers.md says
    loaded.model.save_pretrained(tmp_path / "base")
    base, state = AutoModel.from_pretrained(tmp_path / "base"), loaded.model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in base.state_dict().items())
    assert models.ConvertedFolder(tmp_path / "base").spec.modules_to_not_convert == ()
    assert loaded.to(torch.float16).dtype == torch.float16


def test_layers_without_their_description_are_told(tmp_path: Path, seed: int) -> None:
    model = model_for("llama", seed)
    qcutlass.replace_linear(model, W4)
    folder = tmp_path / "saved"
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCABULARY)
    values = json.loads((folder / CONFIG).read_text())
    del values[QUANTIZATION]
    (folder / CONFIG).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="qcutlass has packed these layers, but no quantization_config"):
        formats.load(folder)
    for arguments in (["convert", folder, tmp_path / "new"], ["generate", folder, "--prompt", "a"]):
        result = command(*arguments)
        assert result.exit_code == 2
        assert "save the model that has them again" in result.stderr
    assert not (tmp_path / "new").exists()


def test_only_packed_layers_are_described(tmp_path: Path, seed: int) -> None:
    """Those that are there when the model is saved: one put back, then all; the configuration stays as it was."""
    model = model_for("llama", seed)
    before = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    packed = qcutlass.replace_linear(model, W4)
    model.save_pretrained(tmp_path / "packed")
    assert not hasattr(model.config, QUANTIZATION)
    float_model = type(model)(model.config).eval()
    float_model.save_pretrained(tmp_path / "float")
    assert torch.equal(logits(load(tmp_path / "float")), logits(float_model))

    model.set_submodule(packed[0], before[packed[0]])
    model.save_pretrained(tmp_path / "one")
    assert packed[0] in models.ConvertedFolder(tmp_path / "one").spec.modules_to_not_convert
    loaded = load(tmp_path / "one")
    assert torch.equal(logits(loaded), logits(model))

    for name in packed:
        model.set_submodule(name, before[name])
        loaded.set_submodule(name, before[name])
    for each in (model, loaded):
        each.save_pretrained(tmp_path / "none")
        assert QUANTIZATION not in json.loads((tmp_path / "none" / CONFIG).read_text())
        assert torch.equal(logits(load(tmp_path / "none")), logits(model))
    assert loaded.config.quantization_config.quant_method == "qcutlass"  # with which it was loaded


def test_a_copy_saves_itself(tmp_path: Path, seed: int) -> None:
    model = model_for("llama", seed)
    qcutlass.replace_linear(model, W4)
    for which in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            which.model.norm.weight.fill_(7)
        which.save_pretrained(tmp_path)
        assert torch.equal(logits(load(tmp_path)), logits(which))


def test_a_part_without_packed_layers_is_saved_as_ever(tmp_path: Path) -> None:
    from transformers import CLIPVisionConfig, CLIPVisionModel, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**sizes, image_size=16, patch_size=8, projection_dim=32)
    text = LlamaConfig(**sizes, vocab_size=VOCABULARY)
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text)).eval()
    qcutlass.replace_linear(model, W4, ["*vision_tower*", "*projector*", "lm_head"])
    tower = model.model.vision_tower
    tower.save_pretrained(tmp_path)
    assert QUANTIZATION not in json.loads((tmp_path / CONFIG).read_text())
    again = CLIPVisionModel.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in tower.state_dict().items())


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_given_state_is_what_is_saved(kind: str, tmp_path: Path, seed: int) -> None:
    model, other = model_for(kind, seed), model_for(kind, seed + 1)
    for each in (model, other):
        qcutlass.replace_linear(each, W4)
    for _ in range(2):
        model.save_pretrained(tmp_path / "other", state_dict={k: v.clone() for k, v in other.state_dict().items()})
        assert torch.equal(logits(load(tmp_path / "other")), logits(other))
        model.save_pretrained(tmp_path / "own")
        model = load(tmp_path / "own")  # saves the state that it is given, too


def test_models_without_embeddings_of_tokens(tmp_path: Path, seed: int) -> None:
    """Sounds and pictures have none, which transformers says by an error where it is asked for them."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.Wav2Vec2Config(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128, vocab_size=32,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForCTC(config).eval()
    assert qcutlass.replace_linear(model, WeightOnly(8, 32))
    model.save_pretrained(tmp_path / "saved")
    loaded = transformers.Wav2Vec2ForCTC.from_pretrained(tmp_path / "saved").eval()
    sounds = torch.randn(1, 3000)
    with torch.inference_mode():
        assert torch.equal(loaded(sounds).logits, model(sounds).logits)


def test_a_given_state_may_hold_floats(tmp_path: Path, seed: int) -> None:
    model, before = model_for("llama", seed), model_for("llama", seed)
    name, *_ = qcutlass.replace_linear(model, W4)
    state = {key: tensor for key, tensor in model.state_dict().items() if not key.startswith(f"{name}.")}
    model.save_pretrained(tmp_path, state_dict={**state, f"{name}.weight": before.get_submodule(name).weight})
    model.set_submodule(name, before.get_submodule(name))
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_a_given_state_of_other_layers_is_refused(tmp_path: Path, seed: int) -> None:
    model = model_for("llama", seed)
    name, *_ = qcutlass.replace_linear(model, W4)
    state, scales = model.state_dict(), f"{name}.scales"
    for given, words in (
        ({**state, scales: state[scales].double()}, f"{scales}: expected torch.float32 .* got torch.float64"),
        ({key: state[key] for key in state if key != scales}, f"{scales}: expected .* absent"),
        ({**state, "other.w_packed": state[f"{name}.w_packed"]}, "other.w_packed: the model has no packed layer there"),
    ):
        with pytest.raises(ValueError, match=f"^state_dict: {words}"):
            model.save_pretrained(tmp_path / "saved", state_dict=given)
    assert not (tmp_path / "saved").exists()
