"""Mixtures of experts of several formats: converted folders, logits, text, saving, export, quantising."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.python.models.mixtures import EXPERTS, KINDS, VOCABULARY, MixtureCut, model_of
from tests.python.models.test_commands import command
from torch import Tensor, nn

import qcutlass
from qcutlass import UnsupportedError, WeightOnly, models
from qcutlass.algorithms import InputStatistics, gptq
from qcutlass.layers import QuantExperts, QuantLinear
from qcutlass.models.quantizing.methods import UNREACHED
from qcutlass.testing.models import NOISE, noise_ratio

pytest.importorskip("transformers", reason="needs transformers")

FORMS = ("gptq", "awq", "compressed", "compressed_8")
IDS = torch.randint(0, VOCABULARY, (1, 24), generator=torch.Generator().manual_seed(0))
SCHEME = WeightOnly(4, 32, scale_dtype=torch.float16)
EIGHT_BITS = 0.05
"""The relative error of most tokens' logits with weights of 8 bits: 0.007 to 0.039 with any tokens to calibrate on.
With two experts' weights that have changed places it is 0.056 (deepseek_v2) to 0.58."""


def load(folder: Path, direct: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    from qcutlass.models.transformers import checkpoint_config

    keywords = {"config": checkpoint_config(folder)} if direct else {}
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **keywords)
    assert {name: found for name, found in report.items() if found} == {}
    return model


@torch.inference_mode()
def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    return model(ids).logits  # type: ignore[no-any-return]


def error_of_most_tokens(model: Any, cut: MixtureCut) -> float:
    """The median of tokens' relative errors; one near a router's boundary may go to another expert."""
    floats = logits(cut.dense(cut.floats(), torch.float32))
    return float(((logits(model) - floats).norm(dim=-1) / floats.norm(dim=-1)).median())


def experts_of(model: nn.Module) -> dict[str, QuantExperts]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantExperts)}


def check_structure(model: nn.Module, kind: str) -> None:
    """All experts are packed, routers are in floats."""
    assert len(experts_of(model)) == (1 if "deepseek" in kind else 2)
    for name, module in model.named_modules():
        if name.endswith((".gate", "shared_expert_gate")):
            assert not isinstance(module, QuantLinear)
            assert module.get_parameter("weight").is_floating_point()
        assert type(module) is not nn.Linear or name == "lm_head" or "shared_expert_gate" in name


FLOATING = [
    *(pytest.param(kind, "fp8", id=f"fp8-{kind}") for kind in ("qwen3_moe", "deepseek_v3")),
    *(pytest.param(kind, "nvfp4", id=f"nvfp4-{kind}") for kind in ("mixtral", "deepseek_v3")),
]
"""Kinds and forms of experts that are floats of 8 and 4 bits."""
ORDERED = [pytest.param(kind, "act_order", id=f"act_order-{kind}") for kind in ("mixtral", "qwen3_moe")]
"""Kinds of experts whose columns have an order of their own."""
GROUPED = [
    *((kind, "awq_16") for kind in ("mixtral", "deepseek_v3")),
    ("deepseek_v3", "compressed_16"),
    ("qwen3_moe", "compressed_symmetric"),
]
"""Kinds of experts with several groups of columns, or without zero points."""


@pytest.mark.parametrize(
    ("kind", "form"), [*((kind, form) for kind in KINDS for form in FORMS), *FLOATING, *ORDERED, *GROUPED]
)
def test_logits_are_those_of_the_dequantised_model(
    kind: str, form: str, cuts: dict[str, MixtureCut], tmp_path: Path
) -> None:
    cut = getattr(cuts[kind], form)()
    done = models.convert(cut.folder, tmp_path / "new", verify=True)
    assert done.layers == done.verified == len(cuts[kind].names)
    model, direct = load(tmp_path / "new"), load(cut.folder, direct=True)
    for each in (model, direct):
        check_structure(each, kind)
    exact, dense = (logits(cuts[kind].dense(cut, dtype)) for dtype in (torch.float64, torch.float32))
    assert noise_ratio(logits(model), dense, exact) <= NOISE
    assert torch.equal(logits(direct), logits(model))
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(IDS, **options), cuts[kind].dense(cut, torch.float32).generate(IDS, **options))


def test_orders_of_columns_are_kept(cuts: dict[str, MixtureCut], tmp_path: Path) -> None:
    """In converted and in saved folders, in `inspect`; and the logits tell the order of another expert."""
    cut = cuts["mixtral"].act_order()
    models.convert(cut.folder, tmp_path / "new")
    model = load(tmp_path / "new")
    model.save_pretrained(tmp_path / "saved")
    for folder in (tmp_path / "new", tmp_path / "saved"):
        found = models.ConvertedFolder(folder)
        assert all("perm" in dict(found[name].spec.buffers) for name in cuts["mixtral"].experts)
    assert torch.equal(logits(load(tmp_path / "saved")), logits(model))
    assert "act-order" in command("inspect", tmp_path / "new").stdout
    exact, dense = (logits(cuts["mixtral"].dense(cut, dtype)) for dtype in (torch.float64, torch.float32))
    (experts, *_) = experts_of(model).values()
    for stack in (experts.gate_up, experts.down):
        assert stack.perm is not None
        right = stack.perm.clone()
        stack.perm.copy_(right.roll(1, 0))
        assert noise_ratio(logits(model), dense, exact) > 10 * NOISE
        stack.perm.copy_(right)
    assert noise_ratio(logits(model), dense, exact) <= NOISE


@pytest.mark.parametrize("what", ["weight", "expert"])
def test_noise_is_a_bound_that_tells_wrong_experts(what: str, cuts: dict[str, MixtureCut]) -> None:
    """One zero point of one expert; two experts that have changed places."""
    cut = cuts["qwen3_moe"].gptq()
    model = load(cut.folder, direct=True)
    (experts, *_) = experts_of(model).values()
    if what == "weight":
        assert experts.down.zeros is not None
        experts.down.zeros[1, 0, 7] += 1
    else:
        experts.gate_up.w_packed[:2] = experts.gate_up.w_packed[:2].flip(0)
    exact, dense = (logits(cuts["qwen3_moe"].dense(cut, dtype)) for dtype in (torch.float64, torch.float32))
    assert noise_ratio(logits(model), dense, exact) > 10 * NOISE


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_each_expert_are_those_of_its_file(kind: str, cuts: dict[str, MixtureCut]) -> None:
    cut = cuts[kind].awq()
    for place, experts in experts_of(load(cut.folder, direct=True)).items():
        block = re.escape(place.replace(".mlp.", ".")).replace(r"\.experts", r"\.\w+\.experts")
        for index in range(EXPERTS):
            names = [[name for name in cut.weights if re.fullmatch(rf"{block}\.{index}\.({part})", name)]
                     for part in ("gate_proj|w1", "up_proj|w3", "down_proj|w2")]  # fmt: skip
            for (name,), layer in zip(names, experts.expert(index), strict=True):
                assert torch.equal(models.weights_of(layer), cut.weights[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_floats_are_rounded_as_replace_linear_does(kind: str, cuts: dict[str, MixtureCut], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = cuts[kind].floats().folder
    models.convert(folder, tmp_path / "new", scheme=SCHEME, verify=True)
    floats = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16).eval()
    names = qcutlass.replace_linear(floats, SCHEME)
    assert sum(name.endswith(".experts") for name in names) == len(experts_of(floats))
    converted = load(tmp_path / "new")
    for place, experts in experts_of(converted).items():
        for name, part in experts.state_dict().items():
            assert torch.equal(floats.get_submodule(place).state_dict()[name], part), (place, name)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_saved_models_are_converted_folders(
    kind: str, direct: bool, cuts: dict[str, MixtureCut], tmp_path: Path
) -> None:
    models.convert(cuts[kind].gptq().folder, tmp_path / "new")
    model = load(cuts[kind].gptq().folder, direct=True) if direct else load(tmp_path / "new")
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved")), logits(model))
    found, expected = (models.ConvertedFolder(tmp_path / name) for name in ("saved", "new"))
    assert (set(found), set(found.rest)) == (set(expected), set(expected.rest))
    for name in expected:
        assert torch.equal(models.weights_of(found[name]), models.weights_of(expected[name]))


@pytest.mark.parametrize("to", ["gptq", "compressed-tensors"])
@pytest.mark.parametrize("kind", KINDS)
def test_exported_folders_hold_the_same_weights(
    kind: str, to: str, cuts: dict[str, MixtureCut], tmp_path: Path
) -> None:
    scheme = WeightOnly(4, 8, scale_dtype=torch.float16)  # groups that divide every K
    models.convert(cuts[kind].floats().folder, tmp_path / "new", scheme=scheme)
    assert models.export_model(tmp_path / "new", tmp_path / "others", to) == len(cuts[kind].names)
    assert torch.equal(logits(load(tmp_path / "others", direct=True)), logits(load(tmp_path / "new")))


def test_experts_that_are_skipped_stay_floats(cuts: dict[str, MixtureCut], tmp_path: Path) -> None:
    cut = cuts["mixtral"]
    models.convert(cut.floats().folder, tmp_path / "new", scheme=SCHEME, skip=["lm_head", "*.experts.*"])
    model = load(tmp_path / "new")
    assert experts_of(model) == {}
    assert model.model.layers[0].mlp.experts.gate_up_proj.is_floating_point()
    assert isinstance(model.model.layers[0].self_attn.q_proj, QuantLinear)
    models.quantize_model(cut.floats().folder, tmp_path / "w8", "w8a8", skip=["lm_head", "*.experts.*"])
    assert experts_of(load(tmp_path / "w8")) == {}


def rewritten(folder: Path, place: Path, dtype: torch.dtype) -> Path:
    """A folder whose floats have another type; scales keep theirs."""
    shutil.copytree(folder, place)
    for path in place.glob("*.safetensors"):
        floats = {
            name: t.to(dtype) for name, t in load_file(path).items() if "scale" not in name and t.is_floating_point()
        }
        save_file(load_file(path) | floats, path, {"format": "pt"})
    return place


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_parameters_have_the_types_that_transformers_gives_them(
    kind: str, dtype: torch.dtype, stored: torch.dtype, cuts: dict[str, MixtureCut], tmp_path: Path
) -> None:
    """In whole models and base models: those of transformers' own, also of routers, which have other names in files."""
    from transformers import AutoModel, AutoModelForCausalLM

    from qcutlass.models.transformers import checkpoint_config

    plain = AutoModelForCausalLM.from_pretrained(cuts[kind].root / "saved", dtype=dtype)
    expected = {name: parameter.dtype for name, parameter in plain.named_parameters()}
    folder = rewritten(cuts[kind].gptq().folder, tmp_path / "folder", stored)
    config = checkpoint_config(folder)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, config=config)
    base = AutoModel.from_pretrained(folder, dtype=dtype, config=checkpoint_config(folder))
    for prefix, model in (("", whole), ("model.", base)):
        found = {f"{prefix}{name}": parameter.dtype for name, parameter in model.named_parameters()}
        assert found == {name: expected[name] for name in found}
        assert any("gate.weight" in name for name in found)
    assert logits(whole).isfinite().all()


def test_a_base_model_takes_its_part(cuts: dict[str, MixtureCut], tmp_path: Path) -> None:
    from transformers import AutoModel

    models.convert(cuts["olmoe"].gptq().folder, tmp_path / "new")
    model, whole = AutoModel.from_pretrained(tmp_path / "new", dtype=torch.float32), load(tmp_path / "new")
    assert len(experts_of(model)) == 2
    with torch.inference_mode():
        assert torch.equal(model(IDS).last_hidden_state, whole.model(IDS).last_hidden_state)


def test_devices_are_filled_by_the_size_of_the_experts(cuts: dict[str, MixtureCut]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations.accelerate import compute_module_sizes

    from qcutlass.models.transformers import QcutlassConfig, QcutlassQuantizer

    folder = cuts["mixtral"].awq().folder
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    quantizer = QcutlassQuantizer(QcutlassConfig())
    quantizer._process_model_before_weight_loading(model, [str(folder / "model.safetensors")])
    sizes, _ = compute_module_sizes(model, quantizer)
    stored = load_file(folder / "model.safetensors")
    expected = sum(tensor.nbytes for name, tensor in stored.items() if "layers.1.block_sparse_moe.experts" in name)
    assert sizes["model.layers.1.mlp.experts"] == expected


@pytest.mark.parametrize("name", ["rtn", "gptq", "awq"])
@pytest.mark.parametrize("kind", KINDS)
def test_methods_quantise_every_expert(
    kind: str, name: str, cuts: dict[str, MixtureCut], tmp_path: Path, seed: int
) -> None:
    ids = torch.randint(0, VOCABULARY, (8, 24), generator=torch.Generator().manual_seed(seed))
    method = models.Method(name, WeightOnly(8, 32))
    calibration = ids if method.needs_calibration else None
    done = models.quantize_model(cuts[kind].floats().folder, tmp_path / "new", method, calibration=calibration)
    assert done.layers == len(cuts[kind].names)
    assert not any(UNREACHED in notes for notes in done.notes.values())
    if name != "rtn":
        assert all(done.notes[expert]["error"] < 1e-3 for expert in cuts[kind].experts)
    model = load(tmp_path / "new")
    check_structure(model, kind)
    assert error_of_most_tokens(model, cuts[kind]) < EIGHT_BITS


def test_gptq_puts_the_columns_of_each_expert_in_an_order(
    cuts: dict[str, MixtureCut], tmp_path: Path, seed: int
) -> None:
    """One that its gate and up share; of unreached experts, none."""
    ids = torch.randint(0, VOCABULARY, (8, 24), generator=torch.Generator().manual_seed(seed))
    method, folder = models.Method("gptq", WeightOnly(8, 32), act_order=True), cuts["qwen3_moe"].floats().folder
    models.quantize_model(folder, tmp_path / "new", method, calibration=ids)
    model = load(tmp_path / "new")
    assert error_of_most_tokens(model, cuts["qwen3_moe"]) < EIGHT_BITS
    for experts in experts_of(model).values():
        assert experts.gate_up.perm is not None
        assert len(experts.gate_up.perm.unique(dim=0)) == EXPERTS
    models.quantize_model(folder, tmp_path / "one", method, calibration=torch.tensor([[3]]))
    assert logits(load(tmp_path / "one")).isfinite().all()


def test_hessians_are_of_the_tokens_that_an_expert_really_got(
    cuts: dict[str, MixtureCut], tmp_path: Path, seed: int
) -> None:
    """The first block's attention stays in floats, so that its experts see what those of the float model do."""
    from transformers import AutoModelForCausalLM

    ids = torch.randint(0, VOCABULARY, (4, 24), generator=torch.Generator().manual_seed(seed))
    folder = cuts["mixtral"].floats().folder
    method = models.Method("gptq", WeightOnly(4, 32))
    skip = ["lm_head", "*.self_attn.*"]
    models.quantize_model(folder, tmp_path / "new", method, calibration=ids, skip=skip)
    found = models.ConvertedFolder(tmp_path / "new")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    seen: list[tuple[Tensor, ...]] = []
    experts = model.model.layers[0].mlp.experts
    experts.register_forward_pre_hook(lambda module, arguments: seen.append(arguments))
    for row in ids:
        logits(model, row[None])
    x, chosen = (torch.cat([arguments[i] for arguments in seen]) for i in (0, 1))
    for expert in range(EXPERTS):
        statistics = InputStatistics.empty(64)
        statistics.add(x[(chosen == expert).any(dim=1)])
        weight = experts.gate_up_proj[expert, :64].detach()
        expected = gptq(weight, statistics.second_moment, method.scheme).weight
        layer: Any = found[f"model.layers.0.block_sparse_moe.experts.{expert}.w1"]
        codes = layer.canonical().weight.codes
        assert float((codes != expected.codes).float().mean()) < 0.01  # sums of another order decide a few ties
        everyone = InputStatistics.empty(64)
        everyone.add(x)
        others = gptq(weight, everyone.second_moment, method.scheme).weight
        assert float((codes != others.codes).float().mean()) > 0.05


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_experts_that_calibration_never_reached_are_rounded_and_reported(
    name: str, cuts: dict[str, MixtureCut], tmp_path: Path
) -> None:
    """One token comes to two experts of four."""
    folder, ids = cuts["qwen3_moe"].floats().folder, torch.tensor([[3]])
    done = models.quantize_model(folder, tmp_path / "new", models.Method(name, SCHEME), calibration=ids)
    unreached = [layer for layer, notes in done.notes.items() if UNREACHED in notes]
    assert len(unreached) == 2 * 2 * 3
    assert all(".experts." in layer for layer in unreached)
    models.quantize_model(folder, tmp_path / "rtn", models.Method("rtn", SCHEME))
    found, rounded = (models.ConvertedFolder(tmp_path / each) for each in ("new", "rtn"))
    for layer in unreached:
        assert torch.equal(models.weights_of(found[layer]), models.weights_of(rounded[layer]))
    text = tmp_path / "text.txt"
    text.write_text("3 3")
    shown = command(
        "quantize", folder, tmp_path / "w4", "--method", name, "--calibration", text, "--samples", 1, "--seqlen", 1,
        "--group-size", 32,
    )  # fmt: skip
    assert "12 layers of experts got no token of the calibration and were rounded to nearest" in shown.stdout


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (models.Method("smoothquant"), r"methods that quantise weights alone, not smoothquant; take rtn, gptq or awq"),
        (models.Method("w8a8"), r"not w8a8; .* skip with '\*\.experts\.\*' \(--skip\)"),
    ],
)
def test_methods_that_experts_do_not_take(
    method: models.Method, message: str, cuts: dict[str, MixtureCut], tmp_path: Path
) -> None:
    calibration = IDS if method.needs_calibration else None
    with pytest.raises(UnsupportedError, match=rf"experts\.0\.gate_proj: .*{message}"):
        models.quantize_model(cuts["olmoe"].floats().folder, tmp_path / "new", method, calibration=calibration)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_goes_on(cuts: dict[str, MixtureCut], tmp_path: Path) -> None:
    folder, method = cuts["mixtral"].floats().folder, models.Method("gptq", SCHEME)

    def stop(name: str, count: int, total: int) -> None:
        if name.startswith("block 1: mlp"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.quantize_model(folder, tmp_path / "new", method, calibration=IDS, progress=stop)
    assert models.quantize_model(folder, tmp_path / "new", method, calibration=IDS).resumed == 1
    models.quantize_model(folder, tmp_path / "whole", method, calibration=IDS)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "new" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_unrolled_experts_compute_what_transformers_do(seed: int) -> None:
    from qcutlass.models.quantizing.unrolling import UnrolledExperts

    model = model_of("deepseek_v3", seed)
    model.set_experts_implementation("eager")  # which alone multiplies float64
    experts = model.model.layers[1].mlp.experts
    unrolled = UnrolledExperts(experts)
    with torch.no_grad():
        for index, each in enumerate(unrolled.experts):
            gate, up = experts.gate_up_proj[index].chunk(2)
            for layer, weight in (
                (each.gate_proj, gate),
                (each.up_proj, up),
                (each.down_proj, experts.down_proj[index]),
            ):
                layer.weight.copy_(weight)
    g = torch.Generator().manual_seed(seed)
    x, weights = torch.randn(9, 64, generator=g), torch.rand(9, 2, generator=g)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=g)[:2] for _ in range(9)])
    with torch.inference_mode():
        exact = experts.double()(x.double(), chosen, weights.double())
        dense = experts.float()(x, chosen, weights)
        assert noise_ratio(unrolled(x, chosen, weights), dense, exact) <= NOISE


def test_a_summary_of_a_converted_mixture(cuts: dict[str, MixtureCut], tmp_path: Path) -> None:
    models.convert(cuts["mixtral"].gptq().folder, tmp_path / "new")
    for folder in (tmp_path / "new", cuts["mixtral"].gptq().folder):
        groups = {group.name: group for group in models.inspect(folder).groups}
        for part in ("w1", "w2", "w3"):
            assert groups[f"model.layers.*.block_sparse_moe.experts.*.{part}"].count == 2 * EXPERTS
    described = json.loads((tmp_path / "new/config.json").read_text())["quantization_config"]
    assert not any("experts" in name for name in described["modules_to_not_convert"])
