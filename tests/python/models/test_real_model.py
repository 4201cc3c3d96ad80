"""All of SmolLM2-135M, from its GGUF file and from GPTQ and AWQ folders to text, on the CPU and on a GPU."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import quality
from tests.python.models.folders import SmolCut
from typer.testing import CliRunner

from qcutlass.cli import app
from qcutlass.layers import QuantEmbedding, WeightOnlyLinear
from qcutlass.models.evaluation import perplexity
from qcutlass.testing.models import IMPORTED, NOISE, PERPLEXITY, noise_ratio

DEVICES = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = {"cpu": torch.float32, "cuda": torch.float16}  # which the commands choose
NEW_TOKENS = 24


def in_transformers_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q and k, one at a time: llama.cpp interleaves the halves of each head."""
    size = len(weight) // heads
    moved = torch.empty_like(weight)
    for head in range(heads):
        for row in range(size // 2):
            moved[head * size + row] = weight[head * size + 2 * row]
            moved[head * size + size // 2 + row] = weight[head * size + 2 * row + 1]
    return moved


@pytest.mark.parametrize(
    ("ours", "theirs", "heads"), [("q_proj", "attn_q", 9), ("k_proj", "attn_k", 3), ("v_proj", "attn_v", 0)]
)
def test_rows_of_q_and_k_are_put_in_order(ours: str, theirs: str, heads: int, smol: SmolCut) -> None:
    found = smol.source.layer(f"model.layers.3.self_attn.{ours}").dequantize(torch.float32)
    stored = smol.source.checkpoint[f"blk.3.{theirs}"].dequantize(torch.float32)
    assert torch.equal(found, in_transformers_order(stored, heads) if heads else stored)
    assert torch.equal(found, stored) == (heads == 0)


@pytest.fixture(scope="module")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pydoc_data.topics import topics

    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text("".join(f"{topic}\n" for topic in topics.values()), encoding="utf-8")
    return path


def command(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def evaluated(folder: Path, topics: Path, tokens: int, *options: str) -> float:
    """The perplexity that the command prints."""
    out = command("eval", folder, "--text", topics, "--tokens", tokens, *options).stdout
    found = re.match(r"perplexity ([\d.]+) of (\d+) tokens in windows of 512, ", out)
    assert found is not None, out
    assert int(found[2]) == tokens // 512 * 511
    return float(found[1])


def check(model: Any, dense: Any, tokenizer: Any, folder: Path, topics: Path, tokens: int, device: str) -> None:
    """Compares the commands' output, and the model loaded from the folder, with the dequantised model in float32."""
    dtype = DTYPES[device]
    text = topics.read_text(encoding="utf-8")[: 10 * tokens]
    layers = 210 + isinstance(model.get_input_embeddings(), QuantEmbedding)
    assert f"{layers} layers, " in command("inspect", folder).stdout
    expected = perplexity(dense, tokenizer(text, return_tensors="pt").input_ids[0, :tokens]).perplexity
    assert 10 < expected < 20
    found = evaluated(folder, topics, tokens, "--device", device)
    assert abs(found - expected) < IMPORTED
    if dtype == torch.float32:
        assert abs(found / expected - 1) < PERPLEXITY

    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2 + 2?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    ).input_ids.to(device)
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=2,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ids, continuation = made.sequences[:, :-1], made.sequences[0, prompt.shape[1] :]
    options = ("--chat", "--max-new-tokens", NEW_TOKENS, "--device", device)
    printed = command("generate", folder, "--prompt", "What is 2 + 2?", *options).stdout
    assert printed.strip() == tokenizer.decode(continuation, skip_special_tokens=True).strip()

    with torch.inference_mode():
        step_by_step, at_once = torch.stack(made.logits, dim=1), model(ids).logits
        exact, same = (copy.deepcopy(dense).to(kind)(ids).logits for kind in (torch.float64, dtype))
    assert torch.equal(step_by_step[0].argmax(-1), continuation)
    assert noise_ratio(at_once, same, exact) <= NOISE
    behind = slice(prompt.shape[1] - 1, None)
    assert noise_ratio(step_by_step.to(dtype), same[:, behind], exact[:, behind]) <= NOISE


@pytest.mark.parametrize("device", DEVICES)
def test_the_imported_model_is_the_dequantised_one(device: str, smol_file: Path, topics: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers needs it to dequantise GGUF files")
    from transformers import AutoModelForCausalLM

    from qcutlass.models.transformers import load_model

    folder = tmp_path / "smol"
    done = command("convert", smol_file, folder, "--verify").stdout
    assert done.startswith("gguf: 211 layers of 134.5 M weights packed, 211 read back and equal; ")
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1.05 * smol_file.stat().st_size
    model, tokenizer = load_model(folder, device)
    dense: Any = AutoModelForCausalLM.from_pretrained(smol_file.parent, gguf_file=smol_file.name, dtype=torch.float32)
    assert sum(type(module) is WeightOnlyLinear for module in model.modules()) == 210
    every = torch.arange(model.config.vocab_size, device=device)
    assert torch.equal(model.model.embed_tokens(every).cpu(), dense.model.embed_tokens.weight.to(DTYPES[device]))
    assert model.lm_head.embedding is model.model.embed_tokens
    check(model, dense.to(device).eval(), tokenizer, folder, topics, 4096, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_quantised_folders_are_the_dequantised_model(
    kind: str, device: str, whole_smol: SmolCut, topics: Path, tmp_path: Path
) -> None:
    from qcutlass.models.transformers import load_model

    cut, folder = getattr(whole_smol, kind)(), tmp_path / "converted"
    done = command("convert", cut.folder, folder, "--verify").stdout
    assert done.startswith(f"{kind}: 210 layers of 106.2 M weights packed, 210 read back and equal; ")
    dense = whole_smol.dense(cut, torch.float32).to(device)
    for place in (cut.folder, folder):
        model, tokenizer = load_model(place, device)
        assert sum(isinstance(module, WeightOnlyLinear) for module in model.modules()) == 210
        check(model, dense, tokenizer, place, topics, 1024, device)


@pytest.mark.slow
def test_rows_of_the_quality_table(smol_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers needs it to dequantise GGUF files")
    settings = quality.Settings(samples=1, seqlen=64, tokens=256, window=128)
    names = ["float", "imported", "w8a8", "blockwise"]
    wanted = [entry for entry in quality.entries() if entry.name in names]
    exact, imported, *int8 = quality.run(settings, wanted, [], tmp_path)
    assert exact["divergence"] == 0
    assert imported["divergence"] < 1e-6
    assert len(int8) == 2
    assert all(0 < row["divergence"] < 0.05 for row in int8)
    assert abs(imported["perplexity"] / exact["perplexity"] - 1) < PERPLEXITY
    assert 5 < imported["bits_per_weight"] < 7
    assert all(8 < row["bits_per_weight"] < 8.2 for row in int8)
    assert list(tmp_path.iterdir()) == []
