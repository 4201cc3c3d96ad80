"""Mixtures of experts that are refused, before anything is written; routers are left alone everywhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.python.formats.stored import Tensors, as_gptq, named, stored
from tests.python.models.folders import GPTQ, random_model, write_model, write_tokenizer
from tests.python.models.mixtures import EXPERTS, KINDS, VOCABULARY, MixtureCut, model_of
from torch import Tensor
from typer.testing import CliRunner

import qcutlass
from qcutlass import CheckpointError, UnsupportedError, models
from qcutlass.cli import app
from qcutlass.layers import QuantExperts, QuantLinear
from qcutlass.layers.replace import ROUTERS, SKIPPED
from qcutlass.models.transformers import load_model

pytest.importorskip("transformers", reason="needs transformers")

REFUSED: dict[str, dict[str, Any]] = {
    "granitemoe": {"num_local_experts": 4},
}


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
@pytest.mark.parametrize("kind", REFUSED)
def test_they_are_refused_before_anything_is_written(kind: str, stored_as: str, tmp_path: Path, seed: int) -> None:
    folder = tmp_path / "model"
    model_of(kind, **REFUSED[kind]).save_pretrained(folder)
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
    """Its experts are of a type that is not read either."""
    folder = tmp_path / "model"
    experts = {"model.layers.0.moe.experts.down_codes": torch.zeros(4, 64, 2, 16, dtype=torch.uint8)}
    write_model(folder, experts, {"model_type": "some_moe", "num_local_experts": 4}, {"quant_method": "codes"})
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


@pytest.mark.parametrize("kind", [*KINDS, *REFUSED, "gpt_oss"])
def test_replacing_in_memory_takes_all(kind: str) -> None:
    model = model_of(kind, **{**REFUSED, "gpt_oss": {"num_local_experts": 4, "head_dim": 32}}.get(kind, {}))
    names = qcutlass.replace_linear(model, qcutlass.WeightOnly(group_size=32))
    assert any(name.endswith(("o_proj", "q_proj")) for name in names)
    assert any(name.endswith(".experts") for name in names) == (kind not in REFUSED)
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last in ROUTERS or ".router." in name:
            assert not isinstance(module, QuantLinear), name
        assert isinstance(module, QuantExperts) == (name in names and name.endswith(".experts"))
    with torch.inference_mode():
        assert bool(model(torch.arange(8)[None]).logits.isfinite().all())


@pytest.mark.parametrize(
    ("scheme", "skip"), [(qcutlass.W8A8(), None), (qcutlass.WeightOnly(group_size=32), ["lm_head", "*.experts.*"])]
)
def test_experts_that_stay_floats_in_memory(scheme: Any, skip: Any) -> None:
    """Those of other schemes than weights alone; those that are skipped."""
    model = model_of("olmoe")
    names = qcutlass.replace_linear(model, scheme, skip)
    assert names
    assert not any(isinstance(module, QuantExperts) for module in model.modules())


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> MixtureCut:
    return MixtureCut(tmp_path_factory.mktemp("cut"), "qwen3_moe")


def written(folder: Path, cut: MixtureCut, form: str, change: Callable[[Tensors], Tensors]) -> Path:
    """A folder of a form with some tensors changed."""
    source = getattr(cut, form)().folder
    config = json.loads((source / "config.json").read_text())
    tensors = change(load_file(source / "model.safetensors"))
    return write_model(folder, tensors, config, config.get("quantization_config"))


def without(word: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if word not in name}


def replaced(layer: str, **tensors: Tensor) -> Callable[[Tensors], Tensors]:
    return lambda found: {**without(f"{layer}.")(found), **named(tensors, layer)}


def stacked(tensors: Tensors) -> Tensors:
    """As a state of transformers has them, but codes."""
    name = "model.layers.0.mlp.experts"
    down = torch.stack([tensors[f"{name}.{i}.down_proj.qweight"] for i in range(EXPERTS)])
    return {**without(f"{name}.")(tensors), f"{name}.down_proj": down}


EXPERT = "model.layers.1.mlp.experts.2"
GATE = "model.layers.0.mlp.gate"
WRONG: dict[str, tuple[str, Callable[[Tensors], Tensors], str]] = {
    "stacked": ("gptq", stacked, r"a mixture of experts \(model\.layers\.0\.mlp\.experts\.down_proj\)"),
    "an expert is absent": ("gptq", without(f"{EXPERT}."), r"expert 2 of 4 has no gate projection"),
    "a part is absent": ("gptq", without(f"{EXPERT}.up_proj"), r"expert 2 of 4 has no up projection"),
    "floats": (
        "gptq",
        replaced(f"{EXPERT}.up_proj", weight=torch.ones(40, 64).half()),
        r"2\.up_proj: floats, shape \[40, 64\], but .*0\.gate_proj: 4 bits.*need one shape and one scheme",
    ),
    "bits": (
        "gptq",
        replaced(f"{EXPERT}.up_proj", **as_gptq(stored(40, 64, 64, bits=8, seed=0, symmetric=True))),
        r"experts\.2\.up_proj: 8 bits, group_size -1, shape \[40, 64\], but .*experts\.0\.gate_proj: 4 bits",
    ),
    "act-order": (
        "act_order",
        replaced(f"{EXPERT}.gate_proj", **as_gptq(stored(40, 64, 16, seed=0, act_order=True))),
        r"2\.up_proj: its columns are in another order \(act-order\) than those of .*2\.gate_proj.*--requantize",
    ),
    "a quantised router": (
        "gptq",
        replaced(GATE, **as_gptq(stored(8, 64, 64, seed=0))),
        r"layers\.0\.mlp\.gate: a router is quantised, which is to be in floats",
    ),
    "int8 activations": ("w8a8", lambda tensors: tensors, r"experts of quantised activations \(w8a8 .*--requantize"),
}


@pytest.mark.parametrize("what", WRONG)
def test_experts_that_no_product_takes_are_refused(what: str, cut: MixtureCut, tmp_path: Path) -> None:
    form, change, message = WRONG[what]
    source = written(tmp_path / "source", cut, form, change)
    keywords: dict[str, Any] = {"config": {"bits": None, "group_size": None}} if what == "bits" else {}
    with pytest.raises((UnsupportedError, CheckpointError), match=message):
        models.convert(source, tmp_path / "new", **keywords)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("what", ["an expert is absent", "floats", "act-order", "int8 activations"])
def test_and_not_loaded_either(what: str, cut: MixtureCut, tmp_path: Path) -> None:
    form, change, _ = WRONG[what]
    source = written(tmp_path / "source", cut, form, change)
    with pytest.raises((UnsupportedError, CheckpointError), match=r"layers\.[01]\.mlp\.experts"):
        load_model(source)


@pytest.mark.parametrize("word", ["experts.2.down_proj.w_packed", "experts.2.", ".experts."])
def test_converted_mixtures_without_an_expert_are_refused(word: str, cut: MixtureCut, tmp_path: Path) -> None:
    models.convert(cut.gptq().folder, tmp_path / "new")
    path = tmp_path / "new/model.safetensors"
    save_file(without(word)(load_file(path)), path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(cut.gptq().folder / name, tmp_path / "new" / name)
    with pytest.raises((UnsupportedError, CheckpointError), match=r"layers\.[01]\.mlp\.experts"):
        load_model(tmp_path / "new")


@pytest.mark.parametrize("count", [EXPERTS - 1, EXPERTS + 1])
def test_models_of_another_number_of_experts(count: int, cut: MixtureCut, tmp_path: Path) -> None:
    """What could not be loaded is not written."""
    source = written(tmp_path / "source", cut, "fp8", lambda tensors: tensors)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {key: count for key in config if key.endswith("_experts")}))
    write_tokenizer(source, VOCABULARY)
    message = rf"layers\.0\.mlp\.experts: expected {count} experts, as config\.json has it.*those of {EXPERTS}"
    with pytest.raises(CheckpointError, match=message):
        models.convert(source, tmp_path / "new")
    with pytest.raises(CheckpointError, match=message):
        load_model(source)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_models_with_another_activation(cut: MixtureCut, tmp_path: Path) -> None:
    source = written(tmp_path / "source", cut, "fp8", lambda tensors: tensors)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    with pytest.raises(UnsupportedError, match=r"layers\.0\.mlp\.experts: experts with GELUActivation are not taken"):
        models.convert(source, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_expert_of_another_shape(cut: MixtureCut, tmp_path: Path) -> None:
    models.convert(cut.gptq().folder, tmp_path / "new")
    config = json.loads((tmp_path / "new/config.json").read_text())
    (tmp_path / "new/config.json").write_text(json.dumps({**config, "moe_intermediate_size": 48}))
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj: expected weights \[48, 64\] for .*experts, got"):
        load_model(tmp_path / "new")


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
