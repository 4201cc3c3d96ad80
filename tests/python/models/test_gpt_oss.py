"""gpt-oss: folders in MXFP4 as they are published, written here; against transformers' own dequantisation and model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.python.formats.stored import Tensors
from tests.python.models.folders import write_model, write_tokenizer
from tests.python.models.mixtures import EXPERTS, VOCABULARY, model_of
from tests.python.models.test_commands import command
from torch import Tensor

import qcutlass
from qcutlass import CheckpointError, UnsupportedError, WeightOnly, formats, models
from qcutlass.layers import QuantExperts
from qcutlass.models.transformers import load_model
from qcutlass.products.checks import E8M0
from qcutlass.testing.models import NOISE, noise_ratio

pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.skipif(not E8M0, reason="this torch has no float8_e8m0fnu")

IDS = torch.randint(0, VOCABULARY, (1, 24), generator=torch.Generator().manual_seed(0))
H, I = 64, 96  # noqa: E741
OPTIONS: dict[str, Any] = {"num_local_experts": EXPERTS, "head_dim": 32, "intermediate_size": I, "sliding_window": 8}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
EXPERT = "model.layers.0.mlp.experts"


class Folder:
    """A random model, stored in MXFP4 with a tokenizer of numbers.

    Attributes:
        path: the folder.
        stored: its tensors.
    """

    def __init__(self, root: Path, seed: int) -> None:
        model = model_of("gpt_oss", seed, **OPTIONS)
        g = torch.Generator().manual_seed(seed)
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for name in [name for name in state if name.endswith((".gate_up_proj", ".down_proj"))]:
            count, k, n = state.pop(name).shape  # the input's dimension first
            state[f"{name}_blocks"] = torch.randint(0, 256, (count, n, k // 32, 16), generator=g).to(torch.uint8)
            state[f"{name}_scales"] = torch.randint(121, 125, (count, n, k // 32), generator=g).to(torch.uint8)
        for name in state:
            if name.endswith(("_bias", ".bias", "sinks")):
                state[name] = torch.randn(state[name].shape, generator=g) / 2
        self.stored: Tensors = state
        self.config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
        self.config["architectures"] = ["GptOssForCausalLM"]
        self.path = write_model(root / "mxfp4", state, self.config, MXFP4)
        write_tokenizer(self.path, VOCABULARY)

    def dequantised(self, dtype: torch.dtype) -> Tensors:
        """The state of the float model, by transformers' own dequantisation."""
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        state = {name: part for name, part in self.stored.items() if not name.endswith(("_blocks", "_scales"))}
        for name, blocks in self.stored.items():
            if name.endswith("_blocks"):
                stem = name.removesuffix("_blocks")
                state[stem] = convert_moe_packed_tensors(blocks, self.stored[f"{stem}_scales"], dtype=dtype)
        return {name: part.to(dtype) for name, part in state.items()}

    def dense(self, dtype: torch.dtype) -> Any:
        model = model_of("gpt_oss", **OPTIONS).to(dtype)
        model.set_experts_implementation("eager")
        model.load_state_dict(self.dequantised(dtype))
        return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, module_seed: int = 7) -> Folder:
    return Folder(tmp_path_factory.mktemp("gpt_oss"), module_seed)


@torch.inference_mode()
def logits(model: Any) -> Tensor:
    return model(IDS).logits  # type: ignore[no-any-return]


def test_weights_are_those_of_transformers_bit_for_bit(folder: Folder) -> None:
    """Every layer of every expert, biases too."""
    found, expected = formats.load(folder.path), folder.dequantised(torch.bfloat16)
    assert found.format == "mxfp4"
    assert len(found) == 2 * EXPERTS * 3
    for name, layer in found.items():
        block, expert, part = re.fullmatch(r"(.*\.experts)\.(\d)\.(\w+)_proj", name).groups()  # type: ignore[union-attr]
        stem = f"{block}.down_proj" if part == "down" else f"{block}.gate_up_proj"
        rows = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}[part]
        assert torch.equal(layer.dequantize(torch.bfloat16), expected[stem][int(expert)].T[rows]), name
        assert layer.bias is not None
        assert torch.equal(layer.bias, folder.stored[f"{stem}_bias"][int(expert)][rows])


def test_every_code_and_exponent() -> None:
    """0.0 and -0.0 as well; exponents past what bfloat16 holds are infinite there and here."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256).to(torch.uint8).view(1, 1, 16, 16).repeat(1, 254, 1, 1)
    scales = torch.arange(1, 255).to(torch.uint8)[None, :, None].repeat(1, 1, 16)
    tensors = {f"x.experts.down_proj{name}": part for name, part in {"_blocks": blocks, "_scales": scales}.items()}
    tensors["x.experts.down_proj_bias"] = torch.zeros(1, 254)
    (layer,) = formats.load(tensors).values()
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].T
    ours = layer.dequantize(torch.float32)
    assert torch.equal(ours, expected)
    assert torch.equal(ours.signbit(), expected.signbit())


@pytest.mark.parametrize("direct", [False, True])
def test_logits_are_those_of_the_dequantised_model(folder: Folder, direct: bool, tmp_path: Path) -> None:
    if not direct:
        done = models.convert(folder.path, tmp_path / "new", verify=True)
        assert (done.source, done.layers, done.verified) == ("mxfp4", 2 * EXPERTS * 3, 2 * EXPERTS * 3)
    model, _ = load_model(folder.path if direct else tmp_path / "new")
    experts = [module for module in model.modules() if isinstance(module, QuantExperts)]
    assert [(each.activation, each.limit, each.alpha) for each in experts] == [("swigluoai", 7.0, 1.702)] * 2
    exact, dense = (logits(folder.dense(dtype)) for dtype in (torch.float64, torch.float32))
    assert noise_ratio(logits(model), dense, exact) <= NOISE
    wrong = experts[0].gate_up.w_packed
    wrong[:2] = wrong[:2].flip(0).clone()
    assert noise_ratio(logits(model), dense, exact) > 10 * NOISE


def test_saved_models_are_converted_folders(folder: Folder, tmp_path: Path) -> None:
    models.convert(folder.path, tmp_path / "new")
    model, _ = load_model(folder.path)
    model.save_pretrained(tmp_path / "saved")
    write_tokenizer(tmp_path / "saved", VOCABULARY)
    assert torch.equal(logits(load_model(tmp_path / "saved")[0]), logits(model))
    found, expected = (models.ConvertedFolder(tmp_path / name) for name in ("saved", "new"))
    assert (set(found), set(found.rest)) == (set(expected), set(expected.rest))


def floats(folder: Folder, root: Path) -> Path:
    path = write_model(root / "floats", folder.dequantised(torch.bfloat16), folder.config, None)
    write_tokenizer(path, VOCABULARY)
    return path


def test_floats_are_rounded_as_replace_linear_does(folder: Folder, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path, scheme = floats(folder, tmp_path), WeightOnly(4, 32, scale_dtype=torch.float16)
    models.convert(path, tmp_path / "new", scheme=scheme, verify=True)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    names = qcutlass.replace_linear(model, scheme)
    converted, _ = load_model(tmp_path / "new")
    for name in (f"model.layers.{i}.mlp.experts" for i in range(2)):
        assert name in names
        for key, part in converted.get_submodule(name).state_dict().items():
            assert torch.equal(model.get_submodule(name).state_dict()[key].to(part.dtype), part), (name, key)
    router = converted.model.layers[0].mlp.router
    assert router.weight.is_floating_point()


def test_what_is_not_taken(folder: Folder, tmp_path: Path) -> None:
    path = floats(folder, tmp_path)
    with pytest.raises(UnsupportedError, match=r"experts\.0\.down_proj: stays floats, .*skip no experts"):
        models.convert(path, tmp_path / "new", scheme=WeightOnly(4, 32), skip=["lm_head", "*.experts.*"])
    with pytest.raises(UnsupportedError, match="experts of GptOssExperts, with another activation than SiLU"):
        models.quantize_model(path, tmp_path / "new", "rtn")
    assert not (tmp_path / "new").exists()


def changed(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Tensors], Tensors]:
    def apply(tensors: Tensors) -> Tensors:
        found = change(tensors[name])
        rest = {key: part for key, part in tensors.items() if key != name}
        return rest if found is None else {**rest, name: found}

    return apply


DAMAGED: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no scales": (changed(f"{EXPERT}.down_proj_scales", lambda t: None), r"0\.down_proj: expected a tensor scales"),
    "scales of fewer experts": (changed(f"{EXPERT}.down_proj_scales", lambda t: t[:3]), r"3\.down_proj: expected a"),
    "scales' shape": (changed(f"{EXPERT}.down_proj_scales", lambda t: t[:, :-1]), r"scales: expected U8 or F8_E8M0"),
    "NaN": (changed(f"{EXPERT}.gate_up_proj_scales", lambda t: t | 255), "expected powers of two, got NaN"),
    "blocks' type": (changed(f"{EXPERT}.down_proj_blocks", lambda t: t.view(torch.int8)), r"blocks: expected U8"),
    "blocks of 8 bytes": (changed(f"{EXPERT}.down_proj_blocks", lambda t: t[..., :8]), r"K / 32, 16\], got"),
    "odd channels": (changed(f"{EXPERT}.gate_up_proj_blocks", lambda t: t[:, :-1]), "an even number of channels"),
    "dimensions": (changed(f"{EXPERT}.gate_up_proj_blocks", lambda t: t.flatten(2)), "expected 4 dimensions"),
    "a block's experts": (changed(f"{EXPERT}.gate_up_proj_blocks", lambda t: t[:2]), r"expert 2 of 4 has no gate"),
    "bias": (changed(f"{EXPERT}.down_proj_bias", lambda t: t * torch.nan), r"3?\.bias: expected finite numbers"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_folders(what: str, folder: Folder, tmp_path: Path) -> None:
    change, message = DAMAGED[what]
    path = write_model(tmp_path / "old", change(folder.stored), folder.config, MXFP4)
    with pytest.raises(CheckpointError, match=message):
        models.convert(path, tmp_path / "new")
    assert [each.name for each in tmp_path.iterdir()] == ["old"]


def test_the_commands(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(" ".join(map(str, IDS[0].repeat(4).tolist())))
    table = command("inspect", folder.path)
    assert table.exit_code == 0, table.output
    assert re.search(r"experts\.\*\.gate_proj .*e2m1 g32 e8m0 scales", table.stdout)
    made = command("convert", folder.path, tmp_path / "new", "--verify")
    assert made.exit_code == 0, made.output
    expected = folder.dense(torch.float32).generate(IDS[:, :3], max_new_tokens=4, do_sample=False)[0, 3:]
    prompt = " ".join(map(str, IDS[0, :3].tolist()))
    for options in ([], ["--no-fuse"]):
        text = command("generate", tmp_path / "new", "--prompt", prompt, "--max-new-tokens", 4, *options)
        assert text.exit_code == 0, text.output
        assert text.stdout.split()[-4:] == list(map(str, expected.tolist()))
    score = command("eval", tmp_path / "new", "--text", tmp_path / "text.txt", "--window", 32)
    assert score.exit_code == 0, score.output
    assert "perplexity" in score.output
