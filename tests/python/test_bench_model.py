"""The benches of whole models, at a tiny size."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers", reason="needs transformers")

from bench import command_line, llama, model, schemes, step, tokens
from bench.__main__ import app
from transformers import Qwen3MoeForCausalLM

from qcutlass.layers import QuantExperts, QuantLinear
from qcutlass.testing.models import NOISE, noise_ratio

SCHEME = schemes.parse_weight_only("w4a16_g64_int")
CPU = torch.device("cpu")
FORMS = ("dense", "qcutlass", "fused")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def devices() -> list[Any]:
    return ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_forms_are_the_same_model(seed: int) -> None:
    quantized = llama.quantized_model(llama.SIZES["tiny"], SCHEME, CPU, torch.float32)
    forms = {"dense": llama.dense(quantized, torch.float32), "qcutlass": quantized, "fused": llama.fused(quantized)}
    ids = torch.randint(0, 96, (2, 8), generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        logits = {name: form(ids).logits for name, form in forms.items()}
        exact = copy.deepcopy(forms["dense"]).double()(ids).logits
    assert torch.equal(logits["fused"], logits["qcutlass"])
    assert noise_ratio(logits["qcutlass"], logits["dense"], exact) <= NOISE
    assert forms["dense"].model.embed_tokens.weight is quantized.model.embed_tokens.weight
    assert tokens.megabytes(forms["dense"]) > 1.5 * tokens.megabytes(quantized) > 0.05
    tied = llama.quantized_model(llama.Size(32, 32, 1, 2, 1, 64, tied=True), SCHEME, CPU, torch.float32)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def test_a_mixture_and_its_dense_form_are_the_same_model(seed: int) -> None:
    size = llama.SIZES["tiny-moe"]
    quantized = llama.quantized_model(size, SCHEME, CPU, torch.float32)
    experts = [module for module in quantized.modules() if isinstance(module, QuantExperts)]
    assert [(module.num_experts, module.down.in_features) for module in experts] == [(8, 64)] * size.blocks
    dense = llama.dense(quantized, torch.float32)
    assert not any(isinstance(module, QuantExperts | QuantLinear) for module in dense.modules())
    ids = torch.randint(0, 96, (2, 8), generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        logits, close = quantized(ids).logits, dense(ids).logits
        double = copy.deepcopy(dense).double()
        double.set_experts_implementation("eager")  # torch's grouped products have no float64
        exact = double(ids).logits
    assert noise_ratio(logits, close, exact) <= NOISE
    # Codes and scales of the experts that a token goes to: all of 8, but 2 of 8 for one token.
    saved = sum(buffer.nbytes - buffer.nbytes * 2 // 8 for module in experts for buffer in module.buffers())
    assert step._bytes(quantized, 4, 0) - step._bytes(quantized, 1, 0) == saved


def test_steps_of_a_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "ROUNDS", 2)
    monkeypatch.setattr(step, "STEPS", 1)
    options = ("--device", "cpu", "--mode", "eager", "--batch", 2, "--context", 5, "--scheme", SCHEME.name)
    result = run("step", "--model", "tiny-moe", *options, "--json", tmp_path / "step.json")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert [(row["model"], row["weights"], row["mode"]) for row in rows] == [
        ("tiny-moe", weights, "eager") for weights in ("dense", SCHEME.name)
    ]
    assert [round(row["step_ms"] * row["tokens"], 3) for row in rows] == [2000, 2000]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_steps_in_every_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced but not compiled; rows on the CPU say that there is no graph."""
    monkeypatch.setattr(step, "ROUNDS", 2)
    monkeypatch.setattr(step, "STEPS", 1)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    modes = [word for mode in step.MODES for word in ("--mode", mode)]
    options = ("--device", "cpu", *modes, "--batch", 2, "--prompt", 5, "--scheme", SCHEME.name, "--blocks", 1)
    more = "--lm-head", 8, "--projections", "--json", tmp_path / "step.json", "--markdown", tmp_path / "step.md"
    result = run("step", "--model", "Tiny", *options, *more)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "step.json").read_text())["rows"]
    names = "eager", "graph, without a CUDA graph", "compiled", "default, without a CUDA graph"
    forms = "dense", SCHEME.name, f"{SCHEME.name}, head of 8 bits", f"{SCHEME.name}, projections alone"
    assert [(row["mode"], row["weights"]) for row in rows] == [(mode, form) for mode in names for form in forms]
    assert {row["model"] for row in rows} == {"tiny"}
    assert all(row["prefill_ms"] > 0 and row["prefill_to_dense"] > 0 and row["step_ms"] > 0 for row in rows)
    assert "prompt, of dense's" in (tmp_path / "step.md").read_text()


def test_what_bench_step_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, words in (
        (("--model", "x"), "--model 'x': expected one of llama3-8b, "),
        (("--mode", "fast"), "--mode 'fast': expected one of eager, graph, compiled, default"),
        (("--lm-head", 5), "--lm-head 5: expected 8 or 4"),
    ):
        result = run("step", "--device", "cpu", *options)
        assert result.exit_code == 2
        assert words in " ".join(result.output.replace("│", "").split())
    assert command_line.size_of("--model", "llama-3-8B", 2) == (
        "llama3-8b",
        replace(llama.SIZES["llama3-8b"], blocks=2),
    )

    def broken(*_: object, **__: object) -> None:
        raise OSError("no compiler")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=broken))
    with pytest.raises(RuntimeError, match=r"steps are not compiled, which is slower: .*no compiler"):
        run("step", "--model", "tiny", "--device", "cpu", "--mode", "compiled", "--batch", 1, "--prompt", 5)


def test_rows_of_steps_outlive_what_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is stopped in its third row has left two."""
    done = [{"model": "tiny", "batch": batch} for batch in (1, 8)]

    def stopped(*_: object) -> Iterator[dict[str, Any]]:
        yield from done
        raise KeyboardInterrupt

    monkeypatch.setattr(step, "run", stopped)
    files = "--json", tmp_path / "step.json", "--markdown", tmp_path / "step.md"
    assert run("step", "--model", "tiny", "--device", "cpu", *files).exit_code != 0
    assert json.loads((tmp_path / "step.json").read_text())["rows"] == done
    assert "| tiny |" in (tmp_path / "step.md").read_text()


def test_the_size_of_qwen3_30b_a3b() -> None:
    """30.5 billion weights, 3.3 of them for a token."""
    size = llama.SIZES["qwen3-30b-a3b"]
    experts = size.blocks * 3 * size.hidden * size.intermediate
    with torch.device("meta"):
        found = Qwen3MoeForCausalLM(size.config()).num_parameters()
    assert round(found / 1e9, 1) == 30.5
    assert round((found - experts * (size.experts - size.slots)) / 1e9, 1) in (3.3, 3.4)


@pytest.mark.parametrize(("form", "index", "name"), [("qcutlass", 5, "up_proj"), ("fused", 1, "k_proj, fused")])
def test_a_wrong_layer_is_not_timed(form: str, index: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = model.Model(llama.SIZES["tiny"], SCHEME, torch.float32, CPU)
    assert len(list(model.run(bench, [2]))) == 1
    layer: Any = bench.forms[form][index]
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda a: forward(a) + 1e-3 * (torch.arange(layer.out_features) == 7))
    with pytest.raises(AssertionError, match=f"{name}: 2 of .* out of bounds"):
        list(model.run(bench, [2]))


@pytest.mark.parametrize("device", devices())
def test_a_step_through_all_layers(device: str, tmp_path: Path) -> None:
    files = "--json", tmp_path / "model.json", "--markdown", tmp_path / "model.md"
    result = run("model", "--size", "tiny", "--device", device, "--m", 1, "--m", 3, *files)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "model.json").read_text())
    assert [row["m"] for row in found["rows"]] == [1, 3]
    for row in found["rows"]:
        assert row["speedup"] == row["dense_ms"] / row["qcutlass_ms"]
        assert row["fused_speedup"] == row["dense_fused_ms"] / row["fused_ms"]
        assert row["goal_ok"] is None  # promised for the large model alone
        assert 0 < row["error"] <= 1
    assert (tmp_path / "model.md").read_text().count("\n| ") == 1 + 2


@pytest.mark.parametrize("device", devices())
def test_tokens_of_a_whole_model(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "STEPS", 4)
    files = "--json", tmp_path / "tokens.json", "--markdown", tmp_path / "tokens.md"
    options = ("--batch", 1, "--batch", 2, "--prompt", 7)
    result = run("tokens", "--size", "tiny", "--device", device, *options, *files)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "tokens.json").read_text())["rows"]
    modes = ["eager"] if device == "cpu" else ["eager", "CUDA graph"]
    types = ["float32"] if device == "cpu" else ["float16", "bfloat16"]
    assert [(row["dtype"], row["batch"], row["mode"], row["phase"]) for row in rows] == [
        (dtype, batch, mode, phase)
        for dtype in types
        for batch in (1, 2)
        for mode in modes
        for phase in ("prefill", "decode")
    ]
    for row in rows:
        tokens_of_each = {"prefill": 7, "decode": 1}[row["phase"]]
        for form in FORMS:
            assert round(row[f"{form}_tokens"] * row[f"{form}_ms"] / row["batch"] / tokens_of_each, 3) == 1000
        assert row["ratio"] == row["dense_ms"] / min(row["qcutlass_ms"], row["fused_ms"])
        assert row["dense_mb"] > row["qcutlass_mb"] > 0
        assert row["same_text"] is (True if row["mode"] == "CUDA graph" else None)
        assert row["differ"] == ""
        assert 0 < row["error"] <= 1


def test_tokens_are_those_of_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "STEPS", 6)
    quantized = llama.quantized_model(llama.SIZES["tiny"], SCHEME, CPU, torch.float32)
    with torch.inference_mode():
        found = tokens._text(quantized, 2, 9, graph=False)
        decoding, firsts = tokens._Decoding(quantized, 2, 9, 6), []
        for call in (decoding.prefill, decoding.step, decoding.step, decoding.prefill, decoding.step):
            call()
            firsts.append(decoding.token.clone())
    ids = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(2))
    quantized.generation_config.eos_token_id = None
    expected = quantized.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)[:, 9:]
    assert torch.equal(found.T, expected)
    assert torch.equal(torch.cat(firsts, dim=1), expected[:, [0, 1, 2, 0, 1]])  # a prompt begins anew


@pytest.mark.parametrize("size", ["tiny", "tiny-qwen3"])
def test_a_quantised_head_changes_the_logits_alone(size: str) -> None:
    model = llama.quantized_model(llama.SIZES[size], SCHEME, CPU, torch.float32)
    twin = llama.with_head(model, 8)
    assert isinstance(twin.get_output_embeddings(), QuantLinear)
    assert twin.get_input_embeddings().weight is model.get_input_embeddings().weight
    ids = torch.arange(7)[None]
    with torch.inference_mode():
        states, same = (one.model(ids).last_hidden_state for one in (model, twin))
        logits, close = (one(ids).logits for one in (model, twin))
    assert torch.equal(states, same)
    assert not torch.equal(logits, close)
    # A scale of fp16, 2^-11, and half a step of 127 for the largest weight of a group of 64 columns.
    weight = model.get_output_embeddings().weight
    bound = states.abs().sum(-1, keepdim=True) * weight.abs().max() * (0.5 / 127 + 2**-10)
    assert ((logits - close).abs() <= bound).all()


def test_a_tied_head_is_refused() -> None:
    tied = replace(llama.SIZES["tiny"], tied=True)
    model = llama.quantized_model(tied, SCHEME, CPU, torch.float32)
    with pytest.raises(ValueError, match="the model's head is its embedding"):
        llama.with_head(model, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("model", "--size", "gpt"), "expected one of llama3-8b, qwen3-8b"),
        (("model", "--device", "tpu"), "expected cuda or cpu"),
        (("model", "--scheme", "w8a8"), "weight-only"),
        (("tokens", "--dtype", "f8", "--device", "cpu"), "expected one of f16, bf16, f32"),
    ],
)
def test_wrong_options(arguments: tuple[str, ...], message: str) -> None:
    device = () if "--device" in arguments else ("--device", "cpu")
    result = run(*arguments, *device)
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")
