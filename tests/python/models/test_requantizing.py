"""Layers that converted folders can't hold as they are: refused, or quantised anew and said to be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.python.formats.stored import as_fp8, as_gptq, as_modelopt, named, stored
from tests.python.models.folders import Cut, RandomCut, write_model
from tests.python.models.mixtures import MixtureCut
from tests.python.models.quantizations import make
from tests.python.models.test_commands import command
from tests.python.models.test_mixtures import load, logits

import qcutlass
from qcutlass import UnsupportedError, WeightOnly, models
from qcutlass.algorithms import round_to_nearest
from qcutlass.formats.specs import ModelSpec, Requantized
from qcutlass.models.transformers import load_model
from qcutlass.testing.models import NOISE, noise_ratio
from qcutlass.testing.quantizing import OUTPUTS, relative_norm

pytest.importorskip("transformers", reason="needs transformers")

SCHEME = WeightOnly(8, 64)


def errors_of(folder: Path, weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """What the weights of a converted folder are off by."""
    found = models.ConvertedFolder(folder)
    return {name: relative_norm(models.weights_of(found[name]), weights[name]) for name in found if name in weights}


def is_near(found: float, expected: float) -> bool:
    return abs(found - expected) <= OUTPUTS * expected


def check_record(folder: Path, done: models.Conversion, weights: dict[str, torch.Tensor], stored_as: str) -> None:
    """The result, `config.json` and `inspect` say the same, and it is true."""
    errors = errors_of(folder, weights)
    assert set(done.requantized) == set(errors)
    for name, lost in done.requantized.items():
        assert lost.stored == stored_as
        assert is_near(lost.error, errors[name])
    described = json.loads((folder / "config.json").read_text())["quantization_config"]["requantized"]
    assert described == {name: {"from": each.stored, "error": each.error} for name, each in done.requantized.items()}
    told = {group.requantized: group.error for group in models.inspect(folder).groups if group.error is not None}
    assert set(told) == {stored_as}
    largest = [group.error for group in models.inspect(folder).groups if group.error is not None]
    assert max(largest) == max(lost.error for lost in done.requantized.values())


@pytest.mark.parametrize(("kind", "nested"), [("nf4", 0), ("nf4", 256), ("fp4", 0)])
def test_four_bits_are_rounded_anew(kind: str, nested: int, random_cut: RandomCut, tmp_path: Path) -> None:
    cut = random_cut.bitsandbytes(kind, nested)
    with pytest.raises(UnsupportedError, match=rf"no product multiplies {kind} g64.*--requantize.*qcutlass quantize"):
        models.convert(cut.folder, tmp_path / "new")
    with pytest.raises(UnsupportedError, match=rf"no product multiplies {kind} g64"):
        load_model(cut.folder)
    assert list(tmp_path.iterdir()) == []
    done = models.convert(cut.folder, tmp_path / "new", scheme=SCHEME, requantize=True, verify=True)
    assert done.layers == done.verified == len(random_cut.names)
    check_record(tmp_path / "new", done, cut.weights, f"{kind} g64" + " of double quantisation" * bool(nested))
    assert all(lost.error < 0.01 for lost in done.requantized.values())
    converted = models.ConvertedFolder(tmp_path / "new")
    assert all(layer.spec.words == "w8 g64 int zeros" for layer in converted.values())
    anew = Cut(tmp_path / "new", {name: models.weights_of(layer) for name, layer in converted.items()})
    exact, dense = (logits(random_cut.dense(anew, dtype)) for dtype in (torch.float64, torch.float32))
    assert noise_ratio(logits(load(tmp_path / "new")), dense, exact) <= NOISE
    before = logits(random_cut.dense(cut, torch.float64))
    assert float((exact - before).norm() / before.norm()) < 0.1


def test_int8_of_bitsandbytes_is_kept(random_cut: RandomCut, tmp_path: Path) -> None:
    cut = random_cut.bitsandbytes("int8")
    done = models.convert(cut.folder, tmp_path / "new", verify=True)
    assert (done.requantized, done.verified) == ({}, len(random_cut.names))
    assert "requantized" not in json.loads((tmp_path / "new/config.json").read_text())["quantization_config"]
    assert max(errors_of(tmp_path / "new", cut.weights).values()) < 2**-22
    exact, dense = (logits(random_cut.dense(cut, dtype)) for dtype in (torch.float64, torch.float32))
    for model in (load(tmp_path / "new"), load_model(cut.folder)[0]):
        assert noise_ratio(logits(model), dense, exact) <= NOISE


def test_the_commands(random_cut: RandomCut, tmp_path: Path) -> None:
    cut, new = random_cut.bitsandbytes("nf4"), tmp_path / "new"
    refused = command("convert", cut.folder, new)
    assert refused.exit_code == 2
    assert "qcutlass convert --requantize (requantize=True) rounds them anew" in refused.stderr
    assert not new.exists()
    made = command("convert", cut.folder, new, "--requantize", "--bits", 8, "--group-size", 64, "--verify")
    assert made.exit_code == 0, made.output
    count, errors = len(random_cut.names), errors_of(new, cut.weights)
    assert f"{count} layers were quantised anew, WITH LOSS" in made.stdout
    shown = re.search(rf"{count} of nf4 g64: (\S+) on average, (\S+) at most \((\S+)\)", made.stdout)
    assert shown is not None
    noted = [lost.error for lost in models.ConvertedFolder(new).spec.requantized.values()]
    assert shown.groups()[:2] == (f"{sum(noted) / count:.2g}", f"{max(noted):.2g}")
    assert is_near(errors[shown[3]], max(errors.values()))
    table = command("inspect", new)
    assert "w8 g64 int zeros, anew from nf4 g64 (error up to 0.00" in table.stdout
    assert command("inspect", cut.folder).stdout.count("nf4 g64") == len(models.inspect(cut.folder).groups)
    text = command("generate", new, "--prompt", "5 6 7", "--max-new-tokens", 4)
    assert text.exit_code == 0, text.output
    (tmp_path / "text.txt").write_text(" ".join(str(i % 100) for i in range(96)))
    score = command("eval", new, "--text", tmp_path / "text.txt", "--window", 32)
    assert score.exit_code == 0, score.output
    load(new).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]
    assert set(saved["requantized"]) == set(random_cut.names)
    assert torch.equal(logits(load(tmp_path / "saved")), logits(load(new)))


def test_methods_with_calibration_take_them(random_cut: RandomCut, tmp_path: Path, seed: int) -> None:
    """By which `quantize` loses less of the layers' outputs."""
    ids = torch.randint(0, RandomCut.VOCABULARY, (8, 24), generator=torch.Generator().manual_seed(seed))
    cut, method = random_cut.bitsandbytes("nf4"), models.Method("gptq", WeightOnly(8, 64))
    done = models.quantize_model(cut.folder, tmp_path / "new", method, calibration=ids)
    assert done.layers == len(random_cut.names)
    assert max(errors_of(tmp_path / "new", cut.weights).values()) < 0.02


def test_what_needs_no_rounding_gets_none(random_cut: RandomCut, tmp_path: Path) -> None:
    cut = random_cut.gptq()
    shown = command("convert", cut.folder, tmp_path / "new", "--requantize", "--verify")
    assert "no layer had to be quantised anew: nothing is lost" in shown.stdout
    models.convert(cut.folder, tmp_path / "plain")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "new" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_floats_are_not_meant(random_cut: RandomCut, tmp_path: Path) -> None:
    shown = command("convert", random_cut.floats().folder, tmp_path / "new", "--requantize", "--bits", 4)
    assert shown.exit_code == 2
    assert "are floats, which --bits rounds; leave it out" in shown.stderr
    with pytest.raises(TypeError, match="requantize: expected True or False, got int"):
        models.convert(random_cut.floats().folder, tmp_path / "new", requantize=1)  # type: ignore[arg-type]


def test_layers_to_skip_become_floats(random_cut: RandomCut, tmp_path: Path) -> None:
    cut = random_cut.bitsandbytes("nf4")
    done = models.convert(cut.folder, tmp_path / "new", skip=["lm_head", "*.q_proj"], requantize=True, verify=True)
    found = models.ConvertedFolder(tmp_path / "new")
    kept = [name for name in random_cut.names if name.endswith("q_proj")]
    assert set(done.requantized) == set(random_cut.names) - set(kept)
    for name in kept:
        assert torch.equal(found.tensor(f"{name}.weight"), cut.weights[name])


@pytest.mark.parametrize("form", ["w8a8", "fp8", "act-order", "mixed"])
def test_experts_that_one_product_does_not_take(form: str, tmp_path: Path, seed: int) -> None:
    """Quantised activations, with act-order, some of them floats: attention and floating codes stay what they are."""
    cut = MixtureCut(tmp_path, "qwen3_moe")
    if form == "w8a8":
        source, weights = cut.w8a8().folder, cut.w8a8().weights
    else:
        source = cut.gptq().folder
        tensors, weights = load_file(source / "model.safetensors"), dict(cut.gptq().weights)
        gates = [name for name in cut.experts if name.endswith("gate_proj")]
        changed = {"fp8": cut.experts, "act-order": gates, "mixed": gates[:1]}[form]
        for i, name in enumerate(changed):
            n, k = weights[name].shape
            tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(f"{name}.")}
            if form == "mixed":
                tensors[f"{name}.weight"] = weights[name]
            elif form == "act-order":
                layer = stored(n, k, 32, seed=seed + i, act_order=True)
                tensors |= named(as_gptq(layer), name)
                weights[name] = layer.weight
            else:
                parts, weights[name] = as_fp8(weights[name], (16, 16), "weight_scale_inv")
                tensors |= named(parts, name)
        config = json.loads((source / "config.json").read_text())
        config["quantization_config"] |= {"bits": None, "group_size": None}
        write_model(source, tensors, config, config["quantization_config"])
    if form == "fp8":  # of one format
        tensors = load_file(source / "model.safetensors")
        plain = {name for name in cut.names if name not in cut.experts}
        kept = {key: tensor for key, tensor in tensors.items() if key.rpartition(".")[0] not in plain}
        write_model(
            source, kept | {f"{name}.weight": weights[name] for name in plain},
            json.loads((source / "config.json").read_text()),
            {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"},
        )  # fmt: skip
    if form == "fp8":
        assert not models.convert(source, tmp_path / "kept").requantized
    else:
        with pytest.raises(UnsupportedError, match="--requantize"):
            models.convert(source, tmp_path / "new")
    done = models.convert(source, tmp_path / "new", scheme=WeightOnly(8, 32), requantize=True, verify=True)
    inner = [name for name in cut.experts if "down" not in name]  # gate and up are one matrix
    expected = {"fp8": [], "act-order": inner, "mixed": [name for name in inner if "layers.0" in name]}
    assert sorted(done.requantized) == sorted(expected.get(form, cut.experts))
    found = models.ConvertedFolder(tmp_path / "new")
    errors = errors_of(tmp_path / "new", weights)
    for name, error in errors.items():
        assert error < 0.01 if name in done.requantized and form != "w8a8" else error < 1e-6, name
    anew = {name: models.weights_of(found[name]) if name in found else weights[name] for name in cut.names}
    exact, dense = (logits(cut.dense(Cut(tmp_path / "new", anew), dtype)) for dtype in (torch.float64, torch.float32))
    model = load(tmp_path / "new")
    if form != "w8a8":  # whose attention has activations of 8 bits
        assert noise_ratio(logits(model), dense, exact) <= NOISE
    model.save_pretrained(tmp_path / "saved")
    described = [
        ModelSpec.from_dict(json.loads((tmp_path / each / "config.json").read_text())["quantization_config"])
        for each in ("new", "saved")
    ]
    assert described[0].requantized == described[1].requantized == dict(done.requantized)


@pytest.mark.parametrize("static", [False, True])
def test_fp8_experts_keep_their_codes_for_activations_of_16_bits(static: bool, tmp_path: Path) -> None:
    """As Qwen3-MoE is published with a scale a channel, or a tensor, of which no expert of weights alone needs more."""
    cut = MixtureCut(tmp_path, "qwen3_moe")
    tensors, weights = dict(cut.rest), {name: cut.weight(name) for name in cut.names}
    tensors |= {f"{name}.weight": weights[name] for name in cut.names if name not in cut.experts}
    for name in cut.experts:
        parts, weights[name] = as_fp8(weights[name], weights[name].shape if static else None)
        tensors |= named(parts | ({"input_scale": torch.tensor(0.05)} if static else {}), name)
    config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    source = write_model(tmp_path / "source", tensors, cut.config, config)
    with pytest.raises(UnsupportedError, match=r"--requantize .* keeps their codes"):
        models.convert(source, tmp_path / "new")
    done = models.convert(source, tmp_path / "new", requantize=True, verify=True)
    assert {each.error for each in done.requantized.values()} == {0}
    told = command("convert", source, tmp_path / "told", "--requantize").stdout
    assert f"{len(cut.experts)} layers keep their weights, and their activations are no longer quantised" in told
    assert sorted(done.requantized) == sorted(cut.experts)
    dense = Cut(tmp_path / "new", weights)
    exact, plain = (logits(cut.dense(dense, dtype)) for dtype in (torch.float64, torch.float32))
    assert noise_ratio(logits(load(tmp_path / "new")), plain, exact) <= NOISE


def test_records_that_are_damaged(random_cut: RandomCut, tmp_path: Path) -> None:
    models.convert(random_cut.bitsandbytes("nf4").folder, tmp_path / "new", requantize=True)
    path = tmp_path / "new/config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    for value in ([], {"a": 1}, {"a": {"from": 1, "error": 0.1}}, {"a": {"from": "nf4", "error": "0.1"}}):
        config["quantization_config"]["requantized"] = value
        path.write_text(json.dumps(config))
        with pytest.raises(qcutlass.CheckpointError, match="requantized"):
            models.ConvertedFolder(tmp_path / "new")
    assert Requantized.from_dict({"from": "nf4", "error": 1}, "") == Requantized("nf4", 1.0)


def write_modelopt(folder: Path, seed: int, scaled: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder of ModelOpt's W4A16_AWQ, and its weights with the factors of their input, which those `scaled` have."""
    model = make("llama", seed)
    tensors, exact, config = {}, {}, model.config.to_dict()
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if not module.endswith(("_proj", "lm_head")):
            tensors[name] = tensor
            continue
        layer = stored(*tensor.shape, 32, seed=len(tensors), symmetric=True)
        tensors |= named(as_modelopt(layer), module)
        exact[module] = layer.weight
        if module.endswith(scaled):
            factors = torch.exp2(torch.randint(-2, 3, (tensor.shape[1],)).float())
            tensors[f"{module}.pre_quant_scale"] = factors
            exact[module] = layer.weight * factors
    described = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 32}
    return write_model(folder, tensors, config, described), exact


def test_factors_of_a_layers_input_are_part_of_its_weights(tmp_path: Path, seed: int) -> None:
    """ModelOpt's pre_quant_scale: kept by a conversion, multiplied in where weights are quantised anew."""
    source, exact = write_modelopt(tmp_path / "source", seed, "_proj")
    assert len(exact) == 22
    models.convert(source, tmp_path / "converted", verify=True)
    folder = models.ConvertedFolder(tmp_path / "converted")
    assert all(torch.equal(folder[name].canonical().effective_weight(), weight) for name, weight in exact.items())
    method = models.Method("rtn", SCHEME)
    models.quantize_model(source, tmp_path / "new", method)
    folder = models.ConvertedFolder(tmp_path / "new")
    del exact["lm_head"]  # stays as it is
    for name, weight in exact.items():
        expected = round_to_nearest(weight, method.scheme, clip=method.clip)
        assert torch.equal(models.weights_of(folder[name]), expected.dequantize(torch.float32))


def test_an_exported_head_has_the_factors_of_its_input(tmp_path: Path, seed: int) -> None:
    source, exact = write_modelopt(tmp_path / "source", seed, "lm_head")
    models.convert(source, tmp_path / "converted")
    models.export_model(tmp_path / "converted", tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert torch.equal(exported["lm_head.weight"], exact["lm_head"].half())
