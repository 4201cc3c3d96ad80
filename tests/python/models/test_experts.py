"""Mixtures of experts are refused before anything is written; their routers are left alone everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.python.formats.stored import as_gptq, named, stored
from tests.python.models.folders import GPTQ, random_model, write_model
from typer.testing import CliRunner

import qcutlass
from qcutlass import UnsupportedError, models
from qcutlass.cli import app
from qcutlass.layers import QuantLinear
from qcutlass.layers.replace import ROUTERS, SKIPPED

pytest.importorskip("transformers", reason="needs transformers")

SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 64, "head_dim": 32},
    "olmoe": {"num_experts": 4},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "gpt_oss": {"num_local_experts": 4, "head_dim": 32},
    "granitemoe": {"num_local_experts": 4},
}


def model_of(kind: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **KINDS[kind]))


def without_counts(folder: Path) -> None:
    """The tensors alone tell then."""
    config = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in config.items() if "experts" not in key}
    (folder / "config.json").write_text(json.dumps(kept))


def as_gptq_folder(folder: Path, seed: int) -> None:
    """The linear layers of a folder of floats stored as GPTQ does."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if tensor.ndim == 2 and "proj" in name and tensor.shape[1] % 64 == 0:
            del tensors[name]
            layer = stored(*tensor.shape, 64, seed=seed)
            tensors |= named(as_gptq(layer), name.removesuffix(".weight"))
    write_model(folder, tensors, json.loads((folder / "config.json").read_text()), {**GPTQ, "desc_act": False})


@pytest.mark.parametrize("stored_as", ["floats", "gptq"])
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_refused_before_anything_is_written(kind: str, stored_as: str, tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "model"
    model_of(kind).save_pretrained(folder)
    if stored_as == "gptq":
        as_gptq_folder(folder, seed)
    for prepare in (lambda folder: None, without_counts):
        prepare(folder)
        for write in (models.convert, lambda old, new: models.quantize_model(old, new, "rtn")):
            with pytest.raises(UnsupportedError, match=r"a mixture of experts \(.*qcutlass\.replace_linear\(model"):
                write(folder, tmp_path / "new")
            assert list(tmp_path.iterdir()) == [folder]
    result = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "new")])
    assert result.exit_code == 2
    assert "a mixture of experts" in result.stderr


def test_one_that_no_reader_knows_is_refused_for_what_it_is(tmp_path: Path) -> None:
    """gpt-oss as it is published: its experts are of a type that is not read either."""
    folder = tmp_path / "model"
    experts = {"model.layers.0.mlp.experts.down_proj_blocks": torch.zeros(4, 64, 2, 16, dtype=torch.uint8)}
    write_model(folder, experts, {"model_type": "gpt_oss", "num_local_experts": 4}, {"quant_method": "mxfp4"})
    with pytest.raises(UnsupportedError, match="a mixture of experts"):
        models.convert(folder, tmp_path / "new")


@pytest.mark.parametrize(
    "values", [{"num_experts": 0}, {"num_local_experts": 1}, {"text_config": {"num_experts": None}}]
)
def test_dense_models_may_say_that_they_have_no_experts(values: dict[str, Any], tmp_path: Path, seed: int) -> None:
    folder = random_model(tmp_path / "model", 1, seed=seed)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    assert models.convert(folder, tmp_path / "new").layers == 1


@pytest.mark.parametrize("values", [{"text_config": {"num_experts": 8}}, {"ffn_config": {"moe_num_experts": [4, 4]}}])
def test_parts_of_a_configuration(values: dict[str, Any], tmp_path: Path, seed: int) -> None:
    folder = random_model(tmp_path / "model", 1, seed=seed)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    with pytest.raises(UnsupportedError, match="a mixture of experts"):
        models.convert(folder, tmp_path / "new")


@pytest.mark.parametrize("kind", KINDS)
def test_replacing_in_memory_is_the_way_out(kind: str) -> None:
    model = model_of(kind).eval()
    names = qcutlass.replace_linear(model, qcutlass.WeightOnly(group_size=32))
    assert any(name.endswith(("o_proj", "q_proj")) for name in names)
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last in ROUTERS or ".router." in name:
            assert not isinstance(module, QuantLinear), name
    with torch.inference_mode():
        assert bool(model(torch.arange(8)[None]).logits.isfinite().all())


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.gate, self.shared_expert_gate = (torch.nn.Linear(64, 64) for _ in range(3))
        self.router = torch.nn.Sequential(torch.nn.Linear(64, 64))
        self.gate_proj = torch.nn.Linear(64, 64)


def test_routers_are_floats_by_default(tmp_path: Path) -> None:
    """In a model of linear layers that is no mixture of experts but for their names."""
    model = torch.nn.ModuleDict({"block": Block()})
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    models.convert(tmp_path, tmp_path.parent / f"{tmp_path.name}-new")
    expected = ["block.gate_proj", "block.up_proj"]
    assert sorted(models.ConvertedFolder(tmp_path.parent / f"{tmp_path.name}-new")) == expected
    assert sorted(qcutlass.replace_linear(model, qcutlass.WeightOnly())) == expected


def test_one_list_of_names() -> None:
    import inspect

    from qcutlass.cli import quantize as command

    assert set(ROUTERS) < set(SKIPPED)
    for function in (models.convert, models.quantize_model):
        assert inspect.signature(function).parameters["skip"].default is SKIPPED
    assert inspect.signature(command.quantize).parameters["skip"].default == [*SKIPPED]
