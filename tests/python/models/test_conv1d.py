"""GPT-2 and its like, whose linear layers are transformers' `Conv1D`: the weight lies transposed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.python.formats.stored import as_gptq, named
from tests.python.models.folders import GPTQ, requantized, write_model
from tests.python.models.quantizations import VOCABULARY, calibration
from tests.python.models.test_mixtures import load, logits

import qcutlass
from qcutlass import WeightOnly, formats, models
from qcutlass.formats import FloatLinear
from qcutlass.layers import QuantLinear
from qcutlass.testing.models import NOISE, noise_ratio
from qcutlass.testing.quantizing import relative_norm

transformers = pytest.importorskip("transformers", reason="needs transformers")

SCHEME = WeightOnly(4, 32)
LAYERS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
CONFIG = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 32, "bos_token_id": None}


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(**CONFIG, eos_token_id=None, initializer_range=0.2)
    return transformers.GPT2LMHeadModel(config).eval()


def conv1ds(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if type(module).__name__ == "Conv1D"}


def check(loaded: Any, model: Any, skipped: int = 0) -> None:
    """The layers are packed, and compute what the model does with their weights."""
    packed = {name: module for name, module in loaded.named_modules() if isinstance(module, QuantLinear)}
    assert len(packed) == 2 * len(LAYERS) - skipped
    assert len(conv1ds(loaded)) == skipped
    dense = copy.deepcopy(model)
    for name, layer in packed.items():
        dense.get_submodule(name).weight.data = layer.weights().T.contiguous()
    expected = logits(dense)
    assert noise_ratio(logits(loaded), expected, logits(dense.double())) <= NOISE


@pytest.mark.parametrize(
    ("config", "is_transposed"),
    [
        ({"model_type": "gpt2"}, True),
        ({"model_type": "vision-encoder-decoder", "decoder": {"model_type": "gpt2"}}, True),
        ({"model_type": "gpt_bigcode"}, False),  # the same names, of torch.nn.Linear
    ],
)
def test_weights_are_read_as_those_of_linear_layers(
    config: dict[str, Any], is_transposed: bool, tmp_path: Path
) -> None:
    stored = {f"h.0.{name}.weight": torch.randn(64, 64 * (1 + 2 * name.endswith("attn"))) for name in LAYERS}
    biases = {"h.0.attn.c_attn.bias": torch.randn(192 if is_transposed else 64)}
    folder = write_model(tmp_path / "old", {**stored, **biases}, config, None)
    found = formats.load(folder)
    for name in LAYERS:
        layer = found[f"h.0.{name}"]
        weight = stored[f"h.0.{name}.weight"]
        assert isinstance(layer, FloatLinear)
        assert torch.equal(layer.weight, weight.T if is_transposed else weight)
        assert torch.equal(layer.tensors["weight"], weight)
        again = FloatLinear.of(layer.tensors, **layer.options)
        assert torch.equal(again.weight, layer.weight)
        assert torch.equal(again.tensors["weight"], weight)
    shapes = {group.name: group.shape for group in models.inspect(folder).groups}
    assert shapes["h.*.attn.c_attn"] == ((192, 64) if is_transposed else (64, 192))


@pytest.mark.parametrize("skip", [["lm_head"], ["lm_head", "c_fc", "*.0.attn.c_proj"]])
def test_floats_are_rounded(skip: list[str], tmp_path: Path) -> None:
    model = gpt2()
    model.save_pretrained(tmp_path / "old")
    models.convert(tmp_path / "old", tmp_path / "new", scheme=SCHEME, skip=skip, verify=True)
    check(load(tmp_path / "new"), model, 3 if len(skip) > 1 else 0)
    folder = models.ConvertedFolder(tmp_path / "new")
    weight = model.transformer.h[1].mlp.c_proj.weight.detach()
    expected = qcutlass.quantize(weight.T.contiguous(), 4, 32, symmetric=False)
    assert torch.equal(folder["transformer.h.1.mlp.c_proj"].weights(), expected.dequantize(torch.float32))


@pytest.mark.parametrize("name", ["rtn", "gptq", "awq", "smoothquant"])
def test_methods(name: str, tmp_path: Path) -> None:
    model, ids = gpt2(), calibration(0)
    model.save_pretrained(tmp_path / "old")
    method = models.Method(name) if name == "smoothquant" else models.Method(name, WeightOnly(8, 32))
    needed = ids if method.needs_calibration else None
    found = models.quantize_model(tmp_path / "old", tmp_path / "new", method, calibration=needed)
    assert (found.layers, found.kept) == (2 * len(LAYERS), [])
    loaded = load(tmp_path / "new")
    assert not conv1ds(loaded)
    with torch.no_grad():
        assert relative_norm(loaded(ids).logits, model(ids).logits) < 0.15


def test_blocks_that_return_lists(tmp_path: Path) -> None:
    """Those of the first GPT."""
    torch.manual_seed(0)
    config = transformers.OpenAIGPTConfig(n_embd=64, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=32)
    model, ids = transformers.OpenAIGPTLMHeadModel(config).eval(), calibration(0)
    model.save_pretrained(tmp_path / "old")
    method = models.Method("gptq", WeightOnly(8, 32))
    found = models.quantize_model(tmp_path / "old", tmp_path / "new", method, calibration=ids)
    assert found.layers == 2 * len(LAYERS)
    with torch.no_grad():
        assert relative_norm(load(tmp_path / "new")(ids).logits, model(ids).logits) < 0.05


def test_exports(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "old")
    models.quantize_model(tmp_path / "old", tmp_path / "new", models.Method("rtn", WeightOnly(4, 32, True)))
    expected = logits(load(tmp_path / "new"))
    for format in ("gptq", "compressed-tensors"):
        models.export_model(tmp_path / "new", tmp_path / format, format)
        assert torch.equal(logits(load(tmp_path / format, direct=True)), expected)
        note = models.export_note(tmp_path / format)
        assert (note is None) == (format == "gptq")
        assert note is None or "random weights in the place of compressed-tensors layers of models with Conv1D" in note


def test_layers_in_memory_are_replaced(tmp_path: Path) -> None:
    """With hooks they are refused as others are; what is saved is a converted folder."""
    model = gpt2()
    hooked = gpt2()
    hooked.transformer.h[0].mlp.c_fc.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"transformer\.h\.0\.mlp\.c_fc: has forward hooks"):
        qcutlass.replace_linear(hooked, SCHEME)
    replaced = gpt2()
    assert qcutlass.replace_linear(replaced, SCHEME) == list(conv1ds(model))
    check(replaced, model)
    replaced.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert torch.equal(logits(again), logits(replaced))


def test_static_activations_are_recorded() -> None:
    model, ids = gpt2(), calibration(0)
    with torch.no_grad(), qcutlass.calibrate(model) as seen:
        expected = model(ids).logits
    assert set(conv1ds(model)) <= set(seen)
    qcutlass.replace_linear(model, qcutlass.W8A8("static", symmetric=False), statistics=seen)
    with torch.no_grad():
        assert relative_norm(model(ids).logits, expected) < 0.15


def test_quantised_layers_are_those_of_linear_ones(tmp_path: Path) -> None:
    """Quantisers of others transpose weights first; what they leave as floats stays transposed."""
    model = gpt2()
    model.save_pretrained(tmp_path / "floats")
    tensors = load_file(tmp_path / "floats" / "model.safetensors")
    dense = copy.deepcopy(model)
    for seed, (name, module) in enumerate(conv1ds(model).items()):
        if name.endswith("c_fc"):
            continue
        layer = requantized(module.weight.detach().T.contiguous(), seed, act_order=False)
        del tensors[f"{name}.weight"]
        tensors |= named(as_gptq(layer), name)
        dense.get_submodule(name).weight.data = layer.weight.T.contiguous()
    config = {**model.config.to_dict(), "architectures": ["GPT2LMHeadModel"]}
    folder = write_model(tmp_path / "gptq", tensors, config, GPTQ)
    models.convert(folder, tmp_path / "new", verify=True)
    for loaded in (load(folder, direct=True), load(tmp_path / "new")):
        check(loaded, model, 2)
        assert relative_norm(logits(loaded), logits(dense)) < 1e-4
