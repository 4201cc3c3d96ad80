"""The commands `convert`, `quantize`, `export`, `inspect`, `eval` and `generate`."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.python.models.folders import RandomCut, SmolCut, random_model
from typer.testing import CliRunner

from qcutlass import models
from qcutlass.cli import app
from qcutlass.models.evaluation import perplexity
from qcutlass.testing.models import INT8_ACTIVATIONS, PERPLEXITY


def command(*arguments: object) -> Any:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, [str(argument) for argument in arguments])


def test_convert_and_inspect(tmp_path: Path, seed: int) -> None:
    source = random_model(tmp_path / "source", 3, seed=seed)
    result = command("convert", source, tmp_path / "new", "--verify")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("gptq: 3 layers of 0.0 M weights packed, 3 read back and equal; ")
    table = command("inspect", tmp_path / "new")
    assert table.exit_code == 0
    row = next(line for line in table.stdout.splitlines() if "up_proj" in line)
    assert re.sub(r"\s+", " ", row).strip().startswith("model.layers.*.mlp.up_proj 64 x 128 w4 g64 int zeros 3 4.")
    facts = json.loads(command("inspect", tmp_path / "new", "--json").stdout)
    assert facts == json.loads(json.dumps(models.inspect(tmp_path / "new").to_dict()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("convert", "{source}", "{new}"), "exists; pass overwrite=True"),
        (("convert", "{source}", "{source}", "--overwrite"), "apart from the source"),
        (("convert", "{source}", "{other}", "--from", "magic"), "format: expected 'auto' or one of"),
        (("convert", "{source}", "{other}", "--from", "gguf"), "got 'gguf', but this is no GGUF file; pass 'auto'"),
        (("convert", "{source}", "{new}/config.json/deep/er"), "config.json is a file, not a folder to make it in"),
        (("convert", "{absent}", "{other}"), "no such file or folder"),
        (("inspect", "{absent}"), "no such file or folder"),
        (("eval", "{absent}", "--text", "{source}/config.json"), "no such folder"),
        (("eval", "{new}", "--text", "{absent}"), "absent: No such file"),
        (("eval", "{new}", "--text", "{new}/model.safetensors"), "expected a text file in UTF-8"),
        (("generate", "{absent}", "--prompt", "x"), "no such folder"),
    ],
)
def test_errors_of_users(arguments: tuple[str, ...], message: str, tmp_path: Path, seed: int) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    source = random_model(tmp_path / "source", 1, seed=seed)
    models.convert(source, tmp_path / "new")
    places = {name: tmp_path / name for name in ("source", "new", "other", "absent")}
    result = command(*(argument.format(**places) for argument in arguments))
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("kind", ["gptq", "floats", "converted"])
def test_a_damaged_model_makes_no_text(kind: str, random_cut: RandomCut, tmp_path: Path) -> None:
    """Without a message of ours, absent tensors would be random numbers, and cut files a failure of another package."""
    folder = tmp_path / "damaged"
    if kind == "converted":
        models.convert(random_cut.gptq().folder, folder)
    else:
        shutil.copytree(getattr(random_cut, kind)().folder, folder)
    path = folder / "model.safetensors"
    whole = load_file(path)
    norm = "model.layers.1.input_layernorm.weight"

    def message() -> str:
        result = command("generate", folder, "--prompt", "5 6", "--max-new-tokens", 1)
        assert result.exit_code == 2
        assert result.stdout == ""
        return " ".join(str(result.output).split())

    save_file({name: tensor for name, tensor in whole.items() if name != norm}, path)
    assert f"1 of the model's tensors are absent: {norm}" in message()
    save_file({name: tensor for name, tensor in whole.items() if "1.mlp.up_proj" not in name}, path)
    assert "layers.1.mlp.up_proj" in message()
    path.write_bytes(path.read_bytes()[:-1])
    assert "model.safetensors: not a whole safetensors file" in message()
    path.unlink()
    assert "expected .safetensors files" in message()
    save_file(whole, path)
    for file in folder.glob("token*"):
        file.unlink()
    assert "transformers reads no tokenizer there" in message()
    (folder / "config.json").write_text("{")
    assert "config.json: not JSON" in message()


def test_a_gpu_that_is_not_there(random_cut: RandomCut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "text.txt").write_text("5 6 7")
    for words in (("generate", "--prompt", "5"), ("eval", "--text", tmp_path / "text.txt")):
        result = command(words[0], random_cut.awq().folder, *words[1:], "--device", "cuda")
        assert result.exit_code == 2
        assert "torch sees no CUDA device; use --device cpu" in result.output


def test_floats_stay_floats_whatever_the_label(random_cut: RandomCut, tmp_path: Path) -> None:
    folder = tmp_path / "labelled"
    shutil.copytree(random_cut.floats().folder, folder)
    expected = command("generate", folder, "--prompt", "5 6", "--max-new-tokens", 3)
    config = json.loads((folder / "config.json").read_text())
    for label in ({"quant_method": "gptq", "bits": 4}, {"quant_method": None}):
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": label}))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one says that the label lies
            result = command("generate", folder, "--prompt", "5 6", "--max-new-tokens", 3)
        assert result.exit_code == 0, result.output
        assert result.stdout == expected.stdout


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_from_a_quantised_folder_to_text(kind: str, smol: SmolCut, tmp_path: Path) -> None:
    cut = getattr(smol, kind)()
    assert command("convert", cut.folder, tmp_path / "new", "--verify").exit_code == 0
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 12)
    tokens = ("--max-new-tokens", "6")
    expected = _continuation(smol, cut, "Once upon a time", 6)
    for folder in (tmp_path / "new", cut.folder):
        result = command("generate", folder, "--prompt", "Once upon a time", *tokens)
        assert result.exit_code == 0, result.output
        assert re.search(
            r"4 tokens of prompt, the first new one after \d+ ms, then [\d.]+ tokens/s; 6 in all", result.stderr
        )
        assert result.stdout.rstrip("\n") == expected.rstrip("\n")
        assert "not fused" not in result.stderr
    plain = command("generate", tmp_path / "new", "--prompt", "Once upon a time", *tokens, "--no-fuse")
    assert plain.stdout.rstrip("\n") == expected.rstrip("\n")
    together = command("generate", tmp_path / "new", "--prompt", "Once upon a time", *tokens, "--fuse")
    assert together.stdout.rstrip("\n") == expected.rstrip("\n")
    differing = [line for line in together.stderr.splitlines() if line.startswith("not fused: ")]
    assert len(differing) == (4 if kind == "gptq" else 0)  # each layer has an act-order of its own
    assert all(line.endswith("perm differs in its values") for line in differing)
    score = command("eval", tmp_path / "new", "--text", text, "--window", "32", "--tokens", "70", "--fuse")
    assert score.exit_code == 0, score.output
    found = re.match(r"perplexity ([\d.]+) of 62 tokens in windows of 32, \d+ tokens/s", score.stdout)
    assert found, score.stdout
    assert abs(float(found[1]) / _perplexity(smol, cut, text.read_text()) - 1) < PERPLEXITY


@pytest.mark.parametrize(("options", "wanted"), [((), True), (("--fuse",), True), (("--no-fuse",), False)])
def test_blocks_are_fused_on_the_cpu_unless_told_otherwise(
    options: tuple[str, ...], wanted: bool, random_cut: RandomCut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qcutlass.models.block_modules import FusedNorm
    from qcutlass.models.growing_cache import GrowingLayer

    called: list[str] = []

    def count(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def counted(*arguments: Any) -> Any:
            called.append(name)
            return method(*arguments)

        monkeypatch.setattr(kind, name, counted)

    count(FusedNorm, "add")
    count(GrowingLayer, "update")
    folder = random_cut.awq().folder
    (tmp_path / "text.txt").write_text(" ".join(map(str, range(5, 70))))
    assert command("generate", folder, "--prompt", "5 6 7", "--max-new-tokens", 3, *options).exit_code == 0
    assert set(called) == ({"add", "update"} if wanted else set())
    called.clear()
    assert command("eval", folder, "--text", tmp_path / "text.txt", "--window", 32, *options).exit_code == 0
    assert ("add" in called) == wanted


def _continuation(smol: SmolCut, cut: Any, prompt: str, count: int) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(cut.folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    dense = smol.dense(cut, torch.float32)
    out = dense.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=2)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def _perplexity(smol: SmolCut, cut: Any, text: str) -> float:
    """The perplexity computed by hand, window by window."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(cut.folder)(text, return_tensors="pt").input_ids[0, :64].view(2, 32)
    dense = smol.dense(cut, torch.float32)
    with torch.inference_mode():
        scores = dense(ids).logits.double().log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])
    return float((-scores.mean()).exp())


def test_threads(random_cut: RandomCut) -> None:
    before = torch.get_num_threads()
    try:
        result = command(
            "generate", random_cut.awq().folder, "--prompt", "5 6", "--max-new-tokens", "1", "--threads", "3"
        )
        assert (result.exit_code, torch.get_num_threads()) == (0, 3), result.output
    finally:
        torch.set_num_threads(before)


def test_int8_activations(smol: SmolCut, tmp_path: Path) -> None:
    """Close to the perplexity without, not equal to it; float layers have nothing to quantise for."""
    text = tmp_path / "text.txt"
    text.write_text("It was a bright cold day in April, and the clocks were striking thirteen. " * 8)
    folder, options = smol.awq().folder, ("--text", text, "--window", "32", "--tokens", "70")
    scores = []
    for more in ((), ("--activations", "int8")):
        result = command("eval", folder, *options, *more)
        assert result.exit_code == 0, result.output
        scores.append(float(result.stdout.split()[1]))
    assert scores[0] != scores[1]
    assert abs(scores[1] / scores[0] - 1) < INT8_ACTIVATIONS
    prompt = "--prompt", "Once upon a time", "--max-new-tokens", "2", "--activations", "int8"
    for fused in ((), ("--fuse",)):
        result = command("generate", folder, *prompt, *fused)
        assert result.exit_code == 0, result.output
    refused = command("generate", smol.floats().folder, *prompt)
    assert refused.exit_code == 2
    assert "model: expected layers with integer codes" in refused.output


def test_chat_needs_a_template(smol: SmolCut, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    models.convert(smol.awq().folder, folder)
    chat = command("generate", folder, "--prompt", "Hello", "--chat", "--max-new-tokens", "2")
    assert chat.exit_code == 0, chat.output
    assert int(chat.stderr.split()[0]) > 20  # the template's tokens
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    bare = command("generate", folder, "--prompt", "Hello", "--chat")
    assert bare.exit_code == 2
    assert "no chat template" in bare.output


def test_a_text_that_is_too_short() -> None:
    with pytest.raises(ValueError, match="at least one window of 512 tokens, got 3"):
        perplexity(lambda ids: None, torch.arange(3))


@pytest.mark.parametrize("buffers", [0, 1])
def test_perplexity_of_a_model_without_parameters(buffers: int) -> None:
    class Uniform(torch.nn.Module):
        def forward(self, ids: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=torch.zeros(*ids.shape, 8))

    model = Uniform()
    for _ in range(buffers):
        model.register_buffer("packed", torch.zeros(1, dtype=torch.uint8))
    assert abs(perplexity(model, torch.arange(8), window=4).perplexity / 8 - 1) < PERPLEXITY


@pytest.mark.parametrize(("logit", "expected"), [(1000.0, torch.inf), (torch.inf, torch.nan), (700.0, 1e304)])
def test_perplexity_of_a_broken_model(logit: float, expected: float) -> None:
    """Sure of a token that does not come."""

    def model(ids: torch.Tensor) -> SimpleNamespace:
        logits = torch.zeros(*ids.shape, 8)
        logits[..., 0] = logit
        return SimpleNamespace(logits=logits)

    found = perplexity(model, torch.arange(8), window=4).perplexity
    assert found == expected or (found != found and expected != expected) or abs(found / expected - 1) < 0.02


def test_eval_reports_an_infinite_perplexity(random_cut: RandomCut, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(random_cut.floats().folder, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][9] *= 2000  # tied: the likeliest token, by far
    tensors["model.embed_tokens.weight"][8] *= -2000
    save_file(tensors, folder / "model.safetensors")
    (tmp_path / "text.txt").write_text("9 8 " * 20)
    result = command("eval", folder, "--text", tmp_path / "text.txt", "--window", 4)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("perplexity inf of ")


def test_from_floats_to_text_in_the_format_of_others(smol: SmolCut, tmp_path: Path) -> None:
    source, text = smol.floats().folder, tmp_path / "text.txt"
    text.write_text("It was a bright cold day in April, and the clocks were striking thirteen. " * 20)
    options = ("--group-size", 64, "--symmetric", "--calibration", text, "--samples", 2, "--seqlen", 32, "--seed", 3)
    result = command("quantize", source, tmp_path / "new", "--method", "awq", "--no-act-scale", *options)
    assert result.exit_code == 0, result.output
    assert "calibration: 2 windows of 32 of " in result.stderr
    assert result.stderr.rstrip().endswith("seed 3")
    assert result.stdout.startswith("awq: 14 layers of 7.1 M weights; ")
    assert "error of the layers' outputs" in result.stdout
    assert command("inspect", tmp_path / "new").stdout.count("w4 g64 sym") == 7

    result = command("export", tmp_path / "new", tmp_path / "gptq")
    assert (result.exit_code, result.stdout) == (0, f"gptq: 14 layers in {tmp_path / 'gptq'}\n")
    answers = [
        command("generate", tmp_path / name, "--prompt", "It was", "--max-new-tokens", 4) for name in ("new", "gptq")
    ]
    assert answers[0].exit_code == 0, answers[0].output
    assert answers[0].stdout == answers[1].stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quantize", "{source}", "{other}"), "--calibration: gptq needs a text file"),
        (("quantize", "{source}", "{other}", "--method", "magic"), "method: expected one of rtn"),
        (("quantize", "{absent}", "{other}", "--method", "rtn"), "no such file or folder"),
        (
            ("quantize", "{source}", "{other}", "--method", "rtn", "--skip", "q_prj"),
            "'q_prj' matches no layer; there are",
        ),
        (
            ("quantize", "{source}", "{other}", "--method", "rtn", "--calibration", "x"),
            "--calibration: rtn does not read",
        ),
        (("quantize", "{source}", "{other}", "--method", "rtn", "--samples", "128"), "--samples: rtn does not read it"),
        (
            ("quantize", "{source}", "{other}", "--method", "awq", "--damping", "0.01"),
            "--damping: awq does not read it",
        ),
        (
            ("quantize", "{source}", "{other}", "--method", "awq", "--clip"),
            "--clip: awq does not read it, only rtn, gptq",
        ),
        (("quantize", "{source}", "{other}", "--method", "w8a8", "--bits", "4"), "--bits: w8a8 does not read it"),
        (
            ("quantize", "{source}", "{other}", "--method", "w8a8", "--no-act-scale"),
            "only awq, smoothquant; leave it out",
        ),
        (
            ("quantize", "{source}", "{other}", "--method", "blockwise", "--activations", "dynamic"),
            "--activations: blockwise does not read it, only smoothquant, w8a8, fp8; leave it out",
        ),
        (
            ("quantize", "{source}", "{other}", "--method", "fp8", "--activations", "static"),
            "--calibration: fp8 with static activations needs a text file",
        ),
        (
            ("quantize", "{source}", "{other}", "--method", "fp8", "--calibration", "{source}/config.json"),
            "--calibration: fp8 reads it for static activations alone; leave it out",
        ),
        (("quantize", "{source}", "{other}", "--calibration", "{absent}"), "--calibration"),
        (
            ("quantize", "{source}", "{other}", "--calibration", "{source}/model.safetensors"),
            "model.safetensors: expected a text file in UTF-8",
        ),
        (("quantize", "{source}", "{source}", "--method", "rtn"), "apart from the source"),
        (("export", "{absent}", "{other}"), "no such folder"),
        (("export", "{source}", "{other}"), "not a converted folder"),
        (("export", "{source}/model.safetensors", "{other}"), "a file, expected a converted folder; qcutlass convert"),
    ],
)
def test_errors_of_quantising(arguments: tuple[str, ...], message: str, smol: SmolCut, tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("other", "absent")} | {"source": smol.floats().folder}
    result = command(*(argument.format(**places) for argument in arguments))
    assert result.exit_code == 2
    assert message in result.output
    assert list(tmp_path.iterdir()) == []
