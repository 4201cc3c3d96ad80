"""Models of transformers whose layers `replace_linear` has replaced: what they save is a converted folder."""

from __future__ import annotations

import json
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
